"""`assert_same`: whether a value that was got is the one that was put, down to the bits.

What `==` and `torch.equal` let pass (dtype, strides, NaN, -0.0, Parameter, names, ties, 1 or True) differs here.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import datetime
import math
import struct
from collections import UserDict, defaultdict, deque
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    UnbatchedTensor,
)
from tensordict import is_tensorclass as _is_tensorclass

from memstore.structure import is_wrapper, repeats, shown_attributes

# --- Comparison ------------------------------------------------------------------------------------------------------


_COLLECTIONS = (TensorDict, LazyStackedTensorDict, TensorDictParams, TypedTensorDict)


def assert_same(put: Any, got: Any, *, ties: bool = True) -> None:
    """Raises AssertionError, saying where and how `got` differs from `put`.

    What a get promises not to keep is no difference: the strides of tensors and arrays with gaps, the order of arrays
    that are stored as objects, whether an array can be written (a got one always can), and the ties of tensors with
    gaps that nothing without gaps covers.

    Args:
        ties: also compare which tensors share memory, and which are one object.
    """
    __tracebackhide__ = True
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    _compare(put, got, "value", pairs)
    if ties:
        _compare_ties(pairs)


def is_same(put: Any, got: Any, *, ties: bool = True) -> bool:
    try:
        assert_same(put, got, ties=ties)
    except AssertionError:
        return False
    return True


def _expect(condition: bool, where: str, what: str, put: Any, got: Any) -> None:
    if not condition:
        raise AssertionError(f"{where}: {what}: put {put!r:.200}, got {got!r:.200}")


def _compare(put: Any, got: Any, where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if isinstance(put, torch.Tensor):
        _compare_tensors(put, got, where, pairs)
        return
    _expect(type(put) is type(got), where, "type", type(put), type(got))
    if isinstance(put, dict):
        _compare_dicts(put, got, where, pairs)
    elif isinstance(put, UserDict):
        _compare(vars(put), vars(got), f"{where}.__dict__", pairs)
    elif isinstance(put, (list, tuple, deque)):
        if isinstance(put, deque):
            _expect(put.maxlen == got.maxlen, where, "maxlen", put.maxlen, got.maxlen)
        _expect(len(put) == len(got), where, "length", len(put), len(got))
        for i, (have, want) in enumerate(zip(put, got, strict=True)):
            _compare(have, want, f"{where}[{i}]", pairs)
    elif isinstance(put, _COLLECTIONS) or _is_tensorclass(type(put)):
        _compare_collections(put, got, where, pairs)
    elif isinstance(put, np.ndarray):
        _compare_arrays(put, got, where)
        if (
            put.flags.writeable
            and put.flags.c_contiguous
            and put.dtype.char in "efdFDbBhHiIlLqQ?"
            and put.dtype.isnative
        ):
            pairs.append((torch.from_numpy(put), torch.from_numpy(got)))
    elif shown_attributes(put) is not None:
        _compare(dict(shown_attributes(put) or {}), dict(shown_attributes(got) or {}), f"{where}.__dict__", pairs)
    else:
        _expect(_bits_of(put) == _bits_of(got), where, "value", put, got)


# -- objects ---------------------------------------------------------------------------------------------------------

# their repr shows more than == compares: the zone, fold, trailing zeros
_SHOWN = {datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone, Decimal}


def _bits_of(value: Any) -> Any:
    """Something that is equal only for the same value: 0.0 and -0.0, 1 and True, two NaNs of other bits differ."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if kind in _SHOWN:
        return kind, repr(value)
    if kind in (set, frozenset):
        return kind, frozenset(map(_bits_of, value))
    if kind is tuple:
        return kind, tuple(map(_bits_of, value))
    return kind, value


def _compare_dicts(put: Any, got: Any, where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    have, want = list(map(_bits_of, put)), list(map(_bits_of, got))
    _expect(have == want, where, "keys, in order", list(put), list(got))
    for (key, mine), theirs in zip(put.items(), got.values(), strict=True):
        _compare(mine, theirs, f"{where}[{key!r}]", pairs)
    if hasattr(put, "__dict__"):
        _compare(vars(put), vars(got), f"{where}.__dict__", pairs)
    if isinstance(put, defaultdict):
        _expect(put.default_factory is got.default_factory, where, "factory", put.default_factory, got.default_factory)


def _compare_arrays(put: np.ndarray[Any, Any], got: np.ndarray[Any, Any], where: str) -> None:
    _expect(put.dtype == got.dtype and put.dtype.str == got.dtype.str, where, "dtype", put.dtype, got.dtype)
    _expect(put.shape == got.shape, where, "shape", put.shape, got.shape)
    _expect(put.tobytes() == got.tobytes(), where, "bits", put, got)
    _expect(got.flags.writeable, where, "writable", put.flags.writeable, got.flags.writeable)
    if put.size:
        steps = [steps_of(put)] if shares_strides(put) else []
        gaps = not steps or has_gaps(put.shape, steps[0])
        allowed = [*steps, c_order(put.shape)] if gaps else steps
        found = significant(put.shape, steps_of(got))
        same = found in [significant(put.shape, step) for step in allowed]
        packed = gaps and bool(steps) and is_packed(put.shape, steps[0], steps_of(got))
        _expect(same or packed, where, "strides", allowed, found)


# -- tensors ---------------------------------------------------------------------------------------------------------


def _compare_tensors(
    put: torch.Tensor, got: torch.Tensor, where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    kind = type(put)
    if kind.__name__ == "MemoryMappedTensor":
        kind, put = torch.Tensor, put.as_subclass(torch.Tensor)  # comes back as a plain tensor
    _expect(type(got) is kind, where, "type", kind, type(got))
    for name in ("dtype", "device", "layout", "requires_grad", "is_nested", "is_quantized"):
        _expect(getattr(put, name) == getattr(got, name), where, name, getattr(put, name), getattr(got, name))
    _expect(got.is_leaf and not got.is_inference(), where, "a normal leaf of autograd", put, got)
    for name in ("_is_buffer", "persistent"):
        if getattr(put, "_is_buffer", False):
            have, want = getattr(put, name, True), getattr(got, name, None)
            _expect(have == want, where, name, have, want)
    _expect(getattr(got, "_is_buffer", False) == getattr(put, "_is_buffer", False), where, "Buffer", put, got)
    if put.is_nested:
        _compare_nested(put, got, where, pairs)
        return
    _expect(put.shape == got.shape, where, "shape", tuple(put.shape), tuple(got.shape))
    if isinstance(put, UnbatchedTensor) and isinstance(got, UnbatchedTensor):
        _expect(put.batch_size == got.batch_size, where, "batch size", put.batch_size, got.batch_size)
        _compare(put._base_tensor(), got._base_tensor(), where, pairs)
        return
    if put.is_quantized:
        _compare_quantized(put, got, where, pairs)
        return
    if put.layout is not torch.strided:
        _compare_sparse(put.detach(), got.detach(), where, pairs)
        return
    if is_wrapper(type(put)):
        _compare_wrappers(put, got, where, pairs)
        return
    same = got.stride() in _strides(put)
    _expect(same or is_packed(put.shape, put.stride(), got.stride()), where, "stride", put.stride(), got.stride())
    _expect(not got.is_conj() and not got.is_neg(), where, "resolved", put, got)
    _expect(torch.equal(_bytes(put), _bytes(got)), where, "bits", put, got)
    pairs.append((put, got))


def _strides(put: torch.Tensor) -> set[tuple[int, ...]]:
    """The strides with which a tensor may come back: its own, and where it has gaps also the contiguous ones."""
    own = put.stride()
    dense = not has_gaps(put.shape, own)
    contiguous = c_order(put.shape)
    if put.is_conj() or put.is_neg():
        return {contiguous}
    return {own} if dense or not put.numel() else {own, contiguous}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().as_subclass(torch.Tensor)
    if plain.dtype.itemsize == 1:
        return plain.view(torch.uint8).contiguous()
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _compare_nested(put: Any, got: Any, where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if put.layout is torch.strided:
        _expect(torch.equal(put._nested_tensor_size(), got._nested_tensor_size()), where, "sizes", put, got)
        _compare(put.detach().contiguous().values(), got.detach().contiguous().values(), f"{where}.values", pairs)
        return
    _expect(put._ragged_idx == got._ragged_idx, where, "ragged index", put._ragged_idx, got._ragged_idx)
    _compare(put._offsets, got._offsets, f"{where}.offsets", pairs)
    _compare(put._lengths, got._lengths, f"{where}.lengths", pairs)
    _compare(put._values.detach(), got._values.detach(), f"{where}.values", pairs)
    for key in ("min_seqlen", "max_seqlen"):
        have, want = put._metadata_cache.get(key), got._metadata_cache.get(key)
        _expect((have is None) == (want is None), where, key, have, want)
        if have is not None:
            _expect(have.shape == want.shape, where, key, have.shape, want.shape)


def _compare_quantized(
    put: torch.Tensor, got: torch.Tensor, where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    _expect(put.qscheme() == got.qscheme(), where, "scheme", put.qscheme(), got.qscheme())
    _expect(torch.equal(put.int_repr(), got.int_repr()), where, "integers", put, got)
    if put.qscheme() == torch.per_tensor_affine:
        have, want = (put.q_scale(), put.q_zero_point()), (got.q_scale(), got.q_zero_point())
        _expect(have == want, where, "scale and zero point", have, want)
        return
    _compare(put.q_per_channel_scales(), got.q_per_channel_scales(), f"{where}.scales", pairs)
    _compare(put.q_per_channel_zero_points(), got.q_per_channel_zero_points(), f"{where}.zero_points", pairs)


def _compare_sparse(put: Any, got: Any, where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if put.layout is torch.sparse_coo:
        _expect(put.is_coalesced() == got.is_coalesced(), where, "coalesced", put.is_coalesced(), got.is_coalesced())
        names = ("_indices", "_values")
    elif put.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    else:
        names = ("ccol_indices", "row_indices", "values")
    for name in names:
        part = getattr(put, name)()
        part = part.contiguous() if repeats(part) else part  # comes back with memory of its own
        _compare(part, getattr(got, name)(), f"{where}.{name}()", pairs)


def _compare_wrappers(put: Any, got: Any, where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for name in ("_is_param", "stride"):
        have, want = (value() if callable(value := getattr(one, name, False)) else value for one in (put, got))
        _expect(have == want, where, name, have, want)
    (have, context), (want, other) = put.__tensor_flatten__(), got.__tensor_flatten__()
    _expect(list(have) == list(want), where, "tensors inside", have, want)
    _compare(context, other, f"{where}.context", pairs)
    for name in have:
        _compare(getattr(put, name), getattr(got, name), f"{where}.{name}", pairs)


# -- tensordict ------------------------------------------------------------------------------------------------------


def _compare_collections(put: Any, got: Any, where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for name in ("batch_size", "device", "is_locked"):
        _expect(getattr(put, name) == getattr(got, name), where, name, getattr(put, name), getattr(got, name))
    if isinstance(put, TensorDictParams):
        for name in ("no_convert", "_lock_content"):
            _expect(getattr(put, name) == getattr(got, name), where, name, getattr(put, name), getattr(got, name))
        _compare(put._param_td, got._param_td, where, pairs)
    elif isinstance(put, TypedTensorDict):
        _compare(put._source, got._source, where, pairs)
    elif isinstance(put, LazyStackedTensorDict):
        _expect(put.stack_dim == got.stack_dim, where, "stack dim", put.stack_dim, got.stack_dim)
        _expect(put._td_dim_name == got._td_dim_name, where, "stack dim name", put._td_dim_name, got._td_dim_name)
        _compare(put.tensordicts, got.tensordicts, where, pairs)
    elif isinstance(put, TensorDict):
        _expect(put.names == got.names, where, "names", put.names, got.names)
        _compare(dict(put._tensordict), dict(got._tensordict), where, pairs)
    else:
        _compare(put._tensordict, got._tensordict, where, pairs)
        if isinstance(put, (NonTensorData, MetaData)):
            _compare(put.data, got.data, f"{where}.data", pairs)
        else:
            _compare(put._non_tensordict, got._non_tensordict, where, pairs)


# -- ties ------------------------------------------------------------------------------------------------------------


def _compare_ties(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    pairs = [(put, got) for put, got in pairs if put.numel() and not put.is_conj() and not put.is_neg()]
    have = list(tied([put for put, _ in pairs]))
    want = list(tied([got for _, got in pairs]))
    _expect(sorted(have) == sorted(want), "value", "leaves that share memory, by number", sorted(have), sorted(want))
    firsts: dict[int, torch.Tensor] = {}
    for put, got in pairs:
        first = firsts.setdefault(id(put), got)
        _expect(first is got or put.is_nested, "value", "one tensor under two names", put, got)


# --- Geometry --------------------------------------------------------------------------------------------------------
# Where the elements of tensors and arrays lie: strides, how far they reach, and which tensors overlap.
#
# Made for `equality` alone, and on purpose not with what the library has for it: a mistake there must show here.


def shares_strides(array: np.ndarray[Any, Any]) -> bool:
    """Whether a tensor can have the array's strides, and memstore stores it as one."""
    return (
        array.dtype.char in "efdFDbBhHiIlLqQ?"
        and array.dtype.isnative
        and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    )


def steps_of(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """The strides in elements."""
    return tuple(step // array.itemsize for step in array.strides) if array.itemsize else array.strides


def c_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, dtype=torch.uint8, device="meta").stride()


def significant(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    """Without the strides of dimensions of one element, which mean nothing."""
    return tuple(step for size, step in zip(shape, steps, strict=True) if size > 1)


def reach(shape: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """The elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))


def has_gaps(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether memory between the first and the last element is none of the elements."""
    if 0 in shape or significant(shape, steps) == significant(shape, c_order(shape)):
        return False
    return _places(shape, steps) < reach(shape, steps)


def is_packed(shape: tuple[int, ...], steps: tuple[int, ...], packed: tuple[int, ...]) -> bool:
    """Whether elements have several indices each, as if expanded, and `packed` are their strides without gaps."""
    places = _places(shape, steps)
    return places < math.prod(shape) and reach(shape, packed) == places == _places(shape, packed)


def _places(shape: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """How many elements in memory there are."""
    seen = np.zeros(1, np.int64)
    for size, step in zip(shape, steps, strict=True):
        if size > 1 and step:
            seen = np.unique(seen[:, None] + np.arange(size) * step)
    return len(seen)


def span(tensor: torch.Tensor) -> int:
    return reach(tensor.shape, tensor.stride()) * tensor.dtype.itemsize


def tied(tensors: list[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """The leaves that stay tied, as tuples of their numbers: those whose memory overlaps.

    A leaf with gaps only if others without gaps cover it, or with leaves of the very same elements.
    """
    ranges = sorted((str(t.device), t.data_ptr(), t.data_ptr() + span(t), i) for i, t in enumerate(tensors))
    gaps = {i for i, t in enumerate(tensors) if has_gaps(t.shape, t.stride())}
    clusters: list[tuple[str, int, int, list[int]]] = []
    for device, start, stop, i in ranges:
        if i in gaps:
            continue
        if clusters and device == clusters[-1][0] and start < clusters[-1][2]:
            _, first, end, members = clusters.pop()
            clusters.append((device, first, max(end, stop), [*members, i]))
        else:
            clusters.append((device, start, stop, [i]))
    alike: dict[Any, list[int]] = {}
    for device, start, stop, i in ranges:
        if i in gaps:
            covers = [
                members for where, first, end, members in clusters if where == device and first <= start < stop <= end
            ]
            look = (device, start, tensors[i].dtype, tensors[i].shape, tensors[i].stride())
            (covers[0] if covers else alike.setdefault(look, [])).append(i)
    for members in [*(members for *_, members in clusters), *alike.values()]:
        yield tuple(sorted(members))
