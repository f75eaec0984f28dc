"""How many bytes connections have moved. The kernel counts them (TCP_INFO): whoever sends and receives pays nothing."""

from __future__ import annotations

import socket
import struct
import threading
from typing import NamedTuple

_SIZE = 512  # bytes: of the kernel's answer, which has grown with its versions, and what isn't known is left out
_ACKNOWLEDGED = struct.Struct("=120xQQ")  # and received; since Linux 4.1
_SENT = struct.Struct("=200xQQ")  # and sent again; since Linux 4.19


class Moved(NamedTuple):
    """Bytes, without headers of packets and what was sent again."""

    sent: int = 0
    received: int = 0


class Traffic:
    """The connections of a process, those too that are closed by now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may end a connection
        self._open: set[socket.socket] = set()
        self._past = Moved()

    def begin(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)

    def end(self, sock: socket.socket) -> None:
        """Call it just before the socket is closed. Nothing happens the second time."""
        with self._lock:
            if sock in self._open:
                self._open.remove(sock)
                self._past = _sum(self._past, moved_by(sock))

    def moved(self) -> Moved:
        with self._lock:
            total = self._past
            for sock in self._open:
                total = _sum(total, moved_by(sock))
            return total


def moved_by(sock: socket.socket) -> Moved:
    """Zeros: the socket is closed, or the kernel doesn't say."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return Moved()
    if len(info) < _ACKNOWLEDGED.size:
        return Moved()
    acknowledged, received = _ACKNOWLEDGED.unpack_from(info)
    if len(info) < _SENT.size:
        return Moved(acknowledged, received)
    sent, again = _SENT.unpack_from(info)
    return Moved(sent - again, received)


def _sum(one: Moved, other: Moved) -> Moved:
    return Moved(one.sent + other.sent, one.received + other.received)
