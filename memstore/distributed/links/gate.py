"""Connections at the listener until they have proven that they know the secret.

At most NEWCOMERS are at this stage, each for HANDSHAKE_TIME at most. Where more knock, the oldest goes as soon as it
has had FAIR_TIME, so that those who never say a word don't keep out others who do.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from memstore.distributed.links import handshake
from memstore.distributed.links.dialing import furnish
from memstore.distributed.links.forks import made
from memstore.distributed.links.outgoing import FLAGS

HANDSHAKE_TIME = 5.0  # seconds
FAIR_TIME = 0.5
NEWCOMERS = 64
_AT_ONCE = 16  # accepts, before those are heard who were accepted before
_OUT_OF_RESOURCES_PAUSE = 0.2

log = logging.getLogger("memstore")


@dataclass(slots=True)
class _Newcomer:
    socket: socket.socket
    greeting: bytes
    since: float
    received: bytes = b""


class Gate:
    """Args:
    listening: bound; non-blocking.
    admit: gets the socket, the kind, and until when it should have said who it is. The socket is in the epoll.
    """

    def __init__(
        self,
        listening: socket.socket,
        epoll: select.epoll,
        secret: bytes | None,
        member: bytes,
        admit: Callable[[socket.socket, int, float], None],
    ) -> None:
        self._listening, self._epoll, self._secret, self._member = listening, epoll, secret, member
        self._admit = admit
        self._newcomers: dict[int, _Newcomer] = {}  # by file descriptor; the oldest first
        self._paused_until = 0.0  # 0: it accepts
        epoll.register(listening.fileno(), select.EPOLLIN)

    def accept(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._make_room():
                return
            try:
                sock = made(lambda: self._listening.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:  # it went away meanwhile
                    continue
                log.warning("no connection can be accepted for now: %s", error.strerror)
                self._pause(monotonic() + _OUT_OF_RESOURCES_PAUSE)  # who knocks is still there then
                return
            self._greet(sock)

    def hears(self, fd: int) -> bool:
        """Reads what a newcomer says, if this is one."""
        newcomer = self._newcomers.get(fd)
        if newcomer is None:
            return False
        try:
            portion = newcomer.socket.recv(handshake.INTRODUCTION_SIZE - len(newcomer.received), FLAGS)
        except BlockingIOError:
            return True
        except OSError:
            portion = b""
        newcomer.received += portion
        if not portion:
            self._drop(fd)
        elif len(newcomer.received) == handshake.INTRODUCTION_SIZE:
            self._judge(fd, newcomer)
        return True

    def tend(self) -> float:
        """Does what is due. Returns the seconds until there is more to do, or -1: nothing is."""
        now = monotonic()
        while self._newcomers:
            fd, oldest = next(iter(self._newcomers.items()))
            if now - oldest.since < HANDSHAKE_TIME:
                break
            self._drop(fd)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._epoll.modify(self._listening.fileno(), select.EPOLLIN)
        due = [one.since + HANDSHAKE_TIME for one in list(self._newcomers.values())[:1]]
        due += [self._paused_until] if self._paused_until else []
        return max(0.0, min(due) - now) if due else -1

    def close(self) -> None:
        for fd in list(self._newcomers):
            self._drop(fd)
        self._listening.close()

    def _make_room(self) -> bool:
        if len(self._newcomers) < NEWCOMERS:
            return True
        fd, oldest = next(iter(self._newcomers.items()))
        if monotonic() - oldest.since < FAIR_TIME:
            self._pause(oldest.since + FAIR_TIME)
            return False
        self._drop(fd)
        return True

    def _pause(self, until: float) -> None:
        self._paused_until = until
        self._epoll.modify(self._listening.fileno(), 0)

    def _greet(self, sock: socket.socket) -> None:
        greeting = handshake.greet(self._member, self._secret)
        try:
            sock.setblocking(False)
            furnish(sock)
            sock.send(greeting, FLAGS)  # there is room in a socket that is new
            self._epoll.register(sock.fileno(), select.EPOLLIN)
        except OSError:  # it has gone already
            sock.close()
            return
        self._newcomers[sock.fileno()] = _Newcomer(sock, greeting, monotonic())

    def _judge(self, fd: int, newcomer: _Newcomer) -> None:
        greeting, introduction = newcomer.greeting, newcomer.received
        is_proven = handshake.is_proven(self._secret, greeting, introduction)
        kind = handshake.kind_asked_for(introduction, self._member) if is_proven else None
        proof = handshake.server_proof(self._secret, greeting, introduction) if is_proven else handshake.WRONG_PROOF
        try:
            newcomer.socket.send(proof, FLAGS)
        except OSError:
            kind = None
        if kind is None:
            self._drop(fd)
            return
        del self._newcomers[fd]
        self._admit(newcomer.socket, kind, newcomer.since + HANDSHAKE_TIME)

    def _drop(self, fd: int) -> None:
        sock = self._newcomers.pop(fd).socket
        self._epoll.unregister(fd)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
