"""Marks: which tensors are fake, and the device that each of them claims.

A fake tensor is a meta tensor whose *storage* has a mark. So whatever shares the storage is fake too, and no table has
to be kept: a view, a Parameter, what `.data` gives; and what a tensor shows of its storage says all about it (`Ref`).

The functions here look at tensors in C, past properties of subclasses. Callers have torch functions disabled.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

_c_tensor: Any = torch._C.TensorBase
is_meta: Callable[[torch.Tensor], bool] = _c_tensor.is_meta.__get__
requires_grad: Callable[[torch.Tensor], bool] = _c_tensor.requires_grad.__get__
is_leaf: Callable[[torch.Tensor], bool] = _c_tensor.is_leaf.__get__
real_device: Callable[[torch.Tensor], torch.device] = _c_tensor.device.__get__
storage_of: Callable[[torch.Tensor], Any] = _c_tensor.untyped_storage
version_of: Callable[[torch.Tensor], int] = _c_tensor._version.__get__
is_inference: Callable[[torch.Tensor], bool] = _c_tensor.is_inference
_dtype, _layout = _c_tensor.dtype.__get__, _c_tensor.layout.__get__
_size, _stride, _offset = _c_tensor.size, _c_tensor.stride, _c_tensor.storage_offset
_is_conj, _is_neg = _c_tensor.is_conj, _c_tensor.is_neg
_NAME = "_memstore_fake"
META = torch.device("meta")
APART = 1 << 30  # the first version of what `.data` gives; torch counts its writes by themselves
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class Mark:
    """What is known of a fake tensor's storage.

    Attributes:
        device: where it would be. "cuda" without an index is the device that is current whenever somebody asks.
        history: what was done with it, a `History` of recorder.py; None: nobody knows, so it has no values.
        is_lent: a tensor was moved to it, or from it, by `.data =` or `set_`; versions count writes of both storages.
        writes_apart: how often it was written through what `.data` gave.
    """

    __slots__ = ("device", "history", "is_lent", "writes_apart")

    def __init__(self, device: torch.device, history: Any) -> None:
        self.device, self.history, self.is_lent, self.writes_apart = device, history, False, 0


class Ref(NamedTuple):
    """A fake tensor, as what it shows of its storage. It keeps the mark, and no tensor."""

    mark: Mark
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """The mark of a fake tensor, None of any other."""
    if not is_meta(tensor):
        return None
    try:
        return getattr(storage_of(tensor), _NAME, None)
    except NotImplementedError:  # a sparse one: it has none
        return None


def set_mark(tensor: torch.Tensor, mark: Mark) -> None:
    setattr(storage_of(tensor), _NAME, mark)


def unrecorded_writes(tensor: torch.Tensor, mark: Mark, recorded: int) -> int:
    """How many writes of a tensor torch has counted that no recorder has heard of.

    Args:
        recorded: how many writes of its storage one has heard of.
    """
    if is_apart(tensor):
        return version_of(tensor) - APART - mark.writes_apart
    return 0 if is_inference(tensor) else version_of(tensor) - recorded + mark.writes_apart


def is_apart(tensor: torch.Tensor) -> bool:
    """Whether its writes are counted apart from those of the tensor that it is the data of."""
    return not is_inference(tensor) and version_of(tensor) >= APART


def ref_of(tensor: torch.Tensor, mark: Mark) -> Ref:
    return Ref(
        mark,
        _dtype(tensor),
        tuple(_size(tensor)),
        tuple(_stride(tensor)),
        _offset(tensor),
        _is_conj(tensor),
        _is_neg(tensor),
    )


def storage_bytes(tensor: torch.Tensor) -> int:
    return int(storage_of(tensor).nbytes())


def over_storage(tensor: torch.Tensor, ref: Ref) -> torch.Tensor:
    """A tensor over the storage of another one, of which it shows what the ref shows of its own."""
    made = torch.empty(0, dtype=ref.dtype, device=real_device(tensor))
    made.set_(storage_of(tensor), ref.offset, ref.size, ref.stride)
    made = made.conj() if ref.conj else made
    return made._neg_view() if ref.neg else made


def meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the shape and strides of a real one, and nothing else of it."""
    return torch.empty_strided(_size(tensor), _stride(tensor), dtype=_dtype(tensor), device=META)


def form_of(tensor: torch.Tensor) -> str:
    """The form in which it has its values, for those that can't be fake; else ""."""
    if _dtype(tensor) in _QUANTIZED:
        return "quantized"
    return "" if _layout(tensor) is torch.strided else "sparse"


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Those among arguments, or results, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)  # pyright: ignore[reportUnknownArgumentType]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same arguments, or results, with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(map_tensors(change, one) for one in value)
    return value
