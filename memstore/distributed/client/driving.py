"""Runs the rules' steps in a process that has the root open: in a thread (`drive`), or without one (`BegunWait`).

1. `Transact`: one transaction of this host's catalog; reads without the store's mutex.
2. `Send`: a message by the process's links, with the time that is left. None as its answer: nobody knows whether it
   came; NOT_SENT: it didn't. A link that is refused (another secret, or another member) is tried again for some
   seconds, since a host may be about to take the place of one that was lost; then that is the error.
3. `Race`: several messages, of which the first answer counts.
4. `Pause`: sleep, at most until the deadline.

When the time is over, `DeadlinePassed` is thrown into the steps in place of a message or a pause; never in place of a
transaction, nor within one. What the steps do after that are transactions that give back: they get half a second. What
a step raises is thrown into the steps, which know what it means. An interrupt (KeyboardInterrupt, SystemExit) ends the
steps where they are: what they have lent is left to the host's audit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.distributed import catalog
from memstore.distributed.links import Begun, Links
from memstore.distributed.rules import (
    LONGEST_WAIT,
    NOT_SENT,
    Answer,
    DeadlinePassed,
    Gather,
    NotSent,
    Pause,
    Race,
    Send,
    Stale,
    Steps,
    Transact,
)
from memstore.engine import IN_A_THREAD, Root, SealedSegment, WaitState
from memstore.errors import HomeUnavailableError, LinkRefusedError

Result = TypeVar("Result")

TO_GIVE_BACK = 0.5  # seconds
REFUSED_FOR = 3.0  # seconds, after which a link that is refused is an error
_KEPT = LONGEST_WAIT / 1000  # seconds that another host keeps a question
_LOST = _KEPT + 2.0  # seconds after which its answer will not come any more
_TO_READ = 10.0  # seconds for the catalog
_BEHIND = "hosts have come or gone, and this host hasn't heard of it: does an agent serve this folder?"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


class Sender(Protocol):
    """`links.Links`, as far as it is needed here."""

    def send(self, address: str, member: bytes | None, message: bytes, deadline: float) -> bytes | None: ...

    def begin(
        self,
        address: str,
        member: bytes | None,
        message: bytes,
        seconds: float,
        told: Callable[[], None],
        deadline: float,
    ) -> Begun: ...

    def trouble_of(self, address: str) -> str: ...


def drive(
    steps: Steps[Result],
    root: Root,
    links: Sender,
    deadline: float,
    *,
    sealed: Sequence[SealedSegment] = (),
    most: int | None = None,
) -> Result:
    """Returns the result of the steps.

    Args:
        deadline: monotonic.
        sealed: segments that this process has filled, and still has open.
        most: bytes to which the catalog here may grow for the sake of large values.

    Raises:
        What the steps raise. LinkRefusedError is among it, and what a transaction raises.
    """
    return _Call(steps, root, links, deadline, sealed, most).run()


class _Call(Generic[Result]):
    """Steps under way in a thread."""

    def __init__(
        self,
        steps: Steps[Result],
        root: Root,
        links: Sender,
        deadline: float,
        sealed: Sequence[SealedSegment],
        most: int | None,
    ) -> None:
        self._steps, self._root, self._links = steps, root, links
        self._deadline, self._sealed, self._most = deadline, sealed, most
        self._is_told = False  # that its time is over
        self._asked = ""  # the address that gave no answer last
        self._is_behind = False  # this host, as the last answer said that came
        self._refusals = Refusals()

    def run(self) -> Result:
        go_on: Callable[[], Any] = partial(next, self._steps)
        try:
            while True:
                try:
                    step = go_on()
                except StopIteration as end:
                    return end.value
                try:
                    go_on = self._take(step)
                except Exception as error:
                    go_on = partial(self._steps.throw, error)
        finally:
            self._steps.close()

    def _take(self, step: Send | Race | Gather | Transact | Pause) -> Callable[[], Any]:
        """Does what a step asks for. Returns how the steps go on."""
        if isinstance(step, Transact):
            return partial(self._steps.send, self._transact(step))
        if time.monotonic() >= self._deadline:
            assert not self._is_told, "steps go on after their time"
            self._is_told = True
            trouble = self._links.trouble_of(self._asked) if self._asked else ""
            behind = _BEHIND if self._is_behind else ""
            return partial(self._steps.throw, DeadlinePassed(trouble or behind))
        if isinstance(step, Pause):
            time.sleep(max(min(step.seconds, self._deadline - time.monotonic()), 0))
            return partial(next, self._steps)
        if isinstance(step, Gather):
            return partial(self._steps.send, [self._send(one) for one in step.sends])
        answer = self._race(step.sends) if isinstance(step, Race) else self._send(step)
        return partial(self._steps.send, answer)

    def _transact(self, step: Transact) -> Any:
        deadline = time.monotonic() + TO_GIVE_BACK if self._is_told else self._deadline
        if step.is_read:
            return catalog.look_or_run(self._root, step.action, deadline)
        return catalog.run(self._root, step.action, deadline, sealed=self._sealed, most=self._most)

    def _send(self, step: Send) -> Answer | NotSent | None:
        self._asked = step.address
        message = encode_request(step)
        until = self._deadline if step.within is None else min(self._deadline, time.monotonic() + step.within)
        answer = self._refusals.sent(lambda: self._links.send(step.address, step.member, message, until))
        if answer is None and step.within is not None and time.monotonic() < until:
            return NOT_SENT
        return answer if answer is None or isinstance(answer, NotSent) else self._heard(answer)

    def _heard(self, answer: bytes) -> Answer | None:
        self._asked = ""
        decoded = decode_answer(answer)
        self._is_behind = isinstance(decoded, Stale)
        return decoded

    def _race(self, sends: Sequence[Send]) -> Answer | NotSent | None:
        """Returns the first answer. NOT_SENT: one of the messages could not be sent."""
        news = threading.Event()
        until = min(self._deadline, time.monotonic() + _LOST)
        begun: list[Begun] = []
        try:
            for send in sends:
                self._asked = send.address
                begin = partial(self._links.begin, send.address, send.member, encode_request(send))
                seconds = max(min(until - time.monotonic(), _KEPT), 0.0)
                one = self._refusals.sent(lambda begin=begin, seconds=seconds: begin(seconds, news.set, until))
                if isinstance(one, NotSent):
                    return one
                begun.append(one)
            while not any(one.is_over for one in begun):
                if not news.wait(max(until - time.monotonic(), 0.0)):
                    return None
                news.clear()
            answer = next(one.answer for one in begun if one.is_over)
            return None if answer is None else self._heard(answer)
        finally:
            for one in begun:
                if not one.is_over:
                    one.give_up()


class Refusals:
    """Links that were refused in one call."""

    def __init__(self) -> None:
        self._since = 0.0  # monotonic; 0: no link is refused

    def sent(self, send: Callable[[], Result]) -> Result | NotSent:
        """Returns what `send` does. Raises LinkRefusedError if it does so for REFUSED_FOR."""
        try:
            result = send()
        except HomeUnavailableError:
            return NOT_SENT
        except LinkRefusedError:
            now = time.monotonic()
            self._since = self._since or now
            if now - self._since >= REFUSED_FOR:
                raise
            return NOT_SENT
        self._since = 0.0
        return result


def encode_request(step: Send) -> bytes:
    return _encode(step.request)


def decode_answer(answer: bytes) -> Answer | None:
    """Returns an answer. None: nobody knows what it was to say, as if it had not come."""
    try:
        return _decode(answer)
    except UNDECODABLE:
        return None


# --- without a thread -------------------------------------------------------------------------------------------------


class BegunWait:
    """A wait that takes no thread while it lasts: an `engine.BegunWait`.

    It runs the same steps as a wait in a thread. Where these wait for an answer, nobody does: who began it is told when
    the answer is there, and calls `go_on`. That may read the catalog, and connect; so it is called first without the
    time for either, and in a thread if that was not enough.

    Args:
        steps: their result is a version, or 0.
    """

    def __init__(
        self, root: Root, links: Links, steps: Steps[int | None], told: Callable[[], None], until: float
    ) -> None:
        self._root, self._links, self._told, self._until = root, links, told, until
        self._steps = steps
        self._resume: Callable[[], Any] = partial(self._steps.send, None)
        self._step: Send | Race | Transact | None = None  # that is to be taken
        self._calls: list[Begun] = []  # that are under way; the first answer counts
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
        """Ends it, unless somebody goes on with it: who does looks here after that, so one of the two always does."""
        if self._is_closed and self._using.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._using.release()

    def _end(self) -> None:
        self._give_up()
        self._steps.close()

    def _give_up(self) -> None:
        for call in self._calls:
            if not call.is_over:
                call.give_up()
        self._calls.clear()

    def _go_on(self, deadline: float | None) -> WaitState:
        if self._calls:
            left = self._due - time.monotonic()
            over = next((call for call in self._calls if call.is_over), None)
            if over is None and left > 0:
                return WaitState(None, left)
            self._give_up()
            answer = None if over is None or over.answer is None else decode_answer(over.answer)
            self._resume = partial(self._steps.send, answer)
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
                if isinstance(step, Send | Race):
                    if self._send(step.sends if isinstance(step, Race) else (step,), deadline):
                        return WaitState(None, _LOST)
                else:
                    found = catalog.look_or_run(self._root, step.action, time.monotonic() + _TO_READ)
                    self._resume = partial(self._steps.send, found)
            except Exception as error:
                self._resume = partial(self._steps.throw, error)

    def _next(self) -> Send | Race | Transact | Pause:
        return self._resume()

    def _send(self, sends: Sequence[Send], deadline: float) -> bool:
        """Returns whether all were sent; if not, the steps go on with that."""
        kept = max(0.0, min(_KEPT, self._until - time.monotonic()))
        for send in sends:
            begin = partial(self._links.begin, send.address, send.member, encode_request(send))
            call = self._refusals.sent(lambda begin=begin: begin(kept, self._told, deadline))
            if isinstance(call, NotSent):
                self._give_up()
                self._resume = partial(self._steps.send, call)
                return False
            self._calls.append(call)
        self._due = time.monotonic() + _LOST
        return True
