"""Servers that die, stop, refuse or come back, and what their clients do."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from time import monotonic, process_time

import pytest

from memstore.distributed.links import Asked, Links, client, parse_address
from memstore.distributed.links.sockets import is_its_own_peer
from memstore.errors import HomeUnavailableError
from tests.children import Child, Wire
from tests.distributed.links.echoing import LOOPBACK, MEMBER, bare, in_threads, linked, listening, soon, try_send, until


def serve(wire: Wire, address: str) -> None:
    """In a child: echoes; "keep" is never answered, and told."""

    def answer(asked: Asked) -> None:
        if asked.message == b"keep":
            wire.send("kept")
        else:
            asked.reply(asked.message)

    with listening(answer, address=address) as listener:
        wire.send(listener.address)
        wire.receive()


def test_requests_end_when_their_server_is_killed_and_work_when_it_is_back() -> None:
    with linked() as links, Child(serve, LOOPBACK) as child:
        address = child.receive()
        assert links.send(address, MEMBER, b"before", soon()) == b"before"
        died: list[float] = []

        def work(number: int) -> None:
            if number:
                assert links.send(address, MEMBER, b"keep", soon(100)) is None
            else:
                for _ in range(3):
                    assert child.receive() == "kept"
                died.append(monotonic())
                child.kill()

        in_threads(4, work)
        assert monotonic() - died[0] < 20
        assert links.trouble_of(address) != ""
        with pytest.raises(HomeUnavailableError, match="refused"):
            links.send(address, MEMBER, b"x", soon(0.5))
        assert "refused" in links.trouble_of(address)
        with Child(serve, address) as again:
            again.receive()
            started = monotonic()
            until(lambda: try_send(links, address, b"after", soon()) == b"after")
            assert monotonic() - started < 10


def test_a_server_that_came_back_while_nobody_asked_is_not_asked_over_the_old_connection() -> None:
    with linked() as links:
        with Child(serve, LOOPBACK) as child:
            address = child.receive()
            assert links.send(address, MEMBER, b"before", soon()) == b"before"
        with Child(serve, address) as child:
            child.receive()
            time.sleep(2 * client.IDLE)
            assert links.send(address, MEMBER, b"after", soon()) == b"after"  # at once: no request is lost


def test_a_refused_connection_is_told_at_once_and_costs_no_busy_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with linked() as links:
        tries, used, end = 0, process_time(), soon(0.6)
        while monotonic() < end:
            started = monotonic()
            with pytest.raises(HomeUnavailableError, match=address):
                links.send(address, MEMBER, b"x", end)
            assert monotonic() - started < 10
            tries += 1
        assert 3 <= tries <= 20
        assert process_time() - used < 0.2
        assert "refused" in links.trouble_of(address)
        with pytest.raises(HomeUnavailableError, match=address):
            links.stream(address, MEMBER, soon())


def test_many_threads_try_an_address_as_often_as_one() -> None:
    """A server that nobody has started: all callers share its tries."""
    tries: list[None] = []

    def refuse(server: socket.socket) -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            sock.close()
            tries.append(None)

    with socket.create_server(("127.0.0.1", 0)) as server, linked() as links:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=refuse, args=(server,))
        thread.start()
        in_threads(20, lambda _: _ask_for(links, address, 0.6))
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        assert 2 <= len(tries) <= 24


def _ask_for(links: Links, address: str, seconds: float) -> None:
    end = soon(seconds)
    while monotonic() < end:
        with pytest.raises(HomeUnavailableError):
            links.send(address, MEMBER, b"x", end)


def test_an_address_that_answers_nothing_ends_at_the_deadline() -> None:
    """Its backlog is full, so that the kernel lets connections wait: as at an address that nobody reaches."""
    with socket.socket() as server, linked() as links:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        place = parse_address(address).for_socket()
        crowd = [socket.socket() for _ in range(4)]
        for sock in crowd:
            sock.setblocking(False)
            sock.connect_ex(place)
        started, used = monotonic(), process_time()
        with pytest.raises(HomeUnavailableError, match="no connection in time"):
            links.send(address, MEMBER, b"x", soon(0.5))
        assert 0.5 <= monotonic() - started < 20
        assert process_time() - used < 0.3
        for sock in crowd:
            sock.close()


def test_a_server_that_lets_all_in_and_answers_nobody_costs_no_busy_loop() -> None:
    def fail(_: Asked) -> None:
        raise RuntimeError("it serves nobody")

    with listening(fail) as listener, linked() as links:
        tries, end = 0, soon(0.6)
        while monotonic() < end:
            assert try_send(links, listener.address, b"x", end) is None
            tries += 1
        assert tries <= 20


def test_a_silent_server_is_given_up_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped: its kernel acknowledges what is sent, and nothing is answered."""
    assert (client.PING_AFTER, client.PING_TIME) == (1.0, 3.0)
    monkeypatch.setattr(client, "PING_AFTER", 0.5)
    monkeypatch.setattr(client, "PING_TIME", 0.5)
    with linked() as links, Child(serve, LOOPBACK) as child:
        address = child.receive()
        assert links.send(address, MEMBER, b"before", soon()) == b"before"
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        started = monotonic()
        assert links.send(address, MEMBER, b"x", soon(60)) is None
        assert 1.0 <= monotonic() - started < 20
        assert "heard" in links.trouble_of(address)
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: try_send(links, address, b"after", soon()) == b"after")


def test_a_long_wait_is_kept_while_its_server_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PING_AFTER", 0.1)
    monkeypatch.setattr(client, "PING_TIME", 0.6)
    timers: list[threading.Timer] = []

    def later(asked: Asked) -> None:
        timers.append(threading.Timer(1.2, asked.reply, (b"late",)))
        timers[-1].start()

    with listening(later) as listener, linked() as links:
        assert links.send(listener.address, MEMBER, b"wait", soon(60)) == b"late"
    assert len(timers) == 1


def test_who_meets_himself_is_told_apart() -> None:
    with socket.socket() as sock, listening() as listener:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert is_its_own_peer(sock)
        with bare(listener.address) as other:
            assert not is_its_own_peer(other)
