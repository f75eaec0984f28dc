"""Clients that know the secret, and misbehave: their connections end, and nobody else's."""

from __future__ import annotations

import contextlib
import functools
import resource
import socket
import threading
import time
from collections.abc import Generator

import pytest

from memstore.distributed.links import Asked, Links, Listener, handshake, server
from memstore.distributed.links.frames import HEADER, MORE, PIECE_LIMIT, frame
from memstore.errors import HomeUnavailableError, ResourceLimitError
from tests.children import Child, Wire, in_child
from tests.distributed.links.echoing import (
    HELLO,
    MEMBER,
    SECRET,
    bare,
    echo,
    is_closed,
    linked,
    listening,
    proven,
    received,
    soon,
    try_send,
    until,
)

MEBIBYTE = 1 << 20


@pytest.fixture
def listener() -> Generator[Listener]:
    with listening() as one:
        yield one


@pytest.fixture
def links(listener: Listener) -> Generator[Links]:
    """Of somebody who behaves, before and after."""
    with linked() as one:
        assert one.send(listener.address, MEMBER, b"before", soon()) == b"before"
        hello = one.hello_of(listener.address)
        yield one
        assert one.send(listener.address, MEMBER, b"after", soon()) == b"after"
        assert one.hello_of(listener.address) is hello, "it had to connect anew"


BAD = {  # what else is no frame: test_frames.py
    "a length of 2^63": (1 << 63).to_bytes(8, "big"),
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "two long messages at a time": HEADER.pack(14, 1, 0, MORE) + b"x" + HEADER.pack(14, 2, 0, MORE) + b"x",
    "a second Hello": frame(0, 0, b"hello"),
}


@pytest.mark.parametrize("stream", BAD.values(), ids=BAD.keys())
def test_whatever_does_not_fit_ends_the_connection(listener: Listener, links: Links, stream: bytes) -> None:
    sock = proven(listener.address)
    sock.sendall(stream)
    assert is_closed(sock)


@pytest.mark.parametrize("cut", [1, 4, 16, 17, 100])
def test_a_truncated_frame_ends_with_its_connection(listener: Listener, links: Links, cut: int) -> None:
    sock = proven(listener.address)
    sock.sendall(frame(1, 0, bytes(200))[:cut])
    sock.shutdown(socket.SHUT_WR)
    assert is_closed(sock)


def test_a_first_message_that_is_no_hello_ends_the_connection(listener: Listener, links: Links) -> None:
    no_text = handshake.encode_hello(HELLO).replace(b"here", b"h\xffre")
    assert no_text != handshake.encode_hello(HELLO)
    for first in (*[frame(0, 0, body) for body in (no_text, b"\x93\x01\x02\x03", b"")], frame(1, 0, b"request")):
        sock = _without_hello(listener.address)
        sock.sendall(first)
        assert is_closed(sock)
    assert links.send(listener.address, MEMBER, b"after", soon()) is not None


def _without_hello(address: str) -> socket.socket:
    sock = bare(address)
    greeting = received(sock, 64)
    introduction = handshake.introduce(greeting, 1, MEMBER, SECRET)
    sock.sendall(introduction)
    assert received(sock, 32) == handshake.server_proof(SECRET, greeting, introduction)
    return sock


def test_a_call_that_is_under_way_twice_ends_the_connection() -> None:
    with listening(lambda _: None) as listener:
        sock = proven(listener.address)
        sock.sendall(frame(1, 0, b"x") * 2)
        assert is_closed(sock)


def test_a_message_beyond_the_limit_is_not_kept(
    listener: Listener, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.distributed.links.frames.MESSAGE_LIMIT", MEBIBYTE)
    monkeypatch.setattr(server.Inbox.__init__, "__defaults__", (MEBIBYTE,))
    sock = proven(listener.address)
    piece = HEADER.pack(13 + PIECE_LIMIT, 1, 0, MORE) + bytes(PIECE_LIMIT)
    with pytest.raises(OSError):  # it closes long before all of it was sent
        for _ in range(1000):
            sock.sendall(piece)
    sock.close()


def test_a_request_that_can_not_be_served_ends_its_connection_only(links: Links, listener: Listener) -> None:
    def fail(asked: Asked) -> None:
        if asked.message == b"bad":
            raise RuntimeError("a bug in what serves")
        asked.reply(asked.message)

    with listening(fail) as other, linked() as good, linked() as bad:
        assert good.send(other.address, MEMBER, b"good", soon()) == b"good"
        assert bad.send(other.address, MEMBER, b"bad", soon()) is None
        assert good.send(other.address, MEMBER, b"good", soon()) == b"good"
        assert bad.send(other.address, MEMBER, b"good", soon()) == b"good"


def test_who_takes_no_answers_is_not_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what waits for him stays bounded. When he takes them, he gets them all."""
    monkeypatch.setattr(server, "SLOW", MEBIBYTE)
    served: list[int] = []

    def serve(asked: Asked) -> None:
        served.append(1)
        asked.reply(bytes(MEBIBYTE))

    def all_are_served() -> bool:
        return len(served) == sent

    sent = 0
    with listening(serve) as listener, linked() as links:
        sock = proven(listener.address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # by itself it may grow to 32 MiB
        while all_are_served() and sent < 100:  # one at a time: many would be read at once
            sent += 1
            sock.sendall(frame(sent, 0, b"x"))
            with contextlib.suppress(TimeoutError):
                until(all_are_served, 1.0)
        assert sent < 60
        assert links.send(listener.address, MEMBER, b"x", soon()) == bytes(MEBIBYTE)
        for number in range(sent + 1, 101):
            sock.sendall(frame(number, 0, b"x"))
        size, buffer = 0, bytearray(MEBIBYTE)
        while size < 100 * MEBIBYTE:
            size += sock.recv_into(buffer)
        assert len(served) == 101
        sock.close()


def test_who_takes_no_answers_and_gets_more_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MESSAGE_LIMIT", 8 * MEBIBYTE)
    kept: list[Asked] = []
    with listening(kept.append) as listener:
        sock = proven(listener.address)
        for number in range(1, 11):
            sock.sendall(frame(number, 0, b"x"))
        until(lambda: len(kept) == 10)
        for asked in kept:
            asked.reply(bytes(7 * MEBIBYTE))  # it never waits
        assert is_closed(sock)


def test_requests_in_service_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOAD_LIMIT", 4 * MEBIBYTE)
    kept: list[Asked] = []
    with listening(kept.append) as listener:
        sock = proven(listener.address)
        done = threading.Event()

        def has_come(number: int) -> bool:
            return len(kept) > number

        def send() -> None:
            for number in range(1, 201):
                sock.sendall(frame(number, 0, bytes(PIECE_LIMIT)))
            done.set()

        sender = threading.Thread(target=send)
        sender.start()
        until(lambda: len(kept) >= 16)
        assert not done.wait(0.5)
        assert len(kept) <= 18
        for number in range(200):
            until(functools.partial(has_come, number))
            kept[number].reply(b"")
        assert done.wait(20)
        sender.join()
        assert len(received(sock, 200 * 17)) == 200 * 17
        sock.close()


def test_half_open_connections_are_closed_both_ways(listener: Listener, links: Links) -> None:
    sock = proven(listener.address)
    sock.sendall(frame(1, 0, b"x"))
    assert received(sock, 18) == frame(1, 0, b"x")
    sock.shutdown(socket.SHUT_WR)
    assert is_closed(sock)


def test_connections_that_are_reset_at_any_point_harm_nobody(listener: Listener, links: Links) -> None:
    for turn in range(30):
        sock = bare(listener.address) if turn % 2 else proven(listener.address)
        if turn % 3:
            sock.sendall(frame(1, 0, bytes(turn * 100)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close sends RST
        sock.close()


# --- no file descriptors ----------------------------------------------------------------------------------------------


def serve_with_few_files(wire: Wire) -> None:
    """In a child: a listener that has room for three connections more."""
    with listening(echo) as listener:
        places = [socket.socket() for _ in range(3)]  # the lowest that are free: others above may be taken
        most = max(each.fileno() for each in places) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for each in places:
            each.close()
        wire.send(listener.address)
        while wire.receive() == "how long":
            wire.send(time.process_time())


def test_a_listener_without_file_descriptors_waits_for_them_and_does_not_spin() -> None:
    with Child(serve_with_few_files) as child, linked() as links:
        address = child.receive()
        assert links.send(address, MEMBER, b"before", soon()) == b"before"
        crowd = [bare(address) for _ in range(8)]
        child.send("how long")
        used = child.receive()
        assert links.send(address, MEMBER, b"meanwhile", soon()) == b"meanwhile"
        with linked() as late, pytest.raises(HomeUnavailableError):
            late.send(address, MEMBER, b"x", soon(0.5))
        child.send("how long")
        assert child.receive() - used < 0.25, "of a processor in half a second: it spins"
        for sock in crowd:
            sock.close()
        with linked() as late:
            until(lambda: try_send(late, address, b"late", soon()) == b"late")
        assert links.send(address, MEMBER, b"after", soon()) == b"after"


def use_up_files_and_send(address: str) -> str:
    with linked() as links:
        used = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used.fileno(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            links.send(address, MEMBER, b"x", soon())
        except ResourceLimitError as error:
            return str(error)
    return "no error"


def test_a_client_without_file_descriptors_says_so(listener: Listener) -> None:
    text = in_child(use_up_files_and_send, listener.address)
    assert listener.address in text and "ulimit -n" in text
