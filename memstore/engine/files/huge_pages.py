"""The pages of a file in memory that is mapped to be filled: allocated at once, and huge while they cost no more.

Huge pages are worth as much as small ones cost, and no more (measured: decision 005). As a rule they cost a tenth:
0.13 ms for 2 MiB. But where the kernel has to move other pages to make room for one, or has given whole blocks back to
the host of a virtual machine, one costs 3 to 22 ms, for minutes. So both are measured all the time, in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from memstore.engine import syscalls

COLLAPSE_STEP = 4 << 20  # a slow one can't be cut short
_GUESS = 0.003 / (8 << 20)  # seconds a byte: small pages, before any were measured
_FAULTS = (
    3  # what small pages cost in the end, of what their allocation does: later each one is a fault (measured: 2.8)
)
_MOVED = 2  # what a huge page may cost that is made of small ones which are in use, of what it may cost new
_NOTHING = 1e-5 / (1 << 20)  # seconds a byte: less than any page costs. These were huge already
_WAITED = 4  # most of the time that a thread waits is the turn of others, on a busy machine or for Python's lock
_REFUSED = 1.0  # seconds that a refusal counts as
_STALE = 1.0  # seconds
_PATIENCE = 10  # times what a slow step has lost: so what is lost is a tenth of the time at most
_FORGIVEN = 64 << 20  # bytes of huge pages that were cheap, after which slow ones before them count no more
_LONGEST = 60.0  # seconds without huge pages, after they were slow

Result = TypeVar("Result")


class PagePrices:
    """The prices of huge pages and small ones of late, and so which the next ones are to be. For any threads.

    After huge pages that cost more than small ones, all do without for ten times what was lost, and for twice as long
    each time that a new try is slow, up to a minute, until 64 MiB in a row were cheap: the first ones of a file often
    are, and the next ones not. Where small pages come to cost as much (all free memory is as cold), huge ones are tried
    at once. Two threads that note a price at the same time may lose one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._huge, self._small = 0.0, _GUESS  # seconds a byte
        self._measured_at = -_STALE
        self._failures = self._cheap = 0  # slow steps, and bytes since the last one
        self._again_at = 0.0

    def prefers_huge(self) -> bool:
        """Returns whether huge pages cost no more than small ones, or it is time to look."""
        return self._huge <= self._small * _FAULTS or self._clock() >= self._again_at

    def is_stale(self) -> bool:
        """Returns whether the price of small pages is an old one, or a guess."""
        return self._clock() - self._measured_at > _STALE

    def note_huge(self, size: int, seconds: float) -> None:
        self._huge = seconds / size
        if self._huge <= self._small * _FAULTS:
            self._cheap += size
            if self._cheap >= _FORGIVEN:
                self._failures = 0
            return
        lost = seconds - size * self._small * _FAULTS
        self._again_at = self._clock() + min(lost * _PATIENCE * 2**self._failures, _LONGEST)
        self._failures, self._cheap = min(self._failures + 1, 20), 0

    def note_refused(self) -> None:
        """Notes that the kernel makes none: it can't, or has no room. That may last."""
        self.note_huge(syscalls.HUGE_PAGE, _REFUSED)

    def note_small(self, size: int, seconds: float) -> None:
        """Notes a price. The first takes the place of a guess or of an old one; of later ones, each counts half."""
        price = seconds / size
        self._small = price if self.is_stale() else (self._small + price) / 2
        self._measured_at = self._clock()


prices = PagePrices()  # of this process


def allocate_pages(fd: int, address: int, size: int) -> None:
    """Allocates all of a new file of zeros that is mapped at `address`, a multiple of 2 MiB.

    (To collapse the last, incomplete extent as well and cut it by truncation splits it, and the next file finds no
    whole page: 4.5 ms instead of 0.3.)

    Raises OSError (ENOSPC) if there is not so much memory.
    """
    whole = size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE
    start = 0
    while (start := allocate_huge(fd, address, start, whole)) < whole:
        _allocate_small(fd, start)
        start += syscalls.HUGE_PAGE
    allocate_rest(fd, address, size)


def allocate_huge(fd: int, address: int, start: int, stop: int) -> int:
    """Allocates whole extents of 2 MiB of a new file from `start` on, while huge pages cost no more than small ones.

    A few may be small: some to measure that, and those that the kernel leaves out for the moment, which may not be
    allocated at all. Returns where it has ended.

    Raises OSError (ENOSPC) if there is not so much memory.
    """
    step = syscalls.HUGE_PAGE  # the first one tells what they cost now
    while stop - start >= syscalls.HUGE_PAGE:
        if prices.prefers_huge():
            size = min(step, (stop - start) // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE)
            _touch_extents(fd, start, size)
            if not _collapse(address + start, size):
                return start
            start, step = start + size, min(2 * step, COLLAPSE_STEP)
        elif prices.is_stale():
            _allocate_small(fd, start)
            start += syscalls.HUGE_PAGE
        else:
            break
    return start


def move_to_huge(address: int, size: int) -> int:
    """Makes huge pages of a file that is allocated, whoever uses it, while that costs little. Returns where it ended.

    What has huge pages already is passed over in microseconds.
    """
    start, step = 0, syscalls.HUGE_PAGE
    while size - start >= syscalls.HUGE_PAGE and prices.prefers_huge():
        part = min(step, (size - start) // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE)
        if not _collapse(address + start, part, _MOVED):
            break
        start, step = start + part, min(2 * step, COLLAPSE_STEP)
    return start


def allocate_rest(fd: int, address: int, size: int) -> None:
    """Allocates what isn't yet, in small pages; what lies behind the last whole extent is mapped, too."""
    whole = size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE
    if size > whole:
        syscalls.populate(address + whole, size - whole)
    if syscalls.status(fd).st_blocks * 512 < size:
        syscalls.allocate(fd, size)


def _touch_extents(fd: int, start: int, size: int) -> None:
    """Allocates a page of each extent, without which a collapse finds nothing."""
    for offset in range(start, start + size, syscalls.HUGE_PAGE):
        syscalls.write_at(fd, b"\0", offset)


def _collapse(address: int, size: int, allowed: int = 1) -> bool:
    seconds, made = _timed(lambda: syscalls.collapse(address, size))
    if not made:
        prices.note_refused()
    elif seconds > size * _NOTHING:
        prices.note_huge(size, seconds / allowed)
    return made


def _allocate_small(fd: int, start: int) -> None:
    seconds, _ = _timed(lambda: syscalls.allocate(fd, syscalls.HUGE_PAGE, start))
    prices.note_small(syscalls.HUGE_PAGE, seconds)


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Returns the seconds that a call costs: of the processor, or a part of those that pass while the thread waits."""
    started, used = time.monotonic(), time.thread_time()
    result = call()
    used = time.thread_time() - used
    return max(used, (time.monotonic() - started) / _WAITED), result
