"""Sockets: the address where a host listens, what a forked child does with sockets, and the bytes that were moved."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from memstore._threads import Hooks, around_forks
from memstore.errors import InvalidAddressError

# --- Addresses -------------------------------------------------------------------------------------------------------
# Where a host listens: `tcp://10.0.0.1:4242`, or `tcp://[fe80::1%eth0]:4242`.
#
# Hosts are given by number only. Names would have to be looked up, which blocks for as long as a name server likes, and
# may say something else tomorrow; but an address is one member's for life.

_FORM = re.compile(r"tcp://(?:\[(?P<ip6>[0-9A-Fa-f:.]+(?:%[^\]\s/]{1,32})?)\]|(?P<ip4>[0-9.]+)):(?P<port>[0-9]{1,5})")
_EXPECTED = "an address is tcp://IP:PORT, such as tcp://10.0.0.1:4242 or tcp://[fd00::1]:4242"


@dataclass(frozen=True, slots=True)
class Address:
    """Attributes:
    ip: IPv4 or IPv6, in its shortest form.
    port: 0 to 65,535; a listener at port 0 is given a free one.
    scope: the network card that a link-local IPv6 address is of, by name or number; else empty.
    """

    ip: str
    port: int
    scope: str = ""

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach it."""
        return self.ip == "::1" or self.ip.startswith("127.")

    def for_socket(self) -> tuple[str, int] | tuple[str, int, int, int]:
        """Returns what `socket.connect` and `bind` take. Raises OSError if the scope is no network card here."""
        if self.family == socket.AF_INET:
            return self.ip, self.port
        return self.ip, self.port, 0, self._scope_number()

    def _scope_number(self) -> int:
        if not self.scope:
            return 0
        return int(self.scope) if self.scope.isdecimal() else socket.if_nametoindex(self.scope)

    def __str__(self) -> str:
        if self.family == socket.AF_INET:
            return f"tcp://{self.ip}:{self.port}"
        return f"tcp://[{self.ip}{'%' if self.scope else ''}{self.scope}]:{self.port}"


def parse_address(text: str) -> Address:
    """Reads an address as users write it.

    Args:
        text: `tcp://IP:PORT`; an IPv6 address stands in brackets, with `%CARD` behind a link-local one.

    Returns: the address; `str` of it is the same for all ways to write it.

    Raises:
        InvalidAddressError: it is none, or nobody could connect to it.
    """
    found = _FORM.fullmatch(text) if isinstance(text, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if found is None:
        raise InvalidAddressError(f"{text!r}: {_EXPECTED}, with numbers and no names")
    port = int(found["port"])
    if port > 65_535:
        raise InvalidAddressError(f"{text!r}: the port {port} is above 65535; {_EXPECTED}")
    number, _, scope = (found["ip6"] or found["ip4"]).partition("%")
    try:
        ip = ipaddress.ip_address(number)
    except ValueError as error:
        raise InvalidAddressError(f"{text!r}: {error}; {_EXPECTED}") from None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_unspecified or ip.is_multicast:
        raise InvalidAddressError(f"{text!r}: other hosts can't connect to {ip}; give the address of one network card")
    return Address(str(ip), port, scope if ip.version == 6 else "")


def parse_own_address(text: str) -> Address:
    """Parses the address of a host that serves, which it keeps for life. Raises InvalidAddressError."""
    found = parse_address(text)
    if found.port == 0:
        raise InvalidAddressError(f"{text!r}: an address is for life, so it needs a port of its own: 1 to 65535")
    return found


# --- Options ---------------------------------------------------------------------------------------------------------

USER_TIMEOUT = 15_000  # milliseconds that bytes may stay without an acknowledgement
_KEEPALIVE = 5  # seconds of silence before the first probe, and between two


def furnish(sock: socket.socket) -> None:
    """Options of all connections, of both sides."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, USER_TIMEOUT // 1000 // _KEEPALIVE)


def is_its_own_peer(sock: socket.socket) -> bool:
    """Tells whether a socket has met itself: it may be given just the free port to which it connects."""
    return sock.getsockname() == sock.getpeername()


# --- Forks -----------------------------------------------------------------------------------------------------------
# A forked child closes its copies of its parent's connections, and never sends or reads a byte there.
#
# A copy that stayed open would keep the connection alive after the parent's end, and its waits at the server with it.
# Sockets are made under a lock that forks take, so that none is between its making and its entry in the list.


class LeftInFork(Protocol):
    def leave_to_parent(self) -> None:
        """In the child: gives up sockets, locks and threads, which are the parent's."""
        ...


_making = threading.RLock()  # a signal handler that interrupts us may fork
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_owners: weakref.WeakSet[LeftInFork] = weakref.WeakSet()


def made(make: Callable[[], socket.socket]) -> socket.socket:
    """A new socket, which forked children close. `make` must not wait."""
    with _making:
        made = make()
        _sockets.add(made)
    return made


def leave_in_forks(owner: LeftInFork) -> None:
    """From now on, for as long as it lives, forked children call its `leave_to_parent`."""
    with _making:
        _owners.add(owner)


def _before_fork() -> None:
    _making.acquire()


def _after_fork_in_parent() -> None:
    _making.release()


def _after_fork_in_child() -> None:
    global _making
    _making = threading.RLock()
    for owner in list(_owners):
        owner.leave_to_parent()
    for one in list(_sockets):
        one.close()


around_forks(Hooks(_before_fork, _after_fork_in_parent, _after_fork_in_child))


# --- Traffic ---------------------------------------------------------------------------------------------------------
# How many bytes connections have moved. The kernel counts them (TCP_INFO): whoever sends and receives pays nothing.

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
