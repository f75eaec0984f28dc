"""Links: a process's connections to listeners, one for each address, which its threads share."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from time import monotonic

from memstore.distributed.links.address import Address, parse_address
from memstore.distributed.links.begun import Begun
from memstore.distributed.links.connection import Connection
from memstore.distributed.links.dialing import Dialed, dial
from memstore.distributed.links.forks import leave_in_forks
from memstore.distributed.links.frames import MESSAGE_LIMIT
from memstore.distributed.links.handshake import STREAM, check_member
from memstore.distributed.links.hello import Hello
from memstore.distributed.links.traffic import Traffic
from memstore.errors import HomeUnavailableError, LinkRefusedError, ResourceLimitError, StoreClosedError

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
        self._busy: dict[int, object] = {}  # threads in `send`: a signal handler, or a finalizer, may send in its turn
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
        link, me, turn = self._link(address), threading.get_ident(), object()
        try:
            if self._busy.setdefault(me, turn) is not turn:
                return link.request_apart(member, message, deadline)
            connection = link.connection(member, deadline)
            if connection is None:
                raise _unreachable(address, link)
            return connection.request(message, deadline)
        finally:
            if me in self._busy and self._busy[me] is turn:  # no calls here: see `Connection`
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
        """What the other side of the present connection says of itself; None: there is no connection."""
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
            self._refusal = error
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
        """One thread dials; the others wait for what comes of it, and fail as it does."""
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
                if self._refusal is not None:
                    raise LinkRefusedError(self._refusal.message)
                return None
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
