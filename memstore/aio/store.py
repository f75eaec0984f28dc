"""AsyncStore: what a user calls. Each method of Store, awaited; and memstore's functions, awaited."""

# Functions of this file use what AsyncStore has.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Generator, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, overload

import torch

from memstore._arguments import flag
from memstore._info import StoreSummary
from memstore._wording import an_instance
from memstore.aio.calls import HERE, WORTH_COUNTING, Awaits, awaited, call, called_as, refusing, start
from memstore.aio.waits import ALL_HOSTS, LazyStore, WaitOwner, change_of, wait_for, wait_for_any
from memstore.datasets import Dataset, as_name
from memstore.engine import Root, absolute_path, deadline_after, owned_now
from memstore.errors import HomeUnavailableError, StoreTimeoutError
from memstore.listing import Mode, wanted_of
from memstore.rows import read_rows as read_rows_blocking
from memstore.store.maintenance import destroy as destroy_blocking
from memstore.store.maintenance import stores as stores_blocking
from memstore.store.opening import OWNER_ONLY
from memstore.store.sharded import OUTLIVES, TO_PUBLISH, PendingPut, done_by, give_up_after, wait_until
from memstore.store.store import Store, begin_load, get_at_once
from memstore.store.values import NO_DEFAULT, NOT_NOW, Pin, Ref
from memstore.store.weights import iter_weights as iter_weights_blocking
from memstore.view import StoredTensor

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from memstore.distributed.serving import Cluster
    from memstore.store.values import GetOptions, ShardedPutOptions

T = TypeVar("T")
D = TypeVar("D")


# --- Opening a store; the stores of this machine ---------------------------------------------------------------------


async def destroy(root: str | os.PathLike[str], *, timeout: float = 30.0) -> None:
    """Removes a store with all its values, and its folder. Arguments and errors as `memstore.destroy`."""
    path = absolute_path(root)
    await call(("destroy", path), lambda _: destroy_blocking(path, timeout=timeout))


async def stores() -> tuple[StoreSummary, ...]:
    """Lists the stores of this machine, as `memstore.stores`."""
    return await call("stores", lambda _: stores_blocking())


def open(
    root: str | os.PathLike[str],
    mode: Mode = "a",
    *,
    durability: Literal["process", "disk"] | None = None,
    checksum: bool | None = None,
    inline_limit: int | None = None,
    capacity: int | str | None = None,
    spill: str | os.PathLike[str] | None = None,
    verify: bool = False,
    allow_pickle: bool = False,
    unix_group: int | str | None = None,
    file_mode: int = OWNER_ONLY,
    timeout: float = 30.0,
    wait: float | None = None,
    cluster: str | Cluster | None = None,
    secret: str | bytes | None = None,
) -> AsyncStore:
    """Opens the store in the folder `root` for tasks of asyncio. Arguments and errors as `memstore.open`.

    Nothing is opened yet, so this may be called where nothing can be awaited: `async with`, `await`, or the store's
    first call opens it, and raises what `memstore.open` would. An invalid root or mode is refused at once.

    Example:
        >>> import asyncio, memstore.aio, tempfile, torch
        >>> async def main():
        ...     async with memstore.aio.open(tempfile.mkdtemp()) as store:
        ...         await store.put("policy", {"w": torch.ones(2, 2)})
        ...         return (await store.get("policy"))["w"].sum()
        >>> asyncio.run(main())
        tensor(4.)
    """
    options: dict[str, Any] = {
        "durability": durability,
        "checksum": checksum,
        "inline_limit": inline_limit,
        "capacity": capacity,
        "spill": spill,
        "verify": verify,
        "allow_pickle": allow_pickle,
        "unix_group": unix_group,
        "file_mode": file_mode,
        "timeout": timeout,
        "wait": wait,
        "cluster": cluster,
        "secret": secret,
    }
    return AsyncStore(root, mode, options)


# --- References, datasets, and puts of several ranks -----------------------------------------------------------------


class AsyncRef(Awaits[Ref]):
    """A version of a key, which stays readable as long as it lives: a `memstore.Ref`, whose methods are awaited.

    Made by `AsyncStore.ref`, and pickled as a reference.

    Attributes:
        ref: the `memstore.Ref` itself, for code that doesn't await.
        key: the key.
        version: the version of the key that it refers to.
        root: the folder of the store, as a path.
    """

    __slots__ = ("_pool", "key", "ref", "root", "version")

    def __init__(self, ref: Ref, pool: Hashable) -> None:
        self.ref, self._pool = ref, pool
        self.key, self.version, self.root = ref.key, ref.version, ref.root

    def _blocking(self) -> Ref:
        return self.ref

    def _pool_of(self, key: object) -> Hashable:
        return self._pool

    get = awaited(Ref.get)
    view = awaited(Ref.view)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ref, self._pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncRef) and self.ref == other.ref

    def __hash__(self) -> int:
        return hash(self.ref)

    def __repr__(self) -> str:
        return f"<memstore.aio.AsyncRef {self.key!r} version {self.version} in {self.root}>"


class AsyncPin(Awaits[Pin]):
    """A pin of a version, which everybody can read as long as this process has it: a `memstore.Pin`, to be awaited.

    Made by `AsyncStore.pin`. It ends with `async with`, `await pin.close()`, or when nothing refers to it any more.

    Attributes:
        pin: the `memstore.Pin` itself, for code that doesn't await.
        key: the key.
        version: the version of the key that is pinned.
        root: the folder of the store, as a path.
    """

    __slots__ = ("_pool", "key", "pin", "root", "version")

    def __init__(self, pin: Pin, pool: Hashable) -> None:
        self.pin, self._pool = pin, pool
        self.key, self.version, self.root = pin.key, pin.version, pin.root

    def _blocking(self) -> Pin:
        return self.pin

    def _pool_of(self, key: object) -> Hashable:
        return self._pool

    close = awaited(Pin.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self.pin.__reduce__()

    def __repr__(self) -> str:
        return f"<memstore.aio.AsyncPin {self.key!r} version {self.version} in {self.root}>"


class AsyncPendingPut(Awaits[PendingPut]):
    """A sharded put whose parts may still be on their way: a `memstore.PendingPut`, whose methods are awaited.

    Made by `AsyncStore.put_sharded` with `wait=False`. A wait takes no thread if this host owns the key. If
    another host does, 8 waits for a key have a thread each, and further ones wait for one of these.

    Attributes:
        key: the key that is put.
        attempt: the text by which the ranks of this put find each other.
    """

    def __init__(self, pending: PendingPut, root: Root, pool: Hashable, owner: WaitOwner, timeout: float) -> None:
        self.timeout = timeout
        self.key, self.attempt = pending.key, pending.attempt
        self._pending, self._root, self._pool, self._owner = pending, root, pool, owner

    def _blocking(self) -> PendingPut:
        return self._pending

    def _pool_of(self, key: object) -> Hashable:
        return self._pool

    done = awaited(PendingPut.done)
    abort = awaited(PendingPut.abort)

    @called_as(PendingPut.wait)
    async def wait(self, timeout: float | None = None) -> int:
        seconds = self.timeout if timeout is None else timeout
        return await self.wait_until(deadline_after(seconds), seconds)

    async def wait_until(self, deadline: float, seconds: float) -> int:
        """Waits as `wait`, whose timeout of so many seconds ends at this monotonic time."""
        name, doorbell = self.key.encode(), self._root.doorbell
        while True:
            seen = doorbell.load(doorbell.bell(name))
            is_done = await call(
                self._pool, lambda _: self._done_here(name, deadline), max(deadline - time.monotonic(), 0.0)
            )
            if is_done is None:  # its news come from another host
                left = max(deadline - time.monotonic(), 0.0)
                pool = "waits", self._pool
                return await call(pool, lambda _: wait_until(self._pending, deadline, seconds), left)
            if is_done or time.monotonic() >= deadline:
                return await call(self._pool, lambda _: wait_until(self._pending, time.monotonic(), seconds))
            await change_of(self._root, name, seen, self._owner, deadline)

    def _done_here(self, name: bytes, deadline: float) -> bool | None:
        """Returns what `done` returns, in a thread. Returns None if another host owns the key."""
        return None if owned_now(self._root, name) is None else done_by(self._pending, deadline + TO_PUBLISH)

    async def wait_or_give_up(self, deadline: float, seconds: float) -> int:
        """Waits as `wait_until`; a timeout gives the put up for all ranks."""
        try:
            return await self.wait_until(deadline, seconds)
        except (StoreTimeoutError, HomeUnavailableError) as error:
            reason = error
        return await call(self._pool, lambda _: give_up_after(self._pending, reason))

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncPendingPut can't be pickled: another process finds the put in store.pending(key)")

    def __repr__(self) -> str:
        return f"<memstore.aio.AsyncPendingPut {self.key!r} attempt {self.attempt!r} in {self._root.path}>"


class AsyncDataset(Awaits[Dataset]):
    """A `memstore.Dataset`, whose methods are awaited. It is pickled by reference.

    Made by `AsyncStore.create_dataset`, `create_dataset_from` and `open_dataset`.

    Attributes:
        dataset: the `memstore.Dataset` itself, for code that doesn't await.
        root: the folder of the store.
        key: its key in the store.
        capacity: the most rows that it can have.
        spec: what a row is: nested dicts of `(shape, dtype)`, or one such pair.
    """

    def __init__(self, dataset: Dataset, root: str, timeout: float) -> None:
        self.dataset, self.root, self.timeout = dataset, root, timeout
        self.key, self.capacity, self.spec = dataset.key, dataset.capacity, dataset.spec

    def _blocking(self) -> Dataset:
        return self.dataset

    def _pool_of(self, key: object) -> Hashable:
        return "rows", self.root, self.key

    @property
    def batch_size(self) -> torch.Size:
        """Returns the batch size of a slice of all rows that are there by now."""
        return self.dataset.batch_size

    def __len__(self) -> int:
        """Returns the number of complete rows."""
        return len(self.dataset)

    def __getitem__(self, index: int | slice | str | tuple[str, ...]) -> Any:
        """Returns rows over the shared memory, at once, for an int or a slice, or a column, for the name of a leaf.

        For other indices await `read_rows`.
        """
        if isinstance(index, int | slice) or as_name(index) is not None:
            return self.dataset[index]
        raise TypeError(f"rows by {type(index).__qualname__} are copied: await read_rows(index)")

    read_rows = awaited(Dataset.read_rows)
    extend = awaited(Dataset.extend)
    flush = awaited(Dataset.flush)
    seal = awaited(Dataset.seal)

    async def write_rows(self, index: Any, batch: Any) -> None:
        """Writes rows as `dataset[index] = batch`.

        A task that is cancelled goes on when nothing is written any more.
        """
        await call(self._pool_of(None), lambda _: self.dataset.__setitem__(index, batch), settles=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, self.root, self.timeout)

    def __repr__(self) -> str:
        return f"<memstore.aio.AsyncDataset {self.key!r}: {len(self):,} of {self.capacity:,} rows>"


class RankPut:
    """A rank's part of a sharded put, on its way.

    Attributes:
        pending: the put; None: not yet.
        is_given_up: its task was cancelled: then the thread that makes the put gives it up for all ranks.
    """

    def __init__(self, key: str, value: Any, options: dict[str, Any]) -> None:
        self._key, self._value, self._options = key, value, options
        self.pending: PendingPut | None = None
        self.is_given_up = False

    def put(self, store: Store, waited: float) -> PendingPut:
        """Makes the put, in a thread, for which it has waited so many seconds of its timeout."""
        options = self._options
        if waited > WORTH_COUNTING:
            options = {**options, "timeout": max(options["timeout"] - waited, 0.0)}
        pending: Any = cast(Any, store).put_sharded(self._key, self._value, **options)
        assert isinstance(pending, PendingPut), "it doesn't wait"
        self.pending = pending
        if self.is_given_up:
            pending.abort()
        return pending


# --- AsyncStore ------------------------------------------------------------------------------------------------------


_PAGE = 1024  # keys that are read at a time
_ABSENT: Any = object()
_FREE = frozenset(("non_blocking", "strict"))  # options of get that say nothing where nothing is copied
_NONE = frozenset(
    ("out", "like", "device", "dtype", "max_age", "version", "timeout")
)  # those that are None to ask for nothing


def _as_ref(store: AsyncStore, ref: Ref) -> AsyncRef:
    root = store._lazy.opened_root
    return AsyncRef(ref, HERE if root is None or root.owners.is_alone else ALL_HOSTS)


def _as_pin(store: AsyncStore, pin: Pin) -> AsyncPin:
    return AsyncPin(pin, HERE)


def _pool_of_ranks(store: AsyncStore, key: object) -> Hashable:
    return store._lazy.pool_of_ranks(key)


def _raise(error: Exception) -> NoReturn:
    raise error


def _as_dataset(store: AsyncStore, dataset: Dataset) -> AsyncDataset:
    return AsyncDataset(dataset, store.root, store.timeout)


class AsyncStore(Awaits[Store]):
    """A store for tasks of asyncio: each method of `memstore.Store`, with the same arguments, awaited.

    Made by `memstore.aio.open`. It is opened by its first call, by `await store`, or by `async with store`. Any number
    of tasks, of any number of loops and threads, may call it at the same time. A call that is cancelled leaves nothing
    behind: see docs/asyncio.md.

    Attributes:
        root: the folder, as an absolute path.
        timeout: seconds that calls take at most which aren't told otherwise.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Mode, options: Mapping[str, Any]) -> None:
        self._lazy = LazyStore(path, mode, options)
        self.root, self.timeout = self._lazy.root, self._lazy.timeout

    def _blocking(self) -> Store:
        return self._lazy.blocking()

    def _pool_of(self, key: object) -> Hashable:
        return self._lazy.pool_of(key)

    # --- put and get --------------------------------------------------------------------------------------------------

    put = awaited(Store.put)
    put_many = awaited(Store.put_many)
    update = awaited(Store.update)
    get_many = awaited(Store.get_many)
    delete = awaited(Store.delete)
    delete_many = awaited(Store.delete_many)
    clear = awaited(Store.clear)
    set_policy = awaited(Store.set_policy)
    pop = awaited(Store.pop)
    setdefault = awaited(Store.setdefault)

    @overload
    async def get(
        self, key: str, default: Any = ..., *, as_type: None = None, **options: Unpack[GetOptions]
    ) -> Any: ...
    @overload
    async def get(self, key: str, *, as_type: type[T], **options: Unpack[GetOptions]) -> T: ...
    @overload
    async def get(self, key: str, default: D, *, as_type: type[T], **options: Unpack[GetOptions]) -> T | D: ...
    @called_as(Store.get)
    async def get(self, key: str, default: Any = NO_DEFAULT, **options: Any) -> Any:
        lazy = self._lazy
        store, root = lazy.ready, lazy.opened_root
        if store is not None and root is not None and (not options or _is_plain(options)):
            value = get_at_once(store, root, key, default, time.perf_counter() if lazy.tells else 0.0)
            if value is not NOT_NOW:
                return value
        pool = lazy.pool_of(key, fetches=True)
        settles = options.get("out") is not None
        return await self._made(Store.get, (key, default), options, pool=pool, is_timed=True, settles=settles)

    # --- values that several ranks hold in part -----------------------------------------------------------------------
    # Calls that wait for other ranks take threads of a pool that their key alone has.

    save_model = awaited(Store.save_model, pool=_pool_of_ranks)
    abort = awaited(Store.abort)

    @called_as(Store.load_model)
    async def load_model(
        self,
        key: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        newer_than: int | None = None,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> int:
        seconds = self.timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        strict, cast = flag("strict", strict), flag("cast", cast)
        load = await call(
            self._pool_of(key), lambda _: begin_load(self._blocking(), key, process_group, seconds), seconds
        )
        lazy = self._lazy
        pool = lazy.pool_of(key, fetches=True) if load.is_alone else lazy.pool_of_ranks(key)
        wait: Callable[[], object] | None = None
        if newer_than is not None and load.leads:
            try:
                await wait_for(lazy, key, newer_than, deadline, seconds)
            except asyncio.CancelledError:
                if not load.is_alone:
                    start(pool, load.give_up)
                raise
            except Exception as error:
                if load.is_alone:
                    raise
                wait = partial(_raise, error)

        def fill(_: float) -> int:
            return load.fill(model, optimizer, strict=strict, cast=cast, wait=wait, deadline=deadline, timeout=seconds)

        return await call(pool, fill, max(deadline - time.monotonic(), 0.0), settles=True, asks=True)

    @overload
    async def put_sharded(
        self, key: str, value: Any, *, wait: Literal[True] = True, **options: Unpack[ShardedPutOptions]
    ) -> int: ...
    @overload
    async def put_sharded(
        self, key: str, value: Any, *, wait: Literal[False], **options: Unpack[ShardedPutOptions]
    ) -> AsyncPendingPut: ...
    @overload
    async def put_sharded(
        self, key: str, value: Any, *, wait: bool, **options: Unpack[ShardedPutOptions]
    ) -> int | AsyncPendingPut: ...
    @called_as(Store.put_sharded)
    async def put_sharded(self, key: str, value: Any, *, wait: bool = True, **options: Any) -> int | AsyncPendingPut:
        timeout = options.get("timeout")
        seconds = self.timeout if timeout is None else timeout
        deadline, pool = deadline_after(seconds), self._lazy.pool_of_ranks(key)
        if flag("wait", wait):
            options["lease"] = seconds + OUTLIVES
        part = RankPut(key, value, {**options, "wait": False, "timeout": seconds})
        try:
            pending = await call(pool, lambda waited: part.put(self._blocking(), waited), seconds)
            root = self._lazy.opened_root
            assert root is not None, "it has made a put"
            found = AsyncPendingPut(pending, root, pool, self._lazy, self.timeout)
            return await found.wait_or_give_up(deadline, seconds) if wait else found
        except asyncio.CancelledError:
            part.is_given_up = True
            if part.pending is not None:
                start(pool, part.pending.abort)
            raise

    # --- look ---------------------------------------------------------------------------------------------------------

    version = awaited(Store.version)
    versions = awaited(Store.versions)
    info = awaited(Store.info)
    pending = awaited(Store.pending)
    stats = awaited(Store.stats)
    tree = awaited(Store.tree)

    @called_as(Store.wait)
    async def wait(self, key: str, *, newer_than: int = 0, timeout: float | None = None) -> int:
        seconds = self.timeout if timeout is None else timeout
        return await wait_for(self._lazy, key, newer_than, deadline_after(seconds), seconds)

    @called_as(Store.wait_any)
    async def wait_any(
        self,
        keys: Iterable[str] | None = None,
        *,
        prefix: str | None = None,
        newer_than: Mapping[str, int] | int = 0,
        timeout: float | None = None,
    ) -> dict[str, int]:
        wanted = wanted_of(keys, prefix, newer_than)
        return await wait_for_any(self._lazy, wanted, self.timeout if timeout is None else timeout)

    async def contains(self, key: str) -> bool:
        """Returns whether there is such a key: `key in store`, awaited."""
        return await self._made(Store.__contains__, (key,), {}, pool=self._pool_of(key), is_timed=False)

    async def count(self) -> int:
        """Returns how many keys there are: `len(store)`, awaited."""
        return await self._made(Store.__len__, (), {}, pool=self._pool_of(None), is_timed=False)

    def keys(self, prefix: str = "", *, partial: bool = False) -> AsyncIterator[str]:
        """Iterates over keys, as `Store.keys`: `async for key in store.keys("policy/")`."""
        return self._keys(prefix, partial)

    async def _keys(self, prefix: str, partial: bool) -> AsyncIterator[str]:
        pool = self._pool_of(None)
        found: Iterator[str] = await call(pool, lambda _: self._blocking().keys(prefix, partial=partial))
        while page := await call(pool, lambda _: list(itertools.islice(found, _PAGE))):
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

    if TYPE_CHECKING:

        @overload
        async def view(
            self, key: str, *, device: torch.device | str | None = ..., version: int | None = ..., as_type: None = ...
        ) -> Any: ...
        @overload
        async def view(
            self, key: str, *, device: torch.device | str | None = ..., version: int | None = ..., as_type: type[T]
        ) -> T: ...
        async def view(self, key: str, **options: Any) -> Any: ...
    else:
        view = awaited(Store.view)
    ref = awaited(Store.ref, _as_ref)
    pin = awaited(Store.pin, _as_pin)
    create_dataset = awaited(Store.create_dataset, _as_dataset)
    create_dataset_from = awaited(Store.create_dataset_from, _as_dataset)

    @called_as(Store.open_dataset)
    async def open_dataset(self, key: str, mode: Any = "r+", *, wait: float | None = None) -> AsyncDataset:
        pool = "rows", self.root, key  # of which some may wait for their datasets
        found = await self._made(Store.open_dataset, (key, mode), {"wait": wait}, pool=pool, is_timed=False)
        return _as_dataset(self, found)

    # --- files, and the whole store -----------------------------------------------------------------------------------

    attach = awaited(Store.attach)
    export = awaited(Store.export)
    export_hf = awaited(Store.export_hf)
    gc = awaited(Store.gc)
    set_quota = awaited(Store.set_quota)
    quotas = awaited(Store.quotas)
    verify = awaited(Store.verify)

    async def close(self) -> None:
        """Closes the store. Waits raise StoreClosedError; calls in progress run to their end. May be called again.

        Values that were got stay valid.
        """
        await call(ALL_HOSTS, lambda _: self._lazy.end())

    def __await__(self) -> Generator[Any, Any, Self]:
        if self._lazy.ready is None:
            yield from call(self._pool_of(None), lambda _: self._blocking()).__await__()
        return self

    async def __aenter__(self) -> Self:
        return await self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles it by its root, as a Store. What was made when this one was opened is there for others."""
        return type(self), self._lazy.arguments()

    def __repr__(self) -> str:
        return f"<memstore.aio.{type(self).__name__} {self.root} ({self._lazy.state()})>"


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


def check_opened(store: object, name: str) -> None:
    """Raises TypeError unless `store` is an AsyncStore.

    Args:
        name: what was called: memstore has something of the same name for a store of `memstore.open`.
    """
    if not isinstance(store, AsyncStore):
        instead = f": memstore.{name} takes that" if isinstance(store, Store) else ""
        raise TypeError(f"store is one of memstore.aio.open, and not {an_instance(store)}{instead}")


def lazy_of(store: AsyncStore) -> LazyStore:
    """Returns what opens a store, for memstore's own parts."""
    return store._lazy


def _is_plain(options: dict[str, Any]) -> bool:
    """Returns whether a get with these options may be made at once: it copies nothing, and asks nobody."""
    for name, value in options.items():
        if name == "timeout" and value is not None:
            deadline_after(value)  # refuses what is no number
        elif name not in _FREE and (name not in _NONE or value is not None):
            return False
    return True


# --- Functions that read ---------------------------------------------------------------------------------------------


# Values of any shape: what they hold has no type before it is looked at.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


_ALL_TOLD: Any = object()


async def iter_weights(
    store: AsyncStore,
    key: str,
    *,
    newer_than: int | None = None,
    prefix: str = "",
    names: Callable[[str], str | None] | None = None,
    timeout: float | None = None,
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Iterates over the tensors of one version of a nested value: `async for name, weight in iter_weights(...)`.

    Arguments and errors as `memstore.iter_weights`. With `newer_than`, the wait takes no thread.
    """
    check_opened(store, "iter_weights")
    if newer_than is not None:
        await store.wait(key, newer_than=newer_than, timeout=timeout)
    pool = store._lazy.pool_of(key, fetches=True)
    weights: Iterator[tuple[str, torch.Tensor]] = await call(
        pool, lambda _: iter_weights_blocking(store._lazy.blocking(), key, prefix=prefix, names=names, timeout=timeout)
    )
    while (found := await call(pool, lambda _: next(weights, _ALL_TOLD))) is not _ALL_TOLD:
        yield found


async def read_rows(
    source: Any, index: Any, *, out: Any = None, device: torch.device | str | None = None, cast: bool = False
) -> Any:
    """Reads rows of every tensor of a view, into memory of its own, or `out`, as `memstore.read_rows`.

    The bytes may lie on another host, so the reads of each key have 8 threads of their own.
    """
    pool = "reading", _key_of(source)

    def read(_: float) -> Any:
        return read_rows_blocking(source, index, out=out, device=device, cast=cast)

    return await call(pool, read, settles=out is not None)


def _key_of(source: Any) -> str:
    """Returns the key of whose value `source` is a view, or "", as far as a look at its first leaf tells."""
    while not isinstance(source, StoredTensor):
        inner: Any = source.values() if isinstance(source, dict) else source
        if not isinstance(source, dict | list | tuple) or not source:
            return ""
        source = next(iter(inner))
    return source.stored.source.key
