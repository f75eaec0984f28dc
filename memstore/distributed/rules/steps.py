"""How rules that take several steps are written: as generators that say what they need, and are given it.

No step does I/O, waits, or looks at a clock: whoever drives it does. A store's processes and the index process drive
it with links and the catalog; the simulation with a scheduler, which may end it at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import msgspec

from memstore.distributed.rules.members import Member
from memstore.distributed.rules.messages import Answer, Request
from memstore.distributed.rules.tables import Tables

Result = TypeVar("Result")


class Send(msgspec.Struct, frozen=True):
    """Send a request. None as its answer: nobody knows whether it came; NOT_SENT: it didn't, and won't.

    Attributes:
        member: that must answer there; None: whoever does.
    """

    address: str
    member: bytes | None
    request: Request


class Transact(msgspec.Struct, frozen=True):
    """Call this in one transaction of the host's catalog.

    Attributes:
        is_read: it changes nothing, so the store's mutex isn't needed.
    """

    action: Callable[[Tables], Any]
    is_read: bool = False


class Pause(msgspec.Struct, frozen=True):
    seconds: float


Steps = Generator[Send | Transact | Pause, Any, Result]


class NotSent:
    """As an answer: there was no connection."""


NOT_SENT = NotSent()


def send(to: Member | str, request: Request) -> Steps[Answer | None]:
    """The answer, if there is one."""
    answer = yield from sent(to, request)
    return None if isinstance(answer, NotSent) else answer


def sent(to: Member | str, request: Request) -> Steps[Answer | NotSent | None]:
    """As `send`, for whom it matters whether the request may have come. What it raises says that it hasn't."""
    if isinstance(to, str):
        return (yield Send(to, None, request))
    return (yield Send(to.address, to.id, request))


def transact(action: Callable[[Tables], Result]) -> Steps[Result]:
    return (yield Transact(action))


def view(action: Callable[[Tables], Result]) -> Steps[Result]:
    """As `transact`, of what changes nothing."""
    return (yield Transact(action, is_read=True))


def pause(seconds: float) -> Steps[None]:
    yield Pause(seconds)
