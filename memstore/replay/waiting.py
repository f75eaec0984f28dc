"""Waiting for something in a replay buffer: look under the mutex, and sleep until somebody changes something."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from memstore.errors import StoreTimeoutError
from memstore.replay.ring import Ring

T = TypeVar("T")

_PAUSE = 0.002  # seconds


def wait_for(ring: Ring, look: Callable[[], T | None], deadline: float, reason: Callable[[], str]) -> T:
    """Calls `look` under the mutex until it gives something. Raises StoreTimeoutError, which says the reason."""
    while True:
        found, seen = ring.run(partial(_look, ring, look), deadline)
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            raise StoreTimeoutError(f"{ring.key!r}: {reason()}", key=ring.key)
        ring.page.sleep(seen, deadline)


def pause(look: Callable[[], T | None], ring: Ring, deadline: float, reason: Callable[[], str]) -> T:
    """As `wait_for`, for who may only read, and can neither have the mutex nor say that it sleeps."""
    while (found := look()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(f"{ring.key!r}: {reason()}", key=ring.key)
        time.sleep(min(_PAUSE, left))
    return found


def _look(ring: Ring, look: Callable[[], T | None]) -> tuple[T | None, int]:
    found = look()
    return found, 0 if found is not None else ring.page.listen()
