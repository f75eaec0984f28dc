"""Streams: the connections over which other hosts send segments to this process. A few are kept, to be used again."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import Protocol

from memstore.distributed.rules import Member
from memstore.distributed.transfers.relay import Relay

_KEPT = 4  # of one host


class Links(Protocol):
    """What makes streams: memstore/distributed/links."""

    def stream(self, address: str, member: bytes | None, deadline: float) -> socket.socket:
        """One whose handshake is done. Raises HomeUnavailableError, LinkRefusedError."""
        ...


class Stream:
    """A connection over which one request is answered at a time.

    Attributes:
        was_kept: it comes of an earlier transfer, so its host may have closed it meanwhile.
    """

    __slots__ = ("member", "socket", "was_kept")

    def __init__(self, stream: socket.socket, member: Member) -> None:
        self.socket, self.member, self.was_kept = stream, member, False
        stream.settimeout(None)

    def set_patience(self, seconds: float) -> None:
        """How long a step may wait for the host: calls raise BlockingIOError then."""
        whole = max(int(seconds), 0)
        wait = struct.pack("@ll", whole, max(int((seconds - whole) * 1e6), 1000))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    @property
    def name(self) -> str:
        """Of the host."""
        return f"{self.member.name or 'the host'} at {self.member.address}"

    def send(self, data: bytes) -> None:
        self.socket.sendall(data, socket.MSG_NOSIGNAL)

    def shut(self) -> None:
        """Whoever waits for something on it fails at once."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


class Streams:
    """Thread-safe. A forked child has none of its parent's, and makes its own.

    Args:
        relay: whether bytes come by another way; None: never.

    Attributes:
        relay: the same.
    """

    def __init__(self, links: Links, relay: Relay | None = None) -> None:
        self._links, self.relay = links, relay
        self._lock = threading.Lock()
        self._kept: dict[bytes, list[Stream]] = {}
        self._pid = os.getpid()

    def take(self, member: Member, deadline: float, *, fresh: bool = False) -> Stream:
        """A stream to a host, which nobody else uses.

        Args:
            fresh: not one that was kept.

        Raises:
            HomeUnavailableError: the host can't be reached.
            LinkRefusedError.
        """
        self._leave_to_parent()
        with self._lock:
            kept = self._kept.get(member.id)
            if kept and not fresh:
                return kept.pop()
        return Stream(self._links.stream(member.address, member.id, deadline), member)

    def give_back(self, stream: Stream) -> None:
        """Keeps a stream on which all was answered."""
        self._leave_to_parent()
        stream.was_kept = True
        with self._lock:
            kept = self._kept.setdefault(stream.member.id, [])
            if len(kept) < _KEPT:
                kept.append(stream)
                return
        stream.close()

    def close(self) -> None:
        self._leave_to_parent()
        with self._lock:
            kept, self._kept = self._kept, {}
        for streams in kept.values():
            for stream in streams:
                stream.close()

    def _leave_to_parent(self) -> None:
        """In a forked child, closes its copies of the parent's: the host sees nothing of it."""
        if self._pid == os.getpid():
            return
        self._lock, kept, self._kept = threading.Lock(), self._kept, {}
        self._pid = os.getpid()
        for streams in kept.values():
            for stream in streams:
                stream.close()
