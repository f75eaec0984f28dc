"""Times on a machine that may be busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable

import memstore


def least_seconds(call: Callable[[], object], enough: float, tries: int = 20) -> float:
    """The least time that a call took in some tries; one that took less than `enough` is the last.

    A busy machine makes a call late now and then, however quick it is; but not each time.
    """
    least = float("inf")
    for _ in range(tries):
        started = time.monotonic()
        call()
        least = min(least, time.monotonic() - started)
        if least < enough:
            break
    return least


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it is not so after {seconds} s"
        time.sleep(0.001)


def give_back_until(store: memstore.Store, is_gone: Callable[[], bool], seconds: float = 60.0) -> None:
    """Collects what nobody holds until something is gone: whoever read it just now may hold it for a moment more."""
    deadline = time.monotonic() + seconds
    store.gc()
    while not is_gone():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it is still there after {seconds} s")
        time.sleep(0.01)
        store.gc()
