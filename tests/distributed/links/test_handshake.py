"""Who is let in: secrets, protocols and members on both sides, and those who never finish."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import socket
import threading
from time import monotonic

import pytest

from memstore.distributed.links import CLIENT, Asked, Links, handshake, server
from memstore.distributed.links.frames import NO_LIMIT, frame
from memstore.distributed.links.handshake import STREAM
from memstore.distributed.links.server import FAIR_TIME, HANDSHAKE_TIME, NEWCOMERS
from memstore.errors import (
    AddressUnavailableError,
    HomeUnavailableError,
    InvalidAddressError,
    LinkRefusedError,
    SecretError,
)
from tests.distributed.links.echoing import (
    HELLO,
    LOOPBACK,
    MEMBER,
    SECRET,
    bare,
    both_families,
    in_threads,
    is_closed,
    linked,
    listening,
    needs_ipv6,
    received,
    soon,
    started_listener,
    until,
)

OTHER = b"o" * 32


@both_families
def test_both_sides_are_let_in(address: str) -> None:
    with listening(address=address) as listener, linked() as links:
        assert links.send(listener.address, MEMBER, b"hello", soon()) == b"hello"
        assert links.send(listener.address, None, b"anybody", soon()) == b"anybody"


def test_no_secret_will_do_on_loopback() -> None:
    with listening(secret=None) as listener, linked(secret=None) as links:
        assert links.send(listener.address, MEMBER, b"hello", soon()) == b"hello"


@pytest.mark.parametrize("theirs, ours", [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
def test_another_secret_is_refused(theirs: bytes | None, ours: bytes | None) -> None:
    asked: list[Asked] = []

    def serve(one: Asked) -> None:
        asked.append(one)
        one.reply(b"")

    with listening(serve, secret=theirs) as listener, linked(secret=ours) as links:
        for _ in range(2):
            with pytest.raises(LinkRefusedError, match="secret.*this process") as caught:
                links.send(listener.address, MEMBER, b"hello", soon())
            assert listener.address in str(caught.value)
        with linked(secret=theirs) as others:  # nobody else is harmed
            assert others.send(listener.address, MEMBER, b"hello", soon()) == b""
    assert len(asked) == 1


def test_another_member_is_refused_by_name() -> None:
    other = bytes(16)[:-1] + b"\1"
    with listening() as listener, linked() as links:
        with pytest.raises(LinkRefusedError, match=f"{MEMBER.hex()}.*{other.hex()}"):
            links.send(listener.address, other, b"hello", soon())
        assert links.send(listener.address, MEMBER, b"hello", soon()) == b"hello"
        with pytest.raises(LinkRefusedError, match=other.hex()):  # nor over the connection that is there
            links.send(listener.address, other, b"hello", soon())


def test_who_is_refused_by_one_member_keeps_nobody_from_another_at_its_address() -> None:
    """A host that came back empty is served where the lost one was, and both are asked at once."""
    other = bytes(16)[:-1] + b"\1"

    def ask(links: Links, address: str, member: bytes) -> None:
        if member == MEMBER:
            assert links.send(address, member, b"hello", soon()) == b"hello"
        else:
            with pytest.raises(LinkRefusedError, match=f"{other.hex()} was expected"):
                links.send(address, member, b"hello", soon())

    with listening() as listener:
        for _ in range(20):
            with linked() as links:
                in_threads(8, lambda number: ask(links, listener.address, MEMBER if number % 2 else other))


def talk(listening_socket: socket.socket, *answers: bytes) -> None:
    """A server of somebody else: it says these things, one after each portion that it hears, and closes."""
    sock, _ = listening_socket.accept()
    with sock, contextlib.suppress(ConnectionResetError):
        for answer in answers:
            sock.sendall(answer)
            sock.recv(1000)


@pytest.mark.parametrize(
    "answers, message",
    [
        ([b"SSH-2.0-OpenSSH_9.9\r\n" + bytes(60)], "no memstore serves there"),
        ([b"memstor1" + b"\0\7" + bytes(54)], f"protocol 7, and this process protocol {handshake.PROTOCOL}"),
        (
            [b"memstor1" + b"\0\3" + bytes(2) + b"\0\7" + bytes(50)],
            f"protocol 7 to 3, and this process protocol {handshake.PROTOCOL}",  # nonsense: it is shown as it is
        ),
        ([handshake.greet(MEMBER, SECRET), bytes(32)], "another secret"),
        ([handshake.greet(MEMBER, SECRET), os.urandom(32)], "another secret"),
    ],
)
def test_a_server_that_is_none_of_ours_is_refused(answers: list[bytes], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, linked() as links:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=talk, args=(server, *answers))
        thread.start()
        with pytest.raises(LinkRefusedError, match=message) as caught:
            links.send(address, MEMBER, b"hello", soon())
        thread.join()
        assert address in str(caught.value)
        assert links.trouble_of(address) == str(caught.value)


def test_a_server_that_goes_away_in_the_handshake_is_no_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, linked() as links:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=talk, args=(server, handshake.greet(MEMBER, SECRET)))
        thread.start()
        with pytest.raises(HomeUnavailableError, match="it closed the connection"):
            links.send(address, MEMBER, b"hello", soon())
        thread.join()
        assert links.trouble_of(address) == "it closed the connection"


def test_a_server_that_does_not_prove_itself_gets_no_request() -> None:
    """A stranger at the address, who answers with what he heard, must not hear what the client has to say."""
    heard: list[bytes] = []

    def reflect(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(handshake.greet(MEMBER, SECRET))
            introduction = sock.recv(1000)
            sock.sendall(introduction[-32:])
            heard.append(introduction)
            heard.append(sock.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as server, linked() as links:
        thread = threading.Thread(target=reflect, args=(server,))
        thread.start()
        with pytest.raises(LinkRefusedError):
            links.send(f"tcp://127.0.0.1:{server.getsockname()[1]}", MEMBER, b"hello", soon())
        thread.join()
    assert [len(portion) for portion in heard] == [handshake.INTRODUCTION_SIZE, 0]


def introduction(greeting: bytes, secret: bytes, **changes: bytes) -> bytes:
    fields = {"magic": b"memstor1", "protocol": b"\0\1", "kind": b"\0\1", "zeros": bytes(4), "nonce": bytes(32)}
    told = b"".join({**fields, "member": MEMBER, **changes}.values())
    return told + hmac.digest(secret, b"client" + greeting + told, "sha256")


@pytest.mark.parametrize(
    "change",
    [
        {"magic": b"memstor2"},
        {"protocol": b"\0\2"},
        {"kind": b"\0\0"},
        {"kind": b"\0\4"},
        {"kind": b"\xff\xff"},
        {"member": bytes(15) + b"\1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_client_that_wants_something_else_is_closed(change: dict[str, bytes]) -> None:
    with listening() as listener:
        sock = bare(listener.address)
        greeting = received(sock, 64)
        sock.sendall(introduction(greeting, SECRET, **change))
        proof = received(sock, 32)
        assert len(proof) == 32
        assert proof != handshake.WRONG_PROOF  # it knows the secret, and may see that the server does
        assert is_closed(sock)


def test_a_server_keeps_the_protocol_that_a_client_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL", 3)
    asked: list[Asked] = []
    with listening(asked.append) as listener:
        for chosen in (b"\0\2", b"\0\3"):
            with bare(listener.address) as sock:
                sock.sendall(introduction(received(sock, 64), SECRET, protocol=chosen))
                received(sock, 32)
                sock.sendall(frame(0, NO_LIMIT, handshake.encode_hello(HELLO)) + frame(1, NO_LIMIT, b"hello"))
                until(lambda: asked)
                assert asked.pop().protocol == chosen[1]


def test_a_wrong_proof_is_told_apart_whatever_else_is_wrong() -> None:
    """Nothing of what a client says is looked at before its proof is."""
    with listening() as listener:
        for change in ({}, {"magic": b"GET / HT"}, {"kind": b"\0\xff"}):
            sock = bare(listener.address)
            greeting = received(sock, 64)
            sock.sendall(introduction(greeting, OTHER, **change))
            assert received(sock, 32) == handshake.WRONG_PROOF
            assert is_closed(sock)


def test_a_recorded_introduction_is_of_no_use() -> None:
    with listening() as listener:
        first = bare(listener.address)
        recorded = introduction(received(first, 64), SECRET)
        first.sendall(recorded)
        assert received(first, 32) != handshake.WRONG_PROOF
        first.close()
        second = bare(listener.address)
        received(second, 64)
        second.sendall(recorded)
        assert received(second, 32) == handshake.WRONG_PROOF
        assert is_closed(second)


GARBAGE = {"HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 10, "random": os.urandom(96), "zeros": bytes(100_000)}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_closed_and_harms_nobody(garbage: bytes) -> None:
    with listening() as listener, linked() as links:
        assert links.send(listener.address, MEMBER, b"before", soon()) == b"before"
        sock = bare(listener.address)
        with contextlib.suppress(OSError):  # it is closed already
            sock.sendall(garbage)
        assert is_closed(sock)
        assert links.send(listener.address, MEMBER, b"after", soon()) == b"after"


def test_who_never_finishes_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HANDSHAKE_TIME == 5
    monkeypatch.setattr(server, "HANDSHAKE_TIME", 1.0)
    with listening() as listener, linked() as links:
        started = monotonic()
        silent, begun, unnamed = (bare(listener.address) for _ in range(3))
        begun.sendall(b"memstor1")
        unnamed.sendall(introduction(received(unnamed, 64), SECRET))  # and no Hello
        assert links.send(listener.address, MEMBER, b"hello", soon()) == b"hello"
        assert is_closed(silent) and is_closed(begun)
        assert monotonic() - started > 0.9
        assert is_closed(unnamed)
        assert links.send(listener.address, MEMBER, b"hello", soon()) == b"hello"


def test_a_flood_of_silent_connections_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 3 * FAIR_TIME < HANDSHAKE_TIME
    monkeypatch.setattr(server, "FAIR_TIME", 0.2)
    with listening() as listener, linked() as links, linked() as late:
        assert links.send(listener.address, MEMBER, b"before", soon()) == b"before"
        crowd = [bare(listener.address) for _ in range(3 * NEWCOMERS)]
        assert links.send(listener.address, MEMBER, b"there already", soon()) == b"there already"
        started, answer = monotonic(), None
        while answer is None and monotonic() - started < 20:
            answer = late.send(listener.address, MEMBER, b"new", soon())
        assert answer == b"new"
        assert monotonic() - started < HANDSHAKE_TIME, "it waited until the crowd was late"
        for sock in crowd:
            sock.close()


def test_streams_are_handed_over_as_plain_sockets() -> None:
    handed: list[socket.socket] = []
    came = threading.Event()

    def take(sock: socket.socket) -> None:
        handed.append(sock)
        came.set()

    with listening(stream=take) as listener, linked() as links:
        with links.stream(listener.address, MEMBER, soon()) as ours:
            assert came.wait(20)
            with handed[0] as theirs:
                assert ours.gettimeout() is None and theirs.gettimeout() is None
                theirs.sendall(b"bytes as they are")
                assert received(ours, 17) == b"bytes as they are"
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
        with pytest.raises(LinkRefusedError):
            links.stream(listener.address, bytes(15) + b"\1", soon())
    assert (CLIENT, STREAM) == (1, 3)


# --- where one may listen ---------------------------------------------------------------------------------------------


def own_address() -> str | None:
    """An address of this machine that others can reach, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        found = sock.getsockname()[0]
    return None if found.startswith("127.") else found


def test_without_a_secret_others_are_not_listened_to() -> None:
    with pytest.raises(SecretError, match=re.escape("tcp://192.0.2.1:0") + ".*--insecure"):
        started_listener(address="tcp://192.0.2.1:0", secret=None)
    ip = own_address()
    if ip is None:
        pytest.skip("this machine has no address but loopback")
    with listening(address=f"tcp://{ip}:0", secret=None, insecure=True) as listener, linked(secret=None) as links:
        assert links.send(listener.address, MEMBER, b"hello", soon()) == b"hello"


@both_families
def test_an_address_that_is_taken_is_named(address: str) -> None:
    with listening(address=address) as listener:
        with pytest.raises(AddressUnavailableError, match=re.escape(listener.address)) as caught:
            started_listener(address=listener.address)
        assert "in use" in str(caught.value)


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(AddressUnavailableError, match=re.escape("tcp://192.0.2.1:0")):
        started_listener(address="tcp://192.0.2.1:0")
    with pytest.raises(AddressUnavailableError, match="none-such"):
        started_listener(address="tcp://[fe80::1%none-such]:0")
    with pytest.raises(InvalidAddressError):
        started_listener(address="127.0.0.1:0")


def test_an_address_is_free_again_once_its_listener_is_closed() -> None:
    with listening() as listener, linked() as links:
        address = listener.address
        assert links.send(address, MEMBER, b"hello", soon()) == b"hello"
    with listening(address=address), linked() as links:
        assert links.send(address, MEMBER, b"hello", soon()) == b"hello"


@needs_ipv6
def test_only_the_address_that_was_given_is_bound() -> None:
    with listening(address="tcp://127.0.0.1:0") as listener:
        port = int(listener.address.rpartition(":")[2])
        for other in (f"tcp://127.0.0.2:{port}", f"tcp://[::1]:{port}"):
            with pytest.raises(ConnectionRefusedError):
                bare(other)
    assert LOOPBACK.startswith("tcp://127.0.0.1")
