"""Deadlines, which are this process's own, and the clock that all processes of a boot share."""

from __future__ import annotations

import functools
import time

from memstore.engine import syscalls


def deadline_after(seconds: float) -> float:
    """The monotonic time in `seconds` (may be infinite: a year serves). Raises TypeError, ValueError."""
    try:
        if not seconds >= 0:  # nan, too
            raise ValueError(f"a timeout is a number of seconds, 0 or more, and not {seconds!r}")
        return time.monotonic() + float(min(seconds, 365 * 86400.0))
    except TypeError:
        raise TypeError(f"a timeout is a number of seconds, and not {seconds!r}") from None


def boot_clock() -> int:
    """Nanoseconds since boot, suspend included: leases are compared across processes."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> bytes:
    """16 bytes that tell the boots of all machines apart."""
    return _read_boot_id(syscalls.BOOT_ID)


@functools.cache
def _read_boot_id(path: str) -> bytes:
    """Once a process, which doesn't outlive its boot: to open the file takes 30 us, and each lending names the boot."""
    with open(path) as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))
