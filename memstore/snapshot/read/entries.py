"""What a snapshot has, by path, for people and programs to look at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import torch

from memstore import structure
from memstore.errors import CorruptionError, NoSuchPathError, UnsupportedValueError
from memstore.listing import near
from memstore.snapshot.format import StoredTensor, path_of
from memstore.snapshot.read.stored import Stored, Value
from memstore.structure import DTYPES, PICKLED, name_of
from memstore.wording import age, count_of, size

_CONTAINERS = (dict, OrderedDict, list, tuple)
_COMPARED = 10_000  # paths, with one that is not there


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a snapshot. Made by `Snapshot.get_manifest`.

    Attributes:
        dtype: of its elements.
        shape: of the whole tensor.
        nbytes: of its parts, in bytes.
        files: the files that have its parts.
        boxes: which elements each part has: offsets and sizes. A single one is the whole.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    files: tuple[str, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object of a snapshot that is no tensor. Made by `Snapshot.get_manifest`.

    Attributes:
        value: the object.
    """

    value: Any


Entry = TensorEntry | ObjectEntry


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """A snapshot as a whole. Made by `Snapshot.metadata`.

    Attributes:
        version: the version of memstore that wrote it.
        id: which take wrote it; no two takes have the same.
        created: when it was written, in Unix seconds.
        world_size: how many ranks took it.
        nbytes: of its files.
        checksum: whether their chunks have checksums.
        manifest: the entries by path, as `Snapshot.get_manifest` has them.
    """

    version: str
    id: str
    created: float
    world_size: int
    nbytes: int
    checksum: bool
    manifest: dict[str, Entry]

    def __repr__(self) -> str:
        entries, ranks = count_of(len(self.manifest), "entry", "entries"), count_of(self.world_size, "rank", "ranks")
        return (
            f"<memstore.SnapshotMetadata: {entries}, {size(self.nbytes)}, of {ranks}, by {self.version}, "
            f"{age(self.created)} old>"
        )


def metadata_of(stored: Stored, *, allow_pickle: bool) -> SnapshotMetadata:
    found = stored.manifest
    return SnapshotMetadata(
        found.writer,
        found.id,
        found.created,
        found.world_size,
        found.nbytes,
        any(file.sums for file in found.files),
        entries_of(stored, allow_pickle=allow_pickle),
    )


def entries_of(stored: Stored, *, allow_pickle: bool) -> dict[str, Entry]:
    """All tensors and objects, by rank and path: "0/model/layer.weight"."""
    found: dict[str, Entry] = {}
    for rank in range(stored.manifest.world_size):
        for key in stored.keys(rank):
            value = stored.value(rank, key)
            if value is not None:
                for path, leaf in leaves_of(stored, value, allow_pickle=allow_pickle):
                    found[f"{rank}/{path}"] = _entry(stored, leaf)
    return found


def _entry(stored: Stored, leaf: Leaf) -> Entry:
    if leaf.tensor is None:
        return ObjectEntry(leaf.object)
    tensor = leaf.tensor
    names = dict.fromkeys(stored.manifest.files[box.file].name for box in tensor.boxes)
    boxes = tuple((box.offsets, box.shape) for box in tensor.boxes)
    nbytes = sum(box.nbytes for box in tensor.boxes)
    return TensorEntry(DTYPES[tensor.dtype], tensor.shape, nbytes, tuple(names), boxes)


class Leaf(NamedTuple):
    """A leaf of a stored state dict: a tensor, or an object; of one that is PICKLED, also its bytes."""

    tensor: StoredTensor | None
    object: Any = None
    stored: bytes = b""


def leaves_of(stored: Stored, value: Value, *, allow_pickle: bool) -> Iterator[tuple[str, Leaf]]:
    """By path. Containers of objects are told by their entries, which each have a path; PICKLED is not looked into."""
    for path, tensor in value.paths():
        yield path, Leaf(tensor)
    try:
        objects = stored.objects_of(value, allow_pickle=allow_pickle)
    except UnsupportedValueError:
        for name, raw in zip(value.plan.object_names, _raw_objects(stored, value), strict=True):
            if "__dict__" not in name:
                yield path_of((value.key, *name)), Leaf(None, PICKLED, bytes(raw))
        return
    for name, found in zip(value.plan.object_names, objects, strict=True):
        if "__dict__" not in name:  # what a Module keeps beside its state_dict
            for path, entry in _opened((value.key, *name), found):
                yield path, Leaf(None, entry)


def _raw_objects(stored: Stored, value: Value) -> list[msgspec.Raw]:
    try:
        return structure.raw_objects(value.objects, len(value.plan.object_names))
    except CorruptionError as error:
        raise stored.damaged(f"the value {value.key!r:.100}: {error.detail}") from error


def _opened(name: tuple[str | int, ...], value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in _CONTAINERS and value:
        keyed: Any = value.items() if isinstance(value, dict) else enumerate(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        for key, entry in keyed:
            yield from _opened((*name, name_of(key)), entry)
    else:
        yield path_of(name), value


def find_leaf(stored: Stored, path: str, *, allow_pickle: bool) -> Leaf:
    """The leaf at "RANK/NAME/...", as this rank would restore it: also what another rank has written.

    Raises:
        KeyNotFoundError: there is none.
        UnsupportedValueError: it is an object that was stored with pickle.
    """
    given: Any = path
    if not isinstance(given, str):
        raise TypeError(
            f"path is one of those that get_manifest() lists, as '0/model/layer.weight', and not {given!r:.100}"
        )
    rank, _, rest = path.partition("/")
    key, _, _ = rest.partition("/")
    if rank.isascii() and rank.isdigit() and len(rank) < 10:
        name = key.replace("%2F", "/").replace("%25", "%")
        value = stored.value(int(rank), name)
        if value is not None:
            tensor = stored.tensors(int(rank), name).get(rest)
            if tensor is not None:
                return Leaf(tensor)
            found = dict(leaves_of(stored, value, allow_pickle=allow_pickle))
            if rest in found and found[rest].object is PICKLED:
                stored.objects_of(value, allow_pickle=allow_pickle)  # which raises
            if rest in found:
                return found[rest]
        if rest in stored.by_path():
            return Leaf(stored.by_path()[rest])
    own = rank if rank.isdigit() else "0"
    found = near(path, (f"{own}/{one}" for one in islice(stored.by_path(), _COMPARED)))
    if found:
        likely = " or ".join(map(repr, found))
        raise NoSuchPathError(f"{stored.path} has nothing at {path!r}: did you mean {likely}?", key=path)
    raise NoSuchPathError(
        f"{stored.path} has nothing at {path!r}: paths are a rank, a name of the app state and the keys in its state "
        "dict, as in '0/model/layer.weight'; get_manifest() lists them",
        key=path,
    )
