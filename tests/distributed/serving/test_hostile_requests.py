"""What a peer may send that knows the secret: whatever it says, the home answers, and what it has stays as it is."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from memstore.distributed.catalog import run
from memstore.distributed.links import CLIENT, hello_of_this_process, parse_address
from memstore.distributed.links.client import Dialed, dial
from memstore.distributed.links.frames import Inbox, frame
from memstore.distributed.rules import Ask, Entry, Lookup, Member, Place, Prepare, Refused, Request, Standing
from memstore.distributed.rules.messages import Commit, Committed, Failed, Found, Give, NoSession, Open, Opened, Pending
from memstore.distributed.rules.nouns import Call, Change
from memstore.distributed.serving.questions import decode_answer, decode_request, encode
from memstore.engine import PendingPart, deadline_after
from tests.distributed.catalog.filling import asked, fill, published
from tests.distributed.catalog.operations import BYTES, damage_of, put
from tests.distributed.serving.any_requests import Known, requests
from tests.distributed.serving.homes import AnsweringHome, answering
from tests.examples import examples, one_in

KEY = b"kept/k"
OTHER = b"o" * 16
KINDS = get_args(Request)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


class Home:
    """One for all examples, with a value that no request names by its key.

    Attributes:
        entry: its record.
    """

    def __init__(self, answering: AnsweringHome) -> None:
        self.answering = answering
        (self.grant,) = answering.own(b"kept")
        filled = fill(answering.root, KEY, BYTES)
        put(answering.root, filled)
        published(answering.root, filled)
        _, entry = self.state()
        assert entry is not None
        self.entry = entry

    def state(self) -> tuple[Standing | None, Entry | None]:
        return self.answering.look(lambda tables: (tables.standing(), tables.record(KEY)))

    def known(self) -> Known:
        """With a session that nobody has used."""
        opened = self.answering.ask(Open())
        assert isinstance(opened, Opened)
        (place,) = self.entry.places
        large = ((1 << 63) - 1, 1 << 62, 1 << 40)
        numbers = (0, 1, 2, opened.session, place.put_id, place.segment, self.entry.version, len(BYTES), *large)
        keys = (b"kept/other", b"other/k", b"\xff", b"a\0b", b"k" * 500)
        numbers += (self.grant.number, self.grant.number + 7, self.grant.epoch)
        return Known(numbers, (self.answering.member, OTHER, b"C" * 16, self.entry.body, b"", *keys))

    def check(self) -> None:
        """It still answers, and has what it had; and nothing is there that could not be told to others."""
        found = self.answering.ask(Lookup((KEY,), (self.grant,)))
        assert found == Found((self.entry,))
        standing, entry = self.state()  # the roster may be another one: who knows the secret may change it
        assert entry == self.entry and standing is not None
        assert standing.member == self.answering.member and not standing.is_removed
        parts, outcomes = self.answering.look(lambda tables: (tables.parts(), tables.outcomes()))
        assert decode_answer(encode(Pending(tuple(parts))))
        for outcome in outcomes:
            assert decode_request(encode(Give(b"kept", OTHER, 1, (), (outcome,))))
        assert not self.answering.is_ending


@contextlib.contextmanager
def new_home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, answering(f"{folder}/store", with_waits=True) as made:
        one = Home(made)
        yield one
        assert damage_of(made.root) == []


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with new_home() as made:
        yield made


@pytest.mark.parametrize("kind", one_in(2, KINDS), ids=lambda kind: kind.__name__)
@settings(max_examples=examples(25), suppress_health_check=SLOW)
@given(st.data())
def test_requests_of_any_content_are_answered_and_do_no_harm(home: Home, kind: type[Any], data: st.DataObject) -> None:
    request = data.draw(requests(kind, home.known()))
    home.answering.ask(request)  # some end their connection
    home.check()


@settings(max_examples=examples(40), suppress_health_check=SLOW)
@given(st.data())
def test_damaged_requests_end_their_connection_or_are_answered(home: Home, data: st.DataObject) -> None:
    message = bytearray(encode(data.draw(st.one_of([requests(kind, home.known()) for kind in KINDS]))))
    for at in data.draw(st.lists(st.integers(0, len(message) - 1), min_size=1, max_size=4)):
        message[at] ^= data.draw(st.integers(1, 255))
    with connected(home.answering).socket as sock:
        sock.sendall(frame(1, 1000, bytes(message[: data.draw(st.integers(1, len(message)))])) + frame(0, 0, b""))
        read_to_end_or_ping(sock)
    home.check()


def read_to_end_or_ping(sock: socket.socket) -> str:
    """What is sent is answered, or ends the connection; a ping behind it is answered if it doesn't."""
    inbox = Inbox()
    try:
        while portion := sock.recv(1 << 16):
            if any(message.call == 0 and not message.body for message in inbox.feed(memoryview(portion))):
                return "answered"
    except ConnectionResetError:  # it was closed before all was read
        pass
    return "closed"


def connected(home: AnsweringHome) -> Dialed:
    dialed = dial(parse_address(home.address), home.member, None, CLIENT, hello_of_this_process(), deadline_after(20))
    dialed.socket.settimeout(20)
    return dialed


# --- what would last --------------------------------------------------------------------------------------------------


def asking(**changes: Any) -> list[Any]:
    """A request to join, as msgpack has it."""
    fields = {"id": OTHER, "address": "tcp://127.0.0.1:9", "name": "host", "versions": 0} | changes
    member = [fields["id"], fields["address"], fields["name"], True]
    return [Ask.__struct_config__.tag, member, None, 1, 1, fields["versions"]]


@pytest.mark.parametrize(
    "change",
    [
        {"id": b"short"},
        {"id": b""},
        {"address": "localhost:1"},
        {"address": "tcp://0.0.0.0:1"},
        {"address": "x" * 10_000},
        {"name": "x" * 10_000},
        {"versions": 1 << 63},
    ],
    ids=str,
)
def test_nobody_joins_whom_the_others_could_not_reach_or_name(home: Home, change: dict[str, Any]) -> None:
    with connected(home.answering).socket as sock:
        sock.sendall(frame(1, 1000, msgspec.msgpack.encode(asking(**change))))
        assert read_to_end_or_ping(sock) == "closed"
    home.check()


def test_nobody_joins_whose_versions_leave_no_room_for_others() -> None:
    with new_home() as seed:  # the other one may obey somebody by now
        refused = seed.answering.ask(Ask(Member(OTHER, "tcp://127.0.0.1:9"), None, 1, 1, (1 << 63) - 1))
        assert isinstance(refused, Refused) and "none can be that large" in refused.why
        seed.check()


def test_what_lies_with_the_home_is_named_by_no_message(home: Home) -> None:
    """Else a version of another key, or a part, could take the bytes of this one."""
    session = home.known().numbers[3]
    grants = home.answering.own(b"other")
    own, fake = home.entry.places, (Place(home.answering.member, 77, 77),)
    for number, places in enumerate((own, fake), 1):
        commit = Commit(Call(session, 0, number, 1), (Change(b"other/k", home.entry.body, places),), grants)
        host, *put = places[0].host, places[0].put_id, places[0].segment
        part = PendingPart(b"other/k", "one", 0, 0, 1, *put, len(BYTES), waits_ns=10**9, host=host)
        for request in (commit, Prepare(Call(session, 1, number, 1), part, b"", grants[0])):
            failed = home.answering.ask(request)
            assert isinstance(failed, Failed) and failed.error == "CorruptionError"
            assert home.answering.ask(request) == failed
    home.check()


# --- what was sent before ---------------------------------------------------------------------------------------------


def answer_of(home: AnsweringHome, message: bytes) -> object:
    """Over a connection of its own."""
    with connected(home).socket as sock:
        sock.sendall(message)
        inbox, found = Inbox(), list[Any]()
        while not found:
            portion = sock.recv(1 << 16)
            assert portion, "it was closed"
            found = [one for one in inbox.feed(memoryview(portion)) if one.call]
        return decode_answer(found[0].body)


def test_a_request_that_is_replayed_is_made_once(home: Home) -> None:
    one = home.answering
    opened = one.ask(Open())
    assert isinstance(opened, Opened)
    key = b"replayed/" + os.urandom(4).hex().encode()
    filled = fill(one.root, key, b"inline")
    body = asked(one.root, filled).body
    grants = one.own(b"replayed")
    recorded = frame(7, 1000, encode(Commit(Call(opened.session, 3, 1, 1), (Change(key, body),), grants)))
    first = answer_of(one, recorded)
    assert isinstance(first, Committed)
    assert [answer_of(one, recorded) for _ in range(3)] == [first] * 3
    assert one.look(lambda tables: tables.record(key)).version == first.versions[0]  # type: ignore[union-attr]
    deleted = answer_of(
        one, frame(7, 1000, encode(Commit(Call(opened.session, 3, 2, 1), (Change(key, None),), grants)))
    )
    assert deleted == first
    assert answer_of(one, recorded) == NoSession()
    assert one.look(lambda tables: tables.record(key)) is None
    run(one.root, lambda tables: tables.end_session(opened.session), deadline_after(10))
    assert answer_of(one, recorded) == NoSession()
