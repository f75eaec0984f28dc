"""The server: one thread accepts, shakes hands and reads; others serve requests, and answer.

A connection takes four steps:

1. `Handshakes.accept` takes it, and greets.
2. `Handshakes.hear` compares what it answers, byte by byte as it comes, and admits who knows the secret.
3. `ServerConnection` reads its messages: a Hello, then requests, each of which goes to `serve` as an `Asked`.
4. `Asked.reply` sends the answer, in any thread; what there is no room for, the listener's thread sends later.

(A thread for each connection with blocking reads was measured, 1 KiB on loopback, 2 cores: with 1 client 20 to 26 us
where this takes 32; with 16 more calls; with 500 half as many, 8,000 a second against 14,000, in 67 MB against 27.)
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

from memstore._parsing import UNDECODABLE
from memstore.distributed.links import handshake
from memstore.distributed.links.frames import FLAGS, MESSAGE_LIMIT, NO_LIMIT, FrameError, Inbox, Message, Outgoing
from memstore.distributed.links.handshake import STREAM, Hello, Wanted
from memstore.distributed.links.sockets import Address, Traffic, furnish, leave_in_forks, made, parse_address
from memstore.errors import AddressUnavailableError, SecretError

# --- Handshakes under way --------------------------------------------------------------------------------------------
# Connections at the listener until they have proven that they know the secret.
#
# At most NEWCOMERS are at this stage, each for HANDSHAKE_TIME at most. Where more come, the oldest goes as soon as it
# has had FAIR_TIME, so that those who never say a word don't keep out others who do.

HANDSHAKE_TIME = 5.0  # seconds
FAIR_TIME = 0.5
NEWCOMERS = 64
_AT_ONCE = 16  # accepts, before those are heard who were accepted before
_OUT_OF_RESOURCES_PAUSE = 0.2

log = logging.getLogger("memstore")


@dataclass(slots=True)
class _Handshake:
    socket: socket.socket
    greeting: bytes
    since: float
    received: bytes = b""


class Handshakes:
    """Connections that are not admitted yet.

    Args:
        listening: bound; non-blocking.
        admit: gets the socket, what its client wants, and until when its Hello must have come. The socket is in the
            epoll.
    """

    def __init__(
        self,
        listening: socket.socket,
        epoll: select.epoll,
        secret: bytes | None,
        member: bytes,
        admit: Callable[[socket.socket, Wanted, float], None],
    ) -> None:
        self._listening, self._epoll, self._secret, self._member = listening, epoll, secret, member
        self._admit = admit
        self._under_way: dict[int, _Handshake] = {}  # by file descriptor; the oldest first
        self._paused_until = 0.0  # 0: it accepts
        epoll.register(listening.fileno(), select.EPOLLIN)

    def accept(self) -> None:
        """Takes some of those that wait to be accepted, and greets them."""
        for _ in range(_AT_ONCE):
            if len(self._under_way) >= NEWCOMERS:
                fd, oldest = next(iter(self._under_way.items()))
                if monotonic() - oldest.since < FAIR_TIME:
                    self._pause(oldest.since + FAIR_TIME)
                    return
                self._drop(fd)
            try:
                sock = made(lambda: self._listening.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:  # it went away meanwhile
                    continue
                log.warning("no connection can be accepted for now: %s", error.strerror)
                self._pause(monotonic() + _OUT_OF_RESOURCES_PAUSE)  # who waits is still there then
                return
            greeting = handshake.greet(self._member, self._secret)
            try:
                sock.setblocking(False)
                furnish(sock)
                sock.send(greeting, FLAGS)  # there is room in a socket that is new
                self._epoll.register(sock.fileno(), select.EPOLLIN)
            except OSError:  # it has gone already
                sock.close()
                continue
            self._under_way[sock.fileno()] = _Handshake(sock, greeting, monotonic())

    def hear(self, fd: int) -> bool:
        """Reads what one of them answers. False: it is none of them."""
        one = self._under_way.get(fd)
        if one is None:
            return False
        try:
            portion = one.socket.recv(handshake.INTRODUCTION_SIZE - len(one.received), FLAGS)
        except BlockingIOError:
            return True
        except OSError:
            portion = b""
        one.received += portion
        if not portion:
            self._drop(fd)
        elif len(one.received) == handshake.INTRODUCTION_SIZE:
            self._judge(fd, one)
        return True

    def _judge(self, fd: int, one: _Handshake) -> None:
        greeting, introduction = one.greeting, one.received
        wanted, proof = None, handshake.WRONG_PROOF
        if handshake.is_proven(self._secret, greeting, introduction):
            wanted = handshake.wanted(introduction, self._member)
            proof = handshake.server_proof(self._secret, greeting, introduction)
        try:
            one.socket.send(proof, FLAGS)
        except OSError:
            wanted = None
        if wanted is None:
            self._drop(fd)
            return
        del self._under_way[fd]
        self._admit(one.socket, wanted, one.since + HANDSHAKE_TIME)

    def tend(self, now: float) -> float:
        """Ends who is late. Returns when there is more to do, or inf."""
        for fd, one in list(self._under_way.items()):
            if now - one.since < HANDSHAKE_TIME:
                break
            self._drop(fd)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._epoll.modify(self._listening.fileno(), select.EPOLLIN)
        oldest = next(iter(self._under_way.values()), None)
        return min(self._paused_until or inf, inf if oldest is None else oldest.since + HANDSHAKE_TIME)

    def close(self) -> None:
        for fd in list(self._under_way):
            self._drop(fd)
        self._listening.close()

    def _pause(self, until: float) -> None:
        self._paused_until = until
        self._epoll.modify(self._listening.fileno(), 0)

    def _drop(self, fd: int) -> None:
        sock = self._under_way.pop(fd).socket
        self._epoll.unregister(fd)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


# --- A connection, once both sides have proven themselves ------------------------------------------------------------
# It is read by the listener's thread alone. Answers come from any thread, and are sent by it as far as there is room.
#
# What a connection may take: it isn't read while its requests, and the answers that it doesn't take, are more than
# LOAD_LIMIT, or while such answers are more than SLOW. Who has MESSAGE_LIMIT of answers to take, and gets another,
# loses the connection. TCP itself ends one that takes nothing for 15 s.

LOAD_LIMIT = 2 * MESSAGE_LIMIT
SLOW = 1 << 20
SHORT = 256  # bytes of an answer
_REQUEST_COST = 1024  # of a request, beside its bytes


class Asked:
    """A request, for whoever serves it.

    Attributes:
        message: as it was sent.
        deadline: monotonic; nobody waits for the answer after it.
        connection: a number that no other connection of the listener has, or had.
        kind: of the connection: CLIENT or INDEX.
        protocol: that both sides of the connection speak.
        hello: what the other side says of itself.
    """

    __slots__ = ("_call", "_connection", "callbacks", "connection", "deadline", "hello", "kind", "message", "protocol")

    def __init__(self, connection: ServerConnection, message: Message, hello: Hello) -> None:
        self._connection, self._call = connection, message.call
        self.message = message.body
        left = message.milliseconds
        self.deadline = inf if left == NO_LIMIT else monotonic() + left / 1000
        self.connection, self.hello = connection.number, hello
        self.kind, self.protocol = connection.kind, connection.protocol
        self.callbacks: list[Callable[[], None]] = []

    def reply(self, message: bytes) -> None:
        """Answers it. From any thread; it never waits. Nothing happens after the first time, or once nobody listens.

        Raises:
            ValueError: the answer has more than 128 MiB.
        """
        if len(message) > MESSAGE_LIMIT:
            raise ValueError(f"an answer of {len(message):,} bytes: it may have {MESSAGE_LIMIT:,}")
        self._connection.answer([(self._call, message)])

    @staticmethod
    def reply_to_all(answers: Iterable[tuple[Asked, bytes]]) -> None:
        """Answers each of them, as `reply` does, in few system calls where the answers are short."""
        short: dict[ServerConnection, list[tuple[int, bytes]]] = {}
        for asked, message in answers:
            if len(message) > SHORT:
                asked.reply(message)
            else:
                short.setdefault(asked._connection, []).append((asked._call, message))
        for connection, some in short.items():
            connection.answer(some)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls `callback` if the connection ends before the answer: by the listener's thread, or at once."""
        self._connection.call_at_end(self._call, callback)


class ServerConnection:
    """A connection that was admitted.

    Args:
        number: see `Asked`.
        wanted: the kind of the connection, and its protocol.
        hello_due: when its Hello must have come, monotonic.
    """

    def __init__(
        self,
        number: int,
        wanted: Wanted,
        sock: socket.socket,
        epoll: select.epoll,
        serve: Callable[[Asked], None],
        hello_due: float,
        traffic: Traffic,
    ) -> None:
        self.number, self.hello_due = number, hello_due
        self.kind, self.protocol = wanted
        self._traffic = traffic
        traffic.begin(sock)
        self._socket, self._epoll, self._serve = sock, epoll, serve
        self.hello: Hello | None = None
        self._inbox = Inbox()
        self.outgoing = Outgoing(sock, epoll)
        self._open: dict[int, Asked] = {}
        self._load = 0
        self._is_read, self._is_closed = True, False
        self._lock = threading.Lock()  # before that of `outgoing`

    # --- by the listener's thread -------------------------------------------------------------------------------------

    def react(self, events: int, buffer: memoryview) -> bool:
        """Does what the epoll says that can be done. False: the connection has ended, or must."""
        if events & (select.EPOLLHUP | select.EPOLLERR):
            return False
        try:
            if events & select.EPOLLOUT:
                self.outgoing.flush()
            if events & select.EPOLLIN:
                try:
                    count = self._socket.recv_into(buffer)
                except BlockingIOError:
                    return True
                if not count:
                    return False
                for message in self._inbox.feed(buffer[:count]):
                    self._take(message)
            if not self._is_read or self._load > LOAD_LIMIT or self.outgoing.nbytes > SLOW:
                self._regulate()
            return True
        except (OSError, FrameError, *UNDECODABLE) as error:
            log.info("a connection (%s) ends: %s", self.hello, str(error))
            return False

    def _take(self, message: Message) -> None:
        call = message.call
        if self.hello is None:
            if call:
                raise FrameError(f"the first message is call {call}, and not a Hello")
            self.hello = handshake.decode_hello(message.body)
            return
        if call == 0:
            if message.body:
                raise FrameError("a second Hello")
            self.outgoing.send(0, 0, b"")  # it asks for a sign of life
            return
        asked = Asked(self, message, self.hello)
        with self._lock:
            if call in self._open:
                raise FrameError(f"call {call} is under way already")
            self._open[call] = asked
            self._load += len(asked.message) + _REQUEST_COST
        try:
            self._serve(asked)
        except Exception as error:
            log.exception("a request could not be served")
            raise FrameError("it could not be served") from error

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            left, self._open = self._open, {}
        with self.outgoing.lock:
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

    # --- by any thread ------------------------------------------------------------------------------------------------

    def answer(self, answers: Sequence[tuple[int, bytes]]) -> None:
        """Answers calls. If there are several, each answer has at most SHORT bytes."""
        with self._lock:
            still_open: list[tuple[int, bytes]] = []
            for call, message in answers:
                asked = self._open.pop(call, None)
                if asked is not None:
                    self._load -= len(asked.message) + _REQUEST_COST
                    still_open.append((call, message))
        if not still_open:
            return
        outgoing = self.outgoing
        try:
            if outgoing.nbytes > MESSAGE_LIMIT:
                raise OSError("it doesn't take its answers")
            if len(still_open) == 1:
                outgoing.send(still_open[0][0], 0, still_open[0][1])
            else:
                outgoing.send_short(still_open)
            if not self._is_read or outgoing.nbytes > SLOW:
                self._regulate()
        except (OSError, ValueError):
            with outgoing.lock, contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # the listener's thread will see that, and close it

    def call_at_end(self, call: int, callback: Callable[[], None]) -> None:
        with self._lock:
            asked = self._open.get(call)
            if asked is not None:
                asked.callbacks.append(callback)
                return
            is_closed = self._is_closed
        if is_closed:
            callback()

    def _regulate(self) -> None:
        """Reads on, or doesn't."""
        with self._lock:
            reads = self._load <= LOAD_LIMIT and self.outgoing.nbytes <= SLOW
            if reads != self._is_read:
                self._is_read = reads
                self.outgoing.read_on(reads)


# --- The listener ----------------------------------------------------------------------------------------------------
# One thread accepts, shakes hands, and reads; others serve, and answer.

_BACKLOG = 1024
_SERVER_PORTION = 1 << 18


class Listener:
    """Listens at one address, and at no other, from the moment it is made. Who connects is answered from `start` on.

    Args:
        address: `tcp://IP:PORT`; with port 0 it gets a free one.
        secret: of the cluster; None: anybody is let in, so only a loopback address will do, unless `insecure`.
        member: the store id, 16 bytes.
        hello: what it says of itself.
        serve: gets each request, in the listener's thread: it must not wait, for others would wait with it.
        stream: gets the blocking socket of each stream, as `serve` does. It closes it.
        ended: gets the number of each connection that has ended (`Asked.connection`), as `serve` does.
        insecure: no secret is wanted, at whatever address.
        traffic: counts what its connections move, but for streams.

    Raises:
        InvalidAddressError: the address is none.
        AddressUnavailableError: it is taken, or not one of this host.
        SecretError: it can be reached from elsewhere, and there is no secret.

    Attributes:
        address: as bound.
        turns: how often its thread has come round.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None,
        member: bytes,
        hello: Hello,
        serve: Callable[[Asked], None],
        stream: Callable[[socket.socket], None],
        ended: Callable[[int], None] = lambda connection: None,
        insecure: bool = False,
        traffic: Traffic | None = None,
    ) -> None:
        self._traffic = Traffic() if traffic is None else traffic
        place = parse_address(address)
        if not secret and not (place.is_loopback or insecure):
            raise SecretError(
                f"{address} can be reached from other hosts, and there is no secret: name its file in "
                "MEMSTORE_SECRET_FILE, or listen at 127.0.0.1 or [::1]; with `memstore serve --insecure`, "
                "whoever can connect may change the store"
            )
        self._hello, self._serve, self._stream, self._ended = handshake.encode_hello(hello), serve, stream, ended
        self._listening = _bind(place)
        self.address = str(Address(place.ip, self._listening.getsockname()[1], place.scope))
        self.turns = 0
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # rung by `close` and `nudge`
        self._epoll.register(self._bell, select.EPOLLIN)
        self._handshakes = Handshakes(self._listening, self._epoll, secret, member, self._admit)
        self._connections: dict[int, ServerConnection] = {}
        self._silent: dict[int, ServerConnection] = {}  # those of them whose Hello hasn't come
        self._numbers = itertools.count(1)
        self._buffer = memoryview(bytearray(_SERVER_PORTION))
        self._thread = threading.Thread(target=self._run, name="memstore-listener", daemon=True)
        self._is_closing = self._is_closed = False
        self._closing = threading.Lock()
        leave_in_forks(self)

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """Has its thread come round once, if it can. From any thread."""
        with self._closing:
            if not self._is_closed:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Ends all connections, and returns when that is done. From any thread."""
        self._is_closing = True
        if self._thread is threading.current_thread():
            return  # it does so when it comes back to its loop
        if self._thread.ident is None:
            self._end()
            return
        with self._closing:
            if not self._is_closed:
                os.eventfd_write(self._bell, 1)
        self._thread.join()

    def leave_to_parent(self) -> None:
        self._closing = threading.Lock()
        if not self._is_closed:  # else its numbers are those of other files by now
            self._is_closing = self._is_closed = True
            self._epoll.close()
            os.close(self._bell)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                events = self._epoll.poll(self._tend())
                self.turns += 1
                some_wait = False
                for fd, what in events:
                    connection = self._connections.get(fd)
                    if connection is not None:
                        if not connection.react(what, self._buffer):
                            self._lose(fd)
                        elif self._silent and connection.hello is not None:
                            self._silent.pop(fd, None)
                    elif fd == self._listening.fileno():
                        some_wait = True  # last: it may give descriptors anew that other events of this round are about
                    elif fd == self._bell:
                        os.eventfd_read(fd)
                    else:
                        self._handshakes.hear(fd)
                if some_wait:
                    self._handshakes.accept()
        except Exception:
            log.exception("the listener at %s ends", self.address)
        finally:
            self._end()

    def _tend(self) -> float:
        """Ends who is late. Returns the seconds until the next may be, or -1."""
        now = monotonic()
        for fd, connection in list(self._silent.items()):
            if now > connection.hello_due:
                self._lose(fd)
        due = min(self._handshakes.tend(now), now + 1.0 if self._silent else inf)
        return -1 if due == inf else max(0.0, due - now)

    def _lose(self, fd: int) -> None:
        self._silent.pop(fd, None)
        connection = self._connections.pop(fd)
        connection.close()
        self._ended(connection.number)

    def _admit(self, sock: socket.socket, wanted: Wanted, hello_due: float) -> None:
        fd = sock.fileno()
        if wanted.kind == STREAM:
            self._epoll.unregister(fd)
            sock.setblocking(True)
            try:
                self._stream(sock)
            except Exception:
                log.exception("a stream could not be served")
                sock.close()
            return
        connection = ServerConnection(
            next(self._numbers), wanted, sock, self._epoll, self._serve, hello_due, self._traffic
        )
        self._connections[fd] = self._silent[fd] = connection
        try:
            connection.outgoing.send(0, 0, self._hello)
        except OSError:
            self._lose(fd)

    def _end(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            for fd in list(self._connections):
                self._lose(fd)
            self._handshakes.close()
            self._epoll.close()
            os.close(self._bell)


def _bind(place: Address) -> socket.socket:
    try:
        sock = made(lambda: socket.socket(place.family, socket.SOCK_STREAM))
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # at once after the end of another one
            if place.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(place.for_socket())
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except BaseException:
            with contextlib.suppress(OSError):
                sock.close()
            raise
    except OSError as error:
        raise AddressUnavailableError(
            f"{place}: this process can't listen there: {error.strerror}; give a free address of this host "
            "(--address; of memstore.join MEMSTORE_ADDRESS)",
            code=error.errno,
        ) from error
    return sock
