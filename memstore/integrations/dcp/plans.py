"""torch's plans and metadata, in memstore's terms and back.

planned_item     what a plan of torch.distributed.checkpoint wants written, as a box
reading_of       what a plan wants read, as parts of stored tensors
describe         what is stored of torch's Metadata beside the tensors: known types in msgpack, no pickle
metadata_of      torch's Metadata of a checkpoint, made anew

Names, dtypes, shapes and chunks of tensors stand in the manifest, or the store's record. What only torch knows is kept
in two objects: a `Description`, and the planner's data where that isn't what the planner of torch has.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from memstore._parsing import UNDECODABLE
from memstore._wording import an, first_line
from memstore.errors import (
    CorruptionError,
    FormatVersionError,
    KeyNotFoundError,
    StructureMismatchError,
    UnsupportedValueError,
)
from memstore.integrations.dcp.places import (
    BYTES,
    STATE,
    WRAPPED,
    Checkpoint,
    CheckpointTensor,
    TensorRead,
    text_of,
    wrapped_name,
)
from memstore.integrations.dcp.planners import EncodedTensor, decode_tensor
from memstore.sharding import Box, narrow_to, whole
from memstore.snapshot.drafts import PlannedBox
from memstore.structure import (
    DTYPE_NAMES,
    DTYPES,
    RefusedError,
    fill_parts,
    in_memory,
    is_made_of_several,
    why_no_memory,
    why_parts_not_filled,
)

# --- Items -----------------------------------------------------------------------------------------------------------


class PlannedItem(NamedTuple):
    """An item of a plan, and its box. `key`: STATE, BYTES or WRAPPED."""

    item: MetadataIndex
    key: str
    box: PlannedBox


def planned_item(item: WriteItem, planner: SavePlanner) -> PlannedItem:
    """Returns an item that a rank writes. Bytes of a bytes item are asked for now, a tensor when it is written.

    Raises:
        UnsupportedValueError: it is no tensor and no bytes.
    """
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        data = _bytes_of(name, planner.resolve_data(item))
        box = whole((len(data),))
        return PlannedItem(
            item.index,
            BYTES,
            PlannedBox(name, torch.uint8, box.shape, box, partial(torch.frombuffer, data, dtype=torch.uint8)),
        )
    data = item.tensor_data
    if data is None:
        raise UnsupportedValueError(f"{name}: the plan has a tensor of which it says neither shape nor dtype")
    shown = _looked_up(item, planner)
    if shown is not None and is_made_of_several(shown):
        return _planned_wrapped(item, planner)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    made = PlannedBox(name, data.properties.dtype, tuple(data.size), box, partial(_resolve, planner, item))
    return PlannedItem(item.index, STATE, made)


def _looked_up(item: WriteItem, planner: SavePlanner) -> torch.Tensor | None:
    """Looks up the tensor of an item, where the planner can show it without making it. Checks a plain one.

    Raises UnsupportedValueError for one without memory: now, when nothing is written yet.
    """
    look_up = getattr(planner, "lookup_object", None)
    found = None if look_up is None else look_up(item.index)
    if not isinstance(found, torch.Tensor):
        return None
    if type(found) in (torch.Tensor, torch.nn.Parameter) and not is_made_of_several(found):
        reason = why_no_memory(found)
        if reason is not None:
            raise UnsupportedValueError(f"{item.index.fqn}: {reason}")
    return found


def _planned_wrapped(item: WriteItem, planner: SavePlanner) -> PlannedItem:
    """Plans a tensor that is made of several, as bytes that say how to make it again."""
    name = item.index.fqn
    found: Any = planner.resolve_data(item)
    encoded = EncodedTensor(name, found)
    box = whole((encoded.nbytes,))
    return PlannedItem(
        item.index, WRAPPED, PlannedBox(wrapped_name(item.index), torch.uint8, box.shape, box, encoded.make)
    )


def _bytes_of(name: str, found: Any) -> bytearray:
    if isinstance(found, io.BytesIO):
        return bytearray(found.getbuffer())
    if isinstance(found, bytes | bytearray | memoryview):
        return bytearray(found)
    raise UnsupportedValueError(f"{name}: the planner gives {an(type(found))} for a bytes item, and not a BytesIO")


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    found = planner.resolve_data(item)
    if not isinstance(found, torch.Tensor):
        raise UnsupportedValueError(f"{item.index.fqn}: the planner gives {an(type(found))} for a tensor")
    try:
        return in_memory(settled(found))
    except RefusedError as error:
        raise UnsupportedValueError(f"{item.index.fqn}: {error.reason}") from None


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor; for one that a collective of torch is still to fill, what that fills, once it has."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


class ItemRead(NamedTuple):
    """An item that is read: where it goes to, and what its planner is told afterwards."""

    part: TensorRead
    finish: Callable[[], None]


def reading_of(item: ReadItem, planner: LoadPlanner, stored: Mapping[str, Mapping[str, CheckpointTensor]]) -> ItemRead:
    """Returns what is read for an item.

    Raises:
        KeyNotFoundError: the checkpoint has no such item.
        StructureMismatchError: what is wanted lies not in the stored tensor, or the target has another shape, or can't
            be filled.
    """
    name = item.storage_index.fqn
    key = BYTES if item.type == LoadItemType.BYTE_IO else STATE
    tensor = stored[key].get(name)
    if tensor is None and key == STATE:
        chunk = stored[WRAPPED].get(wrapped_name(item.storage_index))
        if chunk is not None:
            return _reading_of_several(item, planner, chunk)
    if tensor is None:
        raise KeyNotFoundError(f"the checkpoint has no {name!r} among its {'bytes' if key == BYTES else 'tensors'}")
    if key == BYTES:
        data = torch.empty(tensor.shape, dtype=torch.uint8)
        part = TensorRead(key, name, whole(tensor.shape), data)
        return ItemRead(part, lambda: planner.load_bytes(item, io.BytesIO(data.numpy().tobytes())))
    box = _box_of(item, tensor)
    target = _target_of(item, planner, box.shape)
    if is_made_of_several(target):
        data = torch.empty(box.shape, dtype=tensor.dtype)
        return ItemRead(TensorRead(key, name, box, data), partial(_fill, planner, item, target, data))
    target = target.detach()
    return ItemRead(TensorRead(key, name, box, target), partial(planner.commit_tensor, item, target))


def _target_of(
    item: ReadItem, planner: LoadPlanner, shape: tuple[int, ...], takes_whole_tensors: bool = False
) -> torch.Tensor:
    target = settled(planner.resolve_tensor(item))
    is_dense = target.layout is torch.strided and not target.is_quantized
    why = None if 0 in shape or (takes_whole_tensors and not is_dense) else why_parts_not_filled(target)
    if why is not None:
        raise StructureMismatchError(f"{item.dest_index.fqn}: {why}; nothing was loaded on this rank")
    if tuple(target.shape) != shape:
        raise StructureMismatchError(
            f"{item.storage_index.fqn}: the plan reads a part of shape {list(shape)}, and the tensor for it is of "
            f"shape {list(target.shape)}"
        )
    return target


def _reading_of_several(item: ReadItem, planner: LoadPlanner, chunk: CheckpointTensor) -> ItemRead:
    """Returns what is read for a part of a chunk that is stored as several tensors: it is read whole, and cut then."""
    name, sizes = item.storage_index.fqn, tuple(item.lengths)
    target = _target_of(item, planner, sizes, takes_whole_tensors=True)  # copy_ fills sparse and quantized ones
    data = torch.empty(chunk.shape, dtype=torch.uint8)

    def finish() -> None:
        found = decode_tensor(name, data)
        try:
            found = narrow_to(found, Box(tuple(item.storage_offsets), sizes))
        except Exception as error:  # of the class's own operators
            raise UnsupportedValueError(
                f"{name}: {an(type(found))} of shape {list(found.shape)} is stored, of which this rank wants a part, "
                f"and it can't be cut: load it with the sharding that it was saved with ({first_line(error):.200})"
            ) from error
        _fill(planner, item, target, found)

    return ItemRead(TensorRead(WRAPPED, wrapped_name(item.storage_index), whole(chunk.shape), data), finish)


def _fill(planner: LoadPlanner, item: ReadItem, target: torch.Tensor, found: torch.Tensor) -> None:
    """Copies what was read into a tensor, where one of the two is made of several."""
    with torch.no_grad():
        try:
            if not fill_parts(target, found):
                target.copy_(found)
        except Exception as error:  # of the class's own operators
            raise StructureMismatchError(
                f"{item.dest_index.fqn}: {an(type(found))} is stored, which can't be copied into {an(type(target))} "
                f"({first_line(error):.200})"
            ) from error
    planner.commit_tensor(item, target)


def _box_of(item: ReadItem, tensor: CheckpointTensor) -> Box:
    """Returns which elements of the whole tensor an item wants."""
    inner = Box(tuple(item.storage_offsets), tuple(item.lengths))
    chunk = tuple(item.storage_index.offset or (0,) * len(inner.offsets))
    box = inner.moved(chunk) if len(chunk) == len(inner.offsets) else None
    if box is None or not box.fits(tensor.shape):
        raise StructureMismatchError(
            f"{item.storage_index.fqn}: the plan reads {list(inner.shape)} elements at {list(chunk)} + "
            f"{list(inner.offsets)}, and the stored tensor is of shape {list(tensor.shape)}"
        )
    return box


# --- Metadata --------------------------------------------------------------------------------------------------------


DESCRIPTION_FORMAT = 2  # what has no wrapped tensors is written as 1, so that older versions read it
_MEMORY_FORMATS = {
    str(one): one
    for one in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}

PlannerPaths = dict[str, tuple[str | int, ...]]


class StoredProperties(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The properties of a tensor when it was saved; torch keeps them, and calls all of them deprecated."""

    requires_grad: bool = False
    pin_memory: bool = False
    memory_format: str = str(torch.contiguous_format)


class StoredOrigin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """torch's StorageMeta."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    modules: list[str] = []


class WrappedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that is made of several, as it shows itself, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Box]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The stored form of torch's metadata.

    Attributes:
        format: of this.
        version: of torch's metadata.
        paths: the planner's data, where that is where each item lies in a nested state dict.
        properties: of tensors that have other than the usual ones.
        order: the names of all items, as torch lists them.
        wrapped: tensors that are made of several.
    """

    format: int
    version: str | None
    order: list[str]
    paths: PlannerPaths | None
    properties: dict[str, StoredProperties]
    origin: StoredOrigin | None
    wrapped: dict[str, WrappedTensor] = {}


def describe(metadata: Metadata, wrapped: Collection[str] = ()) -> dict[str, Any]:
    """Makes what is stored of it, as a value for memstore.

    Args:
        wrapped: the names of the tensors that are made of several.
    """
    properties: dict[str, StoredProperties] = {}
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            said = found.properties
            kept = StoredProperties(said.requires_grad, said.pin_memory, str(said.memory_format))
            if kept != StoredProperties():
                properties[name] = kept
    paths = _paths_of(metadata.planner_data)
    origin = metadata.storage_meta
    description = Description(
        DESCRIPTION_FORMAT if wrapped else 1,
        metadata.version,
        list(metadata.state_dict_metadata),
        paths,
        properties,
        None if origin is None else _origin_of(origin),
        {name: _wrapped_of(metadata.state_dict_metadata[name]) for name in wrapped},
    )
    return {
        "description": msgspec.msgpack.encode(description),
        "planner_data": metadata.planner_data if paths is None else None,
    }


def _wrapped_of(found: Any) -> WrappedTensor:
    chunks = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
    return WrappedTensor(DTYPE_NAMES[found.properties.dtype], tuple(found.size), chunks)


def _origin_of(meta: StorageMeta) -> StoredOrigin:
    place = None if meta.checkpoint_id is None else text_of(meta.checkpoint_id)
    if place is not None:  # a path may have bytes that are no UTF-8; nobody looks for the checkpoint by this
        place = os.fsencode(place).decode("utf-8", "replace")
    return StoredOrigin(place, meta.save_id, list(meta.modules))


def _paths_of(planner_data: Any) -> PlannerPaths | None:
    """Returns the data of torch's planner, if it is that: so written it takes a tenth of the time and of the bytes."""
    if not isinstance(planner_data, dict):
        return None
    found = cast("dict[Any, Any]", planner_data)
    fits = all(
        type(name) is str and type(path) is tuple and all(type(step) in (str, int) for step in cast("Any", path))
        for name, path in found.items()
    )
    return found if fits else None


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """Returns torch's metadata of a checkpoint.

    Raises:
        CorruptionError: no save of memstore's wrote it.
        FormatVersionError: a newer memstore did.
    """
    objects = checkpoint.objects()
    if not isinstance(objects, dict):  # msgspec 0.23 indexes whatever can be indexed, such as tensors
        raise checkpoint.damaged(f"what torch says of it is {an(type(objects))}, and no dict")
    try:
        stored = msgspec.convert(objects, type=_StoredObjects)
        version = msgspec.msgpack.decode(stored.description, type=_StoredVersion).format
        if not 1 <= version <= DESCRIPTION_FORMAT:
            raise FormatVersionError(
                f"the checkpoint {checkpoint.id} has a description of format {version}, and this memstore reads "
                f"1 to {DESCRIPTION_FORMAT}: use a newer one"
            )
        description = msgspec.msgpack.decode(stored.description, type=Description)
    except UNDECODABLE as error:
        raise checkpoint.damaged(f"what torch says of it can't be read: {error}") from None
    tensors, items = dict(checkpoint.tensors(STATE)), checkpoint.tensors(BYTES)
    stored_chunks = set(checkpoint.tensors(WRAPPED))
    for name, one in description.wrapped.items():
        names_of_chunks = {wrapped_name(MetadataIndex(name, torch.Size(offsets))) for offsets, _ in one.chunks}
        if name in tensors or one.dtype not in DTYPES or not names_of_chunks <= stored_chunks:
            raise checkpoint.damaged(f"what torch says of {name!r:.100} makes no sense")
        tensors[name] = CheckpointTensor(DTYPES[one.dtype], one.shape, one.chunks)
    names = list(dict.fromkeys(description.order))
    if len(names) != len(description.order) or set(names) != {*tensors, *items} or set(tensors) & set(items):
        raise checkpoint.damaged("what torch says of it names other tensors than it has")
    found: dict[str, STORAGE_TYPES] = {}
    for name in names:
        properties = description.properties.get(name, StoredProperties())
        found[name] = (
            BytesStorageMetadata() if name in items else _tensor_of(tensors[name], properties, checkpoint.damaged)
        )
    origin = description.origin or StoredOrigin()
    return Metadata(
        found,
        planner_data=description.paths if stored.planner_data is None else stored.planner_data,
        storage_data=checkpoint.id,
        storage_meta=StorageMeta(origin.checkpoint_id, origin.save_id, None, origin.modules),
        version=description.version,
    )


def _tensor_of(
    tensor: CheckpointTensor, properties: StoredProperties, damaged: Callable[[str], CorruptionError]
) -> TensorStorageMetadata:
    if properties.memory_format not in _MEMORY_FORMATS:
        raise damaged(f"what torch says of it has a memory format {properties.memory_format!r:.60}")
    return TensorStorageMetadata(
        TensorProperties(
            dtype=tensor.dtype,
            requires_grad=properties.requires_grad,
            memory_format=_MEMORY_FORMATS[properties.memory_format],
            pin_memory=properties.pin_memory,
        ),
        torch.Size(tensor.shape),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape in tensor.chunks],
    )


class _StoredVersion(msgspec.Struct, frozen=True):
    format: int


class _StoredObjects(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    description: bytes
    planner_data: Any
