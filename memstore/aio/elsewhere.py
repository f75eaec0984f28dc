"""Waits for keys whose home is another host.

1. A wait is **begun**: the home keeps it until there is a newer version, and no thread waits for that. Its steps that
   may take time, a look into the catalog and a connection to the home, are made in a thread of the home's lane.
2. Where nothing can be begun (this process asks other hosts by actors), all waits for a home are looked up together,
   ten times a second, by one message for each 1,024 of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Hashable

from memstore.aio.lanes import call
from memstore.engine import IN_A_THREAD, BegunWait, Root, deadline_after, elsewhere_of, mutable_entry
from memstore.errors import HomeUnavailableError, StoreClosedError

HERE_BY_NOW = 0  # in place of a version: the key's home has moved here
_EVERY = 0.1  # seconds
_TO_ANSWER = 5.0  # seconds for a home; it is asked again


class Elsewhere:
    """The waits of one store, in one loop, for one home."""

    def __init__(self, root: Root, lane: Hashable) -> None:
        self._root, self._lane = root, lane
        self._bells: set[Bell] = set()  # of begun waits
        self._chime = Chime()
        self._is_ended = False
        self._shared: dict[asyncio.Future[int], tuple[bytes, int]] = {}  # name and version, newer than which
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not (self._bells or self._shared)

    def end(self) -> None:
        """From any thread: the store is being closed, and waits raise StoreClosedError."""
        self._is_ended = True
        for bell in list(self._bells):
            bell.ring()

    async def wait(self, name: bytes, newer_than: int, deadline: float) -> int | None:
        """The version, or HERE_BY_NOW; None: there was none in time. Raises what a lookup raises."""
        bell, left = Bell(self._chime), max(deadline - time.monotonic(), 0.0)
        self._bells.add(bell)
        try:
            begun = await call(self._lane, lambda _: self._begin(name, newer_than, deadline, bell), left)
            if isinstance(begun, int):
                return begun
            if begun is None:
                return await self._look_now_and_then(name, newer_than, bell, deadline)
            try:
                return await self._go_on(begun, bell, deadline)
            finally:
                begun.close()
        finally:
            self._bells.discard(bell)

    def _begin(self, name: bytes, newer_than: int, deadline: float, bell: Bell) -> BegunWait | int | None:
        """In a thread. A version, if there is one already."""
        there = elsewhere_of(self._root)
        (record,) = there.records([name], deadline)
        if record is not None and record.is_mutable:
            raise mutable_entry(name, record.mutable_kind)
        if record is not None and record.version > newer_than:
            return record.version
        return there.begin_wait(name, newer_than, bell.ring, deadline)

    # --- begun ones ---------------------------------------------------------------------------------------------------

    async def _go_on(self, begun: BegunWait, bell: Bell, deadline: float) -> int | None:
        while True:
            bell.arm()
            self._check_open()
            turn = begun.go_on(None)
            left = max(deadline - time.monotonic(), 0.0)
            if turn is IN_A_THREAD:
                until = time.monotonic() + min(left, _TO_ANSWER)
                turn = await call(self._lane, lambda _, until=until: begun.go_on(until), left)
            if turn.version is not None:
                return turn.version
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await bell.rung_within(min(left, turn.again))

    # --- those that are looked up -------------------------------------------------------------------------------------

    async def _look_now_and_then(self, name: bytes, newer_than: int, bell: Bell, deadline: float) -> int | None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._shared[future] = name, newer_than
        try:
            rung = bell.arm()
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
        records = await call(self._lane, lambda _: elsewhere_of(root).records(names, deadline_after(_TO_ANSWER)))
        versions = {name: record.version for name, record in zip(names, records, strict=True) if record is not None}
        for future, (name, newer_than) in self._shared.items():
            if not future.done() and versions.get(name, 0) > newer_than:
                future.set_result(versions[name])


class Chime:
    """Rings bells of one loop, from any thread: all that are rung while the loop does something else by one call.

    A put of many keys, or one message of a home's, ends many waits; each call into a loop is a system call.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung: deque[Bell] = deque()
        self._is_called = False  # and has not begun yet

    def ring(self, bell: Bell) -> None:
        self._rung.append(bell)  # before it looks: who is called says so before it takes bells
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                self._loop.call_soon_threadsafe(self._ring_all)

    def _ring_all(self) -> None:
        self._is_called = False
        while self._rung:
            self._rung.popleft().strike()


class Bell:
    """What a begun wait rings, in any thread. Made in the loop whose task listens."""

    def __init__(self, chime: Chime) -> None:
        self._chime = chime
        self._loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] = self._loop.create_future()

    def arm(self) -> asyncio.Future[None]:
        """What is done when it is rung from now on."""
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
        self._chime.ring(self)

    def strike(self) -> None:
        """In the loop."""
        if not self._rung.done():
            self._rung.set_result(None)
