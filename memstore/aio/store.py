"""AsyncStore: what a user calls. Each method of Store, awaited."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any

from memstore.aio.awaited import awaited, called_as, refusing
from memstore.aio.by_ranks import ByRanks
from memstore.aio.lanes import HERE, call
from memstore.aio.opened import ALL_HOSTS
from memstore.aio.results import AsyncRef
from memstore.aio.rows import AsyncDataset
from memstore.datasets import Dataset
from memstore.engine import deadline_after
from memstore.store.gets import NO_DEFAULT, NOT_NOW, get_at_once
from memstore.store.ref import Ref
from memstore.store.store import Store
from memstore.wording import names_its_methods

if TYPE_CHECKING:
    from typing_extensions import Self

_PAGE = 1024  # keys that are read at a time
_ABSENT: Any = object()
_FREE = frozenset(("non_blocking", "strict"))  # options of get that say nothing where nothing is copied
_NONE = frozenset(("out", "like", "device", "dtype", "max_age", "timeout"))  # those that are None to ask for nothing


def _as_ref(store: AsyncStore, ref: Ref) -> AsyncRef:
    return AsyncRef(ref, ALL_HOSTS if store.opened_root is not None and store.opened_root.membership else HERE)


def _as_dataset(store: AsyncStore, dataset: Dataset) -> AsyncDataset:
    return AsyncDataset(dataset, store.root, store.timeout)


@names_its_methods
class AsyncStore(ByRanks):
    """A store for tasks of asyncio: each method of `memstore.Store`, with the same arguments, awaited.

    Made by `memstore.aio.open`. It is opened by its first call, by `await store`, or by `async with store`. Any number
    of tasks, of any number of loops and threads, may call it at the same time. A call that is cancelled leaves nothing
    behind: see docs/asyncio.md.

    Attributes:
        root: the folder, as an absolute path.
    """

    # --- put and get --------------------------------------------------------------------------------------------------

    put = awaited(Store.put)
    put_many = awaited(Store.put_many)
    update = awaited(Store.update)
    get_many = awaited(Store.get_many)
    delete = awaited(Store.delete)
    delete_many = awaited(Store.delete_many)
    clear = awaited(Store.clear)
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
        """As `key in store`, awaited."""
        return await self.made(Store.__contains__, (key,), {}, lane=self.lane_of(key), is_timed=False)

    async def count(self) -> int:
        """As `len(store)`, awaited."""
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
        """Iterates over keys and values: `async for key, value in store.items()`.

        Keys that are deleted meanwhile are left out.
        """
        async for key in self.keys():
            value = await self.get(key, _ABSENT)
            if value is not _ABSENT:
                yield key, value

    async def values(self) -> AsyncIterator[Any]:
        """Iterates over the values, as `items`: `async for value in store.values()`."""
        async for _, value in self.items():
            yield value

    # --- references and rows -----------------------------------------------------------------------------------------

    view = awaited(Store.view)
    ref = awaited(Store.ref, _as_ref)
    create_dataset = awaited(Store.create_dataset, _as_dataset)
    create_dataset_from = awaited(Store.create_dataset_from, _as_dataset)

    @called_as(Store.open_dataset)
    async def open_dataset(self, key: str, mode: Any = "r+", *, wait: float | None = None) -> AsyncDataset:
        lane = "rows", self.root, key  # of which some may wait for their datasets
        found = await self.made(Store.open_dataset, (key, mode), {"wait": wait}, lane=lane, is_timed=False)
        return _as_dataset(self, found)

    # --- files, and the whole store -----------------------------------------------------------------------------------

    attach = awaited(Store.attach)
    export = awaited(Store.export)
    gc = awaited(Store.gc)
    verify = awaited(Store.verify)

    async def close(self) -> None:
        """Closes the store. Waits raise StoreClosedError; calls in progress run to their end. May be called again.

        Values that were got stay valid.
        """
        await call(ALL_HOSTS, lambda _: self.end())

    def __await__(self) -> Generator[Any, Any, Self]:
        if self.ready is None:
            yield from call(self.lane_of(None), lambda _: self.blocking()).__await__()
        return self

    async def __aenter__(self) -> Self:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


for _name, (_what, _instead) in {
    "__enter__": ("with", "async with"),
    "__exit__": ("with", "async with"),  # Python asks for both first
    "__getitem__": ("store[key]", "await store.get(key)"),
    "__setitem__": ("store[key] = value", "await store.put(key, value)"),
    "__delitem__": ("del store[key]", "await store.delete(key)"),
    "__contains__": ("key in store", "await store.contains(key)"),
    "__iter__": ("a loop over keys", "async for key in store.keys()"),
}.items():  # not in the class, where a type checker would take them for what a store has
    setattr(AsyncStore, _name, refusing(_what, _instead))


def _is_plain(options: dict[str, Any]) -> bool:
    """Whether a get with these options may be made at once: it copies nothing, and asks nobody."""
    for name, value in options.items():
        if name == "timeout" and value is not None:
            deadline_after(value)  # refuses what is no number
        elif name not in _FREE and (name not in _NONE or value is not None):
            return False
    return True
