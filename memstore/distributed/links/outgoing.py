"""The sending half of a connection, of clients and servers alike: any thread sends, and none waits.

What the kernel doesn't take at once stays in the outbox, and the connection's epoll is asked to say when there is room
again: whoever reads there calls `flush`.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterable

from memstore.distributed.links.frames import Outbox, frame

FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL  # a program may have set SIGPIPE back to what kills
_COPIED = 1 << 14  # bytes of a message: a copy is cheaper than a list for sendmsg


class Outgoing:
    """After any exception of `send` or `flush` the stream may be torn, and the connection has to be given up.

    Attributes:
        lock: for whoever closes the socket: nothing is sent while it is held.
    """

    def __init__(self, sock: socket.socket, epoll: select.epoll) -> None:
        self._socket, self._epoll = sock, epoll
        self._outbox = Outbox()
        self._events = select.EPOLLIN
        self._reads = True
        self.lock = threading.RLock()  # a signal handler in the middle of `send` may close the connection

    @property
    def nbytes(self) -> int:
        """That wait to be sent."""
        return self._outbox.nbytes

    def send(self, call: int, milliseconds: int, body: bytes) -> None:
        """Sends a message, or what of it there is room for. Raises OSError."""
        with self.lock:
            outbox = self._outbox
            if outbox.nbytes == 0 and len(body) <= _COPIED:
                whole = frame(call, milliseconds, body)
                try:
                    count = self._socket.send(whole, FLAGS)
                except BlockingIOError:
                    count = 0
                if count == len(whole):
                    return
                outbox.add_frames(memoryview(whole)[count:])
            else:
                outbox.add(call, milliseconds, body)
            self._flush()

    def send_short(self, messages: Iterable[tuple[int, bytes]]) -> None:
        """As `send`, of many calls' messages that fit into a frame each: they go in one piece."""
        with self.lock:
            self._outbox.add_frames(memoryview(b"".join(frame(call, 0, body) for call, body in messages)))
            self._flush()

    def flush(self) -> int:
        """Sends what there is room for. Returns how many bytes that were. Raises OSError."""
        with self.lock:
            return self._flush()

    def give_up(self, call: int) -> None:
        """A message that nobody needs any more: what was not sent of it isn't sent."""
        with self.lock:
            self._outbox.give_up(call)

    def read_on(self, reads: bool) -> None:
        """Whether the epoll is to say that there is something to read."""
        with self.lock:
            self._reads = reads
            self._ask()

    def _flush(self) -> int:
        outbox, total = self._outbox, 0
        while outbox.nbytes:
            try:
                count = self._socket.sendmsg(outbox.next_parts(), (), FLAGS)
            except BlockingIOError:
                break
            outbox.sent(count)
            total += count
        self._ask()
        return total

    def _ask(self) -> None:
        events = (select.EPOLLIN if self._reads else 0) | (select.EPOLLOUT if self._outbox.nbytes else 0)
        if events != self._events:
            self._epoll.modify(self._socket.fileno(), events)
            self._events = events
