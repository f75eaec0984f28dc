"""A value that was taken apart, and its tensors into a data section: one pass over the bytes.

Leaves go by memmove, which costs 0.25 µs where `copy_` takes 0.9; large ones by `copy_`, which uses all cores. It
waits for all of them: where another process keeps one busy, 1 MiB takes 10 ms in two threads and 24 µs in one. Leaves
of other devices are copied asynchronously, with one wait for each device at the end.

Leaves that are cast go by torch's kernel straight into their places, also in one pass. Their targets are cut out of one
tensor, and filled by one call: 1.6 µs a leaf of 64x64, where a call each into tensors of their own takes 3.8. Those of
less than 16 MiB go in pieces that torch leaves to one core, for the reason above. What lies on another device is cast
there, and then copied.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from memstore import _compat
from memstore import _modes as modes
from memstore.structure import traits
from memstore.structure.tensor_memory import Memory, over
from memstore.structure.traits import Packing

_LARGE = 16 << 20  # bytes
_SMALL = 1 << 18  # bytes: up to here no other thread of Python runs meanwhile
ONE_CORE = (1 << 15) - 16  # elements that torch's kernels leave to one core
_WORD = torch.int32  # what large leaves are copied as: by bytes, torch takes an eighth longer

# With PYFUNCTYPE the GIL stays held: giving it up and taking it back costs more than the copy of a small leaf.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

bytes_at = ctypes.string_at  # of an address: so many bytes

# A copy by bits, where the dtype has no copy kernel (uint4) or one that could change a NaN.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class PlainCopy(NamedTuple):
    """A leaf whose bytes are stored as they lie in memory."""

    leaf: int
    offset: int
    nbytes: int


class GatheredCopy(NamedTuple):
    """A leaf that is stored without its gaps, or whose values aren't its bytes (`resolve`: conj, neg)."""

    leaf: int
    offset: int
    resolve: bool
    packing: Packing | None = None  # None: it is stored as large as its shape says


class CastCopy(NamedTuple):
    """A leaf that is stored as another dtype than it has: `shape` and `source_stride` are what is cast of it."""

    leaf: int
    dtype: torch.dtype
    place: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    source_stride: tuple[int, ...] | None  # None: the leaf has this shape, and is cast as it is


class CopyPlan:
    """The copies that fill a data section, for one plan and one kind of tensors."""

    __slots__ = (
        "alone",
        "cast",
        "cast_in_pieces",
        "gathered",
        "large",
        "medium",
        "remote",
        "small_leaves",
        "small_offsets",
        "small_sizes",
        "small_whole",
    )

    def __init__(
        self, raw: list[PlainCopy], gathered: list[GatheredCopy], cast: list[CastCopy], on_cpu: Sequence[bool]
    ) -> None:
        count = len(on_cpu)
        self.large = [copy for copy in raw if copy.nbytes >= _LARGE or not on_cpu[copy.leaf]]
        self.gathered = gathered
        self.cast_in_pieces = [
            copy
            for copy in cast
            if copy.source_stride == copy.stride == (1,)
            and on_cpu[copy.leaf]
            and ONE_CORE < copy.shape[0] < _LARGE // copy.dtype.itemsize
        ]
        in_pieces = {copy.leaf for copy in self.cast_in_pieces}
        self.cast = [copy for copy in cast if copy.leaf not in in_pieces]
        self.remote = [leaf for leaf, here in enumerate(on_cpu) if not here]
        self.medium = [copy for copy in raw if _SMALL <= copy.nbytes < _LARGE and on_cpu[copy.leaf]]
        small = [copy for copy in raw if copy.nbytes < _SMALL and on_cpu[copy.leaf]]
        self.small_leaves = [copy.leaf for copy in small]
        self.small_offsets = [copy.offset for copy in small]
        self.small_sizes = [copy.nbytes for copy in small]
        self.small_whole = self.small_leaves == list(range(count))  # all tensors, in order
        self.alone = raw[0].nbytes if count == len(small) == 1 and not raw[0].offset else 0  # one tensor is all


def copy_tensors(copies: CopyPlan, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
    """Copies tensors to their places in `memory`."""
    small = tensors if copies.small_whole else [tensors[i] for i in copies.small_leaves]
    if small:
        base = memory.ctypes.data
        targets = [base + offset for offset in copies.small_offsets]
        sources = map(torch.Tensor.data_ptr, small)
        deque(map(_memmove, targets, sources, copies.small_sizes), maxlen=0)
    for leaf, offset, nbytes in copies.medium:
        ctypes.memmove(memory.ctypes.data + offset, tensors[leaf].data_ptr(), nbytes)
    has_casts = bool(copies.cast or copies.cast_in_pieces)
    if copies.large or copies.gathered or has_casts:
        with modes.put_aside(), torch.no_grad():
            _fill_with_torch(copies, tensors, memory)
            if has_casts:
                _cast(copies, tensors, memory)
            _wait_for({tensors[leaf].device for leaf in copies.remote})


def _fill_with_torch(copies: CopyPlan, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
    for leaf, offset, nbytes in copies.large:
        source = tensors[leaf]
        start = source.storage_offset() * source.dtype.itemsize
        dtype = _WORD if (start | offset | nbytes) % _WORD.itemsize == 0 else torch.uint8
        shape = (nbytes // dtype.itemsize,)
        flat = over(source.untyped_storage(), dtype, start // dtype.itemsize, shape, (1,), source.device)
        target = torch.from_numpy(memory[offset : offset + nbytes]).view(dtype)
        target.copy_(flat, non_blocking=True)
    for leaf, offset, resolve, packing in copies.gathered:
        source = tensors[leaf]
        shape, stride = (source.shape, source.stride()) if packing is None else packing[:2]
        dtype = source.dtype if resolve else _BITS[source.dtype.itemsize]
        start = source.storage_offset()
        if resolve:
            source = source.as_strided(shape, stride, start)
        else:
            source = over(source.untyped_storage(), dtype, start, shape, stride, source.device)
        storage = torch.from_numpy(memory[offset : offset + source.numel() * dtype.itemsize]).untyped_storage()
        target = over(storage, dtype, 0, source.shape, traits.contiguous_stride(source.shape))
        target.copy_(source, non_blocking=True)


def _cast(copies: CopyPlan, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
    dtype = (copies.cast or copies.cast_in_pieces)[0].dtype  # of all: a put casts to one
    base = torch.from_numpy(memory[: memory.nbytes // dtype.itemsize * dtype.itemsize]).view(dtype)
    targets, sources = _cut_out(copies.cast, base), _sources_of(copies.cast, tensors)
    for whole in _cut_out(copies.cast_in_pieces, base):
        targets += whole.split(ONE_CORE)
    for whole in _sources_of(copies.cast_in_pieces, tensors):
        sources += whole.split(ONE_CORE)
    # non_blocking: else torch would send what another device has, and cast it here in a second pass
    if not _compat.in_forward_ad():
        _compat.copy_each(targets, sources, non_blocking=True)
    else:  # it has no kernel there
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def _cut_out(copies: Sequence[CastCopy], base: torch.Tensor) -> list[torch.Tensor]:
    return [base.as_strided(copy.shape, copy.stride, copy.place) for copy in copies]


def _sources_of(copies: Sequence[CastCopy], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        tensors[copy.leaf]
        if copy.source_stride is None
        else tensors[copy.leaf].as_strided(copy.shape, copy.source_stride)
        for copy in copies
    ]


def _wait_for(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.get_device_module(device).current_stream(device).synchronize()
