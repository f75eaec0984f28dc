"""Waits for versions of keys whose home is here: one thread looks for all of them, of a process and a store.

1. It marks the store's watch word (`engine.Watch`), **then** takes the waits that are new.
2. A wait is due if it is new, if the word of its key's bell is another one than before, or if a second has passed. The
   keys of all that are due are looked at in one transaction; who has a newer version is told.
3. It sleeps on the watch word, until somebody publishes something, a new wait comes, or a second is over. Who publishes
   much that nobody here waits for wakes it at most once in half a millisecond.

In a store that this process may only read, there is no word to mark: it looks at the bells every two milliseconds.
When the last wait has gone, it lingers for a second, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from memstore.engine import LOOK_EVERY, Record, Root, Transaction, mutable_entry
from memstore.errors import StoreClosedError
from memstore.late_imports import Hooks, around_forks

_LINGER = 1.0  # seconds
_BETWEEN_LOOKS = 0.0005  # seconds, where the last one was for nothing
_BETWEEN_GLANCES = 0.002  # seconds, where nobody can be heard

_FOR_EVER = 1e7  # seconds: no timer is set for so long
_CLOSED = "the store {} was closed: memstore.aio.open it again"
_ALL_BELLS = -1
LOOK_AGAIN = -1  # in place of a version: something has changed, such as the hosts of the store


class Owner(Protocol):
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

    def __init__(self, root: Root, name: bytes | None, newer_than: int, membership: int, owner: Owner) -> None:
        self.name, self.newer_than, self.membership, self.owner = name or b"", newer_than, membership, owner
        self.bell = _ALL_BELLS if name is None else root.doorbell.bell(name)
        self.seen = -1
        self.is_of_any_change = name is None
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[int] = self.loop.create_future()


class _Room:
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

    def end(self, owner: Owner) -> bool:
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
        """False: there are none, and the room is closed."""
        with _lock:
            while not (self._waiting or self._incoming):
                self._outgoing.clear()
                self._is_roused = False
                if self._is_dismissed or not self._some.wait(_LINGER):
                    if self._incoming:
                        continue
                    _rooms.pop(id(self._root), None)
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
    """Each loop once."""
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
_rooms: dict[int, _Room] = {}  # by the id of their root, which they keep


async def news_of(root: Root, waiting: Waiting, deadline: float) -> int | None:
    """The version that is waited for, or LOOK_AGAIN. None: there was none by the deadline, which is monotonic."""
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


async def change_of(root: Root, name: bytes | None, seen: int, owner: Owner, deadline: float) -> None:
    """Returns when something has changed for a key since its bell's word was `seen`, or may have; or then.

    `name`: None: for any key, since the doorbell's state was that.
    """
    waiting = Waiting(root, name, 0, 0, owner)
    waiting.is_of_any_change, waiting.seen = True, seen
    await news_of(root, waiting, deadline)


def _enter(root: Root, waiting: Waiting) -> _Room:
    with _lock:
        waiting.owner.check_open()  # else `end_waits`, which comes later, finds this one
        room = _rooms.get(id(root))
        if room is None:
            room = _Room(root)
            room.thread.start()
            _rooms[id(root)] = room
        room.add(waiting)
        return room


def end_waits(root: Root, owner: Owner) -> None:
    """Those of a store object whose `check_open` raises from now on: they raise StoreClosedError.

    The thread ends with the last wait.
    """
    with _lock:
        room = _rooms.get(id(root))
        is_last = room is not None and room.end(owner)
    if room is not None and is_last:
        room.thread.join(_LINGER)  # it refers to the store


def _after_fork_in_child() -> None:
    """The threads, and who holds the lock, are the parent's."""
    global _lock
    _lock = threading.Lock()
    _rooms.clear()


def _do_nothing() -> None:
    pass


around_forks(Hooks(_do_nothing, _do_nothing, _after_fork_in_child))
