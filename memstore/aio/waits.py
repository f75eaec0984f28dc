"""An opened store's waits, and the store that its first call opens.

LazyStore          opens the store in a thread; `pool_in` says which pool of threads takes a call
news_of            for keys that this host owns, one thread looks for all waits of a process and a store
RemoteWaits        for other keys, the owner keeps the wait, and no thread waits for that
wait_for           a wait for newer versions of one key; `wait_for_any`: of several
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, Protocol

from memstore._arguments import encode_key, older_version
from memstore._telling import is_wanted
from memstore._threads import Hooks, around_forks
from memstore.aio.calls import HERE, call
from memstore.engine import (
    IN_A_THREAD,
    LOOK_EVERY,
    BegunWait,
    Record,
    Root,
    Transaction,
    absolute_path,
    deadline_after,
    elsewhere_of,
    index,
    mutable_entry,
    owned_now,
)
from memstore.errors import StoreClosedError, StoreTimeoutError
from memstore.listing import Mode, opened, tell_of_wait
from memstore.store.opening import check_mode, when_there
from memstore.store.opening import open as open_blocking
from memstore.store.store import Store

# --- Keys that this host owns ----------------------------------------------------------------------------------------
# One thread looks for all waits of a process and a store.
#
# 1. It marks the store's watch word (`engine.Watch`), **then** takes the waits that are new.
# 2. A wait is due if it is new, if the word of its key's bell is another one than before, or if a second has passed.
#    The keys of all that are due are looked at in one transaction; who has a newer version is told.
# 3. It sleeps on the watch word, until somebody publishes something, a new wait comes, or a second is over. Who
#    publishes much that nobody here waits for wakes it at most once in half a millisecond.
#
# In a store that this process may only read, there is no word to mark: it looks at the bells every two milliseconds.
# When the last wait has gone, it lingers for a second, and ends.


_LINGER = 1.0  # seconds
_BETWEEN_LOOKS = 0.0005  # seconds, where the last one was for nothing
_BETWEEN_GLANCES = 0.002  # seconds, where nobody can be heard

_FOR_EVER = 1e7  # seconds: no timer is set for so long
_ALL_BELLS = -1
LOOK_AGAIN = -1  # in place of a version: something has changed, such as the hosts of the store


def closed(path: str) -> StoreClosedError:
    """Returns the error of a store that its user has closed."""
    return StoreClosedError(f"the store {path} was closed: memstore.aio.open it again")


class WaitOwner(Protocol):
    """The store object that waits are asked of."""

    def check_open(self) -> None: ...


class Waiting:
    """One wait of a task. Make it in the task's loop.

    Attributes:
        name: the key; None: it is of all keys, and of any change.
        seen: the word of the key's bell at its last look, or of all of them the state; -1: there was none.
        is_of_any_change: it is told LOOK_AGAIN whenever that word changes, and each second.
        owner: the store object that it was asked of: see `end_waits`.
        membership: under which this host owns the key; 0: of a store that nobody serves.
        future: gives the version, or LOOK_AGAIN.
    """

    __slots__ = ("bell", "future", "is_of_any_change", "loop", "membership", "name", "newer_than", "owner", "seen")

    def __init__(self, root: Root, name: bytes | None, newer_than: int, membership: int, owner: WaitOwner) -> None:
        self.name, self.newer_than, self.membership, self.owner = name or b"", newer_than, membership, owner
        self.bell = _ALL_BELLS if name is None else root.doorbell.bell(name)
        self.seen = -1
        self.is_of_any_change = name is None
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[int] = self.loop.create_future()


class _WaitThread:
    """The waits of one root, and their thread. What others change is guarded by `_lock`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._watch = None if root.doorbell.watch is None else root.doorbell.watch.another()
        self._some = threading.Condition(_lock)
        self.thread = threading.Thread(target=self._run, name="memstore.aio waits", daemon=True)
        self._is_dismissed = False
        self._is_roused = False
        self._incoming: list[Waiting] = []
        self._outgoing: list[Waiting] = []
        self._waiting: dict[int, Waiting] = {}  # the thread's own
        self._looked = 0.0  # at all of them

    # --- for others, under the lock -----------------------------------------------------------------------------------

    def add(self, waiting: Waiting) -> None:
        self._incoming.append(waiting)
        self.rouse()

    def drop(self, waiting: Waiting) -> None:
        self._outgoing.append(waiting)
        self.rouse()

    def end(self, owner: WaitOwner) -> bool:
        """Ends the waits of an owner. Returns whether there are no others."""
        waiting = [*self._incoming, *self._waiting.values()]
        ended = [one for one in waiting if one.owner is owner]
        _tell([(one, None, closed(self._root.path)) for one in ended])
        self._outgoing.extend(ended)
        self._is_dismissed = True
        self.rouse()
        return len(ended) == len(waiting)

    def rouse(self) -> None:
        if not self._is_roused:
            self._is_roused = True
            self._some.notify()
            if self._watch is not None:
                self._watch.ring()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        was_for_nothing = False
        while self._wait_for_some():
            if was_for_nothing:
                time.sleep(_BETWEEN_LOOKS)
            if self._watch is not None:
                self._watch.mark()
            is_new = self._take_in()
            told = self._look()
            was_for_nothing = not (told or is_new)
            if self._waiting and self._watch is not None:
                self._watch.sleep(LOOK_EVERY)
            elif self._waiting:
                time.sleep(_BETWEEN_GLANCES)

    def _wait_for_some(self) -> bool:
        """Waits until there are waits. Returns False if none came, and the thread is to end."""
        with _lock:
            while not (self._waiting or self._incoming):
                self._outgoing.clear()
                self._is_roused = False
                if self._is_dismissed or not self._some.wait(_LINGER):
                    if self._incoming:
                        continue
                    _wait_threads.pop(id(self._root), None)
                    return False
        return True

    def _take_in(self) -> bool:
        with _lock:
            incoming, self._incoming = self._incoming, []
            outgoing, self._outgoing = self._outgoing, []
            self._is_roused = False
            self._waiting.update((id(waiting), waiting) for waiting in incoming)
            for waiting in outgoing:
                self._waiting.pop(id(waiting), None)
        return bool(incoming)

    def _look(self) -> bool:
        """Returns whether somebody was told something."""
        now = time.monotonic()
        looks_at_all = now - self._looked >= LOOK_EVERY
        if looks_at_all:
            self._looked = now
        words: dict[int, int] = {}
        due: list[Waiting] = []
        for waiting in self._waiting.values():
            word = words.get(waiting.bell)
            if word is None:
                bell, doorbell = waiting.bell, self._root.doorbell
                word = words[bell] = (
                    doorbell.state() if bell == _ALL_BELLS else doorbell.load(bell)
                )  # before the catalog
            if word != waiting.seen or looks_at_all:
                waiting.seen = word
                due.append(waiting)
        told: list[_News] = [(waiting, LOOK_AGAIN, None) for waiting in due if waiting.is_of_any_change]
        told += self._news_of([waiting for waiting in due if not waiting.is_of_any_change])
        with _lock:
            for waiting, _, _ in told:
                self._waiting.pop(id(waiting), None)
        _tell(told)
        return bool(told)

    def _news_of(self, due: list[Waiting]) -> list[_News]:
        if not due:
            return []
        try:
            self._root.glance()
            if self._root.host_lease[0]:
                self._root.check_lease()
            membership, records = self._root.catalog.view(_records, {waiting.name for waiting in due})
        except Exception as error:  # of one key, or of the store
            if len({waiting.name for waiting in due}) == 1:
                return [(waiting, None, error) for waiting in due]
            names = sorted({waiting.name for waiting in due})
            found = [self._news_of([waiting for waiting in due if waiting.name == name]) for name in names]
            return [news for some in found for news in some]
        return [news for waiting in due if (news := _news(waiting, records[waiting.name], membership)) is not None]


_News = tuple[Waiting, "int | None", "Exception | None"]


def _records(transaction: Transaction, names: set[bytes]) -> tuple[int, dict[bytes, Record | None]]:
    return transaction.counters().membership, {name: transaction.record(name) for name in names}


def _news(waiting: Waiting, record: Record | None, membership: int) -> _News | None:
    if record is not None and record.is_mutable:
        return waiting, None, mutable_entry(waiting.name, record.mutable_kind)
    if record is not None and record.version > waiting.newer_than:
        return waiting, record.version, None
    return None if membership == waiting.membership else (waiting, LOOK_AGAIN, None)


def _tell(news: list[_News]) -> None:
    """Tells each loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_News]] = {}
    for one in news:
        by_loop.setdefault(one[0].loop, []).append(one)
    for loop, some in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it was closed: nobody waits
            loop.call_soon_threadsafe(_set, some)


def _set(news: Sequence[_News]) -> None:
    for waiting, version, error in news:
        if waiting.future.done():
            continue
        if version is None:
            waiting.future.set_exception(error or AssertionError("neither a version nor an error"))
        else:
            waiting.future.set_result(version)


# --- what tasks call --------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_wait_threads: dict[int, _WaitThread] = {}  # by the id of their root, which they keep


async def news_of(root: Root, waiting: Waiting, deadline: float) -> int | None:
    """Waits for a version, and returns it, or LOOK_AGAIN; None if there was none by the (monotonic) deadline."""
    with _lock:
        waiting.owner.check_open()  # else `end_waits`, which comes later, finds this one
        waits = _wait_threads.get(id(root))
        if waits is None:
            waits = _WaitThread(root)
            waits.thread.start()
            _wait_threads[id(root)] = waits
        waits.add(waiting)
    timer: Any = None
    left = deadline - time.monotonic()
    if left < _FOR_EVER:
        timer = waiting.loop.call_later(max(left, 0.0), _set, [(waiting, 0, None)])
    has_news = False
    try:
        version = await waiting.future
        has_news = version != 0
        return version or None
    finally:
        if timer is not None:
            timer.cancel()
        if not has_news:
            with _lock:
                waits.drop(waiting)


async def change_of(root: Root, name: bytes | None, seen: int, owner: WaitOwner, deadline: float) -> None:
    """Returns when something has changed for a key since its bell's word was `seen`, or may have; or then.

    `name`: None: for any key, since the doorbell's state was that.
    """
    waiting = Waiting(root, name, 0, 0, owner)
    waiting.is_of_any_change, waiting.seen = True, seen
    await news_of(root, waiting, deadline)


def end_waits(root: Root, owner: WaitOwner) -> None:
    """Ends the waits of a store object whose `check_open` raises from now on: they raise StoreClosedError.

    The thread ends with the last wait.
    """
    with _lock:
        waits = _wait_threads.get(id(root))
        is_last = waits is not None and waits.end(owner)
    if waits is not None and is_last:
        waits.thread.join(_LINGER)  # it refers to the store


def _after_fork_in_child() -> None:
    """Forgets the threads, and who holds the lock, which are the parent's."""
    global _lock
    _lock = threading.Lock()
    _wait_threads.clear()


around_forks(Hooks(after_in_child=_after_fork_in_child))


# --- Waits for keys that this host doesn't own -----------------------------------------------------------------------
# A wait is **begun**: the owner keeps it until there is a newer version, and no thread waits for it; or the directory,
# if nobody owns the key yet. Its steps that may take time, a look into the catalog and a connection, are made in a
# thread of the owner's pool.


HERE_BY_NOW = 0  # in place of a version: this host owns the key by now
_TO_ANSWER = 5.0  # seconds for a host; it is asked again


class RemoteWaits:
    """The waits of one store, in one loop, of one pool."""

    def __init__(self, root: Root, pool: Hashable) -> None:
        self._root, self._pool = root, pool
        self._wakeups: set[Wakeup] = set()  # of begun waits
        self._batch = BatchedWakeups()
        self._is_ended = False

    @property
    def is_idle(self) -> bool:
        return not self._wakeups

    def end(self) -> None:
        """Lets the waits raise StoreClosedError, since the store is being closed. Any thread may call it."""
        self._is_ended = True
        for wakeup in list(self._wakeups):
            wakeup.ring()

    async def wait(self, name: bytes, newer_than: int, deadline: float) -> int | None:
        """Returns the version, or HERE_BY_NOW; None if there was none in time. Raises what a lookup raises."""
        return await self._wait(lambda wakeup: self._begin(name, newer_than, deadline, wakeup), deadline)

    async def wait_any(self, wanted: index.AwaitedKeys, deadline: float) -> None:
        """Returns when there may be newer versions of keys, or the time is over."""

        def begin(wakeup: Wakeup) -> BegunWait:
            there = elsewhere_of(self._root)
            if wanted.keys is not None:
                return there.begin_wait_any_of(wanted.keys, wanted.newer_than, wakeup.ring, deadline)
            return there.begin_wait_any(wanted.prefix, wanted.newer_than, wakeup.ring, deadline)

        await self._wait(begin, deadline)

    async def _wait(self, begin: Callable[[Wakeup], BegunWait | int], deadline: float) -> int | None:
        wakeup, left = Wakeup(self._batch), max(deadline - time.monotonic(), 0.0)
        self._wakeups.add(wakeup)
        try:
            begun = await call(self._pool, lambda _: begin(wakeup), left)
            if isinstance(begun, int):
                return begun
            try:
                return await self._go_on(begun, wakeup, deadline)
            finally:
                begun.close()
        finally:
            self._wakeups.discard(wakeup)

    def _begin(self, name: bytes, newer_than: int, deadline: float, wakeup: Wakeup) -> BegunWait | int:
        """Begins the wait, in a thread. Returns a version, if there is one already."""
        there = elsewhere_of(self._root)
        (record,) = there.records([name], deadline)
        if record is not None and record.is_mutable:
            raise mutable_entry(name, record.mutable_kind)
        if record is not None and record.version > newer_than:
            return record.version
        return there.begin_wait(name, newer_than, wakeup.ring, deadline)

    # --- begun ones ---------------------------------------------------------------------------------------------------

    async def _go_on(self, begun: BegunWait, wakeup: Wakeup, deadline: float) -> int | None:
        while True:
            wakeup.arm()
            if self._is_ended:
                raise closed(self._root.path)
            answer = begun.go_on(None)
            left = max(deadline - time.monotonic(), 0.0)
            if answer is IN_A_THREAD:
                until = time.monotonic() + min(left, _TO_ANSWER)
                answer = await call(self._pool, lambda _, until=until: begun.go_on(until), left)
            if answer.version is not None:
                return answer.version
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await wakeup.rung_within(min(left, answer.again))


class BatchedWakeups:
    """The calls into one loop that wake its tasks: one call for all that are woken while the loop does something else.

    A put of many keys, or one message of an owner's, ends many waits; each call into a loop is a system call.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung: deque[Wakeup] = deque()
        self._is_called = False  # and has not begun yet

    def ring(self, wakeup: Wakeup) -> None:
        self._rung.append(wakeup)  # before it looks: who is called says so before it takes them
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                self._loop.call_soon_threadsafe(self._ring_all)

    def _ring_all(self) -> None:
        self._is_called = False
        while self._rung:
            self._rung.popleft().strike()


class Wakeup:
    """A bell of a begun wait, which any thread rings. It is made in the loop whose task listens."""

    def __init__(self, batch: BatchedWakeups) -> None:
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] = self._loop.create_future()

    def arm(self) -> asyncio.Future[None]:
        """Returns a future that is done when it is rung from now on."""
        if self._rung.done():
            self._rung = self._loop.create_future()
        return self._rung

    async def rung_within(self, seconds: float) -> None:
        """Returns when it was rung since it was armed, or so many seconds are over."""
        timer = self._loop.call_later(seconds, self.strike)
        try:
            await self._rung
        finally:
            timer.cancel()

    def ring(self) -> None:
        self._batch.ring(self)

    def strike(self) -> None:
        """Wakes the task. Called in the loop."""
        if not self._rung.done():
            self._rung.set_result(None)


# --- A store that its first call opens; which pool of threads takes a call of it -------------------------------------


ALL_HOSTS = "all hosts"  # the pool of calls that may ask several


def pool_in(root: Root, key: object, *, fetches: bool = False) -> Hashable:
    """Returns the pool of a call for a key: of this host, or of the host that owns it as far as this process knows.

    Args:
        fetches: the call may ask other hosts for bytes, also if this host owns the key.
    """
    if root.owners.is_alone:
        return HERE
    if not isinstance(key, str):
        return ALL_HOSTS
    owner = elsewhere_of(root).known_owner(encode_key(key))
    if owner is None:
        return ALL_HOSTS
    return HERE if owner == root.member_id() and not fetches else owner


class LazyStore:
    """A store that its first call opens. An `AsyncStore` has one, and any thread may call it.

    Args:
        path, mode, options: as the arguments of `memstore.open`.

    Attributes:
        root: the folder, as an absolute path.
        mode: as it was asked for.
        timeout: seconds that calls take at most which aren't told otherwise.
        ready: the store, if a call of it need not open anything; else None.
        opened_root: the root of that store.
        tells: whether the log is told of each call.
        is_closed: whether its user has closed it.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Mode, options: Mapping[str, Any]) -> None:
        check_mode(mode)
        self.root, self.timeout = absolute_path(path), options["timeout"]
        self.ready: Store | None = None
        self.opened_root: Root | None = None
        self.tells = is_wanted()
        self.mode: Mode = mode
        self.is_closed = False
        self.remote_waits: dict[Hashable, RemoteWaits] = {}  # by loop and pool, while there are any
        self._options = options
        self._store: Store | None = None
        self._opening = threading.Lock()
        _all.add(self)

    def blocking(self) -> Store:
        """Opens the store, if that is to be done. Call it in a thread.

        Raises what `memstore.open` raises, and a later call tries again; StoreClosedError.
        """
        wait = self._options.get("wait")
        if self._store is None and self._options.get("cluster") is not None:
            open_blocking(self.root, self.mode, **self._options).close()  # joins, without the lock: it may take long
            return self._open_now()
        if wait is None or self._store is not None or self.mode not in ("r", "r+"):
            return self._open_now()
        return when_there(self.root, wait, self._open_now, self.timeout)  # between two looks it may be closed

    def _open_now(self, within: float | None = None) -> Store:
        with self._opening:
            self.check_open()
            if self._store is None:
                options = dict(self._options)
                options.pop("secret", None)
                if options.pop("cluster", None) is not None or self.mode in ("r", "r+"):
                    options.pop("wait", None)  # this host has joined, and the store is there
                if within is not None and within < self.timeout:  # for the opening alone
                    hasty: dict[str, Any] = {**options, "timeout": within}
                    with open_blocking(self.root, self.mode, **hasty):
                        self._store = open_blocking(self.root, self.mode, **options)
                else:
                    self._store = open_blocking(self.root, self.mode, **options)
            store = self._store
            if self.ready is None:
                self.opened_root = opened(store)  # in a forked child, this opens the catalog anew
                self.ready = store
            return store

    def pool_of(self, key: object, *, fetches: bool = False) -> Hashable:
        """Returns the pool of a call for a key, as `pool_in`.

        A store that isn't open yet has a pool of its own: to open it may take long, and so may the call itself.
        """
        root = self.opened_root
        return ("opening", self.root) if root is None else pool_in(root, key, fetches=fetches)

    def pool_of_ranks(self, key: object) -> Hashable:
        """Returns the pool of a call for this key which may wait for other ranks."""
        return "ranks", self.root, key if isinstance(key, str) else None

    def check_open(self) -> None:
        """Raises StoreClosedError if the user has closed the store."""
        if self.is_closed:
            raise closed(self.root)

    def end(self) -> None:
        """Closes it. Takes a moment."""
        self.is_closed = True  # before it looks at the waits: a wait that comes later looks at this
        for waits in list(self.remote_waits.values()):
            waits.end()
        with self._opening:
            store, root = self._store, self.opened_root
            self._store = self.ready = self.opened_root = None
        if root is not None:
            end_waits(root, self)
        if store is not None:
            store.close()

    def leave_to_parent(self) -> None:
        """Forgets, in a forked child, what belongs to the parent's threads and tasks.

        The thread that holds the lock isn't there. The next call opens the catalog, which takes time.
        """
        self._opening = threading.Lock()
        self.ready = None
        self.remote_waits = {}

    def arguments(self) -> tuple[str, Mode, dict[str, Any]]:
        """Returns arguments that open the same store in another process. Raises TypeError, StoreClosedError."""
        self.check_open()
        if self._store is not None:  # what it was created with is in its folder
            kept = {name: self._options[name] for name in ("verify", "allow_pickle", "timeout")}
            return self.root, "r" if self.mode == "r" else "r+", kept
        if self.mode == "w":
            raise TypeError(
                f"the store {self.root} of mode 'w' isn't opened yet, and a copy would begin it anew: await it"
            )
        return self.root, self.mode, dict(self._options)

    def state(self) -> str:
        """Says, for its text, whether it is open."""
        if self.is_closed:
            return "closed"
        return f"mode {self.mode!r}{', not opened yet' if self._store is None else ''}"


_all: weakref.WeakSet[LazyStore] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for one in list(_all):
        one.leave_to_parent()


around_forks(Hooks(after_in_child=_leave_all_to_parent))


# --- Waits for newer versions ----------------------------------------------------------------------------------------


async def wait_for(lazy: LazyStore, key: str, newer_than: int, deadline: float, seconds: float) -> int:
    """Waits for a newer version of a key, as `Store.wait`.

    Args:
        deadline: the monotonic time at which the timeout of so many `seconds` ends.
    """
    began = time.perf_counter() if is_wanted() else 0.0
    name, newer_than = encode_key(key), older_version(newer_than)
    store = lazy.ready
    if store is None:
        store = await call(lazy.pool_of(key), lambda _: lazy.blocking())
    root = opened(store)
    is_sure = root.owners.is_alone
    while True:
        membership = 0 if is_sure else await call(HERE, lambda _: owned_now(root, name), seconds)
        if membership is None:
            version = await wait_elsewhere(lazy, root, key, newer_than, deadline)
        else:
            version = await news_of(root, Waiting(root, name, newer_than, membership, lazy), deadline)
        if version is None:
            version = await call(lazy.pool_of(key), lambda _: index.version_of(root, name, 0))
            if version <= newer_than:  # else it came with the end of the time
                raise index.not_newer(name, version, newer_than, seconds)
        if version != LOOK_AGAIN:
            break
        is_sure = False
    if began:
        tell_of_wait(lazy.root, began, {key: version})
    return version


async def wait_elsewhere(lazy: LazyStore, root: Root, key: str, newer_than: int, deadline: float) -> int | None:
    """Waits for a newer version of a key that this host doesn't own.

    Returns the version; LOOK_AGAIN if this host owns it by now; None if there was none by the deadline.
    """
    try:
        with _remote_waits(lazy, root, lazy.pool_of(key, fetches=True)) as waits:
            version = await waits.wait(encode_key(key), newer_than, deadline)
            return LOOK_AGAIN if version == HERE_BY_NOW else version
    except StoreTimeoutError:
        return None


@contextlib.contextmanager
def _remote_waits(lazy: LazyStore, root: Root, pool: Hashable) -> Generator[RemoteWaits]:
    """Gives the waits of a store, in this loop, that are begun in this pool."""
    name = asyncio.get_running_loop(), ("waits", pool)
    waits = lazy.remote_waits.setdefault(name, RemoteWaits(root, name[1]))
    try:
        lazy.check_open()  # else `end` sees it
        yield waits
    finally:
        if waits.is_idle:
            lazy.remote_waits.pop(name, None)


async def wait_for_any(lazy: LazyStore, wanted: index.AwaitedKeys, seconds: float) -> dict[str, int]:
    """Waits for newer versions of several keys, as `Store.wait_any`."""
    began = time.perf_counter() if is_wanted() else 0.0
    deadline = deadline_after(seconds)
    some = (wanted.prefix if wanted.keys is None else wanted.keys[0]).decode()
    store = lazy.ready
    if store is None:
        store = await call(lazy.pool_of(some), lambda _: lazy.blocking(), seconds)
    root, may_begin = opened(store), True
    while True:
        lazy.check_open()
        left = max(deadline - time.monotonic(), 0.0)
        look = await call(
            lazy.pool_of(some), lambda _: index.look_for_any(lambda: root, wanted, deadline, seconds), left
        )
        if look.found:
            break
        if may_begin and await call(lazy.pool_of(some), lambda _: index.waits_at_owners(root, wanted), left):
            with _remote_waits(lazy, root, ALL_HOSTS) as waits, contextlib.suppress(StoreTimeoutError):
                await waits.wait_any(wanted, deadline)
            may_begin = False  # if it was for a mutable entry, which isn't waited for
        else:
            await change_of(root, None, look.seen, lazy, look.until)
            may_begin = True
    versions = {name.decode(): version for name, version in look.found.items()}
    if began:
        tell_of_wait(lazy.root, began, versions)
    return versions
