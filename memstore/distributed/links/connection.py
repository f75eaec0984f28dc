"""A client's connection: many threads have requests under way, and each of them may be the one who reads.

No thread of its own reads. Of those who wait for answers one is the *leader*: it waits on the socket, and hands out
what comes to the others, who sleep. When it has its own answer it makes way for one of them. So a lone caller sends and
receives in its own thread, and no other has to be woken.

A leader that has heard nothing for PING_AFTER seconds asks for a sign of life, and gives the connection up when none
comes in PING_TIME. TCP alone would find out in 15 s; and after a cut of 10 s it may be silent for 5 s more, since the
pauses between its repetitions double, where a new connection works at once.

Who is interrupted (KeyboardInterrupt) while it waits leaves, and nothing is lost. In the middle of reading or sending
bytes may be, and the connection is given up: others see it break.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable
from time import monotonic

from memstore.distributed.links.begun import Begun, Keeper
from memstore.distributed.links.dialing import Dialed
from memstore.distributed.links.forks import leave_in_forks
from memstore.distributed.links.frames import NO_LIMIT, FrameError, Inbox
from memstore.distributed.links.outgoing import Outgoing
from memstore.distributed.links.traffic import Traffic

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
        self._keeper = Keeper()
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
                if self._leader.setdefault(0, waiting) is waiting:
                    self._lead(waiting, deadline)
                else:
                    waiting.wake.acquire(timeout=min(left, PING_AFTER))
            return waiting.answer
        finally:
            if 0 in self._leader and self._leader[0] is waiting:
                del self._leader[0]
            if call in self._waiting:
                del self._waiting[call]
            self._make_way(call, waiting)

    def begin(self, message: bytes, seconds: float, told: Callable[[], None]) -> Begun:
        """As `request`, but that no thread waits: `told` is called, by another thread, and must not wait either.

        Args:
            seconds: for which the other side need answer.
        """
        call = next(self._calls)

        def give_up() -> None:
            self._keeper.begun.pop(call, None)
            self._outgoing.give_up(call)

        begun = self._keeper.begun[call] = Begun(told, give_up)
        self._send(call, message, _milliseconds(seconds))
        self._quiet_since = self._quiet_since or monotonic()
        if self.is_broken:
            self._keeper.end_all()
        else:
            self._keeper.start(self._lead_for_begun)
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
            if self._keeper.begun:
                self._keeper.rouse()  # it may have wanted the lead just then
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
        self._keeper.end_all()
        for waiting in list(self._waiting.values()):
            waiting.rouse()

    def leave_to_parent(self) -> None:
        self.is_broken = True
        self.trouble = "the process was forked"
        self._socket.close()
        self._epoll.close()

    # --- the leader ---------------------------------------------------------------------------------------------------

    def _lead(self, waiting: _Waiting, deadline: float) -> None:
        while not (waiting.is_done or self.is_broken):
            left = deadline - monotonic()
            if left <= 0:
                return
            if not self._look(min(left, PING_AFTER)):
                self._mind_silence()

    def _lead_for_begun(self) -> None:
        """By the keeper: leads until there are no requests that nobody waits for, or waits while others lead."""
        keeper = self._keeper
        try:
            if self._leader.setdefault(0, keeper) is not keeper:
                keeper.wake.acquire(timeout=PING_AFTER)
                return
            while keeper.begun and not self.is_broken:
                if not self._look(PING_AFTER):
                    self._mind_silence()
        finally:
            if self._leader.get(0) is keeper:
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
                self._read()
        except (OSError, ValueError, FrameError) as error:
            self.break_off(str(error))
        except BaseException:
            self.break_off("a thread was interrupted while it read")
            raise
        return True

    def _read(self) -> None:
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        if not count:
            raise ConnectionResetError("the other side closed the connection")
        leader = self._leader.get(0)
        for message in self._inbox.feed(self._buffer[:count]):
            waiting = self._waiting.get(message.call)
            begun = self._keeper.begun.pop(message.call, None) if waiting is None else None
            if begun is not None:
                self.has_answered = True
                begun.end(message.body)
            elif waiting is not None:  # else it was given up
                waiting.answer, waiting.is_done, self.has_answered = message.body, True, True
                if waiting is not leader:
                    waiting.rouse()
        self._hear()

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

    def _make_way(self, call: int, waiting: _Waiting) -> None:
        """If this is interrupted, the others go on when they look again."""
        if self.is_broken:
            self._close()
        elif not waiting.is_done:
            self._outgoing.give_up(call)
        if not self._leader:
            self._hand_on()

    def _hand_on(self) -> None:
        """Somebody is to take the lead, if there is anything to wait for."""
        if self.is_broken:
            self._close()
        for other in list(self._waiting.values()):
            if not other.is_done:
                other.rouse()
                return
        if self._keeper.begun:
            self._keeper.rouse()

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
