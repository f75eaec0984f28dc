"""How rules that take several steps are written: as generators that say what they need, and are given it.

No step does I/O, waits, or looks at a clock: whoever drives it does. A store's processes and the index process drive
it with links and the catalog; the simulation with a scheduler, which may end it at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import msgspec

from memstore.distributed.members import Member
from memstore.distributed.messages import Answer, Request
from memstore.distributed.tables import Tables

Result = TypeVar("Result")


class Send(msgspec.Struct, frozen=True):
    """Send a request. None as its answer: the link broke, and nobody knows whether it came.

    Attributes:
        member: that must answer there; None: whoever does.
    """

    address: str
    member: bytes | None
    request: Request


class Transact(msgspec.Struct, frozen=True):
    """Call this in one transaction of the host's catalog."""

    action: Callable[[Tables], Any]


class Pause(msgspec.Struct, frozen=True):
    seconds: float


Steps = Generator[Send | Transact | Pause, Any, Result]


def send(to: Member | str, request: Request) -> Steps[Answer | None]:
    if isinstance(to, str):
        return (yield Send(to, None, request))
    return (yield Send(to.address, to.id, request))


def transact(action: Callable[[Tables], Result]) -> Steps[Result]:
    return (yield Transact(action))


def pause(seconds: float) -> Steps[None]:
    yield Pause(seconds)
