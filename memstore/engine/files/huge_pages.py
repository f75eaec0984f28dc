"""The pages of a file in memory that is mapped to be filled: allocated at once, and huge where the kernel has them."""

from __future__ import annotations

import time

from memstore.engine import syscalls

COLLAPSE_STEP = 8 << 20
COLLAPSE_SLOW = 0.1  # seconds a step: untouched memory of a virtual machine takes 0.04, compaction once took 0.7


def touch_extents(fd: int, size: int, start: int = 0) -> None:
    """Allocates a page of each extent of 2 MiB, without which `collapse_extents` finds nothing."""
    for offset in range(start, start + size, syscalls.HUGE_PAGE):
        syscalls.write_at(fd, b"\0", offset)


def collapse_extents(address: int, size: int) -> int:
    """Makes huge pages of whole extents of 2 MiB, which are touched. Returns how many bytes it came.

    Some stay as they are where the kernel refuses, or is slow for want of whole pages. (To collapse the last,
    incomplete extent as well and cut it by truncation splits it, and the next file finds no whole page: 4.5 ms
    instead of 0.3.)
    """
    whole = size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE
    for offset in range(0, whole, COLLAPSE_STEP):
        start = time.monotonic()
        if not syscalls.collapse(address + offset, min(COLLAPSE_STEP, whole - offset)):
            return offset
        if time.monotonic() - start > COLLAPSE_SLOW:
            return min(offset + COLLAPSE_STEP, whole)
    return whole


def allocate_rest(fd: int, address: int, size: int) -> None:
    """Allocates what `collapse_extents` left, in small pages."""
    whole = size // syscalls.HUGE_PAGE * syscalls.HUGE_PAGE
    if size > whole:
        syscalls.populate(address + whole, size - whole)
    if syscalls.status(fd).st_blocks * 512 < size:
        syscalls.allocate(fd, size)
