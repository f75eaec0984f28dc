"""A connection at the listener, once both sides have proven themselves: its requests, and their answers.

It is read by the listener's thread alone. Answers come from any thread, and are sent by it as far as there is room.

What a connection may take: it isn't read while its requests, and the answers that it doesn't take, are more than
LOAD_LIMIT, or while such answers are more than SLOW. Who has MESSAGE_LIMIT of answers to take, and gets another, loses
the connection. TCP itself ends one that takes nothing for 15 s.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from math import inf
from time import monotonic

from memstore._parsing import UNDECODABLE
from memstore.distributed.links import hello
from memstore.distributed.links.frames import MESSAGE_LIMIT, NO_LIMIT, FrameError, Inbox, Message
from memstore.distributed.links.hello import Hello
from memstore.distributed.links.outgoing import Outgoing
from memstore.distributed.links.traffic import Traffic

LOAD_LIMIT = 2 * MESSAGE_LIMIT
SLOW = 1 << 20
SHORT = 256  # bytes of an answer
_COST = 1024  # of a request, beside its bytes

log = logging.getLogger("memstore")


class Asked:
    """A request, for whoever serves it.

    Attributes:
        message: as it was sent.
        deadline: monotonic; nobody waits for the answer after it.
        connection: a number that no other connection of the listener has, or had.
        kind: of the connection: CLIENT or INDEX.
        hello: what the other side says of itself.
    """

    __slots__ = ("_call", "_guest", "callbacks", "connection", "deadline", "hello", "kind", "message")

    def __init__(self, guest: Guest, message: Message, hello: Hello) -> None:
        self._guest, self._call = guest, message.call
        self.message = message.body
        left = message.milliseconds
        self.deadline = inf if left == NO_LIMIT else monotonic() + left / 1000
        self.connection, self.kind, self.hello = guest.number, guest.kind, hello
        self.callbacks: list[Callable[[], None]] = []

    def reply(self, message: bytes) -> None:
        """Answers it. From any thread; it never waits. Nothing happens after the first time, or once nobody listens.

        Raises:
            ValueError: the answer has more than 128 MiB.
        """
        self._guest.answer(self._call, message)

    @staticmethod
    def reply_to_all(answers: Iterable[tuple[Asked, bytes]]) -> None:
        """As `reply` to each of them, in few system calls where the answers are short."""
        short: dict[Guest, list[tuple[int, bytes]]] = {}
        for asked, message in answers:
            if len(message) > SHORT:
                asked.reply(message)
            else:
                short.setdefault(asked._guest, []).append((asked._call, message))
        for guest, some in short.items():
            guest.answer_shortly(some)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls `callback` if the connection ends before the answer: by the listener's thread, or at once."""
        self._guest.call_at_end(self._call, callback)


class Guest:
    """Attributes:
    number, kind: see `Asked`.
    """

    def __init__(
        self,
        number: int,
        kind: int,
        sock: socket.socket,
        epoll: select.epoll,
        serve: Callable[[Asked], None],
        hello_due: float,
        traffic: Traffic,
    ) -> None:
        self.number, self.kind = number, kind
        self._traffic = traffic
        traffic.begin(sock)
        self._socket, self._epoll, self._serve = sock, epoll, serve
        self._hello: Hello | None = None
        self._hello_due = hello_due
        self._inbox = Inbox()
        self._outgoing = Outgoing(sock, epoll)
        self._open: dict[int, Asked] = {}
        self._load = 0
        self._is_read, self._is_closed = True, False
        self._lock = threading.Lock()  # before that of `_outgoing`

    @property
    def has_said_hello(self) -> bool:
        return self._hello is not None

    def is_late(self, now: float) -> bool:
        return self._hello is None and now > self._hello_due

    def greet(self, message: bytes) -> None:
        self._outgoing.send(0, 0, message)

    def react(self, events: int, buffer: memoryview) -> bool:
        """To what the epoll says. False: the connection has ended, or must."""
        if events & (select.EPOLLHUP | select.EPOLLERR):
            return False
        try:
            if events & select.EPOLLOUT:
                self._outgoing.flush()
                self._regulate()
            return not events & select.EPOLLIN or self._read(buffer)
        except (OSError, FrameError, *UNDECODABLE) as error:
            log.info("a connection (%s) ends: %s", self._hello, str(error))
            return False

    def answer(self, call: int, message: bytes) -> None:
        if len(message) > MESSAGE_LIMIT:
            raise ValueError(f"an answer of {len(message):,} bytes: it may have {MESSAGE_LIMIT:,}")
        with self._lock:
            is_open = self._take_out(call)
        if is_open:
            self._send(lambda: self._outgoing.send(call, 0, message))

    def answer_shortly(self, answers: Sequence[tuple[int, bytes]]) -> None:
        """Many calls, with at most SHORT bytes each."""
        with self._lock:
            still_open = [answer for answer in answers if self._take_out(answer[0])]
        if still_open:
            self._send(lambda: self._outgoing.send_short(still_open))

    def _take_out(self, call: int) -> bool:
        """Under the lock. False: nobody listens any more."""
        asked = self._open.pop(call, None)
        if asked is not None:
            self._load -= len(asked.message) + _COST
        return asked is not None

    def _send(self, send: Callable[[], None]) -> None:
        try:
            if self._outgoing.nbytes > MESSAGE_LIMIT:
                raise OSError("it doesn't take its answers")
            send()
            self._regulate()
        except (OSError, ValueError):
            self._end()

    def call_at_end(self, call: int, callback: Callable[[], None]) -> None:
        with self._lock:
            asked = self._open.get(call)
            if asked is not None:
                asked.callbacks.append(callback)
                return
            is_closed = self._is_closed
        if is_closed:
            callback()

    def close(self) -> None:
        """By the listener's thread."""
        with self._lock:
            self._is_closed = True
            left, self._open = self._open, {}
        with self._outgoing.lock:
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._socket.fileno())  # a fork may hold the socket open for a moment
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._traffic.end(self._socket)
            self._socket.close()
        for asked in left.values():
            for callback in asked.callbacks:
                try:
                    callback()
                except Exception:
                    log.exception("what was to be called at the end of a connection failed")

    def _read(self, buffer: memoryview) -> bool:
        try:
            count = self._socket.recv_into(buffer)
        except BlockingIOError:
            return True
        if not count:
            return False
        for message in self._inbox.feed(buffer[:count]):
            self._take(message)
        if self._load > LOAD_LIMIT or self._outgoing.nbytes > SLOW:
            self._regulate()
        return True

    def _take(self, message: Message) -> None:
        if self._hello is None:
            if message.call:
                raise FrameError(f"the first message is call {message.call}, and not a Hello")
            self._hello = hello.decode(message.body)
        elif message.call == 0:
            if message.body:
                raise FrameError("a second Hello")
            self._outgoing.send(0, 0, b"")
        else:
            self._ask(Asked(self, message, self._hello), message.call)

    def _ask(self, asked: Asked, call: int) -> None:
        with self._lock:
            if call in self._open:
                raise FrameError(f"call {call} is under way already")
            self._open[call] = asked
            self._load += len(asked.message) + _COST
        try:
            self._serve(asked)
        except Exception as error:
            log.exception("a request could not be served")
            raise FrameError("it could not be served") from error

    def _regulate(self) -> None:
        with self._lock:
            reads = self._load <= LOAD_LIMIT and self._outgoing.nbytes <= SLOW
            if reads != self._is_read:
                self._is_read = reads
                self._outgoing.read_on(reads)

    def _end(self) -> None:
        """The listener's thread will see that, and close it."""
        with self._outgoing.lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
