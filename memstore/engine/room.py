"""No room: what is kept for reuse is given back, and the change is tried again; or the error says who takes what."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memstore.engine.limits import is_full
from memstore.engine.root import Root
from memstore.engine.sweep import sweep_all
from memstore.engine.usage import measure
from memstore.errors import StoreFullError

Change = TypeVar("Change")
Result = TypeVar("Result")


def where_room_is(make: Callable[[Root, Change, float], Result], root: Root, change: Change, deadline: float) -> Result:
    """Makes a change; a second time if files that are kept for reuse stood in the way."""
    try:
        return make(root, change, deadline)
    except OSError as error:
        if not is_full(error):
            raise
    sweep_all(root, deadline)  # the files that were kept for reuse; another process may have given them back by now
    return make(root, change, deadline)


def explain_full(root: Root, reason: OSError, key: str | None) -> StoreFullError:
    """What has no room, for what, and who could make some."""
    usage = measure(root)
    what = f" for {key!r}" if key is not None else ""
    limit = f"capacity {usage.capacity:,}" if usage.capacity else "no capacity set"
    pinned = f"{usage.pinned_bytes:,} replaced but held"
    if usage.pinned_by:
        pinned += f" by pid {', '.join(map(str, usage.pinned_by))}"
    detail = reason if isinstance(reason, StoreFullError) else reason.strerror
    return StoreFullError(
        f"{root.path} has no room{what} ({detail}): {limit}, {usage.live_bytes:,} bytes live, {pinned}, "
        f"{usage.filling_bytes:,} being written, {usage.catalog_bytes:,} of catalog: delete keys, drop held values, or "
        "enlarge the file system or the capacity; nothing was changed",
        key=key,
    )
