"""A snapshot that is there: its manifest, what each rank had, its leaves by path, and whether it is whole.

`Stored` opens a snapshot. `entries_of` and `metadata_of` say what it has, for people and programs to look at;
`find_leaf` finds one leaf by its path; `verify` reads all files and compares them with their checksums.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

from memstore import structure
from memstore._info import Progress
from memstore._wording import age, count_of, size
from memstore.engine import TORCH_DTYPES, HeaderEntry, Leaf, header_size, read_tensors, split_header
from memstore.errors import (
    CorruptionError,
    MemstoreError,
    NoSuchPathError,
    NotAStoreError,
    ShardMismatchError,
    UnsupportedValueError,
    VersionGoneError,
)
from memstore.listing import near
from memstore.sharding import Box, cover_of
from memstore.snapshot.buckets import is_url
from memstore.snapshot.chunks import FilePart
from memstore.snapshot.manifest import (
    MANIFEST,
    Manifest,
    ManifestBox,
    ManifestFile,
    ManifestTensor,
    ManifestValue,
    load_manifest,
    path_of,
)
from memstore.snapshot.objects import storage_at
from memstore.snapshot.storage import ProgressMeter, hold, verify_file
from memstore.structure import DTYPES, PICKLED, name_of

_log = logging.getLogger("memstore")

# --- The snapshot and its values -------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A state dict as it is stored. `tensors` has one for each leaf of the plan."""

    key: str
    plan: structure.Plan
    objects: bytes
    tensors: tuple[ManifestTensor, ...]

    def paths(self) -> Iterator[tuple[str, ManifestTensor]]:
        """Yields the tensors by path. Of the keys 1 and "1" in a dict, the second has a "~" behind it."""
        seen: set[str] = set()
        for leaf, tensor in zip(self.plan.leaves, self.tensors, strict=True):
            path = path_of((self.key, *leaf.name))
            while path in seen:
                path += "~"
            seen.add(path)
            yield path, tensor


class Stored:
    """A snapshot, opened for reading. Raises NotAStoreError if there is none.

    While it lives, no CheckpointManager removes the snapshot, if that lies on a file system.

    Args:
        options: for a bucket.

    Attributes:
        path: of its folder, or its URL.
        storage, manifest: what is read.
    """

    def __init__(self, path: str, manifest: Manifest | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.path, self.options = path, options
        self.manifest = load_manifest(path, options) if manifest is None else manifest
        self.storage = storage_at(path, options, files=self.manifest.files)
        self._held = None if is_url(path) else hold(path)
        self._values: dict[int, Value] = {}
        self._tensors: dict[int, dict[str, ManifestTensor]] = {}
        self._by_path: dict[str, ManifestTensor] | None = None

    def rank_with(self, rank: int, key: str) -> int | None:
        """Returns the rank whose value of this name a rank gets: its own, else that of the first rank that has one."""
        ranks = self.manifest.ranks
        if rank < len(ranks) and key in ranks[rank]:
            return rank
        return next((other for other, values in enumerate(ranks) if key in values), None)

    def value(self, rank: int, key: str) -> Value | None:
        """Returns what this rank gets under a name of the app state; None if no rank has it."""
        found = self.rank_with(rank, key)
        return None if found is None else self._value(self.manifest.ranks[found][key])

    def tensors(self, rank: int, key: str) -> dict[str, ManifestTensor]:
        """Returns the tensors of `value`, by path."""
        found = self.rank_with(rank, key)
        if found is None:
            return {}
        index = self.manifest.ranks[found][key]
        if index not in self._tensors:
            self._tensors[index] = dict(self._value(index).paths())
        return self._tensors[index]

    def keys(self, rank: int) -> list[str]:
        """Returns the names that a rank has in its app state; all names for a rank that is new."""
        ranks = self.manifest.ranks
        if rank < len(ranks):
            return list(ranks[rank])
        return list(dict.fromkeys(key for values in ranks for key in values))

    def values(self, rank: int) -> list[Value]:
        """Returns what this rank gets under each of these names."""
        found = (self.value(rank, key) for key in self.keys(rank))
        return [value for value in found if value is not None]

    def by_path(self) -> dict[str, ManifestTensor]:
        """Returns the tensors of all ranks by path; of one path, the first rank's."""
        if self._by_path is None:
            self._by_path = {}
            for rank in range(len(self.manifest.ranks)):
                for value in self.values(rank):
                    for path, tensor in value.paths():
                        self._by_path.setdefault(path, tensor)
        return self._by_path

    def _value(self, index: int) -> Value:
        if index not in self._values:
            self._values[index] = self._checked(self.manifest.values[index])
        return self._values[index]

    def _checked(self, stored: ManifestValue) -> Value:
        """Returns the value, once its leaves are known to be the tensors that it names. Raises CorruptionError."""
        tensors = tuple(self.manifest.tensors[i] for i in stored.tensors)
        with self.naming(stored.key):
            plan = structure.plan_of(stored.structure)
        if len(plan.leaves) != len(tensors):
            raise self.damaged(
                f"the value {stored.key!r:.100} has {len(plan.leaves):,} leaves, {len(tensors):,} tensors"
            )
        for leaf, tensor in zip(plan.leaves, tensors, strict=True):
            boxes = tensor.boxes
            is_whole = not boxes or (len(boxes) == 1 and boxes[0].nbytes == leaf.nbytes)  # which covers it, as is known
            if not is_whole or leaf.dtype != tensor.dtype or leaf.shape != tensor.shape or leaf.stride is not None:
                self._check_leaf(leaf, tensor)
        return Value(stored.key, plan, stored.objects, tensors)

    def _check_leaf(self, leaf: Leaf, tensor: ManifestTensor) -> None:
        if (leaf.dtype, leaf.shape) != (tensor.dtype, tensor.shape) or leaf.stride is not None:
            raise self.damaged(f"the leaf {leaf.name} is no {tensor.dtype}{list(tensor.shape)}")
        boxes = [Box(box.offsets, box.shape) for box in tensor.boxes]
        itemsize = structure.DTYPES[leaf.dtype].itemsize
        fits = all(box.nbytes == structure.count(box.shape) * itemsize for box in tensor.boxes)
        try:
            check_cover(tensor.path, tensor.shape, boxes)
        except ShardMismatchError as error:
            raise self.damaged(str(error)) from None
        if not fits:
            raise self.damaged(f"the boxes of {tensor.path!r:.100} have other bytes than {leaf.dtype} takes")

    def objects_of(self, value: Value, *, allow_pickle: bool) -> list[Any]:
        """Returns the leaves of a value that are no tensors, in the order of the plan's names."""
        with self.naming(value.key):
            return structure.decode_objects(value.objects, value.plan.object_count, allow_pickle)

    def check_size(self, file: ManifestFile) -> None:
        """Raises CorruptionError for a file that is missing, or of another size than the manifest says."""
        size = self.storage.size(file.name)
        if size is None:
            raise self.damaged_file(file.name, "the file is missing")
        if size != file.size:
            raise self.damaged_file(file.name, f"it has {size:,} bytes, and the manifest says {file.size:,}")

    def check_files(self, tensors: Iterable[ManifestTensor]) -> None:
        """Checks the sizes of these tensors' files, before memory is taken that only a manifest asks for."""
        with self.reading():
            for index in {box.file for tensor in tensors for box in tensor.boxes}:
                self.check_size(self.manifest.files[index])

    @contextmanager
    def reading(self) -> Generator[None]:
        """Tells a change apart from damage: another snapshot may have taken the place of this one during the block.

        Raises:
            VersionGoneError: instead of a CorruptionError, if the manifest that was read isn't there any more.
        """
        try:
            yield
        except CorruptionError as error:
            change = self._change()
            if change is None:
                raise
            raise VersionGoneError(
                f"{self.path} was {change} while it was read ({error.detail}): open it again", key=self.path
            ) from None

    def _change(self) -> str | None:
        """Says what has become of the manifest since it was read; None if it is there, or can't be read."""
        try:
            return None if load_manifest(self.path, self.options).id == self.manifest.id else "overwritten"
        except NotAStoreError:
            return "removed"
        except MemstoreError:
            return None

    def damaged(self, detail: str) -> CorruptionError:
        return CorruptionError(path=f"{self.path}/{MANIFEST}", detail=detail)

    def damaged_file(self, name: str, detail: str) -> CorruptionError:
        return CorruptionError(path=f"{self.path}/{name}", detail=detail)

    def build(self, value: Value, tensors: list[Any], *, allow_pickle: bool) -> Any:
        """Builds the state dict of these tensors."""
        with self.naming(value.key):
            return structure.build(value.plan, value.objects, tensors, allow_pickle=allow_pickle)

    @contextmanager
    def naming(self, key: str) -> Generator[None]:
        """Names the manifest and a value in what is told of damage in the block."""
        try:
            yield
        except CorruptionError as error:
            raise self.damaged(f"the value {key!r:.100}: {error.detail}") from error


def open_first(paths: Sequence[str], options: Mapping[str, Any] | None = None) -> Stored:
    """Opens the first of several folders, or URLs, that has a snapshot whose manifest can be read.

    Args:
        options: for a bucket.

    Raises:
        NotAStoreError, CorruptionError: of the last one, if none has.
    """
    for path in paths[:-1]:
        try:
            return Stored(path, options=options)
        except NotAStoreError:
            continue
        except CorruptionError as error:
            _log.warning("%s: the next tier, %s, is used", error, paths[-1])
    return Stored(paths[-1], options=options)


# --- Entries and leaves, by path -------------------------------------------------------------------------------------


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


SnapshotEntry = TensorEntry | ObjectEntry


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
    manifest: dict[str, SnapshotEntry]

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


def entries_of(stored: Stored, *, allow_pickle: bool) -> dict[str, SnapshotEntry]:
    """Returns all tensors and objects, by rank and path: "0/model/layer.weight"."""
    return {path: _entry(stored, leaf) for path, leaf in all_leaves(stored, allow_pickle=allow_pickle)}


def all_leaves(stored: Stored, *, allow_pickle: bool) -> Iterator[tuple[str, SnapshotLeaf]]:
    """Yields the leaves of all ranks by rank and path."""
    for rank in range(stored.manifest.world_size):
        for value in stored.values(rank):
            for path, leaf in leaves_of(stored, value, allow_pickle=allow_pickle):
                yield f"{rank}/{path}", leaf


def _entry(stored: Stored, leaf: SnapshotLeaf) -> SnapshotEntry:
    if leaf.tensor is None:
        return ObjectEntry(leaf.object)
    tensor = leaf.tensor
    names = dict.fromkeys(stored.manifest.files[box.file].name for box in tensor.boxes)
    boxes = tuple((box.offsets, box.shape) for box in tensor.boxes)
    nbytes = sum(box.nbytes for box in tensor.boxes)
    return TensorEntry(DTYPES[tensor.dtype], tensor.shape, nbytes, tuple(names), boxes)


class SnapshotLeaf(NamedTuple):
    """A leaf of a stored state dict: a tensor, or an object; of one that is PICKLED, also its bytes."""

    tensor: ManifestTensor | None
    object: Any = None
    stored: bytes = b""


def leaves_of(stored: Stored, value: Value, *, allow_pickle: bool) -> Iterator[tuple[str, SnapshotLeaf]]:
    """Yields the leaves by path. Entries of containers of objects have a path each; PICKLED isn't looked into."""
    for path, tensor in value.paths():
        yield path, SnapshotLeaf(tensor)
    try:
        objects = stored.objects_of(value, allow_pickle=allow_pickle)
    except UnsupportedValueError:
        with stored.naming(value.key):
            raws = structure.raw_objects(value.objects, len(value.plan.object_names))
        for name, raw in zip(value.plan.object_names, raws, strict=True):
            if "__dict__" not in name:
                yield path_of((value.key, *name)), SnapshotLeaf(None, PICKLED, bytes(raw))
        return
    for name, found in zip(value.plan.object_names, objects, strict=True):
        if "__dict__" not in name:  # what a Module keeps beside its state_dict
            for path, entry in _opened((value.key, *name), found):
                yield path, SnapshotLeaf(None, entry)


def _opened(name: tuple[str | int, ...], value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in _CONTAINERS and value:
        keyed: Any = value.items() if isinstance(value, dict) else enumerate(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        for key, entry in keyed:
            yield from _opened((*name, name_of(key)), entry)
    else:
        yield path_of(name), value


def find_leaf(stored: Stored, path: str, *, allow_pickle: bool) -> SnapshotLeaf:
    """Returns the leaf at "RANK/NAME/...", as this rank would restore it: also what another rank has written.

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
                return SnapshotLeaf(tensor)
            found = dict(leaves_of(stored, value, allow_pickle=allow_pickle))
            if rest in found and found[rest].object is PICKLED:
                stored.objects_of(value, allow_pickle=allow_pickle)  # which raises
            if rest in found:
                return found[rest]
        if rest in stored.by_path():
            return SnapshotLeaf(stored.by_path()[rest])
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


# --- Verification of a snapshot: its manifest, the headers of its files, and all their bytes -------------------------


def verify(stored: Stored, progress: Progress | bool | None, *, allow_pickle: bool) -> None:
    """Reads all files, and compares them with their checksums and the manifest; see `Snapshot.verify`."""
    for rank in range(stored.manifest.world_size):
        for value in stored.values(rank):
            with contextlib.suppress(UnsupportedValueError):  # pickles, which only who trusts them may look into
                stored.objects_of(value, allow_pickle=allow_pickle)
    meter = ProgressMeter(progress, stored.manifest.nbytes, "verifying")
    boxes: list[list[tuple[ManifestTensor, ManifestBox]]] = [[] for _ in stored.manifest.files]
    for tensor in stored.manifest.tensors:
        for box in tensor.boxes:
            boxes[box.file].append((tensor, box))
    with stored.reading():
        for file, found in zip(stored.manifest.files, boxes, strict=True):
            stored.check_size(file)
            if file.sums:
                verify_file(stored.storage, file.name, file.size, file.sums, meter.done)
            _check_header(stored, file, found)
    meter.finish()


def _check_header(stored: Stored, file: ManifestFile, boxes: Sequence[tuple[ManifestTensor, ManifestBox]]) -> None:
    """Checks that the header that others read has the same ranges as the manifest has boxes in the file."""
    start, entries = read_header(stored, file)
    there = {(start + entry.data_offsets[0], start + entry.data_offsets[1]): entry for entry in entries.values()}
    for tensor, box in boxes:
        entry = there.get((box.offset, box.offset + box.nbytes))
        dtype = None if entry is None else TORCH_DTYPES[entry.dtype]
        if entry is None or (dtype == tensor.dtype and entry.shape != box.shape):
            raise stored.damaged_file(file.name, f"its header doesn't have {tensor.path!r:.100} where it is")


def read_header(stored: Stored, file: ManifestFile) -> tuple[int, Mapping[str, HeaderEntry]]:
    """Returns where the data of a file starts, and the entries of its header by name. Raises CorruptionError."""
    try:
        head = _bytes(stored, file, 0, min(8, file.size))
        start = header_size(head, file.size)
        _, values = split_header(_bytes(stored, file, 8, start - 8))
        return start, read_tensors(values, file.size - start)
    except CorruptionError as error:
        raise stored.damaged_file(file.name, error.detail) from error


def _bytes(stored: Stored, file: ManifestFile, offset: int, size: int) -> bytes:
    memory = bytearray(size)
    stored.storage.read(file.name, [FilePart(offset, memory)], sums=None)
    return bytes(memory)


# --- Whether boxes make up a tensor ----------------------------------------------------------------------------------


def check_cover(path: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raises ShardMismatchError unless the boxes cover the tensor, each element once."""
    found = cover_of(shape, boxes)
    if found.outside is not None:
        raise ShardMismatchError(f"{path}: the ranks' part [{boxes[found.outside].text}] lies outside of {list(shape)}")
    if found.pair is not None:
        raise ShardMismatchError(f"{path}: the ranks' parts of it overlap without being equal: it can't be saved")
    if found.missing:
        wanted = math.prod(shape)
        covered = wanted - sum(math.prod(gap.shape) for gap in found.missing)
        raise ShardMismatchError(f"{path}: the ranks have {covered:,} of its {wanted:,} elements: a rank is missing")
