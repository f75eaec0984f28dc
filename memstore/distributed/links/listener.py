"""Listener: where a host is asked. One thread accepts, shakes hands, and reads; others serve, and answer."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from time import monotonic

from memstore.distributed.links import hello as hellos
from memstore.distributed.links.address import Address, parse_address
from memstore.distributed.links.forks import leave_in_forks, made
from memstore.distributed.links.gate import Gate
from memstore.distributed.links.guest import Asked, Guest
from memstore.distributed.links.handshake import STREAM
from memstore.distributed.links.hello import Hello
from memstore.distributed.links.traffic import Traffic
from memstore.errors import AddressUnavailableError, SecretError

_BACKLOG = 1024
_PORTION = 1 << 18

log = logging.getLogger("memstore")


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
        self._hello, self._serve, self._stream, self._ended = hellos.encode(hello), serve, stream, ended
        self._listening = _bind(place)
        self.address = str(Address(place.ip, self._listening.getsockname()[1], place.scope))
        self.turns = 0
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # rung by `close` and `nudge`
        self._epoll.register(self._bell, select.EPOLLIN)
        self._gate = Gate(self._listening, self._epoll, secret, member, self._admit)
        self._guests: dict[int, Guest] = {}
        self._silent: dict[int, Guest] = {}  # those of them who have not said who they are
        self._numbers = itertools.count(1)
        self._buffer = memoryview(bytearray(_PORTION))
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
                self._turn()
        except Exception:
            log.exception("the listener at %s ends", self.address)
        finally:
            self._end()

    def _turn(self) -> None:
        events = self._epoll.poll(self._tend())
        self.turns += 1
        knocks = False
        for fd, what in events:
            if fd == self._listening.fileno():
                knocks = True  # last: it may give descriptors anew that other events of this turn are about
            elif fd == self._bell:
                os.eventfd_read(fd)
            elif not self._gate.hears(fd):
                self._react(fd, what)
        if knocks:
            self._gate.accept()

    def _tend(self) -> float:
        """Ends who is late. Returns the seconds until the next may be, or -1."""
        now = monotonic()
        for fd, guest in list(self._silent.items()):
            if guest.is_late(now):
                self._lose(fd)
        due = self._gate.tend()
        return due if not self._silent else min(1.0, due) if due >= 0 else 1.0

    def _react(self, fd: int, events: int) -> None:
        guest = self._guests.get(fd)
        if guest is None:
            return
        if not guest.react(events, self._buffer):
            self._lose(fd)
        elif self._silent and guest.has_said_hello:
            self._silent.pop(fd, None)

    def _lose(self, fd: int) -> None:
        self._silent.pop(fd, None)
        guest = self._guests.pop(fd)
        guest.close()
        self._ended(guest.number)

    def _admit(self, sock: socket.socket, kind: int, hello_due: float) -> None:
        fd = sock.fileno()
        if kind == STREAM:
            self._epoll.unregister(fd)
            sock.setblocking(True)
            try:
                self._stream(sock)
            except Exception:
                log.exception("a stream could not be served")
                sock.close()
            return
        guest = Guest(next(self._numbers), kind, sock, self._epoll, self._serve, hello_due, self._traffic)
        self._guests[fd] = self._silent[fd] = guest
        try:
            guest.greet(self._hello)
        except OSError:
            self._lose(fd)

    def _end(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            for fd in list(self._guests):
                self._lose(fd)
            self._gate.close()
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
