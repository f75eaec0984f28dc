"""What methods of a store return that has methods of its own which may wait: references, and puts of several ranks."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any, NoReturn, cast

from memstore.aio.awaited import WORTH_COUNTING, Awaits, awaited, called_as
from memstore.aio.lanes import call
from memstore.aio.news import home_here
from memstore.aio.waits import Owner, change_of
from memstore.engine import Root, deadline_after
from memstore.errors import HomeUnavailableError, StoreTimeoutError
from memstore.store.ref import Ref
from memstore.store.sharded import TO_PUBLISH, PendingPut
from memstore.store.store import Store


class AsyncRef(Awaits[Ref]):
    """A version of a key, which stays readable as long as it lives: a `memstore.Ref`, whose methods are awaited.

    Made by `AsyncStore.ref`, and pickled as a reference.

    Attributes:
        ref: the `memstore.Ref` itself, for code that doesn't await.
        key: the key.
        version: the version of the key that it refers to.
        root: the folder of the store, as a path.
    """

    __slots__ = ("_lane", "key", "ref", "root", "version")

    def __init__(self, ref: Ref, lane: Hashable) -> None:
        self.ref, self._lane = ref, lane
        self.key, self.version, self.root = ref.key, ref.version, ref.root

    def blocking(self) -> Ref:
        return self.ref

    def lane_of(self, key: object) -> Hashable:
        return self._lane

    get = awaited(Ref.get)
    view = awaited(Ref.view)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ref, self._lane)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncRef) and self.ref == other.ref

    def __hash__(self) -> int:
        return hash(self.ref)

    def __repr__(self) -> str:
        return f"<memstore.aio.AsyncRef {self.key!r} version {self.version} in {self.root}>"


class AsyncPendingPut(Awaits[PendingPut]):
    """A sharded put whose parts may still be on their way: a `memstore.PendingPut`, whose methods are awaited.

    Made by `AsyncStore.put_sharded` with `wait=False`. A wait takes no thread if the key's home is this host. If the
    home is another host, 8 waits for a key have a thread each, and further ones wait for one of these.

    Attributes:
        key: the key that is put.
        attempt: the text by which the ranks of this put find each other.
    """

    def __init__(self, pending: PendingPut, root: Root, lane: Hashable, owner: Owner, timeout: float) -> None:
        self.timeout = timeout
        self.key, self.attempt = pending.key, pending.attempt
        self._pending, self._root, self._lane, self._owner = pending, root, lane, owner

    def blocking(self) -> PendingPut:
        return self._pending

    def lane_of(self, key: object) -> Hashable:
        return self._lane

    done = awaited(PendingPut.done)
    abort = awaited(PendingPut.abort)

    @called_as(PendingPut.wait)
    async def wait(self, timeout: float | None = None) -> int:
        seconds = self.timeout if timeout is None else timeout
        return await self.wait_until(deadline_after(seconds), seconds)

    async def wait_until(self, deadline: float, seconds: float) -> int:
        """As `wait`, whose timeout of so many seconds ends at this monotonic time."""
        name, doorbell = self.key.encode(), self._root.doorbell
        while True:
            seen = doorbell.load(doorbell.bell(name))
            is_done = await call(
                self._lane, lambda _: self._done_here(name, deadline), max(deadline - time.monotonic(), 0.0)
            )
            if is_done is None:  # its news come from another host
                left = max(deadline - time.monotonic(), 0.0)
                lane = "waits", self._lane
                return await call(lane, lambda _: self._pending.wait_until(deadline, seconds), left)
            if is_done or time.monotonic() >= deadline:
                return await call(self._lane, lambda _: self._pending.wait_until(time.monotonic(), seconds))
            await change_of(self._root, name, seen, self._owner, deadline)

    def _done_here(self, name: bytes, deadline: float) -> bool | None:
        """As `done`, in a thread. None: the key's home is another host."""
        return None if home_here(self._root, name) is None else self._pending.done_by(deadline + TO_PUBLISH)

    async def wait_or_give_up(self, deadline: float, seconds: float) -> int:
        """As `wait_until`; a timeout gives the put up for all ranks."""
        try:
            return await self.wait_until(deadline, seconds)
        except (StoreTimeoutError, HomeUnavailableError) as error:
            reason = error
        return await call(self._lane, lambda _: self._pending.give_up_after(reason))

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncPendingPut can't be pickled: another process finds the put in store.pending(key)")

    def __repr__(self) -> str:
        return f"<memstore.aio.AsyncPendingPut {self.key!r} attempt {self.attempt!r} in {self._root.path}>"


class Part:
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
        """In a thread, for which it has waited so many seconds of its timeout."""
        options = self._options
        if waited > WORTH_COUNTING:
            options = {**options, "timeout": max(options["timeout"] - waited, 0.0)}
        pending: Any = cast(Any, store).put_sharded(self._key, self._value, **options)
        assert isinstance(pending, PendingPut), "it doesn't wait"
        self.pending = pending
        if self.is_given_up:
            pending.abort()
        return pending
