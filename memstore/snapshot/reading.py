"""Tensors of a snapshot, read into memory or mapped.

Boxes go straight into the target where its elements lie as in the file, else through a piece of memory of limited size
(`read_into`). Every chunk of which something is read is compared with its checksum, if it has one. `find_targets` finds
the tensors of a state dict that can be filled in place; `read_tensor` reads one tensor by itself, `state_dict_of` a
state dict into new memory.

Files that are mapped into one range of addresses (`MappedFiles`) are the source of lazy leaves (`view`), and of
entries of a store whose values lie in the files of a snapshot (`describe_snapshot`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from memstore import _modes as modes
from memstore import structure
from memstore._arguments import whole_number
from memstore._compat import inner_tensordict
from memstore._wording import an
from memstore.contents import encode_boxes
from memstore.engine import (
    ALIGNMENT,
    Content,
    ExternalFiles,
    Leaf,
    SharedMemory,
    base_after,
    check_header,
    decode_external,
    end_of,
    map_external,
    opened,
)
from memstore.errors import (
    CorruptionError,
    MemstoreError,
    NotAStoreError,
    ResourceLimitError,
    SnapshotMismatchError,
    UnsupportedValueError,
    VersionGoneError,
)
from memstore.sharding import Box, Shard, StoredBox, TensorShard, narrow_to, sharded_leaf, whole
from memstore.snapshot.buckets import path_or_url
from memstore.snapshot.cache import BLOCK, BlockCache, CachedFile, CacheStore, ranges_of
from memstore.snapshot.chunks import CHUNK, FilePart
from memstore.snapshot.manifest import ManifestBox, ManifestTensor, rank_of
from memstore.snapshot.storage import SILENT, ProgressMeter, hold
from memstore.snapshot.stored import Stored, Value
from memstore.structure import DTYPES, ExternalValue, copy_into, count, memory_of, name_of, over, takes_bytes, traits
from memstore.view import Memory, Source, lazy_leaf

# --- Boxes into shards -----------------------------------------------------------------------------------------------


BUDGET = 1 << 28  # bytes of memory for what can't be read straight into its target


T = TypeVar("T")
Read = Callable[[int, Sequence[FilePart]], None]  # parts of a file, by its number in the manifest


class ReadRequest(NamedTuple):
    """A stored tensor, and the parts of it that are wanted, each with the tensor that it goes to."""

    tensor: ManifestTensor
    shards: Sequence[Shard]


@modes.put_aside()
def read_into(
    stored: Stored,
    wants: Sequence[ReadRequest],
    meter: ProgressMeter,
    budget: int = BUDGET,
    *,
    check_narrow: bool = True,
) -> None:
    """Fills the shards, which may be filled (see structure/memory.py). Autograd isn't told of it.

    Args:
        check_narrow: False: chunks of which less than half is wanted are neither read whole nor compared.

    Raises:
        CorruptionError: bytes are damaged, or missing. The shards then have any content.
        VersionGoneError: another snapshot has taken the place of this one. The shards then have any content, too.
    """
    read = partial(_read, stored, meter, check_narrow)
    direct: dict[int, list[FilePart]] = defaultdict(list)
    detours: dict[int, list[BoxPart]] = defaultdict(list)
    targets: list[torch.Tensor] = []
    for want in wants:
        for shard in want.shards:
            targets.append(shard.local)
            for box in want.tensor.boxes:
                _plan(box, shard, direct, detours)
    with stored.reading():
        for file, parts in direct.items():
            for batch in _apart(parts):
                read(file, batch)
        for file, found in detours.items():
            _read_detours(read, file, found, max(budget, CHUNK if stored.manifest.files[file].sums else 1))
    changed = [target for target in targets if not target.is_inference()]
    if changed:
        torch.autograd.graph.increment_version(changed)
    meter.finish()


def _plan(box: ManifestBox, shard: Shard, direct: dict[int, list[FilePart]], detours: dict[int, list[BoxPart]]) -> None:
    """Adds what the shard needs of the box: straight into its memory, where the elements lie there as in the file."""
    local = shard.local
    if shard.box == (box.offsets, box.shape) and local.is_contiguous() and takes_bytes(local):  # which most are
        direct[box.file].append(FilePart(box.offset, memory_of(local)))
        return
    there = Box(box.offsets, box.shape)
    meet = shard.box.meet(there)
    if meet is None:
        return
    part = BoxPart(box.file, box.offset, box.shape, meet.within(there), narrow_to(local, meet.within(shard.box)))
    if part.is_direct:
        direct[box.file] += part.into_target()
    else:
        detours[box.file].append(part)


def _read(stored: Stored, meter: ProgressMeter, check_narrow: bool, file: int, parts: Sequence[FilePart]) -> None:
    found = stored.manifest.files[file]
    stored.check_size(found)
    stored.storage.read(found.name, parts, sums=found.sums or None, check_narrow=check_narrow, done=meter.done)


def _apart(parts: Sequence[FilePart]) -> list[list[FilePart]]:
    """Returns batches in which no two parts overlap in the file: tied tensors are read for each target."""
    batches: list[list[FilePart]] = []
    ends: list[int] = []
    for part in sorted(parts, key=lambda part: part.offset):
        free = 0
        while free < len(ends) and ends[free] > part.offset:
            free += 1
        if free == len(ends):
            ends.append(0)
            batches.append([])
        batches[free].append(part)
        ends[free] = part.offset + len(part.memory)
    return batches


# --- what lies otherwise in the target --------------------------------------------------------------------------------


def in_batches(items: Iterable[T], most: int, nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups items, in their order, into lists of up to `most` bytes, but one item at least."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _read_detours(read: Read, file: int, detours: Sequence[BoxPart], budget: int) -> None:
    pieces = (piece for detour in sorted(detours, key=lambda one: one.start) for piece in detour.pieces(budget))
    for batch in in_batches(pieces, budget, lambda piece: piece.nbytes):
        memories = [np.empty(piece.nbytes, np.uint8) for piece in batch]
        parts = [part for piece, memory in zip(batch, memories, strict=True) for part in piece.into_memory(memory)]
        for together in _apart(parts):
            read(file, together)
        for piece, memory in zip(batch, memories, strict=True):
            piece.copy_from(memory)


# --- Runs of a box ---------------------------------------------------------------------------------------------------
# What is wanted of a stored box: which runs of its file have it. Of a column these are its rows, and not all between.
#
# Runs that lie near each other are read as one, with the gaps between them: a read of its own costs more.


_JOINED = 64 << 10  # bytes of a gap: to read them takes as long as what Python does for a run of its own


class _Runs(NamedTuple):
    """The runs of a part in its file: as many as the first dimensions have indices.

    Attributes:
        dims: how many dimensions count the runs; the others lie within each.
        length: of a run, in elements, with the gaps in it.
        is_dense: whether there are no gaps in it.
    """

    dims: int
    length: int
    is_dense: bool


class BoxPart:
    """A part of a stored box, and the tensor that it goes to.

    Args:
        file, offset, shape: of the box: its file, where it starts there in bytes, its shape.
        inner: which part of it.
        target: a tensor that has just these elements.
    """

    def __init__(self, file: int, offset: int, shape: tuple[int, ...], inner: Box, target: torch.Tensor) -> None:
        self.file, self.offset, self.shape, self.inner, self.target = file, offset, shape, inner, target

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        return traits.contiguous_stride(self.shape)

    @cached_property
    def _runs(self) -> _Runs:
        shape, steps, item = self.inner.shape, self._steps, self.target.itemsize
        dims, length, elements = len(shape), 1, 1
        while dims and (shape[dims - 1] == 1 or (steps[dims - 1] - length) * item <= _JOINED):
            dims -= 1
            length += (shape[dims] - 1) * steps[dims]
            elements *= shape[dims]
        return _Runs(dims, length, length == elements)

    @cached_property
    def start(self) -> int:
        """Returns where its first element lies in the file."""
        first = sum(at * step for at, step in zip(self.inner.offsets, self._steps, strict=True))
        return self.offset + first * self.target.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Returns the size of the memory that all its runs take."""
        dims, length, _ = self._runs
        return traits.count(self.inner.shape[:dims]) * length * self.target.itemsize

    # --- straight into the target -------------------------------------------------------------------------------------

    @property
    def is_direct(self) -> bool:
        """Returns whether the elements of each run lie in the target as in the file."""
        target, (dims, _, is_dense) = self.target, self._runs
        return is_dense and takes_bytes(target) and traits.is_c_ordered(target.shape[dims:], target.stride()[dims:])

    def into_target(self) -> Iterator[FilePart]:
        """Yields the runs and the target's own memory for each, if `is_direct`."""
        target = self.target
        nbytes = traits.reach(target.shape, target.stride()) * target.itemsize
        start = int(target.storage_offset()) * target.itemsize
        flat = over(target.untyped_storage(), torch.uint8, start, (nbytes,), (1,))
        return self._parts(flat.numpy(), target.stride())

    # --- through memory -----------------------------------------------------------------------------------------------

    def into_memory(self, memory: Any) -> Iterator[FilePart]:
        """Yields the runs and where each goes in memory of `nbytes`."""
        return self._parts(memory, self._memory_stride())

    def copy_from(self, memory: Any) -> None:
        """Copies what was read into memory to the target."""
        target = self.target
        storage = torch.from_numpy(memory).untyped_storage()
        source = over(storage, target.dtype, 0, self.inner.shape, self._memory_stride())
        copy_into(target, source)

    def pieces(self, budget: int) -> Iterator[BoxPart]:
        """Yields halves, cut along the first dimension that can be halved, until each takes no more memory."""
        inner = self.inner
        if self.nbytes <= budget or max(inner.shape, default=1) == 1:
            yield self
            return
        dim = next(dim for dim, size in enumerate(inner.shape) if size > 1)
        half = inner.shape[dim] // 2
        for start, size in ((0, half), (half, inner.shape[dim] - half)):
            part, target = inner.narrow(dim, start, size), self.target.narrow(dim, start, size)
            yield from BoxPart(self.file, self.offset, self.shape, part, target).pieces(budget)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _memory_stride(self) -> tuple[int, ...]:
        """Returns strides by which runs lie one behind the other."""
        dims, length, _ = self._runs
        outer = traits.contiguous_stride(self.inner.shape[:dims])
        return (*(step * length for step in outer), *self._steps[dims:])

    def _parts(self, memory: Any, stride: Sequence[int]) -> Iterator[FilePart]:
        dims, length, _ = self._runs
        item, start = self.target.itemsize, self.start
        for index in product(*map(range, self.inner.shape[:dims])):
            there = sum(at * step for at, step in zip(index, self._steps, strict=False)) * item
            here = sum(at * step for at, step in zip(index, stride, strict=False)) * item
            yield FilePart(start + there, memory[here : here + length * item])


# --- Targets: tensors of a state dict that can be filled in place ----------------------------------------------------


Name = tuple[str | int, ...]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Target(NamedTuple):
    """A tensor in a state dict, and what of it is here.

    Attributes:
        value: what stands there.
        why_not: why it can't be filled; "" if it can.
        is_spread: it is what this rank has of a tensor.
    """

    value: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    why_not: str = ""
    is_spread: bool = False


def find_targets(state_dict: Any) -> dict[Name, Target]:
    """Returns the targets by the names that leaves of a stored state dict have.

    What load_state_dict has to make anew is left out: quantized tensors, and those that are not initialized.
    """
    found = list(_walk(state_dict, ()))
    counts = Counter(name for name, _ in found)
    targets = ((name, _target(value)) for name, value in found if counts[name] == 1)
    return {name: target for name, target in targets if target is not None}


def _walk(value: Any, name: Name) -> Iterator[tuple[Name, Any]]:
    if isinstance(value, TensorShard):
        yield name, value
    elif type(value) in (list, tuple, deque):
        for i, entry in enumerate(cast("list[Any]", value)):
            yield from _walk(entry, (*name, i))
    elif isinstance(value, Mapping) and inner_tensordict(value) is None and not hasattr(value, "batch_size"):
        for key, entry in cast("Mapping[Any, Any]", value).items():
            inner = (*name, key if type(key) is str else name_of(key))
            if type(entry) in _PLAIN:  # which most are
                yield inner, entry
            else:
                yield from _walk(entry, inner)
    elif structure.has_wrapped_shards(value):
        leaf = sharded_leaf(value)
        for shard in () if leaf is None else leaf.shards:
            yield from _walk(shard.local, (*name, shard.box.text))
    elif isinstance(value, torch.Tensor) and structure.is_wrapper(type(value)) and structure.is_made_of_several(value):
        inner: Any = value
        for part in inner.__tensor_flatten__()[0]:
            yield from _walk(getattr(inner, part), (*name, part))
    else:
        yield from structure.iter_tensors(value, name)


def _target(value: Any) -> Target | None:
    if is_lazy(value):
        return None
    if type(value) not in _PLAIN:
        try:
            leaf = sharded_leaf(value)
        except UnsupportedValueError as error:
            return Target(value, torch.uint8, (), (), error.message, True)
        if leaf is not None:
            reasons = filter(None, (structure.why_not_filled(shard.local) for shard in leaf.shards))
            return Target(value, leaf.dtype, leaf.shape, leaf.shards, next(reasons, ""), True)
    tensor: torch.Tensor = value
    if tensor.is_quantized:
        return None
    why_not = structure.why_not_filled(tensor) or ""
    if tensor.is_nested:
        return Target(value, tensor.dtype, (), (), why_not)
    shape = tuple(tensor.shape)
    shards = (Shard(whole(shape), tensor.detach()),) if tensor.numel() and not why_not else ()
    return Target(value, tensor.dtype, shape, shards, why_not)


def new_memory(path: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Makes an empty tensor. Raises ResourceLimitError if there is no memory for it."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ResourceLimitError(
            f"{path}: there is no memory on {device} for a tensor of shape {list(shape)}, {dtype}: {error}"
        ) from error


def new_target(tensor: ManifestTensor) -> Target:
    """Makes a new tensor on the CPU."""
    with torch.inference_mode(False), modes.put_aside():
        made = new_memory(tensor.path, tensor.shape, DTYPES[tensor.dtype], "cpu")
    shards = (Shard(whole(tensor.shape), made),) if made.numel() else ()
    return Target(made, made.dtype, tuple(tensor.shape), shards)


def why_not_filled(tensor: ManifestTensor, target: Target) -> str | None:
    """Says how a target differs from the tensor that is stored for it."""
    if target.why_not:
        return target.why_not
    if target.shape != tensor.shape:
        return f"stored with shape {list(tensor.shape)}, here {list(target.shape)}"
    if target.dtype != DTYPES[tensor.dtype]:
        return f"stored as torch.{tensor.dtype}, here {target.dtype}"
    return None


# --- One tensor by itself; a state dict before its tensors are read --------------------------------------------------


def read_tensor(stored: Stored, path: str, tensor: ManifestTensor, obj_out: Any, budget: int | None) -> Any:
    """Reads one tensor; see `Snapshot.read_object`."""
    if isinstance(budget, float) and budget.is_integer():  # 1e9
        budget = int(budget)
    if budget is not None and whole_number("memory_budget_bytes", budget) < 1:
        raise ValueError(f"memory_budget_bytes is a positive number of bytes, and not {budget!r}")
    stored.check_files([tensor])
    if obj_out is None:
        target = new_target(tensor)
    else:
        found = find_targets(obj_out).get(())
        if found is None:
            raise SnapshotMismatchError(f"{path} is a tensor, and obj_out {an(type(obj_out))}, which has no memory")
        problem = why_not_filled(tensor, found)
        if problem:
            raise SnapshotMismatchError(f"{path}: {problem}")
        target = found
    read_into(stored, [ReadRequest(tensor, target.shards)], SILENT, BUDGET if budget is None else budget)
    return target.value


def build_unread(stored: Stored, value: Value, tensors: Sequence[Any], *, allow_pickle: bool) -> Any:
    """Builds the state dict, to be looked at before what is stored is read into these tensors.

    What containers look into when they are made (lengths of jagged tensors) is read, into memory of its own.
    """
    first = {i: value.plan.same.get(i, i) for i in value.plan.loaded}
    made = {i: new_target(value.tensors[i]) for i in set(first.values())}
    read_into(stored, [ReadRequest(value.tensors[i], target.shards) for i, target in made.items()], SILENT)
    shown = [made[first[i]].value if i in first else tensor for i, tensor in enumerate(tensors)]
    return stored.build(value, shown, allow_pickle=allow_pickle)


def state_dict_of(stored: Stored, value: Value, *, allow_pickle: bool) -> Any:
    """Reads a stored state dict into new memory."""
    stored.check_files(value.tensors)
    tensors: list[Any] = []
    made: dict[int, Target] = {}  # what was one tensor in memory is one again
    wants: list[ReadRequest] = []
    for i, tensor in enumerate(value.tensors):
        if i in value.plan.same:
            tensors.append(tensors[value.plan.same[i]])
            continue
        if id(tensor) not in made:
            made[id(tensor)] = new_target(tensor)
            wants.append(ReadRequest(tensor, made[id(tensor)].shards))
        with torch.inference_mode(False), modes.put_aside():
            tensors.append(traits.with_traits(made[id(tensor)].value.detach(), value.plan.traits[i]))
    read_into(stored, wants, SILENT)
    return stored.build(value, tensors, allow_pickle=allow_pickle)


# --- Views, and entries of a store -----------------------------------------------------------------------------------


def describe_snapshot(key: str, path: str | os.PathLike[str], format: object, *, allow_pickle: bool) -> Content:
    """Describes rank 0's state dicts, which lie in the files of a snapshot, for a record.

    Args:
        key: for errors.
        format: not used: the arguments are those of `formats.describe_files`.
    """
    try:
        stored = Stored(os.path.abspath(path))
        values = stored.values(0)
        places = MappedPlaces(stored, [tensor for value in values for tensor in value.tensors])
        starts, boxes = places.with_room([tensor for value in values for tensor in value.tensors])
        keys = [value.key for value in values]
        try:
            joined = structure.join_external(keys, [ExternalValue(one.plan, one.objects) for one in values], starts)
        except CorruptionError as error:
            raise stored.damaged(error.detail) from error
        boxes = {leaf: found for leaf, found in boxes.items() if leaf not in joined.plan.same}
        check_header(key, len(joined.plan.description) + len(joined.objects))
    except MemstoreError as error:
        error.key = key
        raise
    return Content(
        joined.plan.description,
        joined.objects,
        joined.plan.nbytes,
        adopted=places.files,
        boxes=encode_boxes(boxes, {}) if boxes else None,
    )


def load_snapshot(key: str, path: str | os.PathLike[str], format: object, *, allow_pickle: bool) -> Any:
    """Reads rank 0's state dicts into new memory, and compares them with their checksums."""
    try:
        stored = Stored(path_or_url(path))
        values = stored.values(0)
        return {value.key: state_dict_of(stored, value, allow_pickle=allow_pickle) for value in values}
    except MemstoreError as error:
        error.key = key
        raise


@modes.put_aside()
def view(stored: Stored, rank: int, *, allow_pickle: bool, cache: CacheStore | None = None) -> dict[str, Any]:
    """Returns the state dicts of a rank with lazy leaves; see `Snapshot.view`."""
    values = stored.values(rank)
    tensors = [tensor for value in values for tensor in value.tensors]
    places: MappedPlaces | FetchedPlaces
    if stored.storage.is_remote:
        places = FetchedPlaces(stored, tensors)
        source = FetchedFiles(stored, rank, places.bases, places.end, cache)
    else:
        places = MappedPlaces(stored, tensors)
        source = MappedFiles(stored.path, places.files)
    with torch.inference_mode(False):
        return {
            value.key: stored.build(value, _lazy_leaves(stored, value, places, source), allow_pickle=allow_pickle)
            for value in values
        }


def _lazy_leaves(
    stored: Stored, value: Value, places: Places, source: MappedFiles | FetchedFiles
) -> list[torch.Tensor]:
    """Returns lazy leaves, and plain ones where a container looks into them (jagged, quantized, numpy arrays)."""
    leaves: list[torch.Tensor] = []
    plan, loaded = value.plan, value.plan.loaded
    for i, (tensor, leaf, kind) in enumerate(zip(value.tensors, plan.leaves, plan.traits, strict=True)):
        start, boxes = places.of(tensor)
        if i in plan.same:
            leaves.append(leaves[plan.same[i]])
        elif i in loaded and (boxes or source.absent is not None):
            made = new_target(tensor)
            read_into(stored, [ReadRequest(tensor, made.shards)], SILENT)
            leaves.append(traits.with_traits(made.value, kind))
        elif i in loaded:
            leaves.append(traits.with_traits(_over_mapping(source, leaf, start), kind))
        else:
            leaves.append(lazy_leaf(source, leaf, start, boxes, kind))
    return leaves


def _over_mapping(source: Source, leaf: Leaf, start: int) -> torch.Tensor:
    part = source.memory[start : start + leaf.nbytes]
    if start % DTYPES[leaf.dtype].itemsize:
        part = part.copy()
    storage = torch.from_numpy(part).untyped_storage()
    storage._memstore_mapping = source.mapping  # pyright: ignore[reportAttributeAccessIssue] - as structure's own leaves
    return over(storage, DTYPES[leaf.dtype], 0, leaf.shape, traits.contiguous_stride(leaf.shape))


# --- Files, mapped ---------------------------------------------------------------------------------------------------


class Places:
    """The places of tensors in a range of addresses that has the files of a snapshot, one behind the other.

    Attributes:
        bases: where each file starts, by its number in the manifest.
    """

    def __init__(self, stored: Stored, bases: dict[int, int]) -> None:
        self.bases = bases
        self._ranks = {index: rank_of(stored.manifest.files[index].name) for index in bases}

    def of(self, tensor: ManifestTensor) -> MappedPlace:
        if len(tensor.boxes) == 1:
            (box,) = tensor.boxes
            return MappedPlace(self.bases[box.file] + box.offset, ())
        if not tensor.boxes:
            return MappedPlace(0, ())
        boxes = sorted(tensor.boxes, key=lambda box: box.offsets)
        starts = [self.bases[box.file] + box.offset for box in boxes]
        end = starts[0]
        for box, start in zip(boxes, starts, strict=True):
            if start != end or box.shape[1:] != tensor.shape[1:]:
                break
            end += box.nbytes
        else:
            return MappedPlace(starts[0], ())
        return MappedPlace(
            starts[0],
            tuple(
                StoredBox(Box(box.offsets, box.shape), start, self._ranks[box.file], None)
                for box, start in zip(boxes, starts, strict=True)
            ),
        )


class MappedPlaces(Places):
    """The places of tensors in the range of addresses that the files of a snapshot are mapped to.

    Args:
        tensors: whose files are needed.

    Attributes:
        files: these files, encoded.
    """

    def __init__(self, stored: Stored, tensors: Iterable[ManifestTensor]) -> None:
        found = ExternalFiles()
        bases: dict[int, int] = {}
        with stored.reading():
            for index in sorted({box.file for tensor in tensors for box in tensor.boxes}):
                file = stored.manifest.files[index]
                stored.check_size(file)
                path = f"{os.path.realpath(stored.path)}/{file.name}"
                with opened(path) as (_, status):
                    bases[index] = found.add(path, status)
        self.files = found.encode()
        super().__init__(stored, bases)

    def with_room(self, tensors: Sequence[ManifestTensor]) -> tuple[list[int], dict[int, tuple[StoredBox, ...]]]:
        """Returns where tensors start, and the boxes of those in boxes, which start in room behind the files.

        There a get puts them together (docs/format.md); what is one tensor has one place.
        """
        end = base_after(end_of(decode_external(self.files)), 0)
        room: dict[int, int] = {}
        starts: list[int] = []
        found: dict[int, tuple[StoredBox, ...]] = {}
        for number, tensor in enumerate(tensors):
            start, boxes = self.of(tensor)
            if boxes:
                if any(box.place % DTYPES[tensor.dtype].itemsize for box in boxes):
                    raise UnsupportedValueError(
                        f"the parts of {tensor.path!r:.100} don't start on multiples of its elements: attach it with "
                        "copy=True"
                    )
                found[number] = boxes
                if id(tensor) not in room:
                    room[id(tensor)] = end
                    end = -(-(end + count(tensor.shape) * DTYPES[tensor.dtype].itemsize) // ALIGNMENT) * ALIGNMENT
                start = room[id(tensor)]
            starts.append(start)
        return starts, found


class MappedPlace(NamedTuple):
    """The place of a tensor: whole, in C order, from `start` on; or in boxes, if there are any."""

    start: int
    boxes: tuple[StoredBox, ...]


class MappedFiles(Source):
    """Files of a snapshot, mapped. While they are, no CheckpointManager removes the snapshot.

    Args:
        path: of the snapshot.
        files: which, and as they were when it was opened, encoded.
    """

    __slots__ = ("_files", "_held")

    def __init__(self, path: str, files: bytes) -> None:
        self._held = hold(path)
        mapping = map_external(decode_external(files))
        memory: Memory = np.zeros(0, np.uint8) if mapping is None else np.asarray(mapping)
        super().__init__(memory, mapping, path, is_on_disk=mapping is not None)
        self._files = files

    @property
    def title(self) -> str:
        return f"snapshot={self.key!r}"

    def damaged(self, detail: str, place: int = 0) -> CorruptionError:
        files = decode_external(self._files)
        path = files[bisect_right([file.base for file in files], place) - 1].path if files else self.key
        return CorruptionError(path=path, detail=detail)

    def again(self) -> MappedFiles | None:
        return None if self.mapping is None else MappedFiles(self.key, self._files)

    def __reduce__(self) -> tuple[Any, ...]:
        return receive_mapped_files, (self.key, self._files)


def receive_mapped_files(path: str, files: bytes) -> MappedFiles:
    """Unpickles a source. Raises VersionGoneError if its files are gone, or others by now."""
    try:
        return MappedFiles(path, files)
    except CorruptionError as error:
        raise VersionGoneError(
            f"a reference to a part of the snapshot {path} came when that was gone, or another one: {error.detail}",
            key=path,
        ) from None


# --- Files in a bucket, fetched when they are used -------------------------------------------------------------------
# Memory as large as all files together is reserved, and has no pages. What is used of it is fetched, in blocks, and
# stays as long as the view. With a cache, blocks come from a store of this host, as far as one has been fetched before.


class FetchedPlaces(Places):
    """The places of tensors in memory that the files of a snapshot are fetched to.

    Attributes:
        end: bytes in all.
    """

    def __init__(self, stored: Stored, tensors: Iterable[ManifestTensor]) -> None:
        bases: dict[int, int] = {}
        self.end = 0
        with stored.reading():
            for index in sorted({box.file for tensor in tensors for box in tensor.boxes}):
                file = stored.manifest.files[index]
                stored.check_size(file)
                bases[index] = self.end
                self.end += -(-file.size // BLOCK) * BLOCK
        super().__init__(stored, bases)


class FetchedBytes:
    """Bytes of files in a bucket, in memory that has none of them at first: an `Absent`. Thread-safe.

    Args:
        bases: where each file starts in the memory, by its number in the manifest.
        end: bytes of the memory.
        cache: a store for what is fetched.
    """

    def __init__(self, stored: Stored, bases: Mapping[int, int], end: int, cache: CacheStore | None) -> None:
        self.memory = SharedMemory(max(end, BLOCK))
        self._bytes = np.asarray(self.memory)
        self._stored = stored
        self._bases = sorted(bases.items())
        self._cache = None if cache is None else BlockCache(cache, stored.path, stored.manifest)
        self._has = np.zeros(-(-end // BLOCK), bool)
        self._lock = threading.Lock()

    def need(self, starts: Any, stops: Any) -> None:
        """Fetches what lies between these addresses, as far as it isn't there."""
        wanted = np.zeros(len(self._has) + 1, np.int32)
        first = np.clip((np.asarray(starts) - self.memory.address) // BLOCK, 0, len(self._has))
        last = np.clip(-(-(np.asarray(stops) - self.memory.address) // BLOCK), 0, len(self._has))
        np.add.at(wanted, first, 1)
        np.add.at(wanted, last, -1)
        with self._lock:  # who needs the same waits for it
            blocks = np.flatnonzero((np.cumsum(wanted[:-1]) > 0) & ~self._has)
            if len(blocks):
                self._fetch(blocks)

    def need_all(self) -> None:
        address = self.memory.address
        self.need([address], [address + len(self._has) * BLOCK])

    def receive(self, starts: Any, stops: Any, into: Any) -> bool:
        return False

    def localized(self) -> Any:
        raise MemstoreError(f"{self._stored.path} is no entry of a store")  # which nobody asks of a view

    def _fetch(self, blocks: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        with self._stored.reading():
            for index, base in self._bases:
                file = self._stored.manifest.files[index]
                first, last = np.searchsorted(blocks, [base // BLOCK, -(-(base + file.size) // BLOCK)])
                own = (blocks[first:last] - base // BLOCK).tolist()
                memory = self._bytes[base : base + file.size]
                read = partial(self._read, file.name, memory)
                if own and self._cache is not None:
                    self._cache.bring(CachedFile(index, memory), own, read)
                elif own:
                    read(ranges_of(own, file.size))
        self._has[blocks] = True

    def _read(self, name: str, memory: Memory, ranges: Sequence[tuple[int, int]]) -> None:
        self._stored.storage.read(name, [FilePart(start, memory[start:stop]) for start, stop in ranges])


class FetchedFiles(Source):
    """Files of a snapshot in a bucket. A reference to them is the URL, with the options, and the snapshot's id."""

    __slots__ = ("_bases", "_cache", "_end", "_fetched", "_rank", "_stored")

    def __init__(
        self, stored: Stored, rank: int, bases: dict[int, int], end: int, cache: CacheStore | None = None
    ) -> None:
        self._stored, self._rank, self._bases, self._end, self._cache = stored, rank, bases, end, cache
        self._fetched = FetchedBytes(stored, bases, end, cache)
        memory: Memory = np.asarray(self._fetched.memory)
        super().__init__(memory, self._fetched.memory, stored.path, is_on_disk=True, absent=self._fetched)

    @property
    def title(self) -> str:
        return f"snapshot={self.key!r}"

    def damaged(self, detail: str, place: int = 0) -> CorruptionError:
        return CorruptionError(path=self.key, detail=detail)

    def again(self) -> FetchedFiles | None:
        return FetchedFiles(self._stored, self._rank, self._bases, self._end, self._cache)

    def __reduce__(self) -> tuple[Any, ...]:
        stored = self._stored
        return receive_fetched_files, (
            stored.path, dict(stored.options or {}), stored.manifest.id, self._rank, self._bases, self._end,
            None if self._cache is None else self._cache.__reduce__(),
        )  # fmt: skip


def receive_fetched_files(
    path: str, options: dict[str, Any], id: str, rank: int, bases: dict[int, int], end: int, cache: Any = None
) -> FetchedFiles:
    """Unpickles a source. Raises VersionGoneError if the snapshot is gone, or another one by now.

    Args:
        cache: what opens the store that the sender's view has, and its arguments. Where there is none, it goes without.
    """
    try:
        stored = Stored(path, options=options)
    except NotAStoreError as error:
        raise VersionGoneError(f"{path} was removed: {error.message}", key=path) from None
    if stored.manifest.id != id:
        raise VersionGoneError(f"{path} was overwritten before a reference to a part of it came", key=path)
    store: CacheStore | None = None
    if cache is not None:
        with contextlib.suppress(MemstoreError, OSError):
            store = cache[0](*cache[1])
    return FetchedFiles(stored, rank, bases, end, store)
