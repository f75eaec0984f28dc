"""A value that was taken apart, and its tensors into a data section: one pass over the bytes.

Leaves go by memmove, which costs 0.25 µs where `copy_` takes 0.9; large ones by `copy_`, which uses all cores. It
waits for all of them: where another process keeps one busy, 1 MiB takes 10 ms in two threads and 24 µs in one. Leaves
of other devices are copied asynchronously, with one wait for each device at the end.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from memstore.structure.plans import Memory, Plan
from memstore.structure.tensors import modes, over, traits

_LARGE = 16 << 20  # bytes
_SMALL = 1 << 18  # bytes: up to here no other thread of Python runs meanwhile
_WORD = torch.int32  # what large leaves are copied as: by bytes, torch takes an eighth longer

# With PYFUNCTYPE the GIL stays held: giving it up and taking it back costs more than the copy of a small leaf.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

# A copy by bits, where the dtype has no copy kernel (uint4) or one that could change a NaN.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class PlainCopy(NamedTuple):
    """A leaf whose bytes are stored as they lie in memory."""

    leaf: int
    offset: int
    nbytes: int


class GatheredCopy(NamedTuple):
    """A leaf that is stored contiguous but doesn't lie so, or whose values aren't its bytes (`resolve`: conj, neg)."""

    leaf: int
    offset: int
    resolve: bool


class Copies:
    """What to copy where, for one plan and one kind of tensors."""

    __slots__ = ("alone", "gathered", "large", "medium", "small_leaves", "small_offsets", "small_sizes", "small_whole")

    def __init__(
        self, raw: Iterable[PlainCopy], gathered: Iterable[GatheredCopy], count: int, on_cpu: Sequence[bool]
    ) -> None:
        raw = list(raw)
        self.large = [copy for copy in raw if copy.nbytes >= _LARGE or not on_cpu[copy.leaf]]
        self.gathered = list(gathered)
        self.medium = [copy for copy in raw if _SMALL <= copy.nbytes < _LARGE and on_cpu[copy.leaf]]
        small = [copy for copy in raw if copy.nbytes < _SMALL and on_cpu[copy.leaf]]
        self.small_leaves = [copy.leaf for copy in small]
        self.small_offsets = [copy.offset for copy in small]
        self.small_sizes = [copy.nbytes for copy in small]
        self.small_whole = self.small_leaves == list(range(count))  # all tensors, in order
        self.alone = raw[0].nbytes if count == len(small) == 1 and not raw[0].offset else 0  # one tensor is all


class Flat:
    """A value taken apart: its plan, its tensors (no copies), its other leaves as msgpack, and what to copy where."""

    __slots__ = ("copies", "objects", "plan", "tensors")

    def __init__(self, plan: Plan, tensors: list[torch.Tensor], encoded: bytes, copies: Copies) -> None:
        self.plan = plan
        self.tensors = tensors
        self.objects = encoded
        self.copies = copies


def contents(flat: Flat) -> bytes:
    """As `fill`, for values of a few bytes: what the memory would hold."""
    nbytes = flat.plan.nbytes
    if flat.copies.alone == nbytes > 0:
        return ctypes.string_at(flat.tensors[0].data_ptr(), nbytes)
    memory = np.zeros(nbytes, np.uint8)
    fill(flat, memory)
    return memory.tobytes()


def fill(flat: Flat, memory: Memory) -> None:
    """Copies every leaf to its place in `memory`, a writable array of `flat.plan.nbytes` bytes. Pads are left alone."""
    if memory.nbytes < flat.plan.nbytes:
        raise ValueError(f"{flat.plan.nbytes} bytes don't fit into {memory.nbytes}")
    copy_tensors(flat.copies, flat.tensors, memory)


def copy_tensors(copies: Copies, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
    """Copies tensors to their places in `memory`."""
    small = tensors if copies.small_whole else [tensors[i] for i in copies.small_leaves]
    if small:
        base = memory.ctypes.data
        targets = [base + offset for offset in copies.small_offsets]
        sources = map(torch.Tensor.data_ptr, small)
        deque(map(_memmove, targets, sources, copies.small_sizes), maxlen=0)
    for leaf, offset, nbytes in copies.medium:
        ctypes.memmove(memory.ctypes.data + offset, tensors[leaf].data_ptr(), nbytes)
    if copies.large or copies.gathered:
        with modes.put_aside(), torch.no_grad():
            _fill_with_torch(copies, tensors, memory)


def _fill_with_torch(copies: Copies, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
    devices: set[torch.device] = set()
    for leaf, offset, nbytes in copies.large:
        source = tensors[leaf]
        start = source.storage_offset() * source.dtype.itemsize
        dtype = _WORD if (start | offset | nbytes) % _WORD.itemsize == 0 else torch.uint8
        shape = (nbytes // dtype.itemsize,)
        flat = over(source.untyped_storage(), dtype, start // dtype.itemsize, shape, (1,), source.device)
        target = torch.from_numpy(memory[offset : offset + nbytes]).view(dtype)
        target.copy_(flat, non_blocking=True)
        devices.add(source.device)
    for leaf, offset, resolve in copies.gathered:
        source = tensors[leaf]
        devices.add(source.device)
        dtype = source.dtype if resolve else _BITS[source.dtype.itemsize]
        if not resolve:
            offset_in_source, stride = source.storage_offset(), source.stride()
            source = over(source.untyped_storage(), dtype, offset_in_source, source.shape, stride, source.device)
        storage = torch.from_numpy(memory[offset : offset + source.numel() * dtype.itemsize]).untyped_storage()
        target = over(storage, dtype, 0, source.shape, traits.contiguous_stride(source.shape))
        target.copy_(source, non_blocking=True)
    for device in devices:
        if device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()
