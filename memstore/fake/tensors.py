"""Fake tensors: the marks by which they are known, and what they show of their storages.

A fake tensor is a meta tensor whose *storage* has a mark. So whatever shares the storage is fake too, and no table has
to be kept: a view, a Parameter, what `.data` gives; and what a tensor shows of its storage says all about it
(`TensorRef`).

The functions look at tensors in C, past properties of subclasses. Callers have torch functions disabled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from memstore._compat import TensorBase, neg_view, version_of

# --- Marks -----------------------------------------------------------------------------------------------------------


is_meta: Callable[[torch.Tensor], bool] = TensorBase.is_meta.__get__
requires_grad: Callable[[torch.Tensor], bool] = TensorBase.requires_grad.__get__
is_leaf: Callable[[torch.Tensor], bool] = TensorBase.is_leaf.__get__
storage_of: Callable[[torch.Tensor], Any] = TensorBase.untyped_storage
is_inference: Callable[[torch.Tensor], bool] = TensorBase.is_inference
_device, _dtype, _layout = TensorBase.device.__get__, TensorBase.dtype.__get__, TensorBase.layout.__get__
_size, _stride, _offset = TensorBase.size, TensorBase.stride, TensorBase.storage_offset
_is_conj, _is_neg = TensorBase.is_conj, TensorBase.is_neg
_NAME = "_memstore_fake"
META = torch.device("meta")
APART = 1 << 30  # the first version of what `.data` gives; torch counts its writes by themselves
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class Mark:
    """Facts about a fake tensor's storage.

    Attributes:
        device: where it would be. "cuda" without an index is the device that is current whenever somebody asks.
        history: what was done with it, a `History` of session.py; None: nobody knows, so it has no values.
        is_lent: a tensor was moved to it, or from it, by `.data =` or `set_`; versions count writes of both storages.
        writes_apart: how often it was written through what `.data` gave.
    """

    __slots__ = ("device", "history", "is_lent", "writes_apart")

    def __init__(self, device: torch.device, history: Any) -> None:
        self.device, self.history, self.is_lent, self.writes_apart = device, history, False, 0


class TensorRef(NamedTuple):
    """Fake tensor, as what it shows of its storage. It keeps the mark, and no tensor."""

    mark: Mark
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """Returns the mark of a fake tensor; None for any other."""
    if not is_meta(tensor):
        return None
    try:
        return getattr(storage_of(tensor), _NAME, None)
    except NotImplementedError:  # a sparse one: it has none
        return None


def set_mark(tensor: torch.Tensor, mark: Mark) -> None:
    setattr(storage_of(tensor), _NAME, mark)


def unrecorded_writes(tensor: torch.Tensor, mark: Mark, recorded: int) -> int:
    """Returns how many writes of a tensor torch has counted that no recorder has heard of.

    Args:
        recorded: how many writes of its storage one has heard of.
    """
    if is_apart(tensor):
        return version_of(tensor) - APART - mark.writes_apart
    return 0 if is_inference(tensor) else version_of(tensor) - recorded + mark.writes_apart


def is_apart(tensor: torch.Tensor) -> bool:
    """Returns whether its writes are counted apart from those of the tensor that it is the data of."""
    return not is_inference(tensor) and version_of(tensor) >= APART


def ref_of(tensor: torch.Tensor, mark: Mark) -> TensorRef:
    return TensorRef(
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


def over_storage(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Makes a tensor over the storage of another one, of which it shows what the ref shows of its own."""
    made = torch.empty(0, dtype=ref.dtype, device=_device(tensor))
    made.set_(storage_of(tensor), ref.offset, ref.size, ref.stride)
    made = made.conj() if ref.conj else made
    return neg_view(made) if ref.neg else made


def meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a meta tensor with the shape and strides of a real one, and nothing else of it."""
    return torch.empty_strided(_size(tensor), _stride(tensor), dtype=_dtype(tensor), device=META)


def form_of(tensor: torch.Tensor) -> str:
    """Names the form in which a tensor has its values, if it can't be fake; else ""."""
    if _dtype(tensor) in _QUANTIZED:
        return "quantized"
    return "" if _layout(tensor) is torch.strided else "sparse"


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)  # pyright: ignore[reportUnknownArgumentType]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Returns the same arguments or results, with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(map_tensors(change, one) for one in value)
    return value
