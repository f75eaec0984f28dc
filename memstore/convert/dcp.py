"""Snapshots, and checkpoints of torch.distributed.checkpoint in torch's files or in memstore's: read and written.

The metadata of a checkpoint in torch's files (FileSystemWriter) is a pickle. It is read with a list of what it may
refer to: torch's classes of metadata, and no others. Each tensor, or part of one, is what torch.save writes, somewhere
in a file; only where it lies is read of it.

A checkpoint is written as of one rank, in torch's files or in memstore's. Either way torch's own interface is followed,
with plans made here: boxes of tensors, and objects as its planners have them. Checkpoints in memstore's files are
snapshots. A snapshot can have any value, with its containers, its objects, and tensors that share memory.
"""

from __future__ import annotations

import io
import pathlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from memstore._compat import checkpoint_storage_info
from memstore._wording import short
from memstore.convert.files import draft_torch
from memstore.convert.leaves import (
    AssembledFile,
    Assembly,
    BoxedTensor,
    Rules,
    SourceFiles,
    SourceValue,
    load_object,
    stand_in,
    why_not_whole,
)
from memstore.convert.naming import FlatItems, LeafRefusals, OverlapCheck, flattened, nested, plain, special
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError, lacks_told
from memstore.formats import ByteMeter, are_sizes, read_whole
from memstore.integrations.dcp import StorageWriter
from memstore.integrations.dcp.places import BYTES, STATE, WRAPPED, FolderCheckpoint, wrapped_name
from memstore.integrations.dcp.planners import decode_object, decode_tensor, encode_object
from memstore.integrations.dcp.plans import metadata_of
from memstore.sharding import Box, whole
from memstore.snapshot.drafts import write_values
from memstore.snapshot.manifest import ManifestTensor
from memstore.snapshot.stored import Stored, Value
from memstore.structure import DTYPE_NAMES, DTYPES, MalformedError, read_known_pickle, traits

# --- Reading ---------------------------------------------------------------------------------------------------------


StorageInfo: Any = checkpoint_storage_info()
DCP_METADATA = ".metadata"
_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"  # where torch before 2.3 had two of these classes
_OLD_NAMES = {"TensorProperties": "TensorProperties", "MEM_FORMAT_ENCODING": "_MEM_FORMAT_ENCODING"}
_BEFORE_TORCH_2 = "torch.distributed._shard.checkpoint."


class _StoredItem(NamedTuple):
    """The place of an item in a file."""

    name: str
    start: int
    size: int


def open_dcp(path: str, rules: Rules) -> SourceValue:
    """Opens the state dict that was saved.

    Raises:
        CorruptionError: the metadata makes no sense, or a file is missing or too short.
        UnsupportedValueError: the metadata refers to other classes, or an item needs pickle that isn't allowed.
    """
    try:
        with lacks_told(path):
            return _Checkpoint(path, rules).found()
    except (MemstoreError, OSError):
        raise
    except (AttributeError, RuntimeError, TypeError, ValueError, OverflowError) as error:  # of what is out of place
        raise CorruptionError(path=f"{path}/{DCP_METADATA}", detail=f"it makes no sense: {error}") from error


class _Checkpoint:
    def __init__(self, path: str, rules: Rules) -> None:
        self._path, self._rules, self._files = path, rules, SourceFiles(path)
        self._assembly = Assembly()
        self._said = self._read_metadata()

    def found(self) -> SourceValue:
        described = getattr(self._said, "state_dict_metadata", None)
        where = getattr(self._said, "storage_data", None)
        if not isinstance(described, dict) or not isinstance(where, dict):
            self._damaged("it says nothing of a state dict, or of where it is")
        places = self._places(cast("dict[Any, Any]", where))
        items: dict[str, Any] = {}
        for name, said in cast("dict[Any, Any]", described).items():
            if not isinstance(name, str):
                self._damaged(f"an item is called {name!r:.100}")
            if isinstance(said, torch_metadata.TensorStorageMetadata):
                items[name] = self._tensor(name, said, places)
            else:
                place = places.get((name, None)) or self._damaged(f"it doesn't say where {short(name)} is")
                memory = self._files.bytes(place.name)
                if place.start + place.size > len(memory):
                    self._files.damaged(place.name, f"it has {len(memory):,} bytes, and {short(name)} lies beyond")
                data = memory[place.start : place.start + place.size].tobytes()
                items[name] = load_object(f"{self._path}: the item {short(name)}", data, self._rules)
        return SourceValue(nested(items, getattr(self._said, "planner_data", None), self._path), self._assembly.boxes)

    def _read_metadata(self) -> Any:
        path = f"{self._path}/{DCP_METADATA}"
        try:
            return read_known_pickle(read_whole(path), _known_class)
        except MalformedError as error:
            raise CorruptionError(path=path, detail=str(error)) from None
        except UnsupportedValueError as error:
            if _BEFORE_TORCH_2 in error.message:
                raise UnsupportedValueError(
                    f"{path}: {error.message}: it was saved by a torch before 2.0, whose checkpoints aren't read; "
                    "load it with torch if you trust who saved it, and save it anew"
                ) from None
            raise UnsupportedValueError(
                f"{path}: {error.message}, which is no class that torch.distributed.checkpoint writes there, "
                "so it isn't read: load the checkpoint with torch if you trust who saved it"
            ) from None

    def _places(self, where: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], _StoredItem]:
        found: dict[tuple[str, tuple[int, ...] | None], _StoredItem] = {}
        for index, said in where.items():
            name, offset = getattr(index, "fqn", None), getattr(index, "offset", None)
            file, start, size = (getattr(said, part, None) for part in ("relative_path", "offset", "length"))
            if getattr(said, "transform_descriptors", None):
                raise UnsupportedValueError(
                    f"{self._path}: {short(str(name))} is stored transformed ({said.transform_descriptors!r:.100}), as "
                    "an extension of torch.distributed.checkpoint does it: load it with torch"
                )
            if not isinstance(name, str) or not isinstance(file, str) or not are_sizes([start, size]):
                self._damaged(f"what it says of the place of {name!r:.100} makes no sense")
            found[name, None if offset is None else tuple(offset)] = _StoredItem(
                file, cast("int", start), cast("int", size)
            )
        return found

    def _tensor(self, name: str, said: Any, places: Mapping[tuple[str, Any], _StoredItem]) -> torch.Tensor:
        dtype, shape = getattr(said.properties, "dtype", None), tuple(said.size)
        if dtype not in DTYPE_NAMES or not are_sizes(list(shape)):
            self._damaged(f"what it says of {short(name)} makes no sense: {dtype}, of shape {shape!r:.100}")
        if getattr(said.properties, "layout", torch.strided) is not torch.strided:
            raise UnsupportedValueError(f"{self._path}: {short(name)} is of the layout {said.properties.layout}")
        boxes: list[tuple[Box, torch.Tensor]] = []
        for chunk in said.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            if not are_sizes([*box.offsets, *box.shape], most=128) or len(box.offsets) != len(box.shape):
                self._damaged(f"{short(name)} has a chunk {box!r:.100}")
            if box.is_empty:
                continue
            place = places.get((name, box.offsets))
            if place is None and len(said.chunks) == 1:
                place = places.get((name, None))
            if place is None:
                self._damaged(f"it doesn't say where the chunk of {short(name)} at {list(box.offsets)} is")
            boxes.append((box, self._part(name, place, dtype, box.shape)))
        reason = why_not_whole(shape, [box for box, _ in boxes])
        if reason is not None:
            self._damaged(f"the chunks of {short(name)} {reason}")
        made = self._assembly.tensor(dtype, shape, tuple(boxes))
        return made.requires_grad_() if said.properties.requires_grad is True else made

    def _part(self, name: str, place: _StoredItem, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        placed = self._files.locate(place.name, place.start, place.size)
        if (placed.dtype, placed.shape) != (dtype, shape):
            raise CorruptionError(
                path=self._files.path(place.name),
                detail=f"at {place.start:,} is a {placed.dtype}{list(placed.shape)}, and the metadata says that "
                f"{short(name)} is {dtype}{list(shape)}",
            )
        return self._files.tensor(place.name, placed.start, dtype, shape, placed.stride, placed.offset)

    def _damaged(self, detail: str) -> NoReturn:
        raise CorruptionError(path=f"{self._path}/{DCP_METADATA}", detail=detail)


def _known_class(module: str, name: str) -> Any:
    """Returns what the metadata may refer to: dataclasses, numbers' types and paths."""
    if module == torch_metadata.__name__ and name in _METADATA:
        return getattr(torch_metadata, name)
    if module == _OLD_PROPERTIES and name in _OLD_NAMES:
        return getattr(torch_metadata, _OLD_NAMES[name])  # of the same fields, in the same order
    if (module, name) == ("builtins", "getattr"):
        return _member
    if module == filesystem.__name__ and name == "_StorageInfo":
        return StorageInfo
    if (module, name) == ("torch", "Size"):
        return torch.Size
    if (module, name) == ("torch.serialization", "_get_layout"):
        return _layout
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
        return pathlib.PurePosixPath
    dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _member(kind: Any, name: Any) -> Any:
    """Returns a member of an enumeration: Python 3.11.0 to 3.11.3 pickled them as calls of getattr."""
    known = _known_class(torch_metadata.__name__, "_MEM_FORMAT_ENCODING")
    if kind is not known or name not in known.__members__:
        raise MalformedError(f"getattr of {name!r:.60}")
    return known[name]


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise MalformedError(f"a layout {name!r:.60}")
    return found


# --- Writing ---------------------------------------------------------------------------------------------------------


_FILE = "__0_0.distcp"  # of rank 0, its first


def checkpoint_items(found: SourceValue, rules: Rules, refusals: LeafRefusals) -> FlatItems:
    """Returns the items that a checkpoint has of a value."""
    flat = flattened(plain(found.value, refusals), refusals)
    sharing = OverlapCheck(refusals, untie=rules.untie)
    for name, item in flat.items.items():
        if isinstance(item, torch.Tensor):
            reason = special(item)
            if reason:
                refusals.add(flat.paths[name], reason)
            else:
                sharing.add(flat.paths[name], item)
    sharing.check()
    return flat


class _CheckpointItem(NamedTuple):
    """An item that is written at a time: a box of a tensor, or an object."""

    item: WriteItem
    data: Any  # the tensor of the box's elements, or the object


def _items(found: SourceValue, flat: FlatItems) -> list[_CheckpointItem]:
    items: list[_CheckpointItem] = []
    for name, value in flat.items.items():
        if not isinstance(value, torch.Tensor):
            items.append(_CheckpointItem(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO), value))
            continue
        properties = TensorProperties(dtype=value.dtype, requires_grad=value.requires_grad)
        leaf = found.leaf(value)
        for box, tensor in leaf.cut() if leaf.nbytes else ((whole(leaf.shape), value.detach()),):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape))
            said = TensorWriteData(chunk, properties, torch.Size(value.shape))
            items.append(
                _CheckpointItem(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, None, said), tensor)
            )
    return items


def _described(items: list[_CheckpointItem], flat: FlatItems) -> Metadata:
    described: dict[str, Any] = {}
    for item, _ in items:
        said = item.tensor_data
        if said is None:
            described[item.index.fqn] = BytesStorageMetadata()
        else:
            made = described.setdefault(item.index.fqn, TensorStorageMetadata(said.properties, said.size, []))
            made.chunks.append(said.chunk)
    return Metadata(described, planner_data=dict(flat.paths))


# --- torch's files --------------------------------------------------------------------------------------------------


class _TorchWriter(FileSystemWriter):
    """A writer of the metadata.

    Args:
        target: where the checkpoint is going to be.
    """

    def __init__(self, folder: str, target: str) -> None:
        super().__init__(folder)  # pyright: ignore[reportUnknownMemberType]
        self._target = target

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._target, save_id=self.save_id)


def write_torch_checkpoint(
    found: SourceValue, flat: FlatItems, rules: Rules, target: str, folder: str, name: str, meter: ByteMeter
) -> None:
    """Writes files as torch's FileSystemWriter does. `target` is where the folder is going to be."""
    items = _items(found, flat)
    file, frames = AssembledFile(), _TensorFrames(rules)
    results: list[WriteResult] = []
    for item, data in items:
        start = file.size
        if item.tensor_data is None:
            stream = io.BytesIO()
            torch.save(data, stream)
            file.add(stream.getvalue())
        else:
            frames.add(data, file)
        results.append(WriteResult(item.index, file.size - start, StorageInfo(_FILE, start, file.size - start)))
    file.write(folder, _FILE, meter)
    _TorchWriter(folder, target).finish(_described(items, flat), [results])


class _TensorFrames:
    """The bytes that torch.save writes around those of a tensor by itself: the same for all of a dtype and shape."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._made: dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]] = {}

    def add(self, tensor: torch.Tensor, file: AssembledFile) -> None:
        """Adds what torch.save makes of a tensor, with no more of its storage than its elements."""
        kind = tensor.dtype, tensor.shape
        if kind not in self._made:
            self._made[kind] = self._frame(*kind)
        before, after = self._made[kind]
        file.add(before)
        file.add_leaf(BoxedTensor(tensor.dtype, tensor.shape, ((whole(tensor.shape), tensor),)))
        file.add(after)

    def _frame(self, dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
        if not shape.numel():
            made = torch.empty(shape, dtype=dtype)
            return draft_torch(SourceValue(None), made, self._rules).around()
        made = stand_in(dtype, shape)
        return draft_torch(SourceValue(made, {made.data_ptr(): ((whole(shape), made),)}), made, self._rules).around()


# --- memstore's files -----------------------------------------------------------------------------------------------


class _OwnWriter(StorageWriter):
    """A writer that names the place where the checkpoint is going to be."""

    def __init__(self, folder: str, target: str) -> None:
        super().__init__(folder)
        self._target = target

    @property
    def checkpoint_id(self) -> str:
        return self._target


class _Planner:
    """A planner, as far as a writer asks one: for the data of an item."""

    def __init__(self, items: list[_CheckpointItem]) -> None:
        self._data = {item.index: data for item, data in items}

    def resolve_data(self, item: WriteItem) -> Any:
        found = self._data[item.index]
        return found if item.tensor_data is not None else io.BytesIO(encode_object(item.index.fqn, found))


def write_own_checkpoint(
    found: SourceValue, flat: FlatItems, target: str, folder: str, name: str, meter: ByteMeter
) -> None:
    """Writes a snapshot, as memstore's StorageWriter makes it. `target` is where the folder is going to be."""
    items = _items(found, flat)
    writer = _OwnWriter(folder, target)
    writer.reset()
    writer.set_up_storage_writer(True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan([item for item, _ in items]))])
    results = cast("Any", writer.write_data(plan, cast("Any", _Planner(items)))).wait()
    writer.finish(_described(items, flat), [results])
    meter.add(sum(result.size_in_bytes for result in results))


# --- Snapshots, and memstore's checkpoints among them ----------------------------------------------------------------


WHOLE = "state"  # the name in the app state of a value that is no app state


def open_snapshot(path: str, rules: Rules) -> SourceValue:
    """Opens the state dicts by their names; what `Snapshot.take` would have been given.

    Raises:
        UnsupportedValueError: ranks had different values under one name.
    """
    stored = Stored(path)
    _check_ranks(stored)
    reader = _SnapshotTensors(stored)
    values: dict[str, Any] = {}
    for key in stored.keys(stored.manifest.world_size):
        value = stored.value(0, key)
        assert value is not None  # keys() names those that a rank has
        values[key] = reader.value(value, rules)
    return SourceValue(values[WHOLE] if set(values) == {WHOLE} else values, reader.assembly.boxes)


def _check_ranks(stored: Stored) -> None:
    """Refuses what each rank had for itself: a target has one value. What was spread over ranks is one."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, values in enumerate(stored.manifest.ranks):
        for key, index in values.items():
            first, one = seen.setdefault(key, (rank, index))
            # they have one name: what differs is in them
            if one != index and stored.manifest.values[one] != stored.manifest.values[index]:
                raise UnsupportedValueError(
                    f"{stored.path}: ranks {first} and {rank} have different values under {key!r}, and a conversion "
                    "has one: restore it with as many ranks, and save it anew without"
                )


class _SnapshotTensors:
    """The tensors over the files of a snapshot; those that are one there are one here."""

    def __init__(self, stored: Stored) -> None:
        self.assembly = Assembly()
        self._stored, self._files = stored, SourceFiles(stored.path)
        self._made: dict[int, torch.Tensor] = {}

    def value(self, value: Value, rules: Rules) -> Any:
        self._stored.check_files(value.tensors)
        tensors: list[torch.Tensor] = []
        for i, (tensor, kind) in enumerate(zip(value.tensors, value.plan.traits, strict=True)):
            if i in value.plan.same:
                tensors.append(tensors[value.plan.same[i]])
                continue
            found = self.tensor(tensor)
            if i in value.plan.loaded:  # a container looks into it: offsets of a jagged tensor
                found = SourceValue(None, self.assembly.boxes).leaf(found).whole()
            tensors.append(traits.with_traits(found, kind))
        return self._stored.build(value, tensors, allow_pickle=rules.allow_pickle)

    def tensor(self, tensor: ManifestTensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            dtype, files = DTYPES[tensor.dtype], self._stored.manifest.files
            boxes = tuple(
                (Box(box.offsets, box.shape), self._files.tensor(files[box.file].name, box.offset, dtype, box.shape))
                for box in tensor.boxes
            )
            self._made[id(tensor)] = self.assembly.tensor(dtype, tensor.shape, boxes)
        return self._made[id(tensor)]


def open_checkpoint(path: str, rules: Rules) -> SourceValue:
    """Opens the state dict that torch.distributed.checkpoint has saved with memstore's StorageWriter."""
    checkpoint = FolderCheckpoint(path)
    metadata = metadata_of(checkpoint)
    stored, tensors = checkpoint.opened
    stored.check_files(stored.manifest.tensors)
    reader = _SnapshotTensors(stored)
    items: dict[str, Any] = {name: reader.tensor(tensor) for name, tensor in tensors[STATE].items()}
    for name, tensor in tensors[BYTES].items():
        items[name] = decode_object(name, reader.tensor(tensor).numpy().tobytes())
    for name, said in metadata.state_dict_metadata.items():
        if name in items or not isinstance(said, TensorStorageMetadata):
            continue
        if len(said.chunks) > 1:
            raise UnsupportedValueError(
                f"{path}: {short(name)} is made of several tensors, and was saved in {len(said.chunks)} parts: load it "
                "with the sharding that it was saved with"
            )
        chunk = reader.tensor(tensors[WRAPPED][wrapped_name(MetadataIndex(name, said.chunks[0].offsets))])
        items[name] = decode_tensor(name, SourceValue(None, reader.assembly.boxes).leaf(chunk).whole())
    return SourceValue(nested(items, metadata.planner_data, path), reader.assembly.boxes)


# --- Writing snapshots -----------------------------------------------------------------------------------------------


def app_state_of(value: Any) -> dict[str, Any]:
    """Returns a dict of dicts as it is, an app state. Another value, or one that looks like it, gets one name."""
    if type(value) is not dict:
        return {WHOLE: value}
    entries = cast("dict[Any, Any]", value)
    is_state = all(type(key) is str and isinstance(entry, dict) for key, entry in entries.items())
    return entries if is_state and set(entries) not in (set(), {WHOLE}) else {WHOLE: value}


def write_snapshot(found: SourceValue, rules: Rules, folder: str, name: str, meter: ByteMeter) -> None:
    write_values(
        folder,
        app_state_of(found.value),
        lambda tensor: found.leaf(tensor).cut(),
        durable=True,
        allow_pickle=rules.allow_pickle,
        done=meter.add,
    )
