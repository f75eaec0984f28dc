"""Followers for asyncio: a module that a task keeps at the newest version of a key. `memstore/store/following.py`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Generic, NoReturn

from memstore._info import FollowerStatus
from memstore._wording import an_instance
from memstore.aio.calls import call
from memstore.aio.store import AsyncStore, check_opened, lazy_of
from memstore.engine import deadline_after
from memstore.errors import MemstoreError, NotAStoreError, StoreClosedError
from memstore.store.following import (
    PAUSE,
    UNFIT,
    Following,
    InUse,
    M,
    check_every,
    closed,
    newest_of,
    not_followed,
    too_long,
)

log = logging.getLogger("memstore")

AsyncLock = AbstractAsyncContextManager[object]
_FOR_EVER = float("inf")


class AsyncFollower(Generic[M]):
    """A module that a task keeps at the newest version of a key: a `memstore.Follower`, whose methods are awaited.

    Made by `memstore.aio.follow`.

    Attributes:
        key: the key.
    """

    def __init__(
        self,
        store: AsyncStore,
        following: Following[M],
        every: float,
        on_version: Callable[[int], object] | None,
        lock: AsyncLock | None,
    ) -> None:
        self.key = following.key
        self._store, self._following, self._every = store, following, every
        self._on_version, self._lock = on_version, lock
        self._given = store
        self._news: asyncio.Event = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._run(), name=f"memstore follows {self.key}")
        self._task: asyncio.Task[None] | None = task

    @property
    def model(self) -> M:
        """Returns the module that is in use. Outside of `use` a load may change it at any time."""
        return self._following.gate.current.model

    @property
    def version(self) -> int:
        """Returns the version that the module has, or 0 before the first load."""
        return self._following.gate.current.version

    @property
    def error(self) -> Exception | None:
        """Returns why the newest version was not loaded, or None after a load that went well."""
        return self._following.error

    @asynccontextmanager
    async def use(self, timeout: float | None = None) -> AsyncGenerator[InUse[M]]:
        """Keeps the module from being changed: `async with follower.use() as (model, version)`.

        Any number of tasks may be inside at once. Arguments and errors as `memstore.Follower.use`.
        """
        gate = self._following.gate
        if self._lock is not None:
            async with self._lock:
                if gate.failure is not None:
                    raise gate.failure.with_traceback(None)
                yield gate.current
            return
        number = await self._enter(self._following.timeout if timeout is None else timeout)
        try:
            yield gate.in_use(number)
        finally:
            gate.leave(number)

    async def _enter(self, seconds: float) -> int:
        deadline, loop = deadline_after(seconds), asyncio.get_running_loop()
        while True:
            opened = asyncio.Event()
            number = self._following.gate.enter_or_call(partial(loop.call_soon_threadsafe, opened.set))
            if number is not None:
                return number
            try:
                await asyncio.wait_for(opened.wait(), _within(deadline))
            except asyncio.TimeoutError:
                raise too_long(seconds) from None

    async def wait(self, *, newer_than: int = 0, timeout: float | None = None) -> int:
        """Waits until the module has a version that is newer than `newer_than`, and returns it.

        Arguments and errors as `memstore.Follower.wait`.
        """
        following = self._following
        seconds = following.timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        while True:
            news, error = self._news, following.error
            if isinstance(error, UNFIT) and ((await self._newest())[0] or 0) > following.seen:
                error = None  # of a version that was replaced since
            if self.version > newer_than:
                return self.version
            if following.is_ended:
                raise following.error or closed(self.key)
            if isinstance(error, UNFIT) and error is following.error:
                raise error.with_traceback(None)
            try:
                await asyncio.wait_for(news.wait(), _within(deadline))
            except asyncio.TimeoutError:
                raise not_followed(self.key, newer_than, self.version, seconds, following.error) from None

    async def status(self) -> FollowerStatus:
        """Looks into the store, and returns which version the module has, and how far it is behind."""
        return self._following.status(*await self._newest())

    async def _newest(self) -> tuple[int | None, float]:
        lazy = lazy_of(self._store)
        return await call(lazy.pool_of(self.key), lambda _: newest_of(lazy.blocking(), self.key))

    async def close(self) -> None:
        """Ends the task, after a copy under way. The module stays as it is. May be called again."""
        self._following.gate.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None  # it keeps its end's frames, and so the store

    async def __aenter__(self) -> AsyncFollower[M]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an AsyncFollower can't be pickled: it belongs to its loop; send the store and the key, and call "
            "memstore.aio.follow there"
        )

    def __repr__(self) -> str:
        state = "ended" if self._following.is_ended else "follows"
        return f"<memstore.aio.AsyncFollower of {self.key!r}: version {self.version}, {state}>"

    # --- the task -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        following = self._following
        try:
            while True:
                began = time.monotonic()
                try:
                    await self._follow_once()
                except StoreClosedError as error:
                    following.end(error)  # by the user, who closes the store before the follower
                    return
                await asyncio.sleep(max(began + self._every - time.monotonic(), 0.0))
        finally:
            following.end()
            self._tell()
            if self._store is not self._given:
                await self._store.close()

    async def _follow_once(self) -> None:
        """Waits for a newer version, and loads it. Raises StoreClosedError."""
        following, store = self._following, self._store
        pool = "following", store.root, self.key  # whose thread may wait for requests
        version = following.seen
        try:
            # 1. Wait.
            version = await store.wait(self.key, newer_than=following.seen, timeout=_FOR_EVER)
            # 2. Compare.
            fill = await call(pool, lambda _: following.prepare(lazy_of(store).blocking()))
            # 3 to 5. Copy.
            copy = partial(following.copy, fill)
            del fill  # which holds the version
            async with self._lock or nullcontext():
                version = await call(pool, lambda _: copy(), settles=True)
        except StoreClosedError:
            raise
        except Exception as error:  # whatever it is, the module keeps its version, and the next try may go well
            following.fail(error, version)
            self._tell()
            if isinstance(error, NotAStoreError):
                await self._reopen()
            elif not isinstance(error, UNFIT):
                await asyncio.sleep(PAUSE)
            return
        self._tell()
        if self._on_version is not None:
            try:
                awaited = self._on_version(version)
                if inspect.isawaitable(awaited):
                    await awaited
            except Exception:
                log.exception("%r: on_version(%d) has failed", self.key, version)

    async def _reopen(self) -> None:
        """Waits for a store in the place of the one that is gone. Its versions begin anew."""
        while True:
            await asyncio.sleep(PAUSE)
            with suppress(MemstoreError):
                path, _, options = lazy_of(self._store).arguments()
                store = await AsyncStore(path, "r", options)
                if self._store is not self._given:
                    await self._store.close()
                self._store, self._following.seen = store, 0
                return

    def _tell(self) -> None:
        """Wakes who waits for news."""
        news, self._news = self._news, asyncio.Event()
        news.set()


def _within(deadline: float) -> float | None:
    left = deadline - time.monotonic()
    return None if left > 1e7 else max(left, 0.0)


def follow(
    store: AsyncStore,
    key: str,
    model: M,
    *,
    every: float | None = None,
    on_version: Callable[[int], object] | None = None,
    lock: AsyncLock | None = None,
    spare: M | None = None,
    strict: bool = True,
    cast: bool = False,
    timeout: float | None = None,
) -> AsyncFollower[M]:
    """Keeps a module at the newest version of a key, by a task, in a process that serves it.

    As `memstore.follow`, for requests that are tasks: `async with follower.use() as (model, version)`. The wait takes
    no thread. `on_version` may be a coroutine function; `lock` is one of asyncio, such as `asyncio.Lock()`.

    Example:
        >>> import asyncio, memstore.aio, tempfile, torch
        >>> async def main():
        ...     async with memstore.aio.open(tempfile.mkdtemp()) as store:
        ...         await store.put("policy", torch.nn.Linear(2, 1).state_dict())
        ...         async with memstore.aio.follow(store, "policy", torch.nn.Linear(2, 1)) as follower:
        ...             await follower.wait(timeout=10.0)
        ...             async with follower.use() as (model, version):
        ...                 return version, model(torch.ones(1, 2)).shape
        >>> asyncio.run(main())
        (1, torch.Size([1, 1]))
    """
    check_opened(store, "follow")
    given: Any = lock
    if lock is not None and not isinstance(given, AbstractAsyncContextManager):
        raise TypeError(f"lock is one that `async with` takes, as asyncio.Lock(), and not {an_instance(given)}")
    seconds = store.timeout if timeout is None else timeout
    deadline_after(seconds)
    following = Following(store.root, key, model, spare, lock is not None, strict, cast, seconds)
    return AsyncFollower(store, following, check_every(every), on_version, lock)
