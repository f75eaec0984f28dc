"""Senders: the threads of an index process that send segments, one for each stream of another host."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Protocol

from memstore.distributed.links import Traffic
from memstore.distributed.transfers.keeping import Keeping
from memstore.distributed.transfers.messages import Bring, Fetch, Keep, LetGo, Request, Stage
from memstore.distributed.transfers.sending import IDLE, answer, next_request, prepare, send_elsewhere
from memstore.engine import Root
from memstore.errors import MemstoreError

log = logging.getLogger("memstore")

MOST_STREAMS = 64
_JOIN = 5.0  # seconds for threads to end


class Plane(Protocol):
    """Another way for bytes than streams: see memstore/distributed/rdma. Both raise OSError, which ends the stream."""

    def stage(self, stream: socket.socket, request: Stage) -> None:
        """For an index process of another host."""
        ...

    def bring(self, stream: socket.socket, request: Bring) -> None:
        """For a process of this host."""
        ...


class Senders:
    """Serves streams until it is closed.

    Args:
        root: whose segments are sent.
        most: streams at one time, beside those that keep something.
        traffic: counts what they move.

    Attributes:
        keeping: what readers of other hosts look at.
        plane: set once there is one.
    """

    def __init__(self, root: Root, *, most: int = MOST_STREAMS, traffic: Traffic | None = None) -> None:
        self._root, self._most = root, most
        self._traffic = Traffic() if traffic is None else traffic
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, None] = {}  # those that nobody asks anything, the longest idle first
        self.keeping = Keeping(root)
        self.plane: Plane | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """How many streams there are."""
        return len(self._threads)

    def serve(self, stream: socket.socket) -> None:
        """Takes a stream whose handshake is done, and returns at once.

        Where there are too many, the one that was idle for longest ends, and its client makes another when it needs
        one. If none is idle, the new one ends, and its client tries again.
        """
        thread = threading.Thread(target=self._run, args=(stream,), name="memstore-sender", daemon=True)
        with self._lock:
            is_full = len(self._threads) - len(self.keeping) >= self._most
            if is_full and self._idle:
                longest = next(iter(self._idle))
                del self._idle[longest]
                _end(longest)
            elif is_full or self._is_closed:
                stream.close()
                return
            self._threads[stream] = thread
            self._idle[stream] = None
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: its client tries again
            log.warning("%s: a stream can't be served: %s", self._root.path, str(error))
            self._forget(stream)

    def _run(self, stream: socket.socket) -> None:
        try:
            self._traffic.begin(stream)
            prepare(stream)
            while (request := next_request(stream, None if self.keeping.keeps(stream) else IDLE)) is not None:
                with self._lock:
                    self._idle.pop(stream, None)
                self._answer(stream, request)
                del request
                if not self.keeping.keeps(stream):
                    with self._lock:
                        self._idle[stream] = None
        except (OSError, MemstoreError) as error:
            log.debug("%s: a stream ended: %s: %s", self._root.path, type(error).__name__, str(error))
        finally:
            self._forget(stream)

    def _answer(self, stream: socket.socket, request: Request) -> None:
        if isinstance(request, Fetch):
            answer(self._root, stream, request)
        elif isinstance(request, Keep):
            self.keeping.answer(stream, request)
        elif isinstance(request, LetGo):
            self.keeping.let_go(stream, request)
        elif self.plane is None:
            send_elsewhere(stream, "bytes of this host go over TCP")
        elif isinstance(request, Bring):
            self._traffic.end(stream)  # what goes on to a process of this host is not sent to others
            self.plane.bring(stream, request)
        else:
            self.plane.stage(stream, request)

    def _forget(self, stream: socket.socket) -> None:
        with self._lock:
            self._threads.pop(stream, None)
            self._idle.pop(stream, None)
        self.keeping.forget(stream)
        self._traffic.end(stream)
        stream.close()

    def close(self) -> None:
        """Ends all streams, and waits for their threads."""
        with self._lock:
            self._is_closed = True
            running = list(self._threads.items())
        for stream, _ in running:
            _end(stream)
        for _, thread in running:
            thread.join(_JOIN)


def _end(stream: socket.socket) -> None:
    """Whoever sends or waits on it fails at once. Its own thread closes it."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
