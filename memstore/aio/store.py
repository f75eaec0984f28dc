"""AsyncStore: what a user calls. Each method of Store, awaited."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Generator, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memstore.aio.awaited import awaited, called_as
from memstore.aio.elsewhere import HERE_BY_NOW, Elsewhere
from memstore.aio.lanes import HERE, call, start
from memstore.aio.opened import ALL_HOSTS, Opened
from memstore.aio.results import AsyncPendingPut, AsyncRef, Part
from memstore.aio.rows import AsyncDataset
from memstore.aio.waits import LOOK_AGAIN, Waiting, news_of
from memstore.datasets import Dataset
from memstore.engine import Root, deadline_after, home_now, index, is_served
from memstore.errors import StoreTimeoutError
from memstore.keys import encode_key
from memstore.listing import Mode
from memstore.store.gets import NO_DEFAULT, NOT_NOW, get_at_once
from memstore.store.ref import Ref
from memstore.store.sharded import OUTLIVES
from memstore.store.store import Store
from memstore.whole_numbers import older_version

if TYPE_CHECKING:
    from typing_extensions import Self

_PAGE = 1024  # keys that are read at a time
_ABSENT: Any = object()
_FREE = frozenset(("non_blocking", "strict"))  # options of get that say nothing where nothing is copied
_NONE = frozenset(("out", "like", "device", "dtype", "max_age", "timeout"))  # those that are None to ask for nothing


def _as_ref(store: AsyncStore, ref: Ref) -> AsyncRef:
    return AsyncRef(ref, ALL_HOSTS if store.opened_root is not None and store.opened_root.membership else HERE)


def _as_dataset(store: AsyncStore, dataset: Dataset) -> AsyncDataset:
    return AsyncDataset(dataset, store.timeout)


class AsyncStore(Opened):
    """A store for tasks of asyncio: each method of `memstore.Store`, with the same arguments, awaited.

    Made by `memstore.aio.open`. It is opened by its first call, by `await store`, or by `async with store`. Any number
    of tasks, of any number of loops and threads, may call it at the same time. A call that is cancelled leaves nothing
    behind: see docs/asyncio.md.

    Attributes:
        root: the folder, as an absolute path.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Mode, options: Mapping[str, Any]) -> None:
        super().__init__(path, mode, options)
        self._elsewhere: dict[Hashable, Elsewhere] = {}  # by loop and lane, while there are any

    # --- put and get --------------------------------------------------------------------------------------------------

    put = awaited(Store.put)
    put_many = awaited(Store.put_many)
    update = awaited(Store.update)
    get_many = awaited(Store.get_many)
    delete = awaited(Store.delete)
    delete_many = awaited(Store.delete_many)
    pop = awaited(Store.pop)
    setdefault = awaited(Store.setdefault)

    @called_as(Store.get)
    async def get(self, key: str, default: Any = NO_DEFAULT, **options: Any) -> Any:
        store = self.ready
        if store is not None and (not options or _is_plain(options)):
            value = get_at_once(store, key, default)
            if value is not NOT_NOW:
                return value
        lane = self.lane_of(key, fetches=True)
        settles = options.get("out") is not None
        return await self.made(Store.get, (key, default), options, lane=lane, is_timed=True, settles=settles)

    # --- look ---------------------------------------------------------------------------------------------------------

    version = awaited(Store.version)
    info = awaited(Store.info)
    pending = awaited(Store.pending)
    stats = awaited(Store.stats)
    tree = awaited(Store.tree)

    async def contains(self, key: str) -> bool:
        """`key in store`, awaited."""
        return await self.made(Store.__contains__, (key,), {}, lane=self.lane_of(key), is_timed=False)

    async def count(self) -> int:
        """`len(store)`, awaited."""
        return await self.made(Store.__len__, (), {}, lane=self.lane_of(None), is_timed=False)

    def keys(self, prefix: str = "") -> AsyncIterator[str]:
        """Iterates over keys, as `Store.keys`: `async for key in store.keys("policy/")`."""
        return self._keys(prefix)

    async def _keys(self, prefix: str) -> AsyncIterator[str]:
        lane = self.lane_of(None)
        found: Iterator[str] = await call(lane, lambda _: self.blocking().keys(prefix))
        while page := await call(lane, lambda _: list(itertools.islice(found, _PAGE))):
            for key in page:
                yield key

    def __aiter__(self) -> AsyncIterator[str]:
        return self.keys()

    async def items(self) -> AsyncIterator[tuple[str, Any]]:
        """Iterates over keys and values; keys that are deleted meanwhile are left out."""
        async for key in self.keys():
            value = await self.get(key, _ABSENT)
            if value is not _ABSENT:
                yield key, value

    async def values(self) -> AsyncIterator[Any]:
        """Iterates over the values, as `items`."""
        async for _, value in self.items():
            yield value

    # --- wait ---------------------------------------------------------------------------------------------------------

    @called_as(Store.wait)
    async def wait(self, key: str, *, newer_than: int = 0, timeout: float | None = None) -> int:
        seconds = self.timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        name, newer_than = encode_key(key), older_version(newer_than)
        store = self.ready
        if store is None:  # one without keys is false
            store = await call(HERE, lambda _: self.blocking())
        root = store.lend_root(key)[0]
        is_sure = not root.membership
        while True:
            membership = 0 if is_sure else await call(HERE, lambda _: _home_here(root, name), seconds)
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

    # --- references, rows and ranks -----------------------------------------------------------------------------------

    view = awaited(Store.view)
    ref = awaited(Store.ref, _as_ref)
    create_dataset = awaited(Store.create_dataset, _as_dataset)
    create_dataset_from = awaited(Store.create_dataset_from, _as_dataset)
    save_model = awaited(Store.save_model)
    load_model = awaited(Store.load_model)
    abort = awaited(Store.abort)

    @called_as(Store.open_dataset)
    async def open_dataset(self, key: str, mode: Any = "r+", *, wait: float | None = None) -> AsyncDataset:
        lane = "rows", key  # of which some may wait for their datasets
        found = await self.made(Store.open_dataset, (key, mode), {"wait": wait}, lane=lane, is_timed=False)
        return _as_dataset(self, found)

    @called_as(Store.put_sharded)
    async def put_sharded(self, key: str, value: Any, *, wait: bool = True, **options: Any) -> int | AsyncPendingPut:
        timeout = options.get("timeout")
        seconds = self.timeout if timeout is None else timeout
        deadline, lane = deadline_after(seconds), ("ranks", key)
        if wait:
            options["lease"] = seconds + OUTLIVES
        part = Part(key, value, {**options, "wait": False})
        try:
            pending = await self.made(part.put, (), {}, lane=lane, is_timed=False)
            assert self.opened_root is not None, "it has made a put"
            found = AsyncPendingPut(pending, self.opened_root, lane, self, self.timeout)
            return await found.wait_or_give_up(deadline, seconds) if wait else found
        except asyncio.CancelledError:
            part.is_given_up = True
            if part.pending is not None:
                start(lane, part.pending.abort)
            raise

    # --- files, and the whole store -----------------------------------------------------------------------------------

    attach = awaited(Store.attach)
    export = awaited(Store.export)
    gc = awaited(Store.gc)
    verify = awaited(Store.verify)

    def end(self) -> None:
        self.is_closed = True  # before it looks at the waits: who comes later looks at this
        for waits in list(self._elsewhere.values()):
            waits.end()
        super().end()

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._elsewhere = {}  # tasks of the parent's, which go on there

    async def close(self) -> None:
        """Closes the store. Waits raise StoreClosedError; other calls under way end as they can. May be called again.

        Values that were got stay valid.
        """
        await call(ALL_HOSTS, lambda _: self.end())

    def __await__(self) -> Generator[Any, Any, Self]:
        if self.ready is None:
            yield from call(HERE, lambda _: self.blocking()).__await__()
        return self

    async def __aenter__(self) -> Self:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _is_plain(options: dict[str, Any]) -> bool:
    """Whether a get with these options may be made at once: it copies nothing, and asks nobody."""
    for name, value in options.items():
        if name == "timeout" and value is not None:
            deadline_after(value)  # refuses what is no number
        elif name not in _FREE and (name not in _NONE or value is not None):
            return False
    return True


def _home_here(root: Root, name: bytes) -> int | None:
    """The number under which the key's home is here: 0 if nobody serves the root. None: it is elsewhere."""
    if not is_served(root):
        return 0
    return home_now(root, name) or None
