"""A job: one call that a thread makes for a task. How it is given up when the task is cancelled.

1. Not begun: it never runs.
2. Under way: the task goes on at once, the thread goes on to the end of the call, and what it gives is dropped. Calls
   ask whether that is so (`memstore/abandoned.py`): a put that has not copied all of its bytes by then isn't made, and
   one that has is made whole.
3. Under way, and it writes into memory of the caller's (`settles`): the task goes on when the call has ended, so that
   nothing is written there any more. A call that asks before it writes holds the task only while it does.
4. Over, but the task doesn't get what it gives: `undo` is called with that, in a thread. So rows that a sample has
   taken from all others are put back. Such a task may be cancelled at three moments: before the thread is done,
   before the loop has seen that, and before the task has gone on.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from memstore.aio.torch_state import TorchState

T = TypeVar("T")

log = logging.getLogger("memstore")


class Job(Generic[T]):
    """Made in the loop whose task waits for it, if one does. Its lane's lock guards what changes.

    Attributes:
        future: of that loop; what the task awaits. None: no task does.
        settled: as `future`, and never cancelled: for a task that is to see the call's end. None: there is none.
        thread: that runs it; 0: none does.
        function: called with the seconds that it has waited for a thread. None: it is not to run.
    """

    __slots__ = (
        "_add",
        "_context",
        "_error",
        "_loop",
        "_made",
        "_result",
        "_state",
        "_undo",
        "function",
        "future",
        "settled",
        "thread",
    )

    def __init__(
        self,
        function: Callable[[float], T],
        add: Callable[[Job[Any]], object],
        undo: Callable[[T], object] | None = None,
        *,
        is_awaited: bool = True,
    ) -> None:
        """
        Args:
            add: gives another job to the lane.
            undo: called in a thread with what the function gave, if the task doesn't get it.
            is_awaited: a task of this loop waits for it. False: nobody does, and what it raises is noted in the log.
        """
        self._loop = asyncio.get_running_loop() if is_awaited else None
        self._add, self._undo = add, undo
        self._context, self._state = contextvars.copy_context(), TorchState()
        self._made = time.monotonic()
        self._result: Any = None
        self._error: BaseException | None = None
        self.future: asyncio.Future[T] | None = None if self._loop is None else self._loop.create_future()
        self.settled: asyncio.Future[None] | None = None
        self.function: Callable[[float], T] | None = function
        self.thread = 0

    def run(self, function: Callable[[float], T]) -> None:
        """Calls it, in a thread, and keeps what it gives, or what it raises."""
        waited = time.monotonic() - self._made
        try:
            self._result = self._context.run(self._state.run, lambda: function(waited))
        except BaseException as error:
            self._error = error

    def drop(self) -> None:
        """In a thread: the task doesn't get what the function gave."""
        result, error, self._result, self._error = self._result, self._error, None, None
        undo, self._undo = self._undo, None  # once: `_set` comes after it
        if error is None and undo is not None:
            try:
                undo(result)
            except Exception as failed:
                log.info("memstore.aio: %s", str(failed))

    def drop_soon(self, result: T) -> None:
        """In the loop: the same, in a thread of the lane."""
        undo, self._undo = self._undo, None
        if undo is not None:
            self._add(Job(lambda _: undo(result), self._add, is_awaited=False))

    def deliver(self) -> None:
        """To the task, from any thread. By the time when the task goes on, nothing here refers to what it gets."""
        if self._loop is None:
            if self._error is not None:
                log.info("memstore.aio: %s", str(self._error))
            self._result = self._error = None
            return
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop was closed: nobody waits
            self.drop()

    def _set(self) -> None:
        future, self.future = self.future, None
        if self.settled is not None:
            self.settled.set_result(None)
        result, error, self._result, self._error = self._result, self._error, None, None
        if future is None or future.done():
            if error is None:
                self.drop_soon(result)
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
