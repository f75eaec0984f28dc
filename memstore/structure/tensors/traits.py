"""Dtypes by name; what a leaf is beside its bytes (Parameter, Buffer, requires_grad, device); arithmetic of strides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore.structure.checks import require

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

MOST_EXPANDED = 16 << 30  # bytes that are written of a tensor beyond those that it has in memory; seconds, not hours

_DTYPE_NAME = re.compile(r"(b?float|u?int|complex|bits)[0-9][0-9a-z_]*")


def may_be_dtype(name: str) -> bool:
    """Whether another version of torch may have a dtype of this name."""
    return _DTYPE_NAME.fullmatch(name) is not None


WITHOUT_COPY = frozenset(  # torch has no copy kernel for them
    dtype
    for name, dtype in DTYPES.items()
    if name in {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)

# dtypes that numpy has and that torch takes from it. Through numpy a leaf costs a third of torch.frombuffer.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("float16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}

TENSOR, PARAMETER, BUFFER, UNSAVED_BUFFER = range(4)  # kinds: UNSAVED is a Buffer with persistent=False


class Traits(NamedTuple):
    kind: int
    requires_grad: bool
    device: str | None  # None: the CPU


_ON_CPU = tuple((Traits(kind, False, None), Traits(kind, True, None)) for kind in range(4))
PLAIN = _ON_CPU[TENSOR][False]


def traits_of(tensor: torch.Tensor) -> Traits:
    if type(tensor) is torch.nn.Parameter:
        kind = PARAMETER
    elif getattr(tensor, "_is_buffer", False):
        kind = BUFFER if getattr(tensor, "persistent", True) else UNSAVED_BUFFER
    else:
        kind = TENSOR
    if tensor.is_cpu:
        return _ON_CPU[kind][tensor.requires_grad]
    return Traits(kind, tensor.requires_grad, str(tensor.device))


def with_traits(tensor: torch.Tensor, traits: Traits) -> torch.Tensor:
    """Makes a tensor that no caller has yet the Parameter or Buffer that was put."""
    if traits.kind == PARAMETER:
        # half the time of nn.Parameter(tensor), and no detach
        return torch.Tensor._make_subclass(torch.nn.Parameter, tensor, traits.requires_grad)
    if traits.requires_grad:
        tensor.requires_grad_()
    if traits.kind:
        tensor._is_buffer = True  # type: ignore[attr-defined]
        tensor.persistent = traits.kind == BUFFER  # type: ignore[attr-defined]
    return tensor


def to_flags(kind: int, requires_grad: bool) -> int:
    """A tensor's kind and requires_grad as one number, for descriptions."""
    return kind * 2 + requires_grad


def read_flags(flags: Any) -> tuple[int, bool]:
    """Kind and requires_grad; raises MalformedError for what `to_flags` didn't make."""
    require(type(flags) is int and 0 <= flags < 8, "malformed flags of a tensor")
    return flags >> 1, bool(flags & 1)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for dtypes that can't be copied its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in WITHOUT_COPY else tensor


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        stride[i] = step
        step *= max(shape[i], 1)
    return tuple(stride)


def is_c_ordered(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements lie in order without gaps; a dimension of one element may have any stride."""
    expected = contiguous_stride(shape)
    return all(size == 1 or have == want for size, have, want in zip(shape, stride, expected, strict=True))


def count(shape: Sequence[int]) -> int:
    """The number of elements."""
    product = 1
    for size in shape:
        product *= size
    return product


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether several indices are one element in memory."""
    extent, elements = 1, count(shape)
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step < extent and elements:
            break
        extent += (size - 1) * step
    else:
        return False
    if reach(shape, stride) < elements:
        return True
    marks = np.zeros(reach(shape, stride), np.bool_)  # dimensions may interleave without meeting
    np.lib.stride_tricks.as_strided(marks, shape, stride)[...] = True
    return int(marks.sum()) < elements


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from the first to the last one in memory, gaps included."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return last + 1


def repeats(tensor: torch.Tensor) -> bool:
    """Whether elements share bytes: then a few bytes can claim any number of elements."""
    return reach(tensor.shape, tensor.stride()) < tensor.numel()


def expanded_bytes(tensor: torch.Tensor) -> int:
    """The bytes that its elements take when each is written by itself, beyond those that they have in memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    return max(tensor.numel() - reach(tensor.shape, tensor.stride()), 0) * tensor.itemsize


def why_too_expanded(tensor: torch.Tensor, most: int = MOST_EXPANDED) -> str | None:
    """Why a tensor isn't written element by element: `expand` makes any number of them from a few. None for most."""
    more = expanded_bytes(tensor)
    if more <= most:
        return None
    nbytes = tensor.numel() * tensor.itemsize
    return (
        f"a tensor of shape {list(tensor.shape)}, whose elements are {nbytes:,} bytes, and lie in {nbytes - more:,} "
        f"(expanded); at most {most:,} bytes more than there are in memory are written"
    )
