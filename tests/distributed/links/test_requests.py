"""Requests and answers over real sockets on loopback."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
from time import monotonic

import pytest

from memstore.distributed.links import CLIENT, INDEX, Asked
from memstore.distributed.links.frames import MESSAGE_LIMIT, PIECE_LIMIT
from memstore.errors import InvalidAddressError, StoreClosedError
from tests.distributed.links.echoing import HELLO, MEMBER, in_threads, linked, listening, soon, try_send, until


@pytest.mark.parametrize("size", [0, 1, 1000, PIECE_LIMIT, PIECE_LIMIT + 1, 1 << 20, 5_000_000])
def test_an_answer_has_the_bytes_of_its_request(size: int) -> None:
    message = os.urandom(size)
    with listening() as listener, linked() as links:
        assert links.send(listener.address, MEMBER, message, soon()) == message


def test_a_server_is_told_who_asks_and_for_how_long() -> None:
    seen: list[Asked] = []

    def serve(asked: Asked) -> None:
        seen.append(asked)
        asked.reply(b"")

    with listening(serve) as listener, linked() as links, linked(kind=INDEX) as others:
        assert links.hello_of(listener.address) is None
        links.send(listener.address, MEMBER, b"one", soon(10))
        links.send(listener.address, None, b"two", float("inf"))
        others.send(listener.address, MEMBER, b"three", soon(10))
        assert links.hello_of(listener.address) == HELLO
        assert links.trouble_of(listener.address) == ""
    one, two, three = seen
    assert (one.kind, three.kind) == (CLIENT, INDEX)
    assert one.connection == two.connection != three.connection
    assert 5 < one.deadline - monotonic() <= 10
    assert two.deadline == float("inf")
    assert one.hello.host == "there"


def test_threads_share_a_connection_whose_answers_come_out_of_order() -> None:
    """Two threads with thousands of calls, and some with longer messages. The server answers in batches, shuffled."""
    asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
    connections: set[int] = set()

    def answer() -> None:
        chance = random.Random(3)
        while (first := asked.get()) is not None:
            batch = [first]
            while len(batch) < 4 and not asked.empty():
                one = asked.get()
                if one is None:
                    asked.put(None)
                    break
                batch.append(one)
            chance.shuffle(batch)
            for one in batch:
                connections.add(one.connection)
                one.reply(one.message[::-1])

    def work(number: int) -> None:
        count, size = (3000, 100) if number < 2 else (20, 700_000)
        for turn in range(count):
            message = b"%d %d " % (number, turn) + bytes(size)
            assert links.send(listener.address, MEMBER, message, soon(60)) == message[::-1]

    server = threading.Thread(target=answer)
    server.start()
    with listening(asked.put) as listener, linked() as links:
        in_threads(4, work)
        asked.put(None)
        server.join(20)
    assert len(connections) == 1


def test_a_deadline_ends_a_request_and_not_its_connection() -> None:
    late: list[Asked] = []

    def serve(asked: Asked) -> None:
        if asked.message == b"late":
            late.append(asked)
        else:
            asked.reply(asked.message)

    with listening(serve) as listener, linked() as links:
        assert links.send(listener.address, MEMBER, b"first", soon()) == b"first"
        started = monotonic()
        assert links.send(listener.address, MEMBER, b"late", started + 0.5) is None
        assert 0.5 <= monotonic() - started < 20
        late[0].reply(b"nobody waits for this")
        assert links.send(listener.address, MEMBER, b"second", soon()) == b"second"
        late[0].reply(b"nor for this")
        assert links.send(listener.address, MEMBER, b"third", soon()) == b"third"
        assert late[0].connection == 1
        assert links.send(listener.address, MEMBER, b"at once", monotonic() - 1) is None
        assert links.send(listener.address, MEMBER, b"fourth", soon()) == b"fourth"


def test_who_leads_makes_way_when_his_time_is_over() -> None:
    """The first caller reads for all. He gives up, or has his answer, while others still wait."""
    kept: dict[bytes, Asked] = {}

    def serve(asked: Asked) -> None:
        if asked.message == b"go":
            asked.reply(b"")
            for number in (2, 1):
                kept[b"%d" % number].reply(b"%d" % number)
        else:
            kept[asked.message] = asked

    def work(number: int) -> None:
        if number == 0:
            assert links.send(listener.address, MEMBER, b"0", soon(0.5)) is None
            assert links.send(listener.address, MEMBER, b"go", soon()) == b""
        else:
            until(lambda: b"%d" % (number - 1) in kept)
            assert links.send(listener.address, MEMBER, b"%d" % number, soon()) == b"%d" % number

    with listening(serve) as listener, linked() as links:
        started = monotonic()
        in_threads(3, work)
        assert monotonic() - started < 10
        assert kept[b"1"].connection == kept[b"2"].connection


def test_a_long_request_that_is_given_up_leaves_the_connection_whole() -> None:
    """The server reads nothing for a while, so that the request stays half sent."""
    blocked, seen = threading.Event(), list[Asked]()

    def serve(asked: Asked) -> None:
        if asked.message == b"block":
            asked.reply(b"")
            assert blocked.wait(20)
        else:
            seen.append(asked)
            asked.reply(asked.message[:10])

    with listening(serve) as listener, linked() as links:
        assert links.send(listener.address, MEMBER, b"block", soon()) == b""
        assert links.send(listener.address, MEMBER, bytes(60 << 20), soon(0.5)) is None
        blocked.set()
        assert links.send(listener.address, MEMBER, b"after" * 200_000, soon()) == b"afterafter"
        assert links.send(listener.address, MEMBER, b"again", soon()) == b"again"
    assert {asked.connection for asked in seen} == {1}
    assert [len(asked.message) for asked in seen] == [1_000_000, 5]


def test_too_long_a_message_is_refused_by_who_sends_it() -> None:
    errors: list[BaseException] = []
    too_long = bytes(MESSAGE_LIMIT + 1)  # untouched zeros take no memory

    def serve(asked: Asked) -> None:
        try:
            asked.reply(too_long)
        except ValueError as error:
            errors.append(error)
            asked.reply(b"shorter")

    with listening(serve) as listener, linked() as links:
        with pytest.raises(ValueError, match="it may have"):
            links.send(listener.address, MEMBER, too_long, soon())
        assert links.send(listener.address, MEMBER, b"hello", soon()) == b"shorter"
    assert len(errors) == 1


def test_callbacks_are_called_when_a_connection_ends_before_its_answer() -> None:
    ended: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()

    def serve(one: Asked) -> None:
        one.on_close(lambda: ended.put(one.message))
        if one.message == b"quick":
            one.reply(b"")
        asked.put(one)

    with listening(serve) as listener:
        with linked() as links:
            links.send(listener.address, MEMBER, b"quick", soon())
            assert links.send(listener.address, MEMBER, b"slow", soon(0.5)) is None
        assert ended.get(timeout=20) == b"slow"
        quick, slow = asked.get(), asked.get()
        slow.on_close(lambda: ended.put(b"at once"))
        assert ended.get(timeout=20) == b"at once"
        quick.on_close(lambda: ended.put(b"it was answered"))
        slow.reply(b"nobody is there")
        with linked() as links:
            assert links.send(listener.address, MEMBER, b"slow", soon(0.5)) is None
            listener.close()
            assert ended.get(timeout=20) in (b"slow", b"it was answered")


def test_closed_links_say_so() -> None:
    entered = threading.Event()

    def close(_: int) -> None:
        assert entered.wait(20)
        links.close()

    def ask(_: int) -> None:
        assert links.send(listener.address, MEMBER, b"", soon(60)) is None

    with listening(lambda _: entered.set()) as listener, linked() as links:
        started = monotonic()
        in_threads(3, lambda number: close(number) if number == 2 else ask(number))
        assert monotonic() - started < 20
        with pytest.raises(StoreClosedError, match="links"):
            links.send(listener.address, MEMBER, b"", soon())
        links.close()


def test_what_is_no_address_is_refused() -> None:
    with linked() as links:
        for call in (lambda: links.send("here", None, b"", soon()), lambda: links.stream("here", None, soon())):
            with pytest.raises(InvalidAddressError, match="'here'"):
                call()


class Interrupted(Exception):
    pass


def test_a_signal_handler_sends_in_the_middle_of_a_request() -> None:
    """As a trainer does that stores a last checkpoint when it is told to end."""

    def handle(*_: object) -> None:
        nested.append(links.send(listener.address, MEMBER, b"nested", soon()))

    nested: list[bytes | None] = []
    before = signal.signal(signal.SIGALRM, handle)
    with listening() as listener, linked() as links:
        try:
            # A connection is made under a lock that this process's listener takes too, and the handler waits for that.
            assert links.send(listener.address, MEMBER, b"first", soon()) == b"first"
            for turn in range(100):
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + turn * 0.00001)
                while len(nested) == turn:
                    assert links.send(listener.address, MEMBER, b"mine", soon()) == b"mine"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert nested == [b"nested"] * 100


def test_an_interrupted_caller_leaves_and_the_others_go_on() -> None:
    """Signals come at any time into the main thread, which waits, reads, or sends; another thread has calls too."""

    def raise_it(*_: object) -> None:
        raise Interrupted

    def work() -> None:
        while not stop.is_set():
            if links.send(listener.address, MEMBER, b"beside", soon(60)) == b"beside":
                answers.append(1)

    answers: list[int] = []
    interrupts = 0
    stop = threading.Event()
    before = signal.signal(signal.SIGALRM, raise_it)
    beside = threading.Thread(target=work)
    with listening(lambda asked: asked.reply(asked.message)) as listener, linked() as links:
        try:
            beside.start()
            for turn in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0002 + turn * 0.00001)
                    while True:
                        links.send(listener.address, MEMBER, b"mine", soon(60))
                except Interrupted:
                    interrupts += 1
                assert links.send(listener.address, MEMBER, b"after", soon()) in (b"after", None)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            stop.set()
            beside.join(30)
        assert not beside.is_alive()
        assert interrupts == 150 and answers
        until(lambda: try_send(links, listener.address, b"after", soon()) == b"after")
