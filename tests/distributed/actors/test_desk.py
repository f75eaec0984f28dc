"""Where an index actor's requests are taken in: pieces, deadlines, what comes twice or never."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest

from memstore.distributed.actors import Asked, desk
from memstore.distributed.actors.desk import Desk
from memstore.distributed.actors.notes import PIECE, Kind, Note, Reply, Want, decode_reply, encode_note
from memstore.distributed.links import MESSAGE_LIMIT

MEMBER = bytes(range(16))
LONG = 20_000  # milliseconds

Result = TypeVar("Result")


class Served:
    """Answers with what it was sent, or keeps what begins with `keep`."""

    def __init__(self) -> None:
        self.kept: list[Asked] = []
        self.asked = 0
        self.closed = 0

    def __call__(self, asked: Asked) -> None:
        self.asked += 1
        if asked.message == b"bad":
            raise msgspec.DecodeError("no request")
        if asked.message == b"bug":
            raise ZeroDivisionError
        if asked.message.startswith(b"keep"):
            self.kept.append(asked)
            asked.on_close(self.close)
        else:
            asked.reply(asked.message)

    def close(self) -> None:
        self.closed += 1


def run(scene: Callable[[Desk, Served], Coroutine[Any, Any, Result]]) -> Result:
    async def play() -> Result:
        served = Served()
        made = Desk(MEMBER, served)
        result = await scene(made, served)
        assert len(made) == 0, "something is left"
        return result

    return asyncio.run(play())


async def tell(made: Desk, note: Note) -> Reply:
    return decode_reply(await made.take(encode_note(note, MEMBER)))


def ask(message: bytes, milliseconds: int = LONG, ticket: bytes | None = None) -> Note:
    return Note(Want.ASK, ticket or os.urandom(16), milliseconds, 0, len(message), message)


def test_a_request_is_answered_and_a_bad_one_refused() -> None:
    async def scene(made: Desk, served: Served) -> None:
        assert await tell(made, ask(b"x")) == Reply(Kind.ANSWER, 1, b"x")
        assert await tell(made, ask(b"")) == Reply(Kind.ANSWER, 0, b"")
        assert "no request" in (await tell(made, ask(b"bad"))).text
        assert "ZeroDivisionError" in (await tell(made, ask(b"bug"))).text
        assert decode_reply(await made.take(b"garbage")).kind is Kind.REFUSED
        assert await tell(made, Note(Want.PING, bytes(16))) == Reply(Kind.TAKEN)

    run(scene)


def test_long_messages_go_in_pieces_both_ways() -> None:
    message = os.urandom(2 * PIECE + 7)

    async def scene(made: Desk, served: Served) -> None:
        ticket = os.urandom(16)
        for start in (0, PIECE):
            piece = message[start : start + PIECE]
            assert await tell(made, Note(Want.ASK, ticket, LONG, start, len(message), piece)) == Reply(Kind.TAKEN)
        assert await tell(made, ask(b"between")) == Reply(Kind.ANSWER, 7, b"between")
        reply = await tell(made, Note(Want.ASK, ticket, LONG, 2 * PIECE, len(message), message[2 * PIECE :]))
        answer = reply.piece
        while len(answer) < reply.total:
            answer += (await tell(made, Note(Want.MORE, ticket, LONG, len(answer)))).piece
        assert answer == message and served.asked == 2

    run(scene)


def test_what_comes_twice_is_taken_once() -> None:
    async def scene(made: Desk, served: Served) -> None:
        ticket = os.urandom(16)
        first = asyncio.ensure_future(tell(made, ask(b"keep", ticket=ticket)))
        await asyncio.sleep(0)
        assert await tell(made, ask(b"keep", ticket=ticket)) == Reply(Kind.NOTHING)
        served.kept[0].reply(b"once")
        served.kept[0].reply(b"twice")
        assert await first == Reply(Kind.ANSWER, 4, b"once") and served.asked == 1
        long = Note(Want.ASK, os.urandom(16), LONG, 0, 2 * PIECE, bytes(PIECE))
        assert await tell(made, long) == Reply(Kind.TAKEN)
        assert await tell(made, long) == Reply(Kind.NOTHING)
        assert (await tell(made, long._replace(start=PIECE))).total == 2 * PIECE
        assert (await tell(made, Note(Want.MORE, long.ticket, LONG, PIECE))).kind is Kind.ANSWER
        assert await tell(made, Note(Want.MORE, long.ticket, LONG, PIECE)) == Reply(Kind.NOTHING)

    run(scene)


def test_a_request_ends_with_its_time_or_when_nobody_waits() -> None:
    async def scene(made: Desk, served: Served) -> None:
        started = time.monotonic()
        assert await tell(made, ask(b"keep", 100)) == Reply(Kind.NOTHING)
        assert 0.1 <= time.monotonic() - started < 10 and served.closed == 1
        served.kept[0].reply(b"late")
        ticket = os.urandom(16)
        kept = asyncio.ensure_future(tell(made, ask(b"keep", ticket=ticket)))
        await asyncio.sleep(0)
        assert await tell(made, Note(Want.DROP, ticket)) == Reply(Kind.TAKEN)
        assert await kept == Reply(Kind.NOTHING) and served.closed == 2
        served.kept[1].on_close(served.close)  # at once: it is over
        assert served.closed == 3

    run(scene)


def test_answers_come_from_any_thread() -> None:
    async def scene(made: Desk, served: Served) -> None:
        kept = asyncio.ensure_future(tell(made, ask(b"keep")))
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, served.kept[0].reply, b"there")
        assert await kept == Reply(Kind.ANSWER, 5, b"there") and served.closed == 0

    run(scene)


def test_what_nobody_takes_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "KEPT", 0.05)

    async def scene(made: Desk, served: Served) -> None:
        assert (await tell(made, Note(Want.ASK, bytes(16), LONG, 0, 2 * PIECE, bytes(PIECE)))).kind is Kind.TAKEN
        message = os.urandom(PIECE)
        kept = asyncio.ensure_future(tell(made, ask(b"keep")))
        await asyncio.sleep(0)
        served.kept[0].reply(message * 2)
        assert (await kept).total == 2 * PIECE
        deadline = time.monotonic() + 20
        while len(made):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    run(scene)


def test_more_than_it_can_keep_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "LOAD_LIMIT", MESSAGE_LIMIT)

    async def scene(made: Desk, served: Served) -> None:
        large = Note(Want.ASK, os.urandom(16), LONG, 0, MESSAGE_LIMIT - 2048, bytes(10))
        assert await tell(made, large) == Reply(Kind.TAKEN)
        assert await tell(made, large._replace(ticket=os.urandom(16))) == Reply(Kind.NOTHING)
        assert await tell(made, Note(Want.DROP, large.ticket)) == Reply(Kind.TAKEN)
        assert await tell(made, ask(b"x")) == Reply(Kind.ANSWER, 1, b"x")

    run(scene)
