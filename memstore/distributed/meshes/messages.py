"""Messages of `memstore.serve` and its index actors: bytes, by msgpack, and short.

Monarch carries them, and would carry gigabytes; nothing here grows with the store, and what grows with the mesh is
LONGEST at most. `LookAtRoot` and `HostFailed` stay as they are in all versions: they tell one from another.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from memstore._parsing import UNDECODABLE
from memstore.distributed.rules import Roster
from memstore.errors import CorruptionError

VERSION = 3  # of all that stands here
LONGEST = 1 << 20  # bytes of a message
LONGEST_TEXT = 4000  # characters of an error
LONGEST_ROOT = 4000  # characters

Text = Annotated[str, Meta(max_length=4096)]
Ip = Annotated[str, Meta(max_length=64)]


class Folder(NamedTuple):
    """The same one for all that see the same folder: what makes two hosts of a mesh one host of the store."""

    boot: bytes
    device: int
    inode: int


class LookAtRoot(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Makes the root, if there is none, and says how it stands. Answer: HostSeen."""

    version: int
    root: Annotated[str, Meta(max_length=LONGEST_ROOT)]


class HostFailed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Attributes:
    host: its name.
    error: the name of a class of `memstore.errors`, or another one.
    """

    host: Text
    error: Text
    text: Text


class HostSeen(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A host of the mesh.

    Attributes:
        ips: at which others may reach it, the likeliest first. None of them is a loopback's.
        port: where it has to listen; 0: anywhere.
        is_named: somebody has said at which IP it is to listen.
        is_networked: Monarch reaches it by a network, so that there may be other hosts.
        is_served: its agent runs.
        member: its id.
        roster: of the cluster that its root belongs to; None: it was never served.
        is_removed: from that cluster.
        secret: of the root; empty: it has none of its own.
    """

    name: Text
    memstore: Text
    folder: Folder
    ips: tuple[Ip, ...]
    port: int
    is_named: bool
    is_networked: bool
    is_served: bool
    member: bytes
    roster: Roster | None
    is_removed: bool
    secret: bytes


class Receive(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Listens at these IPs, until it is told to end that, or the index actor ends. Answer: Receives."""

    ips: tuple[Ip, ...]
    port: int


class Receives(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A listener that sends the token to whoever connects to one of the addresses."""

    addresses: tuple[Text, ...]
    token: bytes


class Try(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Connects to these addresses, all at once. Answer: Reached.

    Attributes:
        token: that whoever listens there has to send; empty: nothing.
    """

    addresses: tuple[Text, ...]
    token: bytes
    milliseconds: int


class Reached(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """For each of them: from which IP of this host; empty: not, and why not."""

    froms: tuple[Text, ...]
    whys: tuple[Text, ...]


class ReceiveNoMore(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Answer: OrderDone."""


class StartAgent(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Starts the agent, if none runs, and waits until the host is a member. Answer: Started.

    Attributes:
        ip, port: where a host listens that has no address yet; port 0: the first free one.
        address: that it has, or is to take over; empty: none.
        named: addresses of members, which a host that is none asks.
        is_new: it makes the cluster.
        is_owner: it may own keys.
        keeps: the agent goes on when the index actor is stopped.
        promote_after, remove_after: as of `serve`.
        milliseconds: in which it is a member.
    """

    ip: Ip
    port: int
    address: Text
    named: tuple[Text, ...]
    is_new: bool
    secret: bytes
    transport: Text
    is_owner: bool
    keeps: bool
    promote_after: float | None
    remove_after: float | None
    milliseconds: int


class Started(msgspec.Struct, frozen=True, array_like=True, tag=10):
    address: Text


class Settle(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Waits until these are members, and all have settled. Answer: Settled."""

    addresses: tuple[Text, ...]
    milliseconds: int


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=12):
    roster: Roster


class Undo(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Ends the agent that this index actor has started, if it has. Answer: OrderDone."""


class OrderDone(msgspec.Struct, frozen=True, array_like=True, tag=14):
    pass


Order: TypeAlias = LookAtRoot | Receive | Try | ReceiveNoMore | StartAgent | Settle | Undo
Report: TypeAlias = HostFailed | HostSeen | Receives | Reached | Started | Settled | OrderDone

_encoder = msgspec.msgpack.Encoder()
_order: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_report: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    """Raises ValueError: it is too long for a message."""
    data = _encoder.encode(message)
    if len(data) > LONGEST:
        raise ValueError(
            f"a message of {len(data):,} bytes to or from an index actor, which may have {LONGEST:,}: serve fewer "
            "hosts by one call, and let the others join (memstore.serve(mesh, root, join=cluster))"
        )
    return data


def decode_order(data: bytes) -> Order:
    """Raises CorruptionError: it is none of this version."""
    try:
        return _order.decode(data)
    except UNDECODABLE as error:
        raise _other_version(error) from None


def decode_report(data: bytes) -> Report:
    """Raises CorruptionError: it is none of this version."""
    try:
        return _report.decode(data)
    except UNDECODABLE as error:
        raise _other_version(error) from None


def _other_version(error: Exception) -> CorruptionError:
    return CorruptionError(f"a message of another version of memstore ({error})")


def last_line(error: Exception) -> str:
    """Returns the last line of Monarch's text of a failure, which begins with where it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:1000]
