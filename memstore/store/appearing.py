"""Stores that another process is about to make: who may start before it looks for them again and again.

A look costs some microseconds, and takes no part in what the maker does: `memstore.json` is written last, so a store
that is half made is none yet. One that is half removed, since somebody clears the folder, is waited out too. A folder
that another user makes for a group is closed to the group at first: that is waited out for some seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from memstore.engine import deadline_after, has_settings, may_come
from memstore.errors import CorruptionError, MemstoreError, NotAStoreError, PermissionDeniedError, StoreTimeoutError

Opened = TypeVar("Opened")

CLOSED_AT_MOST = 5.0  # seconds; it takes milliseconds, and who has no right to the folder is to hear of it soon
_FIRST_LOOK, _LAST_LOOK = 0.002, 0.05  # seconds between two
_AN_OPENING = 0.1  # seconds; it takes milliseconds, and with wait=0 others may be in the middle of one


def when_there(path: str, wait: float, open_now: Callable[[float], Opened], timeout: float) -> Opened:
    """What `open_now` returns, of the seconds that it may take, once there is a store in the folder `path`.

    Args:
        timeout: seconds after which an opening is given up that waits for a lock; the end of `wait` may come before.

    Raises:
        StoreTimeoutError: there was none within `wait` seconds; or another process was opening it all the time.
        NotAStoreError: nor can there be: something else is there.
        CorruptionError: a file of the store is missing, and that didn't change.
        PermissionDeniedError: the store isn't open to this user; or the folder isn't, and that didn't change.
        TypeError, ValueError: `wait` is no number of seconds.
    """
    deadline, pause = deadline_after(wait), _FIRST_LOOK
    opens_by: float | None = None
    while True:
        was_there = has_settings(path)
        within = max(min(deadline - time.monotonic(), timeout), _AN_OPENING)
        try:
            return open_now(within)
        except (NotAStoreError, CorruptionError, PermissionDeniedError, FileNotFoundError) as error:
            is_there = has_settings(path)
            if is_there and not was_there:  # it was made between the two looks
                continue
            if isinstance(error, PermissionDeniedError):
                opens_by = opens_by or min(deadline, time.monotonic() + CLOSED_AT_MOST)
                if is_there or time.monotonic() >= opens_by:
                    raise
            elif not (_is_being_cleared(error) if is_there else may_come(path)):
                raise
            else:
                opens_by = None
            left = deadline - time.monotonic()
            if left <= 0 and is_there:
                raise
            if left <= 0:
                said = f"{path} doesn't exist"
                if os.path.lexists(path):
                    said = error.message if isinstance(error, MemstoreError) else f"{path}: {error}"
                raise StoreTimeoutError(f"{said}; nobody has made a store there within {float(wait):g} s") from None
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_LOOK)


def _is_being_cleared(error: Exception) -> bool:
    """Whether a file is missing of a folder that says that it is a store."""
    return isinstance(error, FileNotFoundError) or (isinstance(error, CorruptionError) and error.detail == "missing")
