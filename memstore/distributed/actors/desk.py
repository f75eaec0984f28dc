"""Where an index actor's requests are taken in, and their answers given out, in pieces if they are long.

It runs on the actor's event loop; what answers may call from any thread. Monarch repeats what it could not deliver, and
doesn't tell who has died: so a piece that comes twice is taken once, a request ends with its time, and what nobody
takes is forgotten after KEPT seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from time import monotonic

import msgspec

from memstore.distributed.actors.asked import Asked
from memstore.distributed.actors.notes import (
    PIECE,
    Kind,
    Note,
    NoteError,
    Reply,
    Want,
    decode_note,
    encode_reply,
    refused,
)
from memstore.distributed.links import MESSAGE_LIMIT

KEPT = 30.0  # seconds, between two pieces
LOAD_LIMIT = 2 * MESSAGE_LIMIT  # bytes of requests under way, and of answers that wait to be taken
_LONGEST = 60.0  # seconds that a request takes, of one who names no limit
_COST = 1024  # of a request, beside its bytes

log = logging.getLogger("memstore")


class _Request:
    """See `Asked`. It is made, and closed, on the event loop."""

    def __init__(self, message: bytes, deadline: float) -> None:
        self.message, self.deadline, self.connection = message, deadline, None
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[bytes] = self._loop.create_future()
        self._lock = threading.Lock()
        self._is_over = self._is_dropped = False
        self._callbacks: list[Callable[[], None]] = []

    def reply(self, message: bytes) -> None:
        with self._lock:
            self._is_over = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._set, message)

    def on_close(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_over:
                self._callbacks.append(callback)
            is_dropped = self._is_dropped
        if is_dropped:
            callback()

    async def answer(self) -> bytes | None:
        """None: there was none in time, or nobody waits any more."""
        left = self.deadline - monotonic()
        await asyncio.wait([self._answer], timeout=max(left, 0.0))
        if self._answer.done() and not self._answer.cancelled():
            return self._answer.result()
        self.close()
        return None

    def close(self) -> None:
        with self._lock:
            callbacks = [] if self._is_over else self._callbacks
            self._is_dropped = self._is_dropped or not self._is_over
            self._is_over = True
        self._answer.cancel()
        for callback in callbacks:
            callback()

    def _set(self, message: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(message)


class _Ticket:
    """A request under way: its pieces, itself, or its answer."""

    def __init__(self) -> None:
        self.pieces = bytearray()
        self.request: _Request | None = None
        self.answer = b""
        self.cost = 0
        self.timer: asyncio.TimerHandle | None = None


class Desk:
    """Args:
    member: the store id of this host.
    serve: gets each request, on the event loop: it must not wait. It raises msgspec.DecodeError for what is none.
    """

    def __init__(self, member: bytes, serve: Callable[[Asked], None]) -> None:
        self._member, self._serve = member, serve
        self._tickets: dict[bytes, _Ticket] = {}
        self._load = 0

    async def take(self, data: object) -> bytes:
        """Bytes as in `notes`, both ways."""
        try:
            note = decode_note(data, self._member)
            reply = await self._take(note)
        except (NoteError, msgspec.DecodeError) as error:
            reply = refused(str(error))
        except Exception as error:  # a bug, which must not end the actor
            log.exception("the index actor could not take a request")
            reply = refused(f"it could not take the request ({type(error).__name__}): see what its agent prints")
        return encode_reply(reply)

    def __len__(self) -> int:
        """Requests that are under way, or whose answers were not taken."""
        return len(self._tickets)

    async def _take(self, note: Note) -> Reply:
        if note.want is Want.ASK:
            return await self._ask(note)
        if note.want is Want.MORE:
            return self._more(note)
        if note.want is Want.DROP:
            self._forget(note.ticket)
        return Reply(Kind.TAKEN)

    async def _ask(self, note: Note) -> Reply:
        ticket = self._tickets.get(note.ticket)
        if ticket is None:
            if note.start or self._load + note.total > LOAD_LIMIT:
                return Reply(Kind.NOTHING)
            ticket = self._tickets[note.ticket] = _Ticket()
            self._charge(ticket, note.total)
        elif ticket.request is not None or note.start != len(ticket.pieces):
            return Reply(Kind.NOTHING)  # it came twice
        ticket.pieces += note.piece
        if len(ticket.pieces) < note.total:
            self._keep(note.ticket, ticket)
            return Reply(Kind.TAKEN)
        return await self._answer(note, ticket)

    async def _answer(self, note: Note, ticket: _Ticket) -> Reply:
        if ticket.timer is not None:
            ticket.timer.cancel()
        message, ticket.pieces = bytes(ticket.pieces), bytearray()
        request = ticket.request = _Request(message, monotonic() + min(note.milliseconds / 1000, _LONGEST))
        answer = None
        try:
            self._serve(request)
            answer = await request.answer()
        finally:
            request.close()
            if answer is None or len(answer) <= PIECE:
                self._forget(note.ticket)
        if answer is None:
            return Reply(Kind.NOTHING)
        if len(answer) > PIECE:
            ticket.answer = answer
            self._charge(ticket, len(answer))
            self._keep(note.ticket, ticket)
        return Reply(Kind.ANSWER, len(answer), answer[:PIECE])

    def _more(self, note: Note) -> Reply:
        ticket = self._tickets.get(note.ticket)
        if ticket is None or not 0 < note.start < len(ticket.answer):
            return Reply(Kind.NOTHING)
        piece, total = ticket.answer[note.start : note.start + PIECE], len(ticket.answer)
        if note.start + len(piece) == total:
            self._forget(note.ticket)
        else:
            self._keep(note.ticket, ticket)
        return Reply(Kind.ANSWER, total, piece)

    def _charge(self, ticket: _Ticket, nbytes: int) -> None:
        self._load += nbytes + _COST - ticket.cost
        ticket.cost = nbytes + _COST

    def _keep(self, number: bytes, ticket: _Ticket) -> None:
        if ticket.timer is not None:
            ticket.timer.cancel()
        ticket.timer = asyncio.get_running_loop().call_later(KEPT, self._forget, number)

    def _forget(self, number: bytes) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return
        self._load -= ticket.cost
        if ticket.timer is not None:
            ticket.timer.cancel()
        if ticket.request is not None:
            ticket.request.close()
