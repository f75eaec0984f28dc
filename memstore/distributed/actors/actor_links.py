"""ActorLinks: a process's requests by index actors that it was handed references to, in place of sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from time import monotonic

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.distributed.actors.forks import is_monarch_lost
from memstore.distributed.actors.reference import (
    FindActor,
    FoundActor,
    decode_reference,
)
from memstore.distributed.actors.requests import ActorRequest, CalledActor, GoneError
from memstore.distributed.links import MESSAGE_LIMIT, Hello, Links
from memstore.errors import CorruptionError, HomeUnavailableError, LinkRefusedError

_FIND_AGAIN = 1.0  # seconds: an index process that was killed has its actor back later than its listener

_find = msgspec.msgpack.encode(FindActor())
_found = msgspec.msgpack.Decoder(FoundActor).decode


class ActorLinks:
    """`Links`, but that members are asked by their index actors, as long as these answer.

    An actor ends with its index process. Then, and where it is silent, that member is asked by the links, and among
    other things where its next actor is. Streams are the links' in any case.

    Thread-safe. What is Monarch's doesn't go through a fork: a forked child asks by the links alone, also by an
    ActorLinks of its own, if its parent had imported Monarch.

    Args:
        links: it owns them.
        references: encoded; one a member, at most.

    Raises:
        MissingPackageError, LinkRefusedError, CorruptionError: as `open_reference`.
    """

    def __init__(self, links: Links, references: Sequence[bytes]) -> None:
        self._links, self._pid = links, os.getpid()
        ways = () if is_monarch_lost() else map(_Way, references)
        self._ways = {way.member: way for way in ways}

    def send(self, address: str, member: bytes | None, message: bytes, deadline: float) -> bytes | None:
        """As `Links.send`, but that None may also say that nothing was sent to an actor."""
        way = None if member is None or self._pid != os.getpid() else self._ways.get(member)
        if way is None or not (way.is_there or self._find(way, address, deadline)):
            return self._links.send(address, member, message, deadline)
        if len(message) > MESSAGE_LIMIT:
            raise ValueError(f"a message of {len(message):,} bytes to {address}: it may have {MESSAGE_LIMIT:,}")
        way.address = address
        return way.request(message, deadline)

    def trouble_of(self, address: str) -> str:
        """As `Links.trouble_of`."""
        troubles = (way.trouble for way in self._at(address))
        return self._links.trouble_of(address) or next(filter(None, troubles), "")

    def hello_of(self, address: str) -> Hello | None:
        """As `Links.hello_of`."""
        hellos = (way.hello for way in self._at(address) if way.is_there)
        return next(hellos, None) or self._links.hello_of(address)

    def stream(self, address: str, member: bytes | None, deadline: float) -> socket.socket:
        """As `Links.stream`."""
        return self._links.stream(address, member, deadline)

    def close(self) -> None:
        self._ways = {}
        self._links.close()

    def _at(self, address: str) -> list[_Way]:
        return [way for way in self._ways.values() if way.address == address]

    def _find(self, way: _Way, address: str, deadline: float) -> bool:
        """Asks a listener for its actor, now and then. Whether there is one."""
        now = monotonic()
        if now < way.find_at:
            return False
        way.find_at = now + _FIND_AGAIN
        try:
            received = self._links.send(address, way.member, _find, deadline)
        except HomeUnavailableError:
            return False
        if received is None:
            return False
        try:
            return way.renew(_found(received).reference)
        except (*UNDECODABLE, CorruptionError, LinkRefusedError) as error:
            way.trouble = str(error)
            return False


class _Way:
    """To one member.

    Attributes:
        address: under which it was asked last.
        is_there: its actor has not failed yet.
        trouble: why it has.
        find_at: when it is asked for anew, monotonic.
    """

    def __init__(self, reference: bytes) -> None:
        self.address, self.trouble, self.find_at = "", "", 0.0
        self._reference = decode_reference(reference)
        self._actor = CalledActor(self._reference)
        self.is_there = True

    @property
    def member(self) -> bytes:
        return self._reference.member

    @property
    def hello(self) -> Hello:
        return self._reference.hello

    def renew(self, data: bytes) -> bool:
        """Takes another reference, of the same member. False: it is none, or the one that has failed."""
        if not data:
            return False
        reference = decode_reference(data)
        if reference.member != self.member or reference == self._reference:
            return False
        self._actor, self._reference = CalledActor(reference), reference
        self.is_there, self.trouble = True, ""
        return True

    def request(self, message: bytes, deadline: float) -> bytes | None:
        """The answer. None: there was none by the deadline, or the actor is gone. Raises LinkRefusedError."""
        actor = self._actor
        try:
            answer = ActorRequest(actor, self.member, deadline).run(message)
            self.trouble = "" if answer is not None else "the index actor gave no answer in time"
            return answer
        except GoneError as error:
            self.trouble = f"the index actor of {self.hello.host or 'the host'}: {error}"
            if self._actor is actor:
                self.is_there = False
            return None
