"""The elements of a tensor, as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memstore.structure import traits

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The elements in C order, as bytes: the tensor's own memory, or a copy if they don't lie so there."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu" or not plain.is_contiguous():
        plain = traits.copyable(plain).cpu().contiguous()
    return own_bytes(plain)


def own_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor on the CPU."""
    nbytes = tensor.numel() * tensor.itemsize
    start = int(tensor.storage_offset()) * tensor.itemsize
    flat = traits.over(tensor.untyped_storage(), torch.uint8, start, (nbytes,), (1,))
    return flat.numpy()
