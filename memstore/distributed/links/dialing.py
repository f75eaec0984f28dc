"""A connection to a listener, up to where messages can be sent. It blocks; nothing of it lasts after an error."""

from __future__ import annotations

import errno
import os
import socket
import sys
from time import monotonic
from typing import NamedTuple

from memstore._parsing import UNDECODABLE
from memstore.distributed.links import handshake, hello
from memstore.distributed.links.address import Address
from memstore.distributed.links.forks import made
from memstore.distributed.links.frames import NO_LIMIT, FrameError, Inbox, Message, frame
from memstore.distributed.links.handshake import STREAM
from memstore.distributed.links.hello import Hello
from memstore.errors import LinkRefusedError, ResourceLimitError

CONNECT_TIME = 2.0  # seconds: SYNs are repeated after 1, 3, 7, ... s, so that a healed network is found by trying anew
DIAL_TIME = 4.0
USER_TIMEOUT = 15_000  # milliseconds that bytes may stay without an acknowledgement
_KEEPALIVE = 5  # seconds of silence before the first probe, and between two

# Of the process: no address is to blame.
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Dialed(NamedTuple):
    """A connection on which both sides have proven themselves. On a stream nobody says Hello: it is empty."""

    socket: socket.socket
    member: bytes
    hello: Hello


def dial(
    address: Address, member: bytes | None, secret: bytes | None, kind: int, own: Hello, deadline: float
) -> Dialed:
    """Connects, and shakes hands.

    Args:
        member: the store id that must be there; None: any.

    Raises:
        LinkRefusedError: what is there is not what this process wants, or doesn't want this process.
        ResourceLimitError: this process has no file descriptor left.
        OSError: it can't be reached, or went away; TimeoutError if it took longer than the deadline, or DIAL_TIME.
    """
    deadline = min(deadline, monotonic() + DIAL_TIME)
    try:
        sock = made(lambda: socket.socket(address.family, socket.SOCK_STREAM))
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            text = f"{address}: no socket to connect with: {error.strerror}; raise `ulimit -n`"
            raise ResourceLimitError(text, code=error.errno) from error
        raise
    try:
        furnish(sock)
        _connect(sock, address, min(deadline, monotonic() + CONNECT_TIME))
        return _shake_hands(sock, str(address), member, secret, kind, own, deadline)
    except BaseException:
        sock.close()
        raise


def furnish(sock: socket.socket) -> None:
    """Options of all connections, of both sides."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, USER_TIMEOUT // 1000 // _KEEPALIVE)


def _connect(sock: socket.socket, address: Address, deadline: float) -> None:
    _limit(sock, deadline)
    try:
        sock.connect(address.for_socket())
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # not the other side: and there may be one soon
            why = "this host has no free port to connect from (net.ipv4.ip_local_port_range), or no such network"
            raise OSError(errno.EADDRNOTAVAIL, why) from error
        raise
    if is_its_own_peer(sock):
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def is_its_own_peer(sock: socket.socket) -> bool:
    """Who connects to a free port of his own host may be given just that port to connect from, and meet himself."""
    return sock.getsockname() == sock.getpeername()


def _shake_hands(
    sock: socket.socket, name: str, member: bytes | None, secret: bytes | None, kind: int, own: Hello, deadline: float
) -> Dialed:
    greeting = _receive(sock, handshake.GREETING_SIZE, deadline)
    found = handshake.check_greeting(name, greeting, member, secret)
    introduction = handshake.introduce(greeting, kind, member, secret)
    _send(sock, introduction, deadline)
    proof = _receive(sock, handshake.PROOF_SIZE, deadline)
    handshake.check_proof(name, proof, secret, greeting, introduction)
    if kind == STREAM:
        sock.settimeout(None)
        return Dialed(sock, found, Hello(memstore=""))
    _send(sock, frame(0, NO_LIMIT, hello.encode(own)), deadline)
    theirs = _receive_hello(sock, name, deadline)
    sock.setblocking(False)
    return Dialed(sock, found, theirs)


def _receive_hello(sock: socket.socket, name: str, deadline: float) -> Hello:
    inbox = Inbox()
    messages: list[Message] = []
    try:
        while not messages:
            _limit(sock, deadline)
            portion = sock.recv(1 << 14)
            if not portion:
                raise _closed()
            messages = inbox.feed(memoryview(portion))
        return hello.decode(messages[0].body)
    except (FrameError, *UNDECODABLE) as error:
        raise LinkRefusedError(f"{name} has proven itself, but its first message is none: {error}") from error


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly so many bytes: what follows is for others to read."""
    received = b""
    while len(received) < size:
        _limit(sock, deadline)
        portion = sock.recv(size - len(received))
        if not portion:
            raise _closed()
        received += portion
    return received


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    _limit(sock, deadline)
    sock.sendall(data, socket.MSG_NOSIGNAL)


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    sock.settimeout(left)


def _closed() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "it closed the connection")
