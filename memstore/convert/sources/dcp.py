"""Checkpoints that torch.distributed.checkpoint has saved with its own FileSystemWriter.

Their metadata is a pickle. It is read with a list of what it may refer to: torch's classes of metadata, and no others.
Each tensor, or part of one, is what torch.save writes, somewhere in a file; only where it lies is read of it.
"""

from __future__ import annotations

import pathlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as torch_metadata

from memstore.convert.formats import DCP_METADATA
from memstore.convert.leaves import Assembly, Found
from memstore.convert.nesting import nested
from memstore.convert.rules import Rules
from memstore.convert.sources.mapped_files import MappedFiles
from memstore.convert.sources.objects import load_object
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError, lacks_told
from memstore.formats import are_sizes, read_whole
from memstore.sharding import Box, overlap, uncovered, whole
from memstore.structure import DTYPE_NAMES, MalformedError, read_known_pickle
from memstore.wording import short

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


class _Stored(NamedTuple):
    """Where an item is."""

    name: str
    start: int
    size: int


def open_dcp(path: str, rules: Rules) -> Found:
    """The state dict that was saved.

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
        self._path, self._rules, self._files = path, rules, MappedFiles(path)
        self._assembly = Assembly()
        self._said = self._read_metadata()

    def found(self) -> Found:
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
                items[name] = self._object(name, place)
        return Found(nested(items, getattr(self._said, "planner_data", None), self._path), self._assembly.boxes)

    def _read_metadata(self) -> Any:
        path = f"{self._path}/{DCP_METADATA}"
        try:
            return read_known_pickle(read_whole(path), _known)
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

    def _places(self, where: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], _Stored]:
        found: dict[tuple[str, tuple[int, ...] | None], _Stored] = {}
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
            found[name, None if offset is None else tuple(offset)] = _Stored(
                file, cast("int", start), cast("int", size)
            )
        return found

    def _tensor(self, name: str, said: Any, places: Mapping[tuple[str, Any], _Stored]) -> torch.Tensor:
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
        self._check_cover(name, shape, [box for box, _ in boxes])
        made = self._assembly.tensor(dtype, shape, tuple(boxes))
        return made.requires_grad_() if said.properties.requires_grad is True else made

    def _part(self, name: str, place: _Stored, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        placed = self._files.locate(place.name, place.start, place.size)
        if (placed.dtype, placed.shape) != (dtype, shape):
            raise CorruptionError(
                path=self._files.path(place.name),
                detail=f"at {place.start:,} is a {placed.dtype}{list(placed.shape)}, and the metadata says that "
                f"{short(name)} is {dtype}{list(shape)}",
            )
        return self._files.tensor(place.name, placed.start, dtype, shape, placed.stride, placed.offset)

    def _check_cover(self, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
        if boxes == [whole(shape)]:  # most are
            return
        if len({len(box.shape) for box in boxes} | {len(shape)}) > 1 or overlap(boxes) is not None:
            self._damaged(f"the chunks of {short(name)} overlap, or have other dimensions")
        if any(o + n > size for box in boxes for o, n, size in zip(box.offsets, box.shape, shape, strict=True)):
            self._damaged(f"{short(name)} has a chunk beyond its shape {list(shape)}")
        missing = uncovered(whole(shape), boxes)
        if missing:
            self._damaged(f"no chunk of {short(name)} has the elements {missing[0]}: a rank's part is missing")

    def _object(self, name: str, place: _Stored) -> Any:
        memory = self._files.bytes(place.name)
        if place.start + place.size > len(memory):
            self._files.damaged(place.name, f"it has {len(memory):,} bytes, and {short(name)} lies beyond")
        data = memory[place.start : place.start + place.size].tobytes()
        return load_object(f"{self._path}: the item {short(name)}", data, self._rules)

    def _damaged(self, detail: str) -> NoReturn:
        raise CorruptionError(path=f"{self._path}/{DCP_METADATA}", detail=detail)


def _known(module: str, name: str) -> Any:
    """What the metadata may refer to: dataclasses, numbers' types and paths."""
    if module == torch_metadata.__name__ and name in _METADATA:
        return getattr(torch_metadata, name)
    if module == _OLD_PROPERTIES and name in _OLD_NAMES:
        return getattr(torch_metadata, _OLD_NAMES[name])  # of the same fields, in the same order
    if (module, name) == ("builtins", "getattr"):
        return _member
    if module == filesystem.__name__ and name == "_StorageInfo":
        return getattr(filesystem, name)
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
    """Of an enumeration: Python 3.11.0 to 3.11.3 pickled its members as calls of getattr."""
    known = _known(torch_metadata.__name__, "_MEM_FORMAT_ENCODING")
    if kind is not known or name not in known.__members__:
        raise MalformedError(f"getattr of {name!r:.60}")
    return known[name]


def _layout(name: Any) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise MalformedError(f"a layout {name!r:.60}")
    return found
