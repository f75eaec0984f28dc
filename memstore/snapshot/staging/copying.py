"""Tensors into memory, one after the other, each in C order. As fast as memory is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore.engine import ALIGNMENT, syscalls
from memstore.errors import UnsupportedValueError
from memstore.snapshot.parallel import in_parallel
from memstore.snapshot.staging.pinning import own_streams
from memstore.structure import Copies, GatheredCopy, PlainCopy, copy_tensors, modes, why_no_memory

_BRIEF = 1 << 18  # bytes: up to here no other thread of Python runs meanwhile
_SHARE = 16 << 20  # bytes that one thread copies at a time

Memory = np.ndarray[Any, np.dtype[np.uint8]]


class Place(NamedTuple):
    """Where the elements of a tensor lie in the memory, in bytes."""

    offset: int
    nbytes: int


class _Move(NamedTuple):
    target: int  # addresses
    source: int
    nbytes: int


def place_tensors(tensors: Sequence[torch.Tensor]) -> tuple[list[Place], int]:
    """A place for each, aligned; and how many bytes there are in all."""
    places: list[Place] = []
    end = 0
    for tensor in tensors:
        places.append(Place(end, tensor.numel() * tensor.dtype.itemsize))
        end = -(-(end + places[-1].nbytes) // ALIGNMENT) * ALIGNMENT
    return places, end


def copy_into(memory: Memory, tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
    """Copies the elements of each tensor to its place. When it returns, no tensor is needed any more."""
    with modes.put_aside(), torch.no_grad():
        brief, long, others = _sorted_out(memory, tensors, places)
        if brief:
            targets, sources, sizes = zip(*brief, strict=True)
            deque(map(syscalls.copy_briefly, targets, sources, sizes), maxlen=0)
        in_parallel(partial(_copy_share, (memory, tensors)), _shares(long), lambda _: None)
        devices = {tensors[i].device for i in others if tensors[i].is_cuda}
        with own_streams(devices):
            copy_tensors(_copies(tensors, places, others), tensors, memory)


def _sorted_out(
    memory: Memory, tensors: Sequence[torch.Tensor], places: Sequence[Place]
) -> tuple[list[_Move], list[_Move], list[int]]:
    """Short moves, long moves, and the tensors that torch has to copy: of devices, or not as they lie in memory."""
    base = memory.ctypes.data
    brief: list[_Move] = []
    long: list[_Move] = []
    others: list[int] = []
    for i, (tensor, (offset, nbytes)) in enumerate(zip(tensors, places, strict=True)):
        reason = why_no_memory(tensor)
        if reason is not None:
            raise UnsupportedValueError(f"tensor {i} of the snapshot, of shape {list(tensor.shape)}: {reason}")
        if not nbytes:
            continue
        if tensor.is_cpu and _is_plain(tensor):
            (brief if nbytes < _BRIEF else long).append(_Move(base + offset, tensor.data_ptr(), nbytes))
        else:
            others.append(i)
    return brief, long, others


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _shares(moves: Sequence[_Move]) -> list[list[_Move]]:
    """The moves, cut and grouped, so that each group is about as long."""
    shares: list[list[_Move]] = []
    left = 0
    for target, source, nbytes in moves:
        for start in range(0, nbytes, _SHARE):
            if left <= 0:
                shares.append([])
                left = _SHARE
            size = min(nbytes - start, _SHARE)
            shares[-1].append(_Move(target + start, source + start, size))
            left -= size
    return shares


def _copy_share(_: object, share: Sequence[_Move]) -> None:
    """The first argument keeps what the addresses belong to, even if who waits for this is interrupted twice."""
    for move in share:
        syscalls.copy(*move)


def _copies(tensors: Sequence[torch.Tensor], places: Sequence[Place], chosen: Sequence[int]) -> Copies:
    plain = [PlainCopy(i, *places[i]) for i in chosen if _is_plain(tensors[i])]
    gathered = [
        GatheredCopy(i, places[i].offset, tensors[i].is_conj() or tensors[i].is_neg())
        for i in chosen
        if not _is_plain(tensors[i])
    ]
    return Copies(plain, gathered, [], [tensor.is_cpu for tensor in tensors])
