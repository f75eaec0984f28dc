"""How warm rows are copied: the way that is the fastest here, by its own measurements.

Which one is depends on the machine, and on what else runs on it. For 256 rows of 28 KiB, in ms, best and median of 60:

                                            2 idle cores      2 cores, 7 others at work
    select: torch, with all its threads     0.32, 0.47        0.33, 8 to 21
    take: numpy, in this thread             0.61, 0.75        0.61, 0.75
    preadv of each row                      1.1, 1.2          2.0, 2.2

Torch's threads wait for the last of them, and where cores are shared that one isn't running. preadv takes no page
faults, of which the first rows of a map cost as much as its slower copy: 1.9 to 5 by the others, until the leaf is
populated. So each way is tried, and the one that took the least lately is used; the others are tried again at times.
"""

from __future__ import annotations

import time

import torch

from memstore.engine import syscalls
from memstore.view import Source

_SMALL = 64 << 10  # bytes; below, all ways cost their call
_TRY_AGAIN = 64  # calls
_FAR = 4  # times as slow: tried again the more seldom
_LATELY = 0.3  # the weight of the last measurement
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

SELECT, TAKE, PREADV = range(3)


class Costs:
    """Seconds that each way took lately, for batches of about one size."""

    def __init__(self) -> None:
        self._seconds = [-1.0, -1.0, -1.0]
        self._calls = 0

    def choose(self, ways: range) -> int:
        self._calls += 1
        for way in ways:
            if self._seconds[way] < 0:
                return way
        best = min(ways, key=self._seconds.__getitem__)
        if self._calls % _TRY_AGAIN == 0:
            other = ways[self._calls // _TRY_AGAIN % len(ways)]
            if self._seconds[other] < _FAR * self._seconds[best] or self._calls % (_TRY_AGAIN * 16) == 0:
                return other
        return best

    def note(self, way: int, seconds: float) -> None:
        last = self._seconds[way]
        self._seconds[way] = seconds if last < 0 else last + _LATELY * (seconds - last)


_costs: dict[tuple[int, bool], Costs] = {}


def copy_rows(
    real: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, source: Source | None, *, is_mapped: bool
) -> None:
    """Fills `target` with rows of `real`, which lies in the mapping of `source`, if there is one.

    `is_mapped`: no page faults are to be expected.
    """
    if not target.numel():
        return
    bits = _SAME_SIZE[target.dtype.itemsize]  # not every dtype has a kernel
    real, target = real.view(bits), target.view(bits)
    if not (real.is_contiguous() and target.is_contiguous()):
        torch.index_select(real, 0, rows, out=target)
        return
    if target.nbytes < _SMALL:
        _copy(TAKE, real, rows, target, source)
        return
    has_file = source is not None and source.segment > 0
    costs = _costs.setdefault((target.nbytes.bit_length(), is_mapped), Costs())
    way = costs.choose(range(3 if has_file and len(rows) * 2048 <= target.nbytes else 2))
    start = time.perf_counter()
    _copy(way, real, rows, target, source)
    costs.note(way, time.perf_counter() - start)


def _copy(way: int, real: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, source: Source | None) -> None:
    if way == PREADV and source is not None and _read_rows_of_file(source, real, rows, target):
        return
    if way == SELECT:
        torch.index_select(real, 0, rows, out=target)
    else:
        # "clip", since "raise", which is not needed here, would copy by way of a buffer
        real.view(len(real), -1).numpy().take(rows.numpy(), 0, target.view(len(target), -1).numpy(), "clip")


def _read_rows_of_file(source: Source, real: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> bool:
    """False if the file can't be opened: only the mapping is sure to be there as long as the view is."""
    size = target.nbytes // len(target)
    first = real.data_ptr() - source.address + source.start
    fd = source.open_file()
    if fd is None:
        return False
    try:
        buffer = target.view(-1).view(torch.uint8).numpy().data
        for i, row in enumerate(rows.tolist()):
            syscalls.read_into(fd, buffer[i * size : (i + 1) * size], first + row * size)
    finally:
        syscalls.close(fd)
    return True
