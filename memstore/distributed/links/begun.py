"""Requests that no thread waits for: who began one is told when its answer is there, or when none will come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

_LINGER = 1.0  # seconds that a keeper waits for another request, before it ends


class Begun:
    """One that is under way, of `Links.begin`.

    Attributes:
        answer: None: there is none yet; or, once it `is_over`, the connection broke, and nobody knows whether it came.
        is_over: nothing more will come.
    """

    __slots__ = ("_give_up", "_told", "answer", "is_over")

    def __init__(self, told: Callable[[], None], give_up: Callable[[], None]) -> None:
        self._told, self._give_up = told, give_up
        self.answer: bytes | None = None
        self.is_over = False

    def end(self, answer: bytes | None) -> None:
        """By its connection, in any thread. A second time says nothing new."""
        if not self.is_over:
            self.answer = answer
            self.is_over = True
        self._told()

    def give_up(self) -> None:
        """Nobody wants the answer any more. What was not sent of the request isn't sent."""
        self._give_up()


class Keeper:
    """The requests of one connection that nobody waits for, and the thread that reads their answers.

    There is a thread while there are any, and a moment longer. It is one more who waits for answers: it leads when
    nobody else does.

    Attributes:
        begun: the requests, by call.
        wake: locked until there is something to do for the thread: a request, or the lead.
    """

    def __init__(self) -> None:
        self.begun: dict[int, Begun] = {}
        self.wake = threading.Lock()
        self.wake.acquire()
        self._starting = threading.Lock()
        self._is_running = False

    def start(self, lead: Callable[[], None]) -> None:
        """Has `lead` called, by the thread, as long as there are requests; it may wait, and returns now and then."""
        with self._starting:
            if self._is_running:
                self.rouse()
            else:
                threading.Thread(target=self._run, args=(lead,), name="memstore links", daemon=True).start()
                self._is_running = True

    def rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was roused already
            self.wake.release()

    def end_all(self) -> None:
        """The connection is broken."""
        while self.begun:
            with contextlib.suppress(KeyError):  # another thread does the same
                self.begun.popitem()[1].end(None)

    def _run(self, lead: Callable[[], None]) -> None:
        while True:
            if self.begun:
                lead()
            elif not self.wake.acquire(timeout=_LINGER):
                with self._starting:
                    if not self.begun:
                        self._is_running = False
                        return
