"""What an index process is asked beside the rules' own messages: how it is, and to end.

The agent's launcher and `memstore status` ask. Whatever came over a socket is decoded here, types and bounds checked.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from memstore._parsing import UNDECODABLE
from memstore.distributed import rules
from memstore.distributed.actors import FindActor, FoundActor
from memstore.distributed.links import parse_address
from memstore.distributed.rules import Answer, Ask, Request
from memstore.errors import CorruptionError, InvalidAddressError

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=4096)]


class Report(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """How is this host? Its answer is `Reported`."""


class Halt(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """End, and your agent with you. The answer, `Done`, comes before the end.

    Attributes:
        removes: the agent removes the root then, with all values in it.
    """

    removes: bool = False


class Reported(msgspec.Struct, frozen=True, array_like=True, tag=96):
    """What an index process says of its host.

    Attributes:
        epoch: that it is at; 0: it is no member.
        is_settled: it has given all that is at home elsewhere, and waits for nobody.
        incarnation: how often the root's index process was started.
        keys: of those that are at home there.
        live_bytes: of the files there, whatever home they have.
        sent, received: bytes on the network, of this process since it was started.
        memstore, torch, monarch: versions; empty: it isn't installed.
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


Asking: TypeAlias = Request | Report | Halt | FindActor
Told: TypeAlias = Answer | Reported | FoundActor

_request = msgspec.msgpack.Decoder(Request | Report | Halt | FindActor)
_answer: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(rules.Answer | Reported | FoundActor)
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
