"""Reading of rows: `read_rows` walks a value, adds its leaves to a gather, and has that fill what is returned."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from memstore import structure
from memstore._arguments import flag
from memstore._threads import between_forks
from memstore.errors import StructureMismatchError
from memstore.rows.gather import Allocate, Gather, Path, RowIndex, check_there, entry_of, matching, name_of
from memstore.structure import modes, own_device


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
    return _read(Gather(RowIndex(index), own_device(device), cast=cast), source, out)


@modes.uncompiled
def read_rows_to(allocate: Allocate, source: Any, index: Any) -> Any:
    """Reads rows as `read_rows`, into tensors on the CPU that `allocate` makes, of a shape and a dtype."""
    with modes.put_aside():
        return _read(Gather(RowIndex(index), None, allocate), source, None)


def _read(gather: Gather, source: Any, out: Any) -> Any:
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
        gather = Gather(RowIndex(index), torch.device("meta"))
        plan(gather, source, None)
        gather.check(source)
        gather.prefetch()


# --- the walk ---------------------------------------------------------------------------------------------------------


def plan(gather: Gather, source: Any, out: Any, path: Path = ()) -> Any:
    """Plans what the rows of `source` become: `out`, or a new value, yet to be filled."""
    if isinstance(source, torch.Tensor) and not _is_collection(source):
        return gather.add(source, out, path)
    if isinstance(source, dict):
        return _dict(gather, source, out, path)
    if isinstance(source, (list, tuple)):
        return _sequence(gather, source, out, path)
    if _is_collection(source):
        with between_forks():
            from memstore.rows.collections import plan_collection

        return plan_collection(gather, source, out, path, plan)
    if next(structure.iter_tensors(source), None) is not None:
        kind = type(source).__qualname__
        raise TypeError(f"{name_of(path)} is a {kind}: rows are those of dicts, lists, tuples and TensorDicts")
    return source if out is None else out  # no tensor: it has no rows


def _dict(gather: Gather, source: dict[Any, Any], out: Any, path: Path) -> Any:
    outs = matching(source, out, path)
    entries = {
        key: plan(gather, value, entry_of(value, outs, key, path), (*path, key)) for key, value in source.items()
    }
    if out is not None:
        return out
    if type(source) is dict:
        return entries
    found = copy.copy(source)  # an OrderedDict, or what else a view has
    found.update(entries)
    return found


def _sequence(gather: Gather, source: Any, out: Any, path: Path) -> Any:
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


def _is_collection(value: Any) -> bool:
    asked: Any = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return asked is not None and asked(value) and not isinstance(value, type)
