"""New tensors in memory that processes share, for what has no block: torch sends their memory as it is."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import math

import torch


def new_shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory torch sends as it is. One elsewhere it would copy into such memory first."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = torch.UntypedStorage._new_shared(nbytes, device="cpu")
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # pyright: ignore[reportCallIssue]
