"""A tensor in pieces that fit into memory, as arrays that numpy counts with. Lazy leaves are read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memstore.structure import NUMPY_DTYPES

PIECE = 1 << 20  # elements

Numbers = np.ndarray[Any, np.dtype[Any]]


def pieces(tensor: torch.Tensor, most: int = PIECE) -> Iterator[torch.Tensor]:
    """Of up to `most` elements, in order. Tensors of one shape come in pieces of the same shapes."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    rows = tensor.shape[0]
    row = tensor.numel() // rows
    if row > most:
        for i in range(rows):
            yield from pieces(tensor[i], most)
        return
    step = most // row
    for start in range(0, rows, step):
        yield tensor[start : start + step]


def numbers(piece: torch.Tensor) -> Numbers | None:
    """The elements as numpy has them; floats that it lacks as float64. None: torch can't count with the dtype."""
    name = str(piece.dtype).removeprefix("torch.")
    if name not in NUMPY_DTYPES and not (piece.is_floating_point() or piece.is_complex()):
        return None
    try:
        if name not in NUMPY_DTYPES:
            piece = piece.to(torch.complex64 if piece.is_complex() else torch.float64)
        return piece.detach().resolve_conj().resolve_neg().numpy()
    except (RuntimeError, NotImplementedError):  # several numbers in a byte
        return None


def bits(piece: torch.Tensor) -> Numbers:
    """The bytes of each element: [elements, bytes]."""
    plain = piece.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).reshape(plain.numel(), -1).numpy()
