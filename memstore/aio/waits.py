"""Waits for versions of keys: those whose home is here, and those whose home is another host.

For keys at home here, one thread looks for all waits of a process and a store (`news_of`, `change_of`). For keys of
another host, `RemoteWaits` has the home keep the wait, and no thread waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from memstore._threads import Hooks, around_forks
from memstore.aio.calls import call
from memstore.engine import (
    IN_A_THREAD,
    LOOK_EVERY,
    BegunWait,
    Record,
    Root,
    Transaction,
    deadline_after,
    elsewhere_of,
    mutable_entry,
)
from memstore.errors import HomeUnavailableError, StoreClosedError

# --- Keys whose home is here -----------------------------------------------------------------------------------------
# Waits for versions of keys whose home is here: one thread looks for all of them, of a process and a store.
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
_CLOSED = "the store {} was closed: memstore.aio.open it again"
_ALL_BELLS = -1
LOOK_AGAIN = -1  # in place of a version: something has changed, such as the hosts of the store


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
        membership: under which the key's home is here; 0: of a store that nobody serves.
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
        _tell([(one, None, StoreClosedError(_CLOSED.format(self._root.path))) for one in ended])
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
            if self._waiting:
                self._sleep()

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
            membership, records = self._root.catalog.view(_records, {waiting.name for waiting in due})
        except Exception as error:  # of one key, or of the store
            if len({waiting.name for waiting in due}) == 1:
                return [(waiting, None, error) for waiting in due]
            names = sorted({waiting.name for waiting in due})
            found = [self._news_of([waiting for waiting in due if waiting.name == name]) for name in names]
            return [news for some in found for news in some]
        return [news for waiting in due if (news := _news(waiting, records[waiting.name], membership)) is not None]

    def _sleep(self) -> None:
        if self._watch is not None:
            self._watch.sleep(LOOK_EVERY)
        else:
            time.sleep(_BETWEEN_GLANCES)


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
    room = _enter(root, waiting)
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
                room.drop(waiting)


async def change_of(root: Root, name: bytes | None, seen: int, owner: WaitOwner, deadline: float) -> None:
    """Returns when something has changed for a key since its bell's word was `seen`, or may have; or then.

    `name`: None: for any key, since the doorbell's state was that.
    """
    waiting = Waiting(root, name, 0, 0, owner)
    waiting.is_of_any_change, waiting.seen = True, seen
    await news_of(root, waiting, deadline)


def _enter(root: Root, waiting: Waiting) -> _WaitThread:
    with _lock:
        waiting.owner.check_open()  # else `end_waits`, which comes later, finds this one
        room = _wait_threads.get(id(root))
        if room is None:
            room = _WaitThread(root)
            room.thread.start()
            _wait_threads[id(root)] = room
        room.add(waiting)
        return room


def end_waits(root: Root, owner: WaitOwner) -> None:
    """Ends the waits of a store object whose `check_open` raises from now on: they raise StoreClosedError.

    The thread ends with the last wait.
    """
    with _lock:
        room = _wait_threads.get(id(root))
        is_last = room is not None and room.end(owner)
    if room is not None and is_last:
        room.thread.join(_LINGER)  # it refers to the store


def _after_fork_in_child() -> None:
    """Forgets the threads, and who holds the lock, which are the parent's."""
    global _lock
    _lock = threading.Lock()
    _wait_threads.clear()


around_forks(Hooks(after_in_child=_after_fork_in_child))


# --- Waits for keys whose home is another host -----------------------------------------------------------------------
# 1. A wait is **begun**: the home keeps it until there is a newer version, and no thread waits for that. Its steps that
#    may take time, a look into the catalog and a connection to the home, are made in a thread of the home's pool.
# 2. Where nothing can be begun (this process asks other hosts by actors), all waits for a home are looked up together,
#    ten times a second, by one message for each 1,024 of them.


HERE_BY_NOW = 0  # in place of a version: the key's home has moved here
_EVERY = 0.1  # seconds
_TO_ANSWER = 5.0  # seconds for a home; it is asked again


class RemoteWaits:
    """The waits of one store, in one loop, for one home."""

    def __init__(self, root: Root, pool: Hashable) -> None:
        self._root, self._pool = root, pool
        self._wakeups: set[Wakeup] = set()  # of begun waits
        self._batch = BatchedWakeups()
        self._is_ended = False
        self._shared: dict[asyncio.Future[int], tuple[bytes, int]] = {}  # name and version, newer than which
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not (self._wakeups or self._shared)

    def end(self) -> None:
        """Lets the waits raise StoreClosedError, since the store is being closed. Any thread may call it."""
        self._is_ended = True
        for wakeup in list(self._wakeups):
            wakeup.ring()

    async def wait(self, name: bytes, newer_than: int, deadline: float) -> int | None:
        """Returns the version, or HERE_BY_NOW; None if there was none in time. Raises what a lookup raises."""
        wakeup, left = Wakeup(self._batch), max(deadline - time.monotonic(), 0.0)
        self._wakeups.add(wakeup)
        try:
            begun = await call(self._pool, lambda _: self._begin(name, newer_than, deadline, wakeup), left)
            if isinstance(begun, int):
                return begun
            if begun is None:
                return await self._look_now_and_then(name, newer_than, wakeup, deadline)
            try:
                return await self._go_on(begun, wakeup, deadline)
            finally:
                begun.close()
        finally:
            self._wakeups.discard(wakeup)

    def _begin(self, name: bytes, newer_than: int, deadline: float, wakeup: Wakeup) -> BegunWait | int | None:
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
            self._check_open()
            turn = begun.go_on(None)
            left = max(deadline - time.monotonic(), 0.0)
            if turn is IN_A_THREAD:
                until = time.monotonic() + min(left, _TO_ANSWER)
                turn = await call(self._pool, lambda _, until=until: begun.go_on(until), left)
            if turn.version is not None:
                return turn.version
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await wakeup.rung_within(min(left, turn.again))

    # --- those that are looked up -------------------------------------------------------------------------------------

    async def _look_now_and_then(self, name: bytes, newer_than: int, wakeup: Wakeup, deadline: float) -> int | None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._shared[future] = name, newer_than
        try:
            rung = wakeup.arm()
            self._check_open()
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._look())
            left = max(deadline - time.monotonic(), 0.0)
            await asyncio.wait((future, rung), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            self._check_open()
            return None
        finally:
            self._shared.pop(future, None)
            if not self._shared and self._task is not None:
                self._task.cancel()
                self._task = None  # it isn't done yet: who comes next must not wait for it

    def _check_open(self) -> None:
        if self._is_ended:
            raise StoreClosedError(f"the store {self._root.path} was closed: memstore.aio.open it again")

    async def _look(self) -> None:
        while self._shared:
            try:
                await self._look_at_all()
            except HomeUnavailableError:
                pass  # it may come back before the waits' time is over
            except Exception as error:
                for future in self._shared:
                    if not future.done():
                        future.set_exception(error)
            await asyncio.sleep(_EVERY)

    async def _look_at_all(self) -> None:
        names = sorted({name for name, _ in self._shared.values()})
        root = self._root
        records = await call(self._pool, lambda _: elsewhere_of(root).records(names, deadline_after(_TO_ANSWER)))
        versions = {name: record.version for name, record in zip(names, records, strict=True) if record is not None}
        for future, (name, newer_than) in self._shared.items():
            if not future.done() and versions.get(name, 0) > newer_than:
                future.set_result(versions[name])


class BatchedWakeups:
    """Wakes tasks of one loop, from any thread: all that are woken while the loop does something else by one call.

    A put of many keys, or one message of a home's, ends many waits; each call into a loop is a system call.
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
