"""The client: a connection to each address, which a process's threads share, and which is made again when it broke."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from memstore._parsing import UNDECODABLE
from memstore.distributed.links import handshake
from memstore.distributed.links.frames import MESSAGE_LIMIT, NO_LIMIT, FrameError, Inbox, Message, Outgoing, frame
from memstore.distributed.links.handshake import STREAM, Hello, check_member
from memstore.distributed.links.sockets import (
    Address,
    Traffic,
    furnish,
    is_its_own_peer,
    leave_in_forks,
    made,
    parse_address,
)
from memstore.errors import HomeUnavailableError, LinkRefusedError, ResourceLimitError, StoreClosedError

# --- A connection is made --------------------------------------------------------------------------------------------
# A connection to a listener, up to where messages can be sent. It blocks; nothing of it lasts after an error.


CONNECT_TIME = 2.0  # seconds: SYNs are repeated after 1, 3, 7, ... s, so that a healed network is found by trying anew
DIAL_TIME = 4.0

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
    name, deadline = str(address), min(deadline, monotonic() + DIAL_TIME)
    try:
        sock = made(lambda: socket.socket(address.family, socket.SOCK_STREAM))
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            text = f"{address}: no socket to connect with: {error.strerror}; raise `ulimit -n`"
            raise ResourceLimitError(text, code=error.errno) from error
        raise
    try:
        # 1. Connect.
        furnish(sock)
        _limit(sock, min(deadline, monotonic() + CONNECT_TIME))
        try:
            sock.connect(address.for_socket())
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # not the other side: and there may be one soon
                why = "this host has no free port to connect from (net.ipv4.ip_local_port_range), or no such network"
                raise OSError(errno.EADDRNOTAVAIL, why) from error
            raise
        if is_its_own_peer(sock):
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

        # 2. It greets, and says which member it is; this process proves that it knows the secret.
        greeting = _receive(sock, handshake.GREETING_SIZE, deadline)
        found = handshake.check_greeting(name, greeting, member, secret)
        introduction = handshake.introduce(greeting, kind, member, secret)
        _limit(sock, deadline)
        sock.sendall(introduction, socket.MSG_NOSIGNAL)

        # 3. It proves the same.
        proof = _receive(sock, handshake.PROOF_SIZE, deadline)
        handshake.check_proof(name, proof, secret, greeting, introduction)
        if kind == STREAM:
            sock.settimeout(None)
            return Dialed(sock, found, Hello(memstore=""))

        # 4. Both say who they are. What follows is messages.
        _limit(sock, deadline)
        sock.sendall(frame(0, NO_LIMIT, handshake.encode_hello(own)), socket.MSG_NOSIGNAL)
        inbox, messages = Inbox(), list[Message]()
        try:
            while not messages:
                messages = inbox.feed(memoryview(_receive(sock, 1 << 14, deadline, least=1)))
            other = handshake.decode_hello(messages[0].body)
        except (FrameError, *UNDECODABLE) as error:
            raise LinkRefusedError(f"{name} has proven itself, but its first message is none: {error}") from error
        sock.setblocking(False)
        return Dialed(sock, found, other)
    except BaseException:
        sock.close()
        raise


def _receive(sock: socket.socket, size: int, deadline: float, least: int | None = None) -> bytes:
    """Receives so many bytes; or what comes, if it is at least `least`."""
    received = b""
    while len(received) < (least or size):
        _limit(sock, deadline)
        portion = sock.recv(size - len(received))
        if not portion:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        received += portion
    return received


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    sock.settimeout(left)


# --- Requests that no thread waits for -------------------------------------------------------------------------------
# Requests that no thread waits for: who began one is told when its answer is there, or when none will come.


_LINGER = 1.0  # seconds that the thread waits for another request, before it ends


class Begun:
    """One that is under way, of `Links.begin`.

    Attributes:
        answer: None: there is none yet; or, once it `is_over`, the connection broke, and nobody knows whether it came.
        is_over: nothing more will come.
    """

    __slots__ = ("_give_up", "_told", "answer", "is_over")

    def __init__(self, told: Callable[[], None], give_up: Callable[[], None]) -> None:
        self._told, self._give_up = told, give_up
        self.answer: bytes | None = None
        self.is_over = False

    def end(self, answer: bytes | None) -> None:
        """By its connection, in any thread. A second time says nothing new."""
        if not self.is_over:
            self.answer = answer
            self.is_over = True
        self._told()

    def give_up(self) -> None:
        """Nobody wants the answer any more. What was not sent of the request isn't sent."""
        self._give_up()


class BegunRequests:
    """The requests of one connection that nobody waits for, and the thread that reads their answers.

    There is a thread while there are any, and a moment longer. It is one more who waits for answers: it leads when
    nobody else does.

    Attributes:
        begun: the requests, by call.
        wake: locked until there is something to do for the thread: a request, or the lead.
    """

    def __init__(self) -> None:
        self.begun: dict[int, Begun] = {}
        self.wake = threading.Lock()
        self.wake.acquire()
        self._starting = threading.Lock()
        self._is_running = False

    def start(self, lead: Callable[[], None]) -> None:
        """Has `lead` called, by the thread, as long as there are requests; it may wait, and returns now and then."""
        with self._starting:
            if self._is_running:
                self.rouse()
            else:
                threading.Thread(target=self._run, args=(lead,), name="memstore links", daemon=True).start()
                self._is_running = True

    def rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was roused already
            self.wake.release()

    def end_all(self) -> None:
        """The connection is broken."""
        while self.begun:
            with contextlib.suppress(KeyError):  # another thread does the same
                self.begun.popitem()[1].end(None)

    def _run(self, lead: Callable[[], None]) -> None:
        while True:
            if self.begun:
                lead()
            elif not self.wake.acquire(timeout=_LINGER):
                with self._starting:
                    if not self.begun:
                        self._is_running = False
                        return


# --- A connection ----------------------------------------------------------------------------------------------------
# A client's connection: many threads have requests under way, and each of them may be the one who reads.
#
# No thread of its own reads. Of those who wait for answers one is the *leader*: it waits on the socket, and hands out
# what comes to the others, who sleep. When it has its own answer it makes way for one of them. So a lone caller sends
# and receives in its own thread, and no other has to be woken.
#
# A leader that has heard nothing for PING_AFTER seconds asks for a sign of life, and gives the connection up when none
# comes in PING_TIME. TCP alone would find out in 15 s; and after a cut of 10 s it may be silent for 5 s more, since the
# pauses between its repetitions double, where a new connection works at once.
#
# Who is interrupted (KeyboardInterrupt) while it waits leaves, and nothing is lost. In the middle of reading or sending
# bytes may be, and the connection is given up: others see it break.


PING_AFTER = 1.0  # seconds
PING_TIME = 3.0
IDLE = 0.05  # seconds after which a connection is looked at before it is used again: it may have ended meanwhile
_PORTION = 1 << 16


class _Waiting:
    """A request under way. `wake` is locked until there is something to look at: an answer, or the lead."""

    __slots__ = ("answer", "is_done", "wake")

    def __init__(self) -> None:
        self.answer: bytes | None = None
        self.is_done = False
        self.wake = threading.Lock()
        self.wake.acquire()

    def rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was roused already
            self.wake.release()


class Connection:
    """Made of a connection that is dialed already, and owns its socket.

    Args:
        traffic: counts what it moves.

    Attributes:
        member: the store id of the other side.
        hello: what it says of itself.
        is_broken: it is of no use any more. Requests that were under way have no answer.
        trouble: why it is broken.
        has_answered: at least one request.
    """

    def __init__(self, dialed: Dialed, traffic: Traffic | None = None) -> None:
        self.member, self.hello = dialed.member, dialed.hello
        self.is_broken = self.has_answered = False
        self.trouble = ""
        self._socket: socket.socket = dialed.socket
        self._traffic = traffic
        if traffic is not None:
            traffic.begin(self._socket)
        self._epoll = select.epoll(1)
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self._outgoing = Outgoing(self._socket, self._epoll)
        self._inbox = Inbox()
        self._buffer = memoryview(bytearray(_PORTION))
        self._calls = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._begun = BegunRequests()
        # The leader, under 0: only he reads the socket, and closes it. No lock: who is interrupted just after he took
        # it would not know that he has. Here he looks, where he leaves, in statements that call nothing: signals are
        # handled at calls, and threads take turns there.
        self._leader: dict[int, object] = {}
        self._heard = monotonic()
        self._quiet_since = 0.0  # an answer is waited for, and nothing has come since then; 0: something has
        self._pinged = 0.0  # since then, or 0
        leave_in_forks(self)

    def request(self, message: bytes, deadline: float) -> bytes | None:
        """The answer. None: there was none by the deadline, or the connection broke."""
        call, waiting = next(self._calls), _Waiting()
        try:
            self._waiting[call] = waiting
            now = monotonic()
            self._send(call, message, _milliseconds(deadline - now))
            if not self._quiet_since:
                self._quiet_since = now
            while not (waiting.is_done or self.is_broken):
                left = deadline - monotonic()
                if left <= 0:
                    break
                if self._leader.setdefault(0, waiting) is not waiting:
                    waiting.wake.acquire(timeout=min(left, PING_AFTER))
                elif not self._look(min(left, PING_AFTER)):
                    self._mind_silence()
            return waiting.answer
        finally:
            if 0 in self._leader and self._leader[0] is waiting:
                del self._leader[0]
            if call in self._waiting:
                del self._waiting[call]
            # If this is interrupted, the others go on when they look again.
            if self.is_broken:
                self._close()
            elif not waiting.is_done:
                self._outgoing.give_up(call)
            if (self._waiting or self._begun.begun) and not self._leader:
                self._hand_on()

    def begin(self, message: bytes, seconds: float, told: Callable[[], None]) -> Begun:
        """Sends a request for which no thread waits: another thread calls `told`, which must not wait either.

        Args:
            seconds: for which the other side need answer.
        """
        call = next(self._calls)

        def give_up() -> None:
            self._begun.begun.pop(call, None)
            self._outgoing.give_up(call)

        begun = self._begun.begun[call] = Begun(told, give_up)
        self._send(call, message, _milliseconds(seconds))
        self._quiet_since = self._quiet_since or monotonic()
        if self.is_broken:
            self._begun.end_all()
        else:
            self._begun.start(self._lead_for_begun)
        return begun

    def is_usable(self) -> bool:
        """Whether it works, as far as can be seen without asking the other side."""
        if not (self.is_broken or self._leader or monotonic() - self._heard < IDLE):
            looker = object()
            try:
                if self._leader.setdefault(0, looker) is looker:
                    self._look(0)
            finally:
                if 0 in self._leader and self._leader[0] is looker:
                    del self._leader[0]
            if self._begun.begun:
                self._begun.rouse()  # it may have wanted the lead just then
            if self.is_broken:
                self._close()
        return not self.is_broken

    def break_off(self, trouble: str) -> None:
        """Ends it, for all who wait."""
        with self._outgoing.lock:
            if not self.is_broken:
                self.trouble = trouble
                self.is_broken = True
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes the leader
        self._close()
        self._begun.end_all()
        for waiting in list(self._waiting.values()):
            waiting.rouse()

    def leave_to_parent(self) -> None:
        self.is_broken = True
        self.trouble = "the process was forked"
        self._socket.close()
        self._epoll.close()

    # --- the leader ---------------------------------------------------------------------------------------------------

    def _lead_for_begun(self) -> None:
        """Leads until there are no requests that nobody waits for, or waits while others lead. By their thread."""
        begun = self._begun
        try:
            if self._leader.setdefault(0, begun) is not begun:
                begun.wake.acquire(timeout=PING_AFTER)
                return
            while begun.begun and not self.is_broken:
                if not self._look(PING_AFTER):
                    self._mind_silence()
        finally:
            if self._leader.get(0) is begun:
                del self._leader[0]
                self._hand_on()

    def _look(self, seconds: float) -> bool:
        """Waits for something to read, or for room to send, and does it. False: there was nothing."""
        try:
            events = self._epoll.poll(seconds, 1)
        except ValueError:  # closed in a child that was forked in the middle of this call
            self.break_off("the process was forked")
            return True
        if not events:
            return False
        try:
            if events[0][1] & select.EPOLLOUT and self._outgoing.flush():
                self._hear()
            if events[0][1] & ~select.EPOLLOUT:
                try:
                    count = self._socket.recv_into(self._buffer)
                except BlockingIOError:
                    return True
                if not count:
                    raise ConnectionResetError("the other side closed the connection")
                for message in self._inbox.feed(self._buffer[:count]):
                    self._take(message)
                self._hear()
        except (OSError, ValueError, FrameError) as error:
            self.break_off(str(error))
        except BaseException:
            self.break_off("a thread was interrupted while it read")
            raise
        return True

    def _take(self, message: Message) -> None:
        waiting = self._waiting.get(message.call)
        if waiting is not None:
            waiting.answer, waiting.is_done, self.has_answered = message.body, True, True
            if waiting is not self._leader.get(0):
                waiting.rouse()
            return
        begun = self._begun.begun.pop(message.call, None)
        if begun is not None:  # else it was given up
            self.has_answered = True
            begun.end(message.body)

    def _hear(self) -> None:
        self._heard = monotonic()
        self._quiet_since = self._pinged = 0.0

    def _mind_silence(self) -> None:
        now = monotonic()
        if not self._quiet_since:
            self._quiet_since = now
        elif self._pinged:
            if now - self._pinged >= PING_TIME:
                self.break_off(f"nothing was heard for {now - self._quiet_since:.1f} s")
        elif now - self._quiet_since >= PING_AFTER:
            self._pinged = now
            self._send(0, b"", 0)

    def _hand_on(self) -> None:
        """Somebody is to take the lead, if there is anything to wait for."""
        if self.is_broken:
            self._close()
        for other in list(self._waiting.values()):
            if not other.is_done:
                other.rouse()
                return
        if self._begun.begun:
            self._begun.rouse()

    # --- both ---------------------------------------------------------------------------------------------------------

    def _send(self, call: int, message: bytes, milliseconds: int) -> None:
        try:
            self._outgoing.send(call, milliseconds, message)
        except (OSError, ValueError) as error:
            self.break_off(str(error))
        except BaseException:
            self.break_off("a thread was interrupted while it sent")
            raise

    def _close(self) -> None:
        """Unless somebody reads: he does it when he makes way."""
        closer = object()
        if self._leader.setdefault(0, closer) is closer:
            with self._outgoing.lock:
                if self._traffic is not None:
                    self._traffic.end(self._socket)
                self._socket.close()
                self._epoll.close()
            del self._leader[0]


def _milliseconds(left: float) -> int:
    return NO_LIMIT if left >= NO_LIMIT / 1000 else max(0, int(left * 1000))


# --- All connections of a process ------------------------------------------------------------------------------------
# Links: a process's connections to listeners, one for each address, which its threads share.


_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.02, 1.0, 1.3  # seconds between tries, and how much longer each one is


class Links:
    """Connections of this process, made when they are needed and again when they have broken.

    Thread-safe. A forked child has the same object with no connection yet, and makes its own.

    Args:
        secret: of the cluster; None: only hosts that have none are spoken to.
        kind: CLIENT, or INDEX of an index process.
        hello: what this process says of itself.
        traffic: counts what they move, but for streams; None: nobody does.
    """

    def __init__(self, *, secret: bytes | None, kind: int, hello: Hello, traffic: Traffic | None = None) -> None:
        self._secret, self._kind, self._hello, self._traffic = secret, kind, hello, traffic
        self._links: dict[str, _Link] = {}
        self._busy: dict[int, object] = {}  # threads in `send`: a signal handler, or a finalizer, may send within it
        self._is_closed = False
        leave_in_forks(self)

    def send(self, address: str, member: bytes | None, message: bytes, deadline: float) -> bytes | None:
        """Sends a request, and waits for its answer.

        Args:
            address: `tcp://IP:PORT`.
            member: the store id that must be there; None: any.
            message: at most 128 MiB.
            deadline: monotonic. The other side hears how long that is from now.

        Returns: the answer. None: the link broke, or there was no answer in time: nobody knows whether the request
            came.

        Raises:
            HomeUnavailableError: there was no connection by the deadline, or the first try failed: nothing was sent.
            LinkRefusedError: another secret, protocol or member is there.
            InvalidAddressError: the address is none.
            ResourceLimitError: this process has no file descriptor left.
            ValueError: the message is too long.
            StoreClosedError: after `close`.
        """
        if len(message) > MESSAGE_LIMIT:
            raise ValueError(f"a message of {len(message):,} bytes to {address}: it may have {MESSAGE_LIMIT:,}")
        link, me, entry = self._link(address), threading.get_ident(), object()
        try:
            if self._busy.setdefault(me, entry) is not entry:
                return link.request_apart(member, message, deadline)
            connection = link.connection(member, deadline)
            if connection is None:
                raise _unreachable(address, link)
            return connection.request(message, deadline)
        finally:
            if me in self._busy and self._busy[me] is entry:  # no calls here: see `Connection`
                del self._busy[me]

    def begin(
        self,
        address: str,
        member: bytes | None,
        message: bytes,
        seconds: float,
        told: Callable[[], None],
        deadline: float,
    ) -> Begun:
        """Sends a request whose answer no thread waits for. It blocks for as long as it takes to connect.

        Args:
            address, member, message: as of `send`.
            seconds: for which the other side need answer, from now.
            told: called, by any thread, when there is an answer or none will come. It must not wait.
            deadline: monotonic, for a connection.

        Raises:
            What `send` raises.
        """
        if len(message) > MESSAGE_LIMIT:
            raise ValueError(f"a message of {len(message):,} bytes to {address}: it may have {MESSAGE_LIMIT:,}")
        link = self._link(address)
        connection = link.connection(member, deadline)
        if connection is None:
            raise _unreachable(address, link)
        return connection.begin(message, seconds, told)

    def stream(self, address: str, member: bytes | None, deadline: float) -> socket.socket:
        """A connection of its own for bytes as they are: a blocking socket, which the caller closes.

        Raises:
            HomeUnavailableError: there was none by the deadline, or the first try failed.
            LinkRefusedError, InvalidAddressError, ResourceLimitError, StoreClosedError: as `send`.
        """
        link = self._link(address)
        dialed = link.dial(member, STREAM, deadline)
        if dialed is None:
            raise HomeUnavailableError(f"{address} can't be reached for a transfer: {link.trouble}")
        return dialed.socket

    def hello_of(self, address: str) -> Hello | None:
        """Returns the hello of the other side of the present connection; None: there is no connection."""
        connection = self._link(address).current
        return None if connection is None or connection.is_broken else connection.hello

    def trouble_of(self, address: str) -> str:
        """Why the last try to reach it failed, for messages of errors; empty: none did since it last worked."""
        link = self._link(address)
        return link.trouble or ("" if link.current is None else link.current.trouble)

    def close(self) -> None:
        """Ends all connections. Requests that are under way return None."""
        self._is_closed = True
        for link in list(self._links.values()):
            link.close()

    def leave_to_parent(self) -> None:
        self._links, self._busy = {}, {}

    def _link(self, address: str) -> _Link:
        if self._is_closed:
            raise StoreClosedError(f"the links of this process are closed; {address} is not asked any more")
        link = self._links.get(address)
        if link is None:
            fresh = _Link(parse_address(address), self._secret, self._kind, self._hello, self._traffic)
            link = self._links.setdefault(address, fresh)
        return link


class _Link:
    """To one address.

    Attributes:
        current: the connection, which may be broken.
        trouble: why the last try failed; empty after one that didn't.
    """

    def __init__(
        self, address: Address, secret: bytes | None, kind: int, hello: Hello, traffic: Traffic | None
    ) -> None:
        self._address, self._secret, self._kind, self._hello = address, secret, kind, hello
        self._traffic = traffic
        self.current: Connection | None = None
        self.trouble = ""
        self._refusal: LinkRefusedError | None = None  # what the last try ended with
        self._refused: bytes | None = None  # the member that it was for
        self._is_closed = False
        self._dialing = threading.Lock()
        self._failures = 0  # in a row
        self._tries = 0  # that have failed, ever
        self._not_before = 0.0

    def connection(self, member: bytes | None, deadline: float) -> Connection | None:
        """One that works, as far as can be seen. None: there is none by the deadline, or the first try failed."""
        connection = self.current
        if connection is None or not connection.is_usable():
            connection = self._connect(member, deadline)
        if connection is not None:
            check_member(str(self._address), connection.member, member)
        return connection

    def dial(self, member: bytes | None, kind: int, deadline: float) -> Dialed | None:
        """One try. None: it failed."""
        if not self._pause(deadline):
            return None
        try:
            dialed = dial(self._address, member, self._secret, kind, self._hello, deadline)
        except LinkRefusedError as error:
            self._fail(error.message)
            self._refusal, self._refused = error, member
            raise
        except ResourceLimitError:  # an OSError, which says nothing of the other side
            raise
        except OSError as error:
            if monotonic() < deadline:  # else it was the caller's time that was short
                self._fail(error.strerror or str(error))
            else:
                self.trouble = f"no connection in time ({error.strerror or error})"
            return None
        self.trouble = ""
        if kind == STREAM:
            self._failures = 0
        return dialed

    def request_apart(self, member: bytes | None, message: bytes, deadline: float) -> bytes | None:
        """Over a connection for this request, of a thread that is in the middle of another one, with locks of its."""
        try:
            dialed = dial(self._address, member, self._secret, self._kind, self._hello, deadline)
        except ResourceLimitError:
            raise
        except OSError as error:
            raise HomeUnavailableError(f"{self._address} can't be reached: {error.strerror or error}") from None
        connection = Connection(dialed, self._traffic)
        try:
            return connection.request(message, deadline)
        finally:
            connection.break_off("it was for one request")

    def close(self) -> None:
        self._is_closed = True
        if self.current is not None:
            self.current.break_off("it was closed")

    def _connect(self, member: bytes | None, deadline: float) -> Connection | None:
        """One thread dials; the others wait for what comes of it, and fail as it does.

        Who wants another member there than the one that was refused dials itself: two may have the same address.
        """
        tries = self._tries
        held: list[bool] = []
        try:
            # In one C call: an interrupt comes before or after it, and no lock is taken unknown to us.
            held.extend(map(self._dialing.acquire, (True,), (_within(deadline),)))
            if not held[0]:
                self.trouble = self.trouble or "no connection in time"
                return None
            if self.current is not None and not self.current.is_broken:
                return self.current
            if self._tries != tries:
                if self._refusal is None:
                    return None
                if self._refused == member:
                    raise type(self._refusal)(self._refusal.message)
            return self._replace(member, deadline)
        finally:
            if any(held):
                self._dialing.release()

    def _replace(self, member: bytes | None, deadline: float) -> Connection | None:
        broken, self.current = self.current, None
        if broken is not None:
            if broken.has_answered:
                self._failures = 0
            else:
                self._fail(broken.trouble)  # who lets everybody in, and answers nobody
        dialed = self.dial(member, self._kind, deadline)
        if dialed is None:
            return None
        self.current = Connection(dialed, self._traffic)
        if self._is_closed:
            self.close()
        return self.current

    def _fail(self, trouble: str) -> None:
        self.trouble, self._refusal = trouble, None
        self._tries += 1
        self._failures += 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * _GROWTH ** min(self._failures - 1, 20))
        self._not_before = monotonic() + pause * random.uniform(0.5, 1.0)

    def _pause(self, deadline: float) -> bool:
        """Sleeps until the next try is due. False: that is after the deadline."""
        if deadline <= self._not_before:
            time.sleep(_within(deadline))
            return False
        time.sleep(max(0.0, self._not_before - monotonic()))
        return monotonic() < deadline


def _unreachable(address: str, link: _Link) -> HomeUnavailableError:
    return HomeUnavailableError(f"{address} can't be reached: {link.trouble}")


def _within(deadline: float) -> float:
    """Seconds until then, as a lock or a sleep takes them."""
    return max(0.0, min(deadline - monotonic(), 86_400.0))
