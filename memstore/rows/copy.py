"""How rows are copied: by torch with all its threads, or by numpy in this one, as was faster here lately.

Which is depends on the machine, and on what else runs on it. 256 rows of 28 KiB, in ms, the best and the median:

                                            2 idle cores      2 cores, 7 others at work
    select: torch, with all its threads     0.32, 0.47        0.33, 8 to 21
    take: numpy, in this thread             0.61, 0.75        0.61, 0.75

Torch's threads wait for the last of them, and where cores are shared that one isn't running. So both are tried, and the
other one again at times. (A third way, `preadv` of each row into its place, took 1.1 to 2: it has no page faults, but
those are gone after a view's first batch, and from then on it took the longest.)
"""

from __future__ import annotations

import time

import torch

_SMALL = 64 << 10  # bytes; below, either costs its call
_TRY_AGAIN = 64  # calls
_FAR = 4  # times as slow: tried again the more seldom
_LATELY = 0.3  # the weight of the last measurement
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

SELECT, TAKE = range(2)


class Costs:
    """Seconds that each way took lately, for batches of about one size."""

    def __init__(self) -> None:
        self._seconds = [-1.0, -1.0]
        self._calls = 0

    def choose(self) -> int:
        self._calls += 1
        for way in (SELECT, TAKE):
            if self._seconds[way] < 0:
                return way
        best, other = (SELECT, TAKE) if self._seconds[SELECT] <= self._seconds[TAKE] else (TAKE, SELECT)
        every = _TRY_AGAIN if self._seconds[other] < _FAR * self._seconds[best] else _TRY_AGAIN * 16
        return best if self._calls % every else other

    def note(self, way: int, seconds: float) -> None:
        last = self._seconds[way]
        self._seconds[way] = seconds if last < 0 else last + _LATELY * (seconds - last)


_costs: dict[tuple[int, bool], Costs] = {}


def copy_rows(real: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, *, is_mapped: bool) -> None:
    """Fills `target` with rows of `real`. `is_mapped`: no page faults are to be expected."""
    if not target.numel():
        return
    bits = _SAME_SIZE[target.dtype.itemsize]  # not every dtype has a kernel
    real, target = real.view(bits), target.view(bits)
    if not (real.is_contiguous() and target.is_contiguous()):
        _copy(SELECT, real, rows, target)
    elif target.nbytes < _SMALL:
        _copy(TAKE, real, rows, target)
    else:
        costs = _costs.setdefault((target.nbytes.bit_length(), is_mapped), Costs())
        way = costs.choose()
        start = time.perf_counter()
        _copy(way, real, rows, target)
        costs.note(way, time.perf_counter() - start)


def _copy(way: int, real: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> None:
    if way == SELECT:
        torch.index_select(real, 0, rows, out=target)
    else:
        # "clip", since "raise", which is not needed here, would copy by way of a buffer
        real.view(len(real), -1).numpy().take(rows.numpy(), 0, target.view(len(target), -1).numpy(), "clip")
