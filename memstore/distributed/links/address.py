"""Where a host listens: `tcp://10.0.0.1:4242`, or `tcp://[fe80::1%eth0]:4242`.

Hosts are given by number only. Names would have to be looked up, which blocks for as long as a name server likes, and
may say something else tomorrow; but an address is one member's for life.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from memstore.errors import InvalidAddressError

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
        """As `socket.connect` and `bind` take it. Raises OSError if the scope is no network card of this host."""
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
    """As `parse_address`, of a host that serves: its address is for life. Raises InvalidAddressError."""
    found = parse_address(text)
    if found.port == 0:
        raise InvalidAddressError(f"{text!r}: an address is for life, so it needs a port of its own: 1 to 65535")
    return found
