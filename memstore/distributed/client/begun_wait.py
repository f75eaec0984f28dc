"""A wait for a newer version at another home that takes no thread while it lasts.

It runs the same steps as a wait in a thread (`rules.wait_there`). Where these wait for an answer, nobody does: who
began it is told when the answer is there, and calls `go_on`. That may read the catalog, and connect; so it is called
first without the time for either, and in a thread if that was not enough.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from memstore.distributed import catalog
from memstore.distributed.client.driving import Refusals, decode_answer, encode_request
from memstore.distributed.links import Begun, Links
from memstore.distributed.rules import LONGEST_WAIT, NotSent, Pause, Send, Transact, wait_there
from memstore.engine import IN_A_THREAD, Root, WaitState

_KEPT = LONGEST_WAIT / 1000  # seconds that a home keeps a wait
_LOST = _KEPT + 2.0  # seconds after which its answer will not come any more
_TO_READ = 10.0  # seconds for the catalog


class BegunWait:
    """See `engine.BegunWait`, which this is."""

    def __init__(
        self, root: Root, links: Links, key: bytes, newer_than: int, told: Callable[[], None], until: float
    ) -> None:
        self._root, self._links, self._told, self._until = root, links, told, until
        self._steps = wait_there(key, newer_than)
        self._resume: Callable[[], Any] = partial(self._steps.send, None)
        self._step: Send | Transact | None = None  # that is to be taken
        self._call: Begun | None = None  # that is under way
        self._due = inf  # when it is lost
        self._refusals = Refusals()
        self._using = threading.Lock()  # who goes on, or closes it
        self._is_closed = False

    def go_on(self, deadline: float | None) -> WaitState:
        try:
            with self._using:
                return WaitState(0, inf) if self._is_closed else self._go_on(deadline)
        finally:
            self._end_if_closed()

    def close(self) -> None:
        self._is_closed = True
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        """Unless somebody goes on with it: who does looks here after that, so one of the two always ends it."""
        if self._is_closed and self._using.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._using.release()

    def _end(self) -> None:
        if self._call is not None:
            self._call.give_up()
            self._call = None
        self._steps.close()

    def _go_on(self, deadline: float | None) -> WaitState:
        if self._call is not None:
            left = self._due - time.monotonic()
            if not self._call.is_over and left > 0:
                return WaitState(None, left)
            self._take_answer(self._call)
        while True:
            step = self._step
            if step is None:
                try:
                    following = self._next()
                except StopIteration as end:
                    return WaitState(end.value or 0, inf)
                if isinstance(following, Pause):
                    self._resume = partial(self._steps.send, None)
                    return WaitState(None, following.seconds)
                self._step = step = following
            if deadline is None:
                return IN_A_THREAD
            self._step = None
            try:
                if isinstance(step, Send):
                    if self._send(step, deadline):
                        return WaitState(None, _LOST)
                else:
                    found = catalog.look(self._root, step.action, time.monotonic() + _TO_READ)
                    self._resume = partial(self._steps.send, found)
            except Exception as error:
                self._resume = partial(self._steps.throw, error)

    def _next(self) -> Send | Transact | Pause:
        return self._resume()

    def _send(self, step: Send, deadline: float) -> bool:
        """False: it could not be sent, and the steps go on with that."""
        message = encode_request(step)
        kept = max(0.0, min(_KEPT, self._until - time.monotonic()))
        call = self._refusals.sent(
            lambda: self._links.begin(step.address, step.member, message, kept, self._told, deadline)
        )
        if isinstance(call, NotSent):
            self._resume = partial(self._steps.send, call)
            return False
        self._call, self._due = call, time.monotonic() + _LOST
        return True

    def _take_answer(self, call: Begun) -> None:
        self._call = None
        if not call.is_over:
            call.give_up()
        answer = None if call.answer is None else decode_answer(call.answer)
        self._resume = partial(self._steps.send, answer)
