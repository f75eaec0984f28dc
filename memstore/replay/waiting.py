"""Waiting for something in a replay buffer: look under the mutex, and sleep until somebody changes something."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from memstore.abandoned import ABANDONED, AbandonedError, check_abandoned, is_abandoned
from memstore.errors import MemstoreError, StoreTimeoutError
from memstore.replay.ring import Ring
from memstore.replay.turns import Turn

T = TypeVar("T")

_PAUSE = 0.002  # seconds
_TO_LEAVE = 1.0  # seconds
_GIVEN_UP = -1  # in place of the bell's word


def wait_for(
    ring: Ring, look: Callable[[], T | None], deadline: float, reason: Callable[[], str], turn: Turn | None = None
) -> T:
    """Calls `look` under the mutex until it gives something. Raises StoreTimeoutError, which says the reason.

    Raises also NotAStoreError, where the store was removed meanwhile, and what `look` raises.

    `turn` is what `look` asks whether it may go. Who was cancelled meanwhile leaves its turn, and takes nothing.
    """
    while True:
        try:
            ring.entry.check_in_place()
        except MemstoreError:
            if turn is not None:  # the store was moved, and others may go on in it
                with contextlib.suppress(MemstoreError):  # else its seat is taken away after some seconds
                    ring.run(turn.leave, time.monotonic() + _TO_LEAVE)
            raise
        is_last = time.monotonic() >= deadline
        found, seen, sleeps = ring.run(partial(_look, ring, look, turn, is_last=is_last), deadline)
        if sleeps:
            ring.page.wake()
        if found is not None:
            return found
        if seen == _GIVEN_UP:
            raise AbandonedError("whoever awaited this was cancelled")
        if is_last:
            raise StoreTimeoutError(f"{ring.key!r}: {reason()}", key=ring.key)
        ring.page.sleep(seen, deadline)


def pause(look: Callable[[], T | None], ring: Ring, deadline: float, reason: Callable[[], str]) -> T:
    """As `wait_for`, for who may only read, and can neither have the mutex nor say that it sleeps."""
    while (found := look()) is None:
        if ABANDONED:
            check_abandoned()
        ring.entry.check_in_place()
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(f"{ring.key!r}: {reason()}", key=ring.key)
        time.sleep(min(_PAUSE, left))
    return found


def _look(ring: Ring, look: Callable[[], T | None], turn: Turn | None, *, is_last: bool) -> tuple[T | None, int, bool]:
    """Also the bell, and whether somebody is to be woken, who is next in line."""
    is_given_up = bool(ABANDONED) and is_abandoned()
    found = None if is_given_up else look()
    if turn is not None and (is_last or is_given_up):
        turn.leave()
    sleeps = turn is not None and turn.has_left() and ring.page.ring()
    if is_given_up:
        return None, _GIVEN_UP, sleeps
    return found, 0 if found is not None or is_last else ring.page.listen(), sleeps
