"""Who reaches whom: the addresses of hosts, and the lines of `ip -batch` that join, cut, heal and delay.

All hosts hang on one switch (a bridge). Where a host's packets for another go is told by one entry of its table of
neighbours, which is permanent, so that nobody asks for hardware addresses. A cut is an address that no one has: the
packets vanish, with no RST and no ICMP, one way only, and between these two only. A delay is an address at the holder
of the switch, which sends on what it gets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from memstore.testing.hosts.switching import DELAYED, HOST, NOWHERE

MOST_HOSTS = 100  # numbers are parts of addresses
DELAY_PORT = "delays"  # of the switch: its holder has it open
HAS_IPV6 = os.path.exists("/proc/net/if_inet6")
_PORT = "eth0"


@dataclass(frozen=True)
class Cable:
    """One way from one host to another."""

    is_cut: bool = False
    delay: float = 0.0  # seconds


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def address6(number: int) -> str:
    return f"fd77::{number + 1:x}"


def addresses(number: int) -> list[str]:
    return [address(number), address6(number)] if HAS_IPV6 else [address(number)]


def join(holders: Sequence[int]) -> list[str]:
    """In the switch's network: a port for each host, by the pid of its holder."""
    lines = [
        "link add switch up type bridge mcast_snooping 0",
        f"link add {DELAY_PORT} up type veth peer name delayed",
        "link set delayed up master switch",
    ]
    for number, pid in enumerate(holders):
        peer = f"peer name {_PORT} address {_hardware(HOST, number)} netns {pid}"
        lines += [f"link add port{number} type veth {peer}", f"link set port{number} up master switch"]
    return lines


def furnish(number: int, count: int) -> list[str]:
    """In a host's network: its addresses, and its neighbours."""
    lines = ["link set lo up", f"link set {_PORT} up addrgenmode none"]  # no addresses but those that can be cut
    lines += [f"address add {one}/{64 if ':' in one else 24} dev {_PORT}{_at_once(one)}" for one in addresses(number)]
    return lines + [line for other in range(count) if other != number for line in aim(other, Cable())]


def aim(target: int, cable: Cable) -> list[str]:
    """In the sender's network: where what it sends to `target` goes."""
    kind = NOWHERE if cable.is_cut else DELAYED if cable.delay else HOST
    to = f"lladdr {_hardware(kind, target)} dev {_PORT} nud permanent"
    return [f"neighbour replace {one} {to}" for one in addresses(target)]


def _at_once(one: str) -> str:
    return " nodad" if ":" in one else ""  # duplicates would be looked for, for seconds


def _hardware(kind: bytes, number: int) -> str:
    return ":".join(f"{byte:02x}" for byte in (*kind, number))
