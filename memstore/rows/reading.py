"""Reading of rows: `read_rows` walks a value, adds its leaves to a gather, and has that fill what is returned."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any, cast

import torch

from memstore import structure
from memstore._arguments import flag
from memstore._compat import (
    entries_of,
    inner_tensordict,
    new_tensordict,
    params_inner,
    tensorclass_like,
    tensordict_parts,
)
from memstore._wording import an
from memstore.errors import StructureMismatchError
from memstore.rows.gather import Allocate, Path, RowGather, RowIndex, check_there, entry_of, matching, name_of
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
