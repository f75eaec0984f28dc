"""A job: one call that a thread makes for a task. How it is given up when the task is cancelled.

1. Not begun: it never runs.
2. Under way: the task goes on at once, the thread goes on to the end of the call, and what it gives is dropped. A put
   that has not copied all of its bytes by then isn't made (`memstore/abandoned.py`); one that has is made whole.
3. Under way, and it writes into memory of the caller's (`settles`): the task goes on when the call has ended, so that
   nothing is written there any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from memstore.aio.torch_state import TorchState

T = TypeVar("T")


class Job(Generic[T]):
    """Made in the loop whose task waits for it. Its lane's lock guards what changes.

    Attributes:
        future: of that loop; what the task awaits.
        settled: as `future`, and never cancelled: for a task that is to see the call's end. None: there is none.
        thread: that runs it; 0: none does.
        function: called with the seconds that it has waited for a thread. None: it is not to run.
    """

    __slots__ = ("_context", "_loop", "_made", "_state", "function", "future", "settled", "thread")

    def __init__(self, function: Callable[[float], T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._context, self._state = contextvars.copy_context(), TorchState()
        self._made = time.monotonic()
        self.future: asyncio.Future[T] = self._loop.create_future()
        self.settled: asyncio.Future[None] | None = None
        self.function: Callable[[float], T] | None = function
        self.thread = 0

    def run(self, function: Callable[[float], T]) -> tuple[Any, BaseException | None]:
        """Calls it, in a thread. Returns what it gives, or what it raises."""
        waited = time.monotonic() - self._made
        try:
            return self._context.run(self._state.run, lambda: function(waited)), None
        except BaseException as error:
            return None, error

    def deliver(self, result: Any, error: BaseException | None) -> None:
        """To the task, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._set, result, error)
        except RuntimeError:  # the loop was closed: nobody waits
            del error

    def _set(self, result: Any, error: BaseException | None) -> None:
        if self.settled is not None:
            self.settled.set_result(None)
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
