"""At which of its addresses the first host can be reached by the others: they try, before anything is started.

A host may have many: of networks that others aren't on, and of bridges that every host has under the same number. So
whoever answers has to send a token that was made a moment ago.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from memstore.distributed.links import Address, parse_address
from memstore.errors import AddressUnavailableError

FIRST_PORT, PORTS = 7411, 100
_MOST = 16  # addresses of a host
_TRY = 3.0  # seconds for a connection
_GREET = 2.0  # seconds that a guest may take
_TOKEN = 16  # bytes
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s2sH4s16x")


def own_ips(first: Iterable[str] = ()) -> list[str]:
    """The IPs of this host at which others may reach it: those in `first`, those of its name, and of its network cards.

    Neither loopback nor link-local ones.
    """
    found: dict[str, None] = {}
    for text in (*first, *_of_name(), *_ip4s(), *_ip6s()):
        with contextlib.suppress(ValueError):
            ip = ipaddress.ip_address(text)
            if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast):
                found[str(ip)] = None
    return list(found)[:_MOST]


def _of_name() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(one[4][0]) for one in found]


def _ip4s() -> list[str]:
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, card in socket.if_nameindex():
            request = card.encode()[:15].ljust(_IFREQ.size, b"\0")
            with contextlib.suppress(OSError):  # it has no IPv4 address
                _, _, _, ip = _IFREQ.unpack(fcntl.ioctl(sock, _SIOCGIFADDR, request))
                found.append(socket.inet_ntoa(ip))
    return found


def _ip6s() -> list[str]:
    try:
        with open("/proc/net/if_inet6") as table:
            return [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in table]
    except OSError:
        return []


def free_port(ip: str, port: int) -> int:
    """Where an agent may listen: `port`, or, if that is 0, the first free one from 7411.

    Raises AddressUnavailableError: there is none.
    """
    with _listen(ip, port) as sock:
        return int(sock.getsockname()[1])


def _listen(ip: str, port: int) -> socket.socket:
    trouble = ""
    for number in (port,) if port else range(FIRST_PORT, FIRST_PORT + PORTS):
        address = Address(ip, number)
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address.for_socket())
            sock.listen()
            return sock
        except OSError as error:
            sock.close()
            trouble = f"{address}: {error.strerror or error}"
    more = "" if port else f", and the ports before it from {FIRST_PORT}"
    raise AddressUnavailableError(
        f"this host can't listen at {trouble}{more}: end who listens there, or name another port by MEMSTORE_PORT, "
        "another address by MEMSTORE_ADDRESS, in the environment of the host's worker"
    )


class Reception:
    """Listens at IPs of this host, and sends whoever connects the token. From its making until `close`.

    Attributes:
        addresses: where it listens: one for each IP.
        token: random.

    Raises:
        AddressUnavailableError: it can listen at none of the IPs.
    """

    def __init__(self, ips: Sequence[str], port: int) -> None:
        self.token = os.urandom(_TOKEN)
        self._socks: list[socket.socket] = []
        trouble: AddressUnavailableError | None = None
        for ip in ips:
            try:
                self._socks.append(_listen(ip, port))
            except AddressUnavailableError as error:
                trouble = error
        if not self._socks:
            raise trouble or AddressUnavailableError(
                "this host has no address at which others could reach it: name one by MEMSTORE_ADDRESS, in the "
                "environment of its worker"
            )
        names = [sock.getsockname() for sock in self._socks]
        self.addresses = tuple(str(Address(str(name[0]), int(name[1]))) for name in names)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="memstore-reception", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for sock in self._socks:
            sock.close()

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in self._socks:
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, sock)
            while not self._is_over.is_set():
                for key, _ in selector.select(0.05):
                    with contextlib.suppress(OSError):
                        guest, _ = key.data.accept()
                        threading.Thread(target=self._greet, args=(guest,), daemon=True).start()

    def _greet(self, guest: socket.socket) -> None:
        """Waits until the guest has closed: who closes first keeps the port busy."""
        with guest, contextlib.suppress(OSError):
            guest.settimeout(_GREET)
            guest.sendall(self.token)
            guest.recv(1)


def try_all(addresses: Sequence[str], token: bytes, deadline: float) -> list[tuple[str, str]]:
    """Connects to each. Returns from which IP of this host, or an empty text, and why not.

    Args:
        token: that each sends; empty: nothing.
    """
    if not addresses:
        return []

    def one(address: str) -> tuple[str, str]:
        return _try(parse_address(address), token, deadline)

    with ThreadPoolExecutor(len(addresses)) as threads:
        return list(threads.map(one, addresses))


def _try(address: Address, token: bytes, deadline: float) -> tuple[str, str]:
    until = min(deadline, time.monotonic() + _TRY)
    try:
        with socket.socket(address.family, socket.SOCK_STREAM) as sock:
            sock.settimeout(max(until - time.monotonic(), 0.001))
            sock.connect(address.for_socket())
            received = b""
            while len(received) < len(token):
                piece = sock.recv(len(token) - len(received))
                if not piece:
                    break
                received += piece
            if received != token:
                return "", "somebody else listens there"
            return str(sock.getsockname()[0]), ""
    except TimeoutError:
        return "", "no answer"
    except OSError as error:
        return "", error.strerror or str(error)


_OF_TCP = re.compile(r"tcp:(?://)?\[?([0-9.]+|[0-9a-fA-F:]+)\]?:\d+$")


def ips_in(actor_id: str) -> tuple[str, ...]:
    """Returns the IP at which Monarch reaches the process of an actor, if its id names one."""
    found = _OF_TCP.search(actor_id)
    return (found[1],) if found else ()
