"""Tensors and index expressions for lazy leaves."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.uint8, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint16)


@st.composite
def tensors(draw: st.DrawFn, least: int = 0) -> torch.Tensor:
    """Of up to four dimensions, in C order, permuted, or expanded."""
    shape = draw(st.lists(st.integers(0, 5), min_size=least, max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.arange(torch.Size(shape).numel()).remainder(251).reshape(shape).to(dtype)
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    elif shape and shape[0] and draw(st.booleans()):
        tensor = tensor[:1].expand(3, *shape[1:])
    return tensor


@st.composite
def items(draw: st.DrawFn, size: int) -> Any:
    """An index of one dimension; out of range at times."""
    kind = draw(st.sampled_from(("int", "slice", "slice", "list", "tensor", "matrix", "scalar", "mask")))
    near = st.integers(-size - (draw(st.integers(0, 19)) == 0), max(size - 1, 0))
    if kind == "int":
        return draw(near)
    if kind == "slice":
        bound = st.none() | st.integers(-size - 2, size + 2)
        return slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3)))
    if kind == "mask":
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)
    if kind == "scalar":
        return torch.tensor(draw(near))
    if kind == "matrix":
        return torch.tensor([[draw(near), draw(near)]])
    found = draw(st.lists(near, max_size=4))
    return found if kind == "list" else torch.tensor(found, dtype=torch.int64)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """An index expression for this shape."""
    if not shape:
        return draw(st.sampled_from((None, ..., (), (None, ...), True, 0)))
    count = draw(st.integers(0, len(shape)))
    from_end = draw(st.booleans())
    sizes = shape[len(shape) - count :] if from_end else shape[:count]
    parts = [draw(items(size)) for size in sizes]
    if from_end:
        parts.insert(0, ...)
    for _ in range(draw(st.integers(0, 1))):
        parts.insert(draw(st.integers(0, len(parts))), None)
    if len(shape) > 1 and draw(st.integers(0, 9)) == 0:
        mask = torch.zeros(shape[:2], dtype=torch.bool)
        mask[::2, 1::2] = True
        return mask
    return parts[0] if len(parts) == 1 else tuple(parts)
