"""Waits for newer versions of keys: which of two ways they go, as a key's home is this host or another."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any

from memstore.aio.awaited import called_as
from memstore.aio.elsewhere import HERE_BY_NOW, Elsewhere
from memstore.aio.lanes import HERE, call
from memstore.aio.opened import Opened
from memstore.aio.waits import LOOK_AGAIN, Waiting, change_of, news_of
from memstore.arguments import older_version
from memstore.engine import Root, deadline_after, home_now, index, is_served
from memstore.errors import StoreTimeoutError
from memstore.keys import encode_key
from memstore.listing import Mode, tell_of_wait, wanted_of
from memstore.store.store import Store

log = logging.getLogger("memstore")


class Waits(Opened):
    """What `AsyncStore` inherits."""

    def __init__(self, path: str | os.PathLike[str], mode: Mode, options: Mapping[str, Any]) -> None:
        super().__init__(path, mode, options)
        self._elsewhere: dict[Hashable, Elsewhere] = {}  # by loop and lane, while there are any

    @called_as(Store.wait)
    async def wait(self, key: str, *, newer_than: int = 0, timeout: float | None = None) -> int:
        began = time.perf_counter() if log.isEnabledFor(logging.DEBUG) else 0.0
        seconds = self.timeout if timeout is None else timeout
        version = await self._wait_until(key, newer_than, deadline_after(seconds), seconds)
        if began:
            tell_of_wait(self.root, began, {key: version})
        return version

    @called_as(Store.wait_any)
    async def wait_any(
        self,
        keys: Iterable[str] | None = None,
        *,
        prefix: str | None = None,
        newer_than: Mapping[str, int] | int = 0,
        timeout: float | None = None,
    ) -> dict[str, int]:
        began = time.perf_counter() if log.isEnabledFor(logging.DEBUG) else 0.0
        wanted = wanted_of(keys, prefix, newer_than)
        seconds = self.timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        some = (wanted.prefix if wanted.keys is None else wanted.keys[0]).decode()
        store = self.ready
        if store is None:
            store = await call(self.lane_of(some), lambda _: self.blocking(), seconds)
        root = store.lend_root("any")[0]
        while True:
            self.check_open()
            seen, now = root.doorbell.state(), time.monotonic()  # before the catalog
            left = max(deadline - now, 0.0)
            found, hears = await call(self.lane_of(some), partial(look_at, root, wanted, left), left)
            if found:
                versions = {name.decode(): version for name, version in found.items()}
                if began:
                    tell_of_wait(self.root, began, versions)
                return versions
            if time.monotonic() >= deadline:
                raise index.none_newer(wanted, seconds)
            until = deadline if hears else min(deadline, now + index.ASK_EVERY)
            await change_of(root, None, seen, self, until)

    async def _wait_until(self, key: str, newer_than: int, deadline: float, seconds: float) -> int:
        """As `wait`, whose timeout of so many seconds ends at this monotonic time."""
        name, newer_than = encode_key(key), older_version(newer_than)
        store = self.ready
        if store is None:
            store = await call(self.lane_of(key), lambda _: self.blocking())
        root = store.lend_root(key)[0]
        is_sure = not root.membership
        while True:
            membership = 0 if is_sure else await call(HERE, lambda _: home_here(root, name), seconds)
            if membership is None:
                version = await self._wait_elsewhere(root, key, newer_than, deadline)
            else:
                version = await news_of(root, Waiting(root, name, newer_than, membership, self), deadline)
            if version is None:
                found = await call(self.lane_of(key), lambda _: index.version_of(root, name, 0))
                if found > newer_than:  # it came with the end of the time
                    return found
                raise index.not_newer(name, found, newer_than, seconds)
            if version != LOOK_AGAIN:
                return version
            is_sure = False

    async def _wait_elsewhere(self, root: Root, key: str, newer_than: int, deadline: float) -> int | None:
        lane = "waits", self.lane_of(key, fetches=True)
        name = asyncio.get_running_loop(), lane
        waits = self._elsewhere.setdefault(name, Elsewhere(root, lane))
        try:
            self.check_open()  # else `end` sees it
            version = await waits.wait(encode_key(key), newer_than, deadline)
            return LOOK_AGAIN if version == HERE_BY_NOW else version
        except StoreTimeoutError:
            return None
        finally:
            if waits.is_idle:
                self._elsewhere.pop(name, None)

    def end(self) -> None:
        self.is_closed = True  # before it looks at the waits: who comes later looks at this
        for waits in list(self._elsewhere.values()):
            waits.end()
        super().end()

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._elsewhere = {}  # tasks of the parent's, which go on there


def look_at(root: Root, wanted: index.Wanted, seconds: float, _: float) -> tuple[dict[bytes, int], bool]:
    """The keys that have newer versions by now. Also whether the doorbell tells of all that may come."""
    return index.newer_versions(lambda: root, wanted, seconds), index.hears_of_all(root, wanted)


def home_here(root: Root, name: bytes) -> int | None:
    """The number under which the key's home is here: 0 if nobody serves the root. None: it is elsewhere."""
    if not is_served(root):
        return 0
    return home_now(root, name) or None
