"""Questions to index processes beside the rules' messages: how they are, to become the seed, and to end.

Whatever came over a socket is decoded here, types and bounds checked. `Asker` asks, for a process that is no index
process: for `memstore status`, `remove`, `drain`, `promote`, and `Cluster`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from memstore._parsing import UNDECODABLE
from memstore.distributed import rules
from memstore.distributed.catalog import CatalogTables, look
from memstore.distributed.links import CLIENT, Links, hello_of_this_process, parse_address
from memstore.distributed.rules import Answer, Ask, Member, Request, Standing
from memstore.engine import Creation, Root, absolute_path, close_root, open_root
from memstore.errors import CorruptionError, HomeUnavailableError, InvalidAddressError, MemstoreError, NotServedError

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=4096)]

_MUTEX_WITHIN = 5.0  # seconds
_AT_ONCE = 32  # hosts
_AGAIN = 0.1  # seconds
_SILENT = "no answer in time; somebody listens there"

# --- messages ---------------------------------------------------------------------------------------------------------


class Report(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """Asks how a host is. Its answer is `Reported`."""


class Halt(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Asks an index process to end, and its agent with it. The answer, `Done`, comes before the end.

    Attributes:
        removes: the agent removes the root then.
    """

    removes: bool = False


class Promote(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Asks a host to be the seed from now on. Its answer is `Done`, or `Refused`.

    Attributes:
        force: without a majority, or without the directory: what an old seed has granted since may be granted twice.
    """

    force: bool = False


class Leaving(msgspec.Struct, frozen=True, array_like=True):
    """How far a host is that is drained.

    Attributes:
        groups: that it owns.
        live_bytes: that lie there, beside copies of other hosts' values.
        error, text, key: the class of an error by which it doesn't go on, its message, and the key; empty: it goes on.
        at: the address of the host where it doesn't.
    """

    groups: Number
    live_bytes: Number
    error: Text = ""
    text: Text = ""
    key: Text = ""
    at: Text = ""


class Reported(msgspec.Struct, frozen=True, array_like=True, tag=96):
    """An index process's report of its host.

    Attributes:
        epoch: that it is at; 0: it is no member.
        is_settled: it has joined, and no group is on its way to it or from it.
        incarnation: how often the root's index process was started.
        keys: of those that it owns.
        live_bytes: of the files there, whoever owns their keys.
        sent, received: bytes on the network, of this process since it was started.
        memstore, torch, monarch: versions; empty: it isn't installed.
        leaving: what it still has, if it is drained.
        lost: names of keys and groups, with the hosts with which they were lost.
        recovering: what it waits for, as the heir of a removed host, or has brought back as one; empty: it is none.
        lacking: keys that it owns, and that are to have a replica on a second host, and have none.
        spilled_bytes: of the files there that were moved to a disk.
    """

    name: Text
    epoch: Number
    is_settled: bool
    incarnation: Number
    pid: Number
    keys: Number
    live_bytes: Number
    transport: Text
    sent: Number
    received: Number
    memstore: Text
    torch: Text
    monarch: Text
    leaving: Leaving | None = None
    lost: tuple[tuple[Text, Text], ...] = ()
    recovering: Text = ""
    lacking: Number = 0
    spilled_bytes: Number = 0


Asking: TypeAlias = Request | Report | Halt | Promote
Told: TypeAlias = Answer | Reported

_request = msgspec.msgpack.Decoder(Request | Report | Halt | Promote)
_answer: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(rules.Answer | Reported)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Asking | Told) -> bytes:
    return _encoder.encode(message)


def decode_request(message: bytes) -> Asking:
    """Raises msgspec.DecodeError: the listener closes the connection then."""
    try:
        request = _request.decode(message)
        if isinstance(request, Ask):
            parse_address(request.member.address)  # all members are told of it, and connect there
        return request
    except (UnicodeError, RecursionError, InvalidAddressError) as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_answer(message: bytes) -> Told:
    """Raises CorruptionError."""
    try:
        return _answer.decode(message)
    except UNDECODABLE as error:
        raise CorruptionError(f"an answer that could not be read: {error}") from None


# --- who asks ---------------------------------------------------------------------------------------------------------


def standing_of(root: Root) -> Standing | None:
    """Returns what the root knows of its cluster; None: it is in none yet."""
    return look(root, CatalogTables.standing, time.monotonic() + _MUTEX_WITHIN)


def standing_at(root: str, timeout: float) -> Standing | None:
    """Returns what the root in a folder knows of its cluster; None: it is in none yet."""
    use = open_root(absolute_path(root), "r", Creation(), timeout)
    try:
        return standing_of(use.root)
    finally:
        close_root(use)


def served_standing(root: str, timeout: float) -> Standing:
    """Raises NotServedError where `standing_at` returns None."""
    standing = standing_at(root, timeout)
    if standing is None:
        raise NotServedError(f"{root} was never served: memstore serve {root} --address tcp://IP:PORT")
    return standing


class Asker:
    """Asks members. Use it in a `with`.

    Args:
        secret: of the cluster; None: it has none.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._links = Links(secret=secret, kind=CLIENT, hello=hello_of_this_process())

    def ask(self, to: Member | str, request: Asking, deadline: float, *, patience: float = float("inf")) -> Told | None:
        """Asks, and asks again where a connection breaks or can't be made.

        Args:
            to: a member, or whoever answers at an address.
            deadline: monotonic.
            patience: seconds after which it isn't asked again: an index process that was killed is back by then.

        Returns: the answer. None: there was none.

        Raises:
            LinkRefusedError: another secret, protocol or member is there.
        """
        address, member = (to, None) if isinstance(to, str) else (to.address, to.id)
        last_try = min(deadline, time.monotonic() + patience)
        while True:
            with contextlib.suppress(HomeUnavailableError):
                received = self._links.send(address, member, encode(request), deadline)
                if received is not None:
                    return decode_answer(received)
            if time.monotonic() + _AGAIN > last_try:
                return None
            time.sleep(_AGAIN)

    def ask_all(
        self, members: Iterable[Member], request: Report | Halt, deadline: float, *, patience: float = float("inf")
    ) -> dict[bytes, object]:
        """Asks members at once. Returns by member the answer, or the error by which there was none."""

        def one(member: Member) -> object:
            try:
                answer = self.ask(member, request, deadline, patience=patience)
            except MemstoreError as error:
                return error
            return HomeUnavailableError(self.trouble_of(member.address)) if answer is None else answer

        asked = list(members)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return dict(zip((member.id for member in asked), threads.map(one, asked), strict=True))

    def trouble_of(self, address: str) -> str:
        """Returns why there was no answer."""
        return self._links.trouble_of(address) or _SILENT

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._links.close()
