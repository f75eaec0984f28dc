"""Requests to an index actor, in pieces where they are long, and its answers: all that is said to Monarch is said here.

Monarch doesn't tell soon who has died. So who hears nothing for PING_AFTER seconds asks the actor for a sign of life,
and takes it for gone when none comes in PING_TIME.
"""

from __future__ import annotations

import contextvars
import os
from time import monotonic
from typing import Any

from memstore.distributed.actors.notes import (
    PIECE,
    Kind,
    Note,
    NoteError,
    Reply,
    Want,
    decode_reply,
    encode_note,
    milliseconds_of,
)
from memstore.distributed.actors.reference import Call, Reference, open_reference
from memstore.errors import LinkRefusedError

PING_AFTER = 1.0  # seconds without an answer, after which the actor is asked whether it is there
PING_TIME = 3.0  # seconds in which it says so


class GoneError(Exception):
    """The actor doesn't answer any more."""


class CalledActor:
    """An actor as threads call it. Monarch's context of whoever made this is theirs, too: they have none of their own,
    and would begin a client beside it."""

    def __init__(self, reference: Reference) -> None:
        self._take: Call = open_reference(reference)
        self._context = contextvars.copy_context()
        self._ping: tuple[Any, float] | None = None  # that has no answer yet, and since when

    def begin(self, note: bytes) -> Any:
        """Sends it. Returns Monarch's future."""
        try:
            return self._context.copy().run(self._take.call_one, note)
        except Exception as error:  # of any class: Monarch's are many, and its own affair
            raise GoneError(first_line(error)) from error

    def answer(self, future: Any, seconds: float) -> Any:
        """What was answered. Raises TimeoutError: nothing yet; the future is as it was."""
        try:
            return self._context.copy().run(future.get, max(seconds, 0.0))
        except TimeoutError:
            raise
        except Exception as error:
            raise GoneError(first_line(error)) from error

    def doubt(self, ping: bytes) -> None:
        """It was silent. Raises GoneError if it has not answered a ping for long; else there is one under way."""
        under_way = self._ping  # another thread may hear of it at any time
        if under_way is None:
            self._ping = (self.begin(ping), monotonic())
            return
        future, since = under_way
        try:
            self.answer(future, 0.0)
            self._ping = None
        except TimeoutError:
            if monotonic() - since >= PING_TIME:
                raise GoneError(f"it has answered nothing for {PING_TIME:g} s") from None


class ActorRequest:
    """A message to an actor, and its answer: in pieces, where they are long."""

    def __init__(self, actor: CalledActor, member: bytes, deadline: float) -> None:
        self._actor, self._member, self._deadline = actor, member, deadline
        self._ticket = os.urandom(16)

    def run(self, message: bytes) -> bytes | None:
        """None: there was no answer by the deadline. Raises GoneError, LinkRefusedError."""
        is_over = False
        try:
            reply = self._send(message)
            answer = self._receive(reply) if reply.kind is Kind.ANSWER else None
            is_over = True
            return answer
        except TimeoutError:
            return None
        finally:
            if not is_over:
                self._drop()

    def _send(self, message: bytes) -> Reply:
        reply = Reply(Kind.TAKEN)
        starts = range(0, len(message), PIECE) or (0,)
        for start in starts:
            if reply.kind is not Kind.TAKEN:
                return reply
            piece = message[start : start + PIECE]
            reply = self._exchange(self._note(Want.ASK, start, len(message), piece))
        return reply

    def _receive(self, reply: Reply) -> bytes | None:
        answer = bytearray(reply.piece)
        while len(answer) < reply.total:
            more = self._exchange(self._note(Want.MORE, len(answer), 0, b""))
            if more.kind is not Kind.ANSWER or more.total != reply.total or not more.piece:
                return None
            answer += more.piece
        return bytes(answer)

    def _exchange(self, note: bytes) -> Reply:
        """Raises TimeoutError at the deadline, GoneError, LinkRefusedError."""
        future = self._actor.begin(note)
        while True:
            left = self._deadline - monotonic()
            try:
                received = self._actor.answer(future, min(left, PING_AFTER))
                break
            except TimeoutError:
                self._actor.doubt(self._note(Want.PING, 0, 0, b""))
                if left <= PING_AFTER:
                    raise
        try:
            reply = decode_reply(received)
        except NoteError as error:
            raise GoneError(str(error)) from None
        if reply.kind is Kind.REFUSED:
            raise LinkRefusedError(f"the index actor says: {reply.text}")
        return reply

    def _drop(self) -> None:
        """Nobody waits for what this process doesn't need. It may be lost: then the request ends with its time."""
        try:
            self._actor.begin(self._note(Want.DROP, 0, 0, b""))
        except GoneError:
            return

    def _note(self, want: Want, start: int, total: int, piece: bytes) -> bytes:
        left = milliseconds_of(self._deadline - monotonic())
        return encode_note(Note(want, self._ticket, left, start, total, piece), self._member)


def first_line(error: Exception) -> str:
    """Of Monarch's errors, which may have a hundred."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:500]
