"""Operators that read some elements of a leaf in boxes: which points they mean, in terms of indices."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memstore.view.leaf_boxes import LeafBoxes
from memstore.view.points import Points

_aten: Any = torch.ops.aten
_MASKS = frozenset({torch.bool, torch.uint8})
_INTEGERS = frozenset({torch.int64, torch.int32})


class _Meant(NamedTuple):
    """What an operator means: `box[indices]`."""

    box: torch.Tensor
    indices: Sequence[torch.Tensor | None]
    may_be_negative: bool = False


def pick(operator: Any, stored: LeafBoxes, box: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator of rows makes of a box; `args` are those behind it.

    Raises what torch does, where it refuses the arguments.
    """
    meant = _MEANINGS[operator](box, *args, **kwargs) if box.ndim else None
    indices = None if meant is None else _in_range(meant)
    if meant is None or indices is None:  # torch has something to say: to any tensor of that shape
        operator(torch.zeros((), dtype=box.dtype).expand(box.shape), *args, **kwargs)
        return operator(stored.read(box), *args, **kwargs)
    points = Points(indices)
    made = stored.pick(meant.box, points)
    if made is None:
        return operator(stored.read(box), *args, **kwargs)
    placed = points.placed(made)
    return placed if operator in _OF_INDEX else placed.contiguous()


def _in_range(meant: _Meant) -> list[torch.Tensor | None] | None:
    """The indices as `Points` takes them; None where they are others than torch takes."""
    found: list[torch.Tensor | None] = []
    for index in meant.indices:
        if index is not None and index.dtype in _MASKS and meant.may_be_negative:
            dims = meant.box.shape[len(found) : len(found) + index.ndim]
            if index.shape != dims or not index.ndim:
                return None
            found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    if len(found) > meant.box.ndim:
        return None
    for dim, index in enumerate(found):
        if index is None:
            continue
        if index.dtype not in _INTEGERS:
            return None
        size, index = meant.box.shape[dim], index.to(torch.int64)
        if meant.may_be_negative and index.numel() and int(index.min()) < 0:
            index = torch.where(index < 0, index + size, index)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            return None
        found[dim] = index
    try:
        torch.broadcast_shapes(*(index.shape for index in found if index is not None))
    except RuntimeError:
        return None
    return found


def _index(box: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> _Meant:
    return _Meant(box, indices, may_be_negative=True)


def _index_select(box: torch.Tensor, dim: int, index: torch.Tensor) -> _Meant | None:
    if not -box.ndim <= dim < box.ndim or index.ndim > 1:
        return None
    return _Meant(box, [*[None] * (dim % box.ndim), index.reshape(-1)])


def _masked_select(box: torch.Tensor, mask: torch.Tensor) -> _Meant | None:
    if mask.dtype != torch.bool:
        return None
    try:
        shape = torch.broadcast_shapes(box.shape, mask.shape)
    except RuntimeError:
        return None
    return _Meant(box.expand(shape), mask.expand(shape).nonzero(as_tuple=True))


def _gather(box: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> _Meant | None:
    if index.ndim != box.ndim or not -box.ndim <= dim < box.ndim:
        return None
    indices: list[torch.Tensor | None] = []
    for on, size in enumerate(index.shape):
        shape = [1] * box.ndim
        shape[on] = size
        indices.append(index if on == dim % box.ndim else torch.arange(size).reshape(shape))
    return _Meant(box, indices)


def _take(box: torch.Tensor, index: torch.Tensor) -> _Meant | None:
    count = box.numel()
    if index.dtype != torch.int64 or (index.numel() and not -count <= int(index.min()) <= int(index.max()) < count):
        return None
    return _Meant(box, torch.unravel_index(torch.where(index < 0, index + count, index), box.shape))


def _embedding(box: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> _Meant | None:
    return _Meant(box, [indices]) if box.ndim == 2 else None


_OF_INDEX = frozenset({_aten.index.Tensor, _aten._unsafe_index.Tensor})
_MEANINGS: dict[Any, Callable[..., _Meant | None]] = {
    _aten.index.Tensor: _index,
    _aten._unsafe_index.Tensor: _index,
    _aten.index_select.default: _index_select,
    _aten.masked_select.default: _masked_select,
    _aten.gather.default: _gather,
    _aten.take.default: _take,
    _aten.embedding.default: _embedding,
}
