"""Listeners for tests, which answer what they are asked, and links to them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator
from time import monotonic
from typing import Any

import pytest

from memstore.distributed.links import CLIENT, Asked, Hello, Links, Listener, parse_address
from memstore.distributed.links.client import dial
from memstore.errors import HomeUnavailableError

MEMBER = bytes(range(16))
SECRET = b"s" * 32
HELLO = Hello(memstore="1", host="here")
LOOPBACK = "tcp://127.0.0.1:0"
LOOPBACK6 = "tcp://[::1]:0"


def soon(seconds: float = 20.0) -> float:
    return monotonic() + seconds


def echo(asked: Asked) -> None:
    asked.reply(asked.message)


def refuse_streams(sock: socket.socket) -> None:
    sock.close()


def new_links(*, secret: bytes | None = SECRET, kind: int = CLIENT) -> Links:
    return Links(secret=secret, kind=kind, hello=Hello(memstore="2", host="there"))


def started_listener(
    serve: Callable[[Asked], None] = echo,
    *,
    address: str = LOOPBACK,
    secret: bytes | None = SECRET,
    stream: Callable[[socket.socket], None] = refuse_streams,
    **options: Any,
) -> Listener:
    listener = Listener(address, secret=secret, member=MEMBER, hello=HELLO, serve=serve, stream=stream, **options)
    listener.start()
    return listener


@contextlib.contextmanager
def listening(serve: Callable[[Asked], None] = echo, **options: Any) -> Generator[Listener]:
    listener = started_listener(serve, **options)
    try:
        yield listener
    finally:
        listener.close()


@contextlib.contextmanager
def linked(*, secret: bytes | None = SECRET, kind: int = CLIENT) -> Generator[Links]:
    links = new_links(secret=secret, kind=kind)
    try:
        yield links
    finally:
        links.close()


def bare(address: str) -> socket.socket:
    """A connection of somebody who says nothing yet."""
    place = parse_address(address)
    sock = socket.socket(place.family, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(place.for_socket())
    return sock


def proven(address: str) -> socket.socket:
    """A connection of somebody who knows the secret, and is to send frames next."""
    sock = dial(parse_address(address), MEMBER, SECRET, CLIENT, HELLO, soon()).socket
    sock.settimeout(20)
    return sock


def received(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or what came before the end."""
    whole = b""
    while len(whole) < size and (portion := sock.recv(size - len(whole))):
        whole += portion
    return whole


def is_closed(sock: socket.socket) -> bool:
    """Reads to the end, which must come within the socket's timeout. Closes it."""
    with sock:
        try:
            while sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
    return True


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Asks again and again. Raises TimeoutError."""
    deadline = soon(seconds)
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError(f"not so within {seconds} s")
        time.sleep(0.005)


def try_send(links: Links, address: str, message: bytes, deadline: float) -> bytes | None:
    """The answer; None also where nothing could be sent."""
    try:
        return links.send(address, MEMBER, message, deadline)
    except HomeUnavailableError:
        return None


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(number)` in so many threads, and raises what the first of them raises."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for error in errors:
        raise error
    assert not any(thread.is_alive() for thread in threads)


def _why_no_ipv6() -> str | None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError as error:
        return f"no IPv6 here: {error}"
    return None


needs_ipv6 = pytest.mark.skipif(bool(_why_no_ipv6()), reason=_why_no_ipv6() or "")
both_families = pytest.mark.parametrize("address", [LOOPBACK, pytest.param(LOOPBACK6, marks=needs_ipv6)])
