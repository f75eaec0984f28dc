"""Batches of rows out of stored values: `read_rows`, `read_rows_to`, `prefetch_rows`.

`RowIndex` says which rows are asked for. `RowGather` takes a leaf after the other, checks all targets before the first
byte is written, and then copies the rows, by torch or by numpy (`copy_rows`). `read_rows` walks a value, adds its
leaves to a gather, and has that fill what is returned.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import copy
import itertools
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from memstore import structure
from memstore._arguments import flag
from memstore._compat import (
    entries_of,
    inner_tensordict,
    new_tensordict,
    params_inner,
    raw_getter,
    tensorclass_like,
    tensordict_parts,
)
from memstore._wording import an
from memstore.errors import StructureMismatchError
from memstore.structure import can_cast, copy_into, modes, own_device, takes_bytes, traits, why_not_filled
from memstore.view import LeafBoxes, LeafBytes, Points, StoredLeaf, StoredTensor

# --- RowGather -------------------------------------------------------------------------------------------------------


# What a user may take for a value: by a method that it has, and what reads its rows.
_BY_ITSELF = {
    "read_rows": "its own read_rows(index) reads its rows",
    "sample": "its sample(batch_size) reads rows of it",
    "put_many": "read_rows(store.view(key), index) reads rows of a key's value",
    "prefetch": "data[index] reads its rows",
}
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class LeafRows(NamedTuple):
    """The rows of one leaf, and the tensor that they fill."""

    path: Path
    box: torch.Tensor  # the leaf's elements, as `StoredLeaf` wants them
    real: torch.Tensor  # the same, where they can be read; of a leaf in boxes again as it wants them
    stored: StoredLeaf | None  # None: of a tensor in memory
    rows: torch.Tensor
    target: torch.Tensor
    is_given: bool

    def prefetch(self) -> None:
        if self.stored is not None:
            self.stored.prefetch(self.box, self.rows)

    def receive(self) -> bool:
        """Fills a new target straight from another host, if the rows are there. (`out` waits until all have come.)"""
        is_new = not self.is_given and self.target.device.type == "cpu"
        return is_new and isinstance(self.stored, LeafBytes) and self.stored.receive(self.real, self.rows, self.target)

    def fill(self, *, is_mapped: bool) -> None:
        """Copies rows, one copy each; for a device by pinned memory, which torch keeps as long as the stream needs it.

        Rows that are cast are copied first, too: `index_select(out=)` and `take` have no dtype but their source's.
        """
        target, dtype = self.target.detach(), self.real.dtype
        is_direct = takes_bytes(target) and target.dtype == dtype
        if not is_direct and target.device.type == "meta":
            return
        copies = target
        if not is_direct:
            copies = torch.empty(target.shape, dtype=dtype, pin_memory=target.device.type == "cuda")
        if not isinstance(self.stored, LeafBoxes):
            copy_rows(self.real.cpu(), self.rows, copies, is_mapped=is_mapped)
        elif self.stored.pick(self.box, Points([self.rows]), copies) is None:
            copy_rows(self.stored.read(self.box).cpu(), self.rows, copies, is_mapped=is_mapped)
        if not is_direct:
            copy_into(target, copies, non_blocking=True)


class RowGather:
    """One batch: `reading.plan` adds its leaves, `check`, then `read` fills their targets.

    Args:
        device: where new targets are made; None: where their leaves are.
        allocate: makes them, of a shape and a dtype; None: torch does, on the device.
        cast: targets that are given may have other floating dtypes.

    Attributes:
        device: as given.
        later: steps that are taken once all was checked: for what is no tensor.
    """

    def __init__(
        self, index: RowIndex, device: torch.device | None, allocate: Allocate | None = None, *, cast: bool = False
    ) -> None:
        self._index, self.device, self._allocate, self._cast = index, device, allocate, cast
        self._jobs: list[LeafRows] = []
        self.later: list[Callable[[], object]] = []
        self._has_rows = False

    def of_picked(self) -> RowGather:
        """Returns a batch that adds leaves to this one of which all rows are wanted: they were picked before."""
        whole = RowGather(RowIndex(slice(None)), self.device, self._allocate, cast=self._cast)
        whole._jobs, whole.later = self._jobs, self.later
        return whole

    def rows(self, count: int, path: Path) -> torch.Tensor:
        """Returns the wanted rows of a leaf that has `count` of them."""
        self._has_rows = True
        return self._index.rows(count, name_of(path))

    def add(self, source: torch.Tensor, out: Any, path: Path) -> torch.Tensor:
        """Returns what the rows of a leaf will fill: `out`, or a new tensor."""
        if is_unusual(source):
            raise TypeError(
                f"{name_of(path)} is a quantized, nested or sparse tensor, whose rows can't be read so: index it"
            )
        if source.ndim == 0:
            raise ValueError(f"{name_of(path)} has no dimension, and so no rows")
        if isinstance(source, StoredTensor):
            box, stored = source.shown, source.stored
            real = stored.tensor(box) if isinstance(stored, LeafBytes) else box
        else:
            box = real = source.detach()
            stored = None
        rows = self.rows(len(real), path)
        shape = (len(rows), *real.shape[1:])
        if out is None and self._allocate is not None:
            target = self._allocate(shape, real.dtype)
        elif out is None:
            target = torch.empty(shape, dtype=real.dtype, device=self.device or source.device)
        else:
            check_target(out, shape, real.dtype, path, self._cast)
            target = out
        self._jobs.append(LeafRows(path, box, real, stored, rows, target, out is not None))
        return target

    def check(self, source: Any) -> None:
        """Looks at what can only be said once all leaves were added.

        Raises:
            TypeError: nothing in the source has rows.
            StructureMismatchError: targets overlap.
        """
        if not self._has_rows:
            raise TypeError(_no_rows(source))
        given = [(job.path, job.target) for job in self._jobs if job.is_given and job.target.numel()]
        if given:
            read = [job.real for job in self._jobs if job.stored is None]
            check_overlaps(given, read if self._index.memory is None else [*read, self._index.memory])

    def prefetch(self) -> None:
        for job in self._jobs:
            job.prefetch()

    def read(self) -> None:
        cold = {i for i, job in enumerate(self._jobs) if job.stored and job.stored.is_cold(job.box, job.rows)}
        received = {i for i in cold if self._jobs[i].receive()}
        for i in cold - received:  # all of them before the first is waited for
            self._jobs[i].prefetch()
        with torch.no_grad():
            for i, job in enumerate(self._jobs):
                if i in received:
                    continue
                is_mapped = i not in cold
                if isinstance(job.stored, LeafBytes):
                    nbytes = job.target.numel() * job.real.dtype.itemsize  # as stored: a target may cast them
                    job.stored.use(nbytes)
                    is_mapped = is_mapped and job.stored.populate(nbytes)
                job.fill(is_mapped=is_mapped)
        for action in self.later:
            action()


def _no_rows(source: Any) -> str:
    kind = type(source)
    for method, instead in _BY_ITSELF.items():
        if hasattr(kind, method):
            return f"{an(kind)} is no view: {instead}"
    return (
        f"a value of type {kind.__qualname__} without a tensor has no rows: they are read from a view, a lazy leaf, a "
        "tensor, and TensorDicts, dicts, lists and tuples of these"
    )


# --- Which rows are asked for ----------------------------------------------------------------------------------------


_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64})
_LARGEST = np.iinfo(np.int64).max


class RowIndex:
    """An index as it was given, checked; `rows(n)` is what it means for leaves of n rows."""

    def __init__(self, index: Any) -> None:
        self._given: slice | range | torch.Tensor = index if isinstance(index, (slice, range)) else _as_tensor(index)
        self._rows: dict[int, torch.Tensor] = {}
        self._low, self._high = 0, -1  # of no row
        given = self._given
        if isinstance(given, range):
            if given:
                self._low, self._high = min(given[0], given[-1]), max(given[0], given[-1])
        elif isinstance(given, torch.Tensor) and given.dtype != torch.bool and given.numel():
            self._low, self._high = int(given.min()), int(given.max())

    @property
    def memory(self) -> torch.Tensor | None:
        """Returns the memory that must not be written while rows are read."""
        return self._given if isinstance(self._given, torch.Tensor) else None

    def rows(self, count: int, what: str) -> torch.Tensor:
        """Returns the rows of a leaf that has `count` of them: int64, from 0 on. `what` names the leaf in errors."""
        found = self._rows.get(count)
        if found is None:
            found = self._rows[count] = self._find(count, what)
        return found

    def _find(self, count: int, what: str) -> torch.Tensor:
        given = self._given
        if isinstance(given, slice):
            return torch.tensor(range(*given.indices(count)), dtype=torch.int64)
        if isinstance(given, torch.Tensor) and given.dtype == torch.bool:
            if len(given) != count:
                raise IndexError(
                    f"a mask of {len(given):,} for {what}, which has {count:,} rows: it takes one for each"
                )
            return given.nonzero().squeeze(1)
        if self._low < -count or self._high >= count:
            wrong = self._low if self._low < -count else self._high
            allowed = f"from {-count:,} to {count - 1:,}" if count else "none, for it is empty"
            raise IndexError(f"row {wrong:,} of {what}, which has {count:,}: rows are {allowed}")
        if isinstance(given, range):  # not before: it may be of any length
            given = torch.from_numpy(np.asarray(given, np.int64))
        return torch.where(given < 0, given + count, given) if self._low < 0 else given


def _as_tensor(index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor) and (index.layout is not torch.strided or index.is_nested or index.is_meta):
        raise _no_index(f"a tensor of layout {index.layout} on {index.device}")
    if isinstance(index, torch.Tensor) and index.dtype == torch.uint64:  # which torch can't compare
        index = index.detach().cpu().numpy()
    if isinstance(index, (list, tuple)):
        index = np.asarray(index, None if len(index) else np.int64)
    if isinstance(index, np.ndarray):
        if index.dtype.kind not in "iub" or index.dtype == np.uint8:
            raise _no_index(f"an array of {index.dtype}")
        if index.dtype == np.uint64 and index.size and index.max() > _LARGEST:
            raise IndexError(f"row {index.max():,}: no tensor has so many")
        index = torch.from_numpy(index.astype(bool if index.dtype.kind == "b" else np.int64))
    if not isinstance(index, torch.Tensor):
        raise _no_index(f"the number {index}" if isinstance(index, int) else f"{an(type(index))}")
    if index.dtype not in _INTEGERS and index.dtype != torch.bool:
        raise _no_index(f"a tensor of {index.dtype}")
    if index.ndim != 1:
        raise ValueError(f"an index of rows has one dimension, and not {index.ndim}: shape {tuple(index.shape)}")
    return index.detach().to("cpu", index.dtype if index.dtype == torch.bool else torch.int64).contiguous()


def _no_index(what: str) -> TypeError:
    return TypeError(
        f"{what} is no index of rows: it takes integers or booleans (uint8 might mean either), as a list, array or "
        "tensor of one dimension, a slice or a range"
    )


# --- Where a leaf stands in a value, for errors ----------------------------------------------------------------------


Path = tuple[Any, ...]


def of_key(error: IndexError, key: str) -> IndexError:
    """Returns an error of rows of a key's value, with its key."""
    return IndexError(
        re.sub("(of|for) value.*?, which", lambda found: f"{found[1]} {key!r}, which", str(error), count=1)
    )


def name_of(path: Path) -> str:
    return "value" + "".join(f"[{key!r}]" for key in path)


# --- What rows are read into (`out`) ---------------------------------------------------------------------------------


def matching(source: Any, out: Any, path: Path) -> Any:
    """Returns `out`, once it has the keys of `source`, or None if there is none."""
    if out is None:
        return None
    if isinstance(out, type) or not (hasattr(out, "keys") and hasattr(out, "get")):
        what = f"{name_of(path)} of out is {an(type(out))}"
        raise StructureMismatchError(f"{what}, and that of the source has entries by name")
    keys, found = set(source.keys()), set(out.keys())
    if found != keys:
        has = f"missing {list(keys - found)}, too many {list(found - keys)}"
        raise StructureMismatchError(f"{name_of(path)} of out has other entries than the source: {has}")
    return out


def entry_of(source: Any, out: Any, key: Any, path: Path) -> Any:
    """Returns the target of the entry `source`: that of `out`, once it is `matching`, or None if there is no `out`.

    Raises StructureMismatchError where `out` has None there, or makes its entries when it is asked for them.
    """
    if out is None:
        return None
    get = raw_getter(out)
    found = get(key, None)
    check_there(source, found, (*path, key))
    if not is_kept(found, get(key, None)):
        raise StructureMismatchError(
            f"{name_of(path)} of out is {an(type(out))}, which copies {key!r} when it is asked for it, and can't be "
            "filled: give a TensorDict or a dict"
        )
    return found


def check_there(source: Any, found: Any, path: Path) -> None:
    """Raises StructureMismatchError where an `out` has None in the place of a tensor, or of something that has some."""
    has_rows = isinstance(source, (torch.Tensor, dict, list, tuple)) or hasattr(source, "batch_size")
    if found is None and has_rows:
        raise StructureMismatchError(f"{name_of(path)} of out is None, which can't be filled")


def is_kept(found: Any, again: Any) -> bool:
    """Returns whether a container, asked twice for an entry, gave its own: a lazy stack copies a tensor each time."""
    if found is again or type(found) is not torch.Tensor or is_unusual(found):
        return True
    return found.data_ptr() == again.data_ptr()


def is_unusual(tensor: torch.Tensor) -> bool:
    """Returns whether its elements don't lie in memory by strides: torch may end a process that looks for them so."""
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized


def check_target(out: Any, shape: tuple[int, ...], dtype: torch.dtype, path: Path, cast: bool) -> None:
    """Raises StructureMismatchError unless it is a tensor of this shape and dtype that can be filled.

    Args:
        cast: another floating dtype will do.
    """
    if not isinstance(out, torch.Tensor):
        raise StructureMismatchError(f"{name_of(path)} of out is {an(type(out))}, which can't be filled")
    why = why_not_filled(out)
    if why is not None:
        raise StructureMismatchError(f"{name_of(path)} of out is {why}")
    is_cast = out.dtype != dtype and can_cast(dtype, out.dtype)
    if tuple(out.shape) != shape or not (out.dtype == dtype or (is_cast and cast)):
        found = f"{out.dtype} of shape {tuple(out.shape)}"
        advice = "; cast=True casts it" if is_cast and not cast else ""
        raise StructureMismatchError(f"{name_of(path)} of out is {found}, and takes {dtype} of shape {shape}{advice}")


def check_overlaps(targets: Sequence[tuple[Path, torch.Tensor]], read: Sequence[torch.Tensor]) -> None:
    """Raises StructureMismatchError if a target that is to be filled overlaps another one, or what is read."""
    for one, other in sharing([target for _, target in targets]):
        both = f"{name_of(targets[other][0])} and {name_of(targets[one][0])}"
        raise StructureMismatchError(f"{both} of out overlap in memory")
    reads = {device: _Ranges(read, device) for device in {target.device for _, target in targets}}
    for path, target in targets:
        if reads[target.device].meet(*_range(target)):
            raise StructureMismatchError(f"{name_of(path)} of out overlaps what is read")


class _Ranges:
    """Where tensors of one device lie in its memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        found = sorted({_range(one) for one in tensors if one.numel() and one.device == device})
        self._starts = [start for start, _ in found]
        self._reached = list(itertools.accumulate((stop for _, stop in found), max))  # by those up to each

    def meet(self, start: int, stop: int) -> bool:
        before = bisect_left(self._starts, stop)
        return before > 0 and self._reached[before - 1] > start


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + traits.reach(tensor.shape, tensor.stride()) * tensor.dtype.itemsize


def sharing(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Finds tensors that have bytes of others: yields the number of each, and that of the first such other one.

    Columns of one matrix lie between each other, and share nothing. So where ranges cross, each byte is looked at.
    """
    near: list[tuple[int, int, int]] = []  # ranges, one of which reaches beyond the start of the next one
    reached = 0
    for start, stop, number in sorted((*_range(tensor), number) for number, tensor in enumerate(tensors)):
        if reached <= start:
            near.clear()
        device = tensors[number].device
        same = [one for one in near if one[1] > start and tensors[one[2]].device == device]
        near.append((start, stop, number))
        reached = max(reached, stop)
        if same:
            begin = min(one[0] for one in same)
            taken = torch.zeros(max(stop, *(one[1] for one in same)) - begin, dtype=torch.bool, device="cpu")
            _bytes_of(tensors[number], taken, start - begin).fill_(True)
            for first, _, other in same:
                if _bytes_of(tensors[other], taken, first - begin).any():
                    yield number, other
                    break


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns the part of `memory`, of which an element stands for a byte, where the bytes of a tensor lie."""
    item = tensor.itemsize
    return memory.as_strided((*tensor.shape, item), (*[step * item for step in tensor.stride()], 1), offset)


# --- How rows are copied ---------------------------------------------------------------------------------------------
# How rows are copied: by torch with all its threads, or by numpy in this one, as was faster here lately.
#
# Which is depends on the machine, and on what else runs on it. 256 rows of 28 KiB, in ms, the best and the median:
#
#                                             2 idle cores      2 cores, 7 others at work
#     select: torch, with all its threads     0.32, 0.47        0.33, 8 to 21
#     take: numpy, in this thread             0.61, 0.75        0.61, 0.75
#
# Torch's threads wait for the last of them, and where cores are shared that one isn't running. So both are tried, and
# the other one again at times. (A third way, `preadv` of each row into its place, took 1.1 to 2: it has no page faults,
# but those are gone after a view's first batch, and from then on it took the longest.)


_SMALL = 64 << 10  # bytes; below, either costs its call
_TRY_AGAIN = 64  # calls
_FAR = 4  # times as slow: tried again the more seldom
_LATELY = 0.3  # the weight of the last measurement
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

SELECT, TAKE = range(2)


class Costs:
    """Seconds that each way took lately, for batches of about one size."""

    def __init__(self) -> None:
        self._seconds = [-1.0, -1.0]
        self._calls = 0

    def choose(self) -> int:
        self._calls += 1
        for way in (SELECT, TAKE):
            if self._seconds[way] < 0:
                return way
        best, other = (SELECT, TAKE) if self._seconds[SELECT] <= self._seconds[TAKE] else (TAKE, SELECT)
        every = _TRY_AGAIN if self._seconds[other] < _FAR * self._seconds[best] else _TRY_AGAIN * 16
        return best if self._calls % every else other

    def note(self, way: int, seconds: float) -> None:
        last = self._seconds[way]
        self._seconds[way] = seconds if last < 0 else last + _LATELY * (seconds - last)


_costs: dict[tuple[int, bool], Costs] = {}


def copy_rows(real: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, *, is_mapped: bool) -> None:
    """Fills `target` with rows of `real`. `is_mapped`: no page faults are to be expected."""
    if not target.numel():
        return
    bits = _SAME_SIZE[target.dtype.itemsize]  # not every dtype has a kernel
    real, target = real.view(bits), target.view(bits)
    if not (real.is_contiguous() and target.is_contiguous()):
        _copy_by(SELECT, real, rows, target)
    elif target.nbytes < _SMALL:
        _copy_by(TAKE, real, rows, target)
    else:
        costs = _costs.setdefault((target.nbytes.bit_length(), is_mapped), Costs())
        way = costs.choose()
        start = time.perf_counter()
        _copy_by(way, real, rows, target)
        costs.note(way, time.perf_counter() - start)


def _copy_by(way: int, real: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> None:
    if way == SELECT:
        torch.index_select(real, 0, rows, out=target)
    else:
        # "clip", since "raise", which is not needed here, would copy by way of a buffer
        real.view(len(real), -1).numpy().take(rows.numpy(), 0, target.view(len(target), -1).numpy(), "clip")


# --- Functions that read rows, and the walk through a value with its containers --------------------------------------


@modes.uncompiled
def read_rows(
    source: Any, index: Any, *, out: Any = None, device: torch.device | str | None = None, cast: bool = False
) -> Any:
    """Reads rows of every tensor of a view, as `source[index]` does, but faster, and into existing memory.

    Rows that are on a disk are requested all at once. Then every row is copied once, to its destination.

    Args:
        source: a view, a lazy leaf, or a tensor; TensorDicts, tensorclasses, dicts, lists and tuples of them. Rows run
            along the first dimension.
        index: which rows, in which order: integers (negative ones count from the end) as a list, array or tensor of
            one dimension; a slice or range; or a mask of booleans, one for each row. They may repeat, or be none.
        out: a value of the same structure, whose leaves have one row for each requested one; a dict in the place of a
            TensorDict or a tensorclass, and these in the place of each other, will do. It is filled and returned.
            Allocating a new batch costs more than reading it.
        device: the device of the batch; None: that of the leaf. Copies to CUDA go through pinned memory, asynchronously
            on the current stream.
        cast: True casts the rows that go into `out` where it has another floating-point dtype. False: that is a
            mismatch. Integers are never cast to floating-point numbers, or these to integers.

    Returns:
        The rows, in the structure of `source`. It is `out` if that is given, otherwise a new value.

    Raises:
        IndexError: a row out of range; the message names the range.
        TypeError: an index of floats, or of anything else; a source without a tensor; `out` and `device` together;
            `cast` without `out`.
        ValueError: an index of more than one dimension.
        StructureMismatchError: `out` has another structure, shape or dtype, overlaps, or can't be filled. Nothing was
            written.

    Example:
        >>> import memstore, tempfile, torch
        >>> with memstore.open(tempfile.mkdtemp()) as store:
        ...     version = store.put("frames", torch.arange(12.0).reshape(4, 3))
        ...     memstore.read_rows(store.view("frames"), [3, -4, 3])
        tensor([[ 9., 10., 11.],
                [ 0.,  1.,  2.],
                [ 9., 10., 11.]])
    """
    if out is not None and device is not None:
        raise TypeError("out= has a device of its own: leave device= out")
    if flag("cast", cast) and out is None:
        raise TypeError("cast= is for out=, whose dtypes may differ: give out=, or use to(dtype) on the rows")
    if modes.are_active():
        with modes.put_aside():
            return _read_rows(source, index, out, device, cast)
    return _read_rows(source, index, out, device, cast)


def _read_rows(source: Any, index: Any, out: Any, device: torch.device | str | None, cast: bool) -> Any:
    return _read(RowGather(RowIndex(index), own_device(device), cast=cast), source, out)


@modes.uncompiled
def read_rows_to(allocate: Allocate, source: Any, index: Any) -> Any:
    """Reads rows as `read_rows`, into tensors on the CPU that `allocate` makes, of a shape and a dtype."""
    with modes.put_aside():
        return _read(RowGather(RowIndex(index), None, allocate), source, None)


def _read(gather: RowGather, source: Any, out: Any) -> Any:
    result = plan(gather, source, out)
    gather.check(source)
    gather.read()
    return result


@modes.uncompiled
def prefetch_rows(source: Any, index: Any) -> None:
    """Starts to read rows from the disk, and doesn't wait: a later `read_rows` finds them in memory.

    Arguments and errors as `read_rows`. Costs half a microsecond a row, and nothing where the store is in memory.
    """
    with modes.put_aside():
        gather = RowGather(RowIndex(index), torch.device("meta"))
        plan(gather, source, None)
        gather.check(source)
        gather.prefetch()


# --- the walk ---------------------------------------------------------------------------------------------------------


def plan(gather: RowGather, source: Any, out: Any, path: Path = ()) -> Any:
    """Plans what the rows of `source` become: `out`, or a new value, yet to be filled."""
    if _is_collection(source):
        return _collection(gather, source, out, path)
    if isinstance(source, torch.Tensor):
        return gather.add(source, out, path)
    if isinstance(source, dict):
        return _dict(gather, cast("dict[Any, Any]", source), out, path)
    if isinstance(source, (list, tuple)):
        return _sequence(gather, source, out, path)
    if next(structure.iter_tensors(source), None) is not None:
        kind = type(source).__qualname__
        raise TypeError(f"{name_of(path)} is a {kind}: rows are those of dicts, lists, tuples and TensorDicts")
    return source if out is None else out  # no tensor: it has no rows


def _dict(gather: RowGather, source: dict[Any, Any], out: Any, path: Path) -> Any:
    entries = _entries(gather, source, matching(source, out, path), path)
    if out is not None:
        return out
    if type(source) is dict:
        return entries
    found = copy.copy(source)  # an OrderedDict, or what else a view has
    found.update(entries)
    return found


def _entries(gather: RowGather, source: dict[Any, Any], outs: Any, path: Path) -> dict[Any, Any]:
    return {key: plan(gather, value, entry_of(value, outs, key, path), (*path, key)) for key, value in source.items()}


def _sequence(gather: RowGather, source: Any, out: Any, path: Path) -> Any:
    outs = [None] * len(source) if out is None else out
    if not isinstance(outs, (list, tuple)) or len(outs) != len(source):
        raise StructureMismatchError(f"{name_of(path)} of out is no {type(source).__qualname__} of {len(source)}")
    if out is not None:
        for i, (one, other) in enumerate(zip(source, outs, strict=True)):
            check_there(one, other, (*path, i))
    pairs = enumerate(zip(source, outs, strict=True))
    entries = [plan(gather, one, other, (*path, i)) for i, (one, other) in pairs]
    if out is not None:
        return out
    kind: Any = type(source)
    return kind(*entries) if hasattr(kind, "_fields") else kind(entries)


# --- TensorDicts and their relatives ---------------------------------------------------------------------------------
# Where there is a value of its classes, tensordict is imported. Other values do without it: its import takes a second.


def _tensordict() -> Any:
    return sys.modules["tensordict"]


def _is_collection(value: Any) -> bool:
    tensordict: Any = sys.modules.get("tensordict")
    return tensordict is not None and tensordict.is_tensor_collection(value) and not isinstance(value, type)


def _collection(gather: RowGather, source: Any, out: Any, path: Path) -> Any:
    tensordict = _tensordict()
    if tensordict.is_non_tensor(source):
        return _other(gather, source, out, path)
    if not source.batch_size:
        raise ValueError(f"{name_of(path)} is {an(type(source))} without a batch dimension: it has no rows")
    if tensordict.is_tensorclass(source):
        into = inner_tensordict(out) if tensordict.is_tensorclass(type(out)) else out
        inner = plan(gather, inner_tensordict(source), into, path)
        return tensorclass_like(source, inner) if out is None else out
    if isinstance(source, tensordict.TensorDictParams):
        return plan(gather, params_inner(source), out, path)
    rows = gather.rows(source.batch_size[0], path)
    if type(source) is not tensordict.TensorDict:
        return _made_when_asked(gather, source[rows], out, path)
    entries = _entries(gather, entries_of(source), matching(source, out, path), path)
    if out is not None:
        return out
    names = tensordict_parts(source).names
    return new_tensordict(
        tensordict.TensorDict,
        entries,
        torch.Size((len(rows), *source.batch_size[1:])),
        device=gather.device or source.device,
        names=None if names is None else list(names),
        nested=False,
    )


def _made_when_asked(gather: RowGather, picked: Any, out: Any, path: Path) -> Any:
    """Plans rows of a lazy stack, or of another container that makes its entries when it is asked for them."""
    if out is None:
        return picked.clone()
    tensordict = _tensordict()
    whole = gather.of_picked()
    if not (isinstance(picked, tensordict.LazyStackedTensorDict) and isinstance(out, tensordict.LazyStackedTensorDict)):
        plan(whole, tensordict.TensorDict(dict(picked.items()), picked.batch_size), out, path)
        return out
    # A stack is read from members to members, each as a batch of one row.
    members, outs = picked.tensordicts, out.tensordicts
    if (picked.stack_dim, len(members)) != (out.stack_dim, len(outs)):
        found = f"a stack of {len(outs)} along dimension {out.stack_dim}"
        takes = f"{len(members)} along {picked.stack_dim}"
        raise StructureMismatchError(f"{name_of(path)} of out is {found}, and takes one of {takes}")
    for one, other in zip(members, outs, strict=True):
        keys = [key for key in _keys_of_others(one) if key in _keys_of_others(other)]
        if keys:
            gather.later.append(partial(other.update_, one.select(*keys)))
            one, other = one.exclude(*keys), other.exclude(*keys)
        plan(whole, one.unsqueeze(0), other.unsqueeze(0), path)
    return out


def _keys_of_others(member: Any) -> list[Any]:
    """Returns the keys of the leaves of a stack's member that are no tensors, nested ones too."""
    tensordict = _tensordict()

    def is_leaf(kind: type) -> bool:
        return issubclass(kind, (torch.Tensor, tensordict.NonTensorData)) or tensordict.is_non_tensor(kind)

    return [key for key, value in member.items(True, True, is_leaf=is_leaf) if tensordict.is_non_tensor(value)]


def _other(gather: RowGather, source: Any, out: Any, path: Path) -> Any:
    """Plans a leaf that is no tensor: one value for all rows, or one for each."""
    if not source.batch_size:
        return source if out is None else out
    rows = source[gather.rows(source.batch_size[0], path)]
    if out is None:
        return rows
    given = out.tolist() if hasattr(out, "tolist") else out
    if given == rows.tolist() or (isinstance(rows, _tensordict().NonTensorData) and given == rows.data):
        return out
    raise StructureMismatchError(f"{name_of(path)} is no tensor, and out has other values there: they can't be filled")
