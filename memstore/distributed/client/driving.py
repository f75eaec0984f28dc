"""Runs the rules' steps in a process that has the root open.

1. `Transact`: one transaction of this host's catalog; reads without the store's mutex.
2. `Send`: a message by the process's links, with the time that is left. None as its answer: nobody knows whether it
   came; NOT_SENT: it didn't. A link that is refused (another secret, or another member) is tried again for some
   seconds, since a host may be about to take the place of one that was lost; then that is the error.
3. `Pause`: sleep, at most until the deadline.

When the time is over, `DeadlinePassed` is thrown into the steps in place of a message or a pause; never in place of a
transaction, nor within one. What the steps do after that are transactions that give back: they get half a second. What
a step raises is thrown into the steps, which know what it means. An interrupt (KeyboardInterrupt, SystemExit) ends the
steps where they are: what they have lent is left to the host's audit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.distributed import catalog
from memstore.distributed.rules import NOT_SENT, Answer, DeadlinePassed, NotSent, Pause, Send, Stale, Steps, Transact
from memstore.engine import Root, SealedSegment
from memstore.errors import HomeUnavailableError, LinkRefusedError

Result = TypeVar("Result")

TO_GIVE_BACK = 0.5  # seconds
REFUSED_FOR = 3.0  # seconds, after which a link that is refused is an error
_BEHIND = "hosts have come or gone, and this host hasn't heard of it: does an agent serve this folder?"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


class Sender(Protocol):
    """`links.Links`, as far as it is needed here."""

    def send(self, address: str, member: bytes | None, message: bytes, deadline: float) -> bytes | None: ...

    def trouble_of(self, address: str) -> str: ...


def drive(
    steps: Steps[Result], root: Root, links: Sender, deadline: float, *, sealed: Sequence[SealedSegment] = ()
) -> Result:
    """The result of the steps.

    Args:
        deadline: monotonic.
        sealed: segments that this process has filled, and still has open.

    Raises:
        What the steps raise. LinkRefusedError is among it, and what a transaction raises.
    """
    return _Call(steps, root, links, deadline, sealed).run()


class _Call(Generic[Result]):
    """Steps under way."""

    def __init__(
        self, steps: Steps[Result], root: Root, links: Sender, deadline: float, sealed: Sequence[SealedSegment]
    ) -> None:
        self._steps, self._root, self._links = steps, root, links
        self._deadline, self._sealed = deadline, sealed
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

    def _take(self, step: Send | Transact | Pause) -> Callable[[], Any]:
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
        return partial(self._steps.send, self._send(step))

    def _transact(self, step: Transact) -> Any:
        deadline = time.monotonic() + TO_GIVE_BACK if self._is_told else self._deadline
        if step.is_read:
            return catalog.look(self._root, step.action, deadline)
        return catalog.run(self._root, step.action, deadline, sealed=self._sealed)

    def _send(self, step: Send) -> Answer | NotSent | None:
        self._asked = step.address
        message = encode_request(step)
        answer = self._refusals.sent(lambda: self._links.send(step.address, step.member, message, self._deadline))
        if answer is None or isinstance(answer, NotSent):
            return answer
        self._asked = ""
        decoded = decode_answer(answer)
        self._is_behind = isinstance(decoded, Stale)
        return decoded


class Refusals:
    """Of the links of one call."""

    def __init__(self) -> None:
        self._since = 0.0  # monotonic; 0: no link is refused

    def sent(self, send: Callable[[], Result]) -> Result | NotSent:
        """What `send` gives. Raises LinkRefusedError if it does so for REFUSED_FOR."""
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
    """None: nobody knows what it was to say, as if it had not come."""
    try:
        return _decode(answer)
    except UNDECODABLE:
        return None
