"""The elements of a tensor, as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memstore.errors import UnsupportedValueError
from memstore.structure import memory_of, traits, why_no_memory

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The elements in C order, as bytes: the tensor's own memory, or a copy if they don't lie so there.

    Raises UnsupportedValueError if it has no memory.
    """
    reason = why_no_memory(tensor)
    if reason is not None:
        raise UnsupportedValueError(reason)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu" or not plain.is_contiguous():
        plain = traits.copyable(plain).cpu().contiguous()
    return memory_of(plain)
