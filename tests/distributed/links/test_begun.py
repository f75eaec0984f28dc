"""Requests that no thread waits for: who began one is told of its answer, or of the end of its connection."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from memstore.distributed.links import Asked, Begun, Links, Listener, client
from memstore.distributed.links.frames import MESSAGE_LIMIT
from memstore.errors import HomeUnavailableError, StoreClosedError
from tests.distributed.links.echoing import MEMBER, in_threads, linked, listening, soon, until


def begin(links: Links, listener: Listener, message: bytes, told: Callable[[], None] = lambda: None) -> Begun:
    return links.begin(listener.address, MEMBER, message, 20.0, told, soon())


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memstore links"]


class Kept:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: dict[bytes, Asked] = {}

    def serve(self, asked: Asked) -> None:
        if asked.message.startswith(b"now"):
            asked.reply(asked.message)
        else:
            self.asked[asked.message] = asked

    def reply(self, message: bytes) -> None:
        until(lambda: message in self.asked)
        self.asked.pop(message).reply(message[::-1])


def test_a_thousand_take_one_thread_and_are_told_in_any_order() -> None:
    kept, told = Kept(), threading.Semaphore(0)
    with listening(kept.serve) as listener, linked() as links:
        before = set(keepers())
        names = [b"%d!" % number for number in range(1000)]
        requests = {name: begin(links, listener, name, told.release) for name in names}
        until(lambda: len(kept.asked) == 1000)
        assert len(set(keepers()) - before) == 1
        assert not any(one.is_over for one in requests.values())
        for name in reversed(names):
            kept.reply(name)
        for _ in names:
            assert told.acquire(timeout=20)
        assert {name: one.answer for name, one in requests.items()} == {name: name[::-1] for name in names}


def test_threads_are_answered_beside_them_and_the_other_way_round() -> None:
    kept = Kept()

    def work(number: int) -> None:
        for turn in range(50):
            message = b"now %d %d" % (number, turn)
            assert links.send(listener.address, MEMBER, message, soon()) == message
            told = threading.Event()
            one = begin(links, listener, message + b" begun", told.set)
            assert told.wait(20) and one.answer == message + b" begun"

    with listening(kept.serve) as listener, linked() as links:
        long = begin(links, listener, b"long")
        in_threads(4, work)
        assert not long.is_over
        kept.reply(b"long")
        until(lambda: long.is_over)
        assert long.answer == b"gnol"


def test_the_end_of_the_connection_is_told() -> None:
    kept, told = Kept(), threading.Semaphore(0)
    with linked() as links:
        with listening(kept.serve) as listener:
            requests = [begin(links, listener, b"%d" % number, told.release) for number in range(3)]
            until(lambda: len(kept.asked) == 3)
        for _ in requests:
            assert told.acquire(timeout=20)
        assert all(one.is_over and one.answer is None for one in requests)
        with pytest.raises(HomeUnavailableError):
            links.begin(listener.address, MEMBER, b"", 1.0, told.release, soon(0.3))


def test_closed_links_tell_so_and_take_no_more() -> None:
    kept, told = Kept(), threading.Event()
    with listening(kept.serve) as listener, linked() as links:
        one = begin(links, listener, b"never", told.set)
        until(lambda: kept.asked)
        links.close()
        assert told.wait(20) and one.is_over and one.answer is None
        with pytest.raises(StoreClosedError):
            begin(links, listener, b"")


def test_one_that_was_given_up_is_not_told_and_leaves_the_connection_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LINGER", 0.01)
    kept, told = Kept(), threading.Event()
    with listening(kept.serve) as listener, linked() as links:
        one, other = begin(links, listener, b"one", told.set), begin(links, listener, b"other")
        until(lambda: len(kept.asked) == 2)
        one.give_up()
        kept.reply(b"one")
        kept.reply(b"other")
        until(lambda: other.is_over)
        assert not (told.is_set() or one.is_over) and other.answer == b"rehto"
        until(lambda: not keepers())  # there is nothing to keep
        again = begin(links, listener, b"now again")
        until(lambda: again.is_over)
        assert again.answer == b"now again"


def test_too_long_a_message_is_refused() -> None:
    with listening() as listener, linked() as links, pytest.raises(ValueError, match="it may have"):
        begin(links, listener, bytes(MESSAGE_LIMIT + 1))


def test_many_are_answered_together_the_long_and_those_of_other_connections_too() -> None:
    kept, told = Kept(), threading.Semaphore(0)
    with listening(kept.serve) as listener, linked() as links, linked() as others, linked() as gone:
        sizes = {b"%d!" % number: 10_000 if number % 7 == 0 else number for number in range(300)}
        requests = {
            name: begin(others if number % 3 else links, listener, name, told.release)
            for number, name in enumerate(sizes)
        }
        begin(gone, listener, b"gone")
        until(lambda: len(kept.asked) == 301)
        ended = threading.Event()
        kept.asked[b"gone"].on_close(ended.set)
        gone.close()
        assert ended.wait(20)
        Asked.reply_to_all([(asked, bytes(sizes.get(name, 0))) for name, asked in kept.asked.items()])
        for _ in sizes:
            assert told.acquire(timeout=20)
        answers = {name: one.answer for name, one in requests.items()}
        assert answers == {name: bytes(size) for name, size in sizes.items()}
        for asked in kept.asked.values():
            asked.reply(b"twice")  # nobody listens
        assert links.send(listener.address, MEMBER, b"now", soon()) == b"now"
