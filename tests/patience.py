"""Times on a machine that may be busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable


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
