"""Asks for the bytes of tensors that lie in memory where bytes of other hosts may be absent: see `engine.Absent`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from memstore.engine import Absent
from memstore.sharding import runs

_MOST_RUNS = 1 << 20  # of a tensor; beyond, gaps come too
_LEAST_ROW = 1024  # bytes of one that comes by itself; shorter ones come with the gaps between them


def bring(absent: Absent, tensors: Sequence[torch.Tensor]) -> None:
    """Brings the elements of all tensors, by one request a host. Tensors in other memory are there already."""
    found = [_ranges(tensor, _MOST_RUNS) for tensor in tensors if tensor.numel() and tensor.device.type == "cpu"]
    if found:
        absent.need(*map(np.concatenate, zip(*found, strict=True)))


def bring_rows(absent: Absent, tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Brings some rows of a tensor; none of them is negative."""
    if rows.numel() and tensor.numel():
        starts, stops = _ranges(tensor[0], max(_MOST_RUNS // len(rows), 1))
        first = np.unique(rows.numpy())[:, None] * (tensor.stride(0) * tensor.dtype.itemsize)
        absent.need((first + starts).ravel(), (first + stops).ravel())


def receive_rows(absent: Absent, tensor: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> bool:
    """Brings some rows of a tensor, none of them negative, straight into another one, which has them in that order.

    Returns False where they don't lie in one piece each, or are to be kept here: see `bring_rows`. After an error
    anything may lie in the target.
    """
    step = tensor.stride(0) * tensor.dtype.itemsize if tensor.ndim else 0
    if not (rows.numel() and tensor.numel() and target.is_contiguous() and tensor[0].is_contiguous()):
        return False
    nbytes = tensor[0].nbytes
    if nbytes < _LEAST_ROW:
        return False
    found, firsts, which = np.unique(rows.numpy(), return_index=True, return_inverse=True)
    starts = tensor.data_ptr() + found * step
    if step < nbytes or not absent.receive(starts, starts + nbytes, target.data_ptr() + firsts * nbytes):
        return False
    if len(found) < len(rows):  # some come more than once
        whole = target.view(len(rows), -1).view(torch.uint8)
        whole.copy_(whole[torch.as_tensor(firsts[which])])
    return True


def bringing(absent: Absent | None) -> Callable[[Sequence[torch.Tensor]], None] | None:
    """As `bring`; None where all bytes are there."""
    return None if absent is None else lambda tensors: bring(absent, tensors)


def _ranges(tensor: torch.Tensor, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The addresses where the runs of a tensor begin and end."""
    offsets, length = runs(tensor.shape, tensor.stride(), most)
    starts = tensor.data_ptr() + offsets * tensor.dtype.itemsize
    return starts, starts + length * tensor.dtype.itemsize
