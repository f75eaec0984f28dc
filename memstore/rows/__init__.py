"""Batches of rows out of stored values: `read_rows`, `read_rows_to`, `prefetch_rows`.

index         which rows are asked for
path          where a leaf stands in a value, for errors
targets       what rows are read into, and its checks
copy          how rows are copied
gather        the leaves of a batch, and the tensors that they fill
walk          the value, with its dicts and sequences; collections: with its TensorDicts
"""

from __future__ import annotations

from typing import Any

import torch

from memstore.arguments import flag
from memstore.rows.copy import copy_rows
from memstore.rows.gather import Allocate, Gather
from memstore.rows.index import Index
from memstore.rows.path import of_key
from memstore.rows.targets import is_kept
from memstore.rows.walk import plan
from memstore.structure import modes, own_device

__all__ = ["Allocate", "Index", "copy_rows", "is_kept", "of_key", "prefetch_rows", "read_rows", "read_rows_to"]


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
    return _read(Gather(Index(index), own_device(device), cast=cast), source, out)


@modes.uncompiled
def read_rows_to(allocate: Allocate, source: Any, index: Any) -> Any:
    """As `read_rows`, into tensors on the CPU that `allocate` makes, of a shape and a dtype."""
    with modes.put_aside():
        return _read(Gather(Index(index), None, allocate), source, None)


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
        gather = Gather(Index(index), torch.device("meta"))
        plan(gather, source, None)
        gather.check(source)
        gather.prefetch()
