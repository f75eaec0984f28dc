"""A rank of a sharded put, as its process knows it, and the host that has its part."""

from __future__ import annotations

from collections.abc import Callable

from memstore.distributed.rules.attempt_messages import Part
from memstore.distributed.rules.looking import AGAIN, Look, one_home
from memstore.distributed.rules.members import Member
from memstore.distributed.rules.messages import Later, Request
from memstore.distributed.rules.steps import Steps, pause, send, transact, view
from memstore.distributed.rules.tables import Tables
from memstore.errors import UnknownOutcomeError

FORGOTTEN = "nothing is known of it any more: this rank looked later than its lease, or the home was repaired since"


class Seat:
    """A rank's place in an attempt, as its process knows it.

    Attributes:
        part: what the rank puts, or would have; without a number.
        home: the member that has the part, or was asked to keep it; None: nobody was.
        waits_for: whom a message was sent to last, for errors; None: this host.
        number: of the attempt; 0: the rank doesn't know it.
        lane: of the call that asked for it, while nobody knows whether it was made.
    """

    def __init__(self, part: Part, home: bytes | None = None, number: int = 0) -> None:
        self.part, self.home, self.number = part, home, number
        self.lane: int | None = None
        self.waits_for: Member | None = None


def home_of(look: Look, key: bytes) -> Steps[Member | None]:
    """None, after a pause, while this host can't ask it yet."""
    standing = look.standing
    if standing is None or standing.is_joining:
        yield from pause(AGAIN)
        return None
    home = one_home(standing, [key])
    if home.id == standing.member and not standing.is_ready_for(key):
        yield from pause(AGAIN)
        return None
    return home


def asked(seat: Seat, request: Request, here: Callable[[Tables], object], *, is_read: bool = False) -> Steps[object]:
    """The answer of the home where the attempt began, which may be this host."""
    while True:
        standing = yield from view(lambda tables: tables.standing())
        home = None if standing is None or seat.home is None else standing.view.member(seat.home)
        if standing is None or home is None:
            raise unknown(seat.part, "the host where it began was removed")
        seat.waits_for = None if home.id == standing.member else home
        if home.id == standing.member:
            return (yield from view(here)) if is_read else (yield from transact(here))
        answer = yield from send(home, request)
        if answer is not None and not isinstance(answer, Later):
            return answer
        yield from pause(AGAIN)


def unknown(part: Part, why: str) -> UnknownOutcomeError:
    key = part.key.decode()
    return UnknownOutcomeError(
        f"{key!r}: attempt {part.attempt!r}: {why}: the key says whether it was published", key=key
    )
