"""What is said on a stream, behind its handshake: requests, and the bytes that answer them.

    request   length (4), msgpack of `Fetch`, `Keep`, `LetGo`, `Bring` or `Stage`
    answer    what follows (1), how many bytes (8); these bytes; behind bytes of segments, whether they are whole (1)

Numbers are big-endian. One request is answered before the next one is read. The bytes of an answer are the ranges, in
the order of the request, without anything between them; or, where it failed, msgpack of `Failure`. To `Keep` the answer
has no bytes, and to `LetGo` there is none.

`Bring` is what a process asks its own host's index process; its answer is that of `Fetch`. `Stage` is what that one
asks the other host: the bytes come by registered memory. Behind the head the host says of each piece where it lies, as
soon as it lies there (length (4), msgpack of `Staged`), and is told when it was read (1). The bytes that are no whole
STAGED_UNIT follow on the stream, and whether all were whole (1). *Elsewhere* says that they are to be asked for over
TCP, and *busy* that they are this time; a text follows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from memstore.errors import MemstoreError

SEGMENTS_LIMIT = 1024  # of one request
RANGES_LIMIT = 1 << 16  # of one request
RANGE_SIZE = 16  # bytes: offset and size
REQUEST_LIMIT = RANGE_SIZE * RANGES_LIMIT + 64 * SEGMENTS_LIMIT + 256  # bytes
FAILURE_LIMIT = 1 << 16  # bytes
STAGED_LIMIT = 1 << 16  # bytes: what is said of a piece
STAGED_UNIT = 1 << 20  # bytes: pieces are so many of them

FOLLOWS, GONE, FAILED, ELSEWHERE, BUSY = range(5)  # what an answer's head says
WHOLE, TORN = b"\1", b"\0"  # what is said behind the bytes
LENGTH = struct.Struct(">I")
HEAD = struct.Struct(">BQ")

Number = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A segment of the host that is asked.

    Attributes:
        size, start: of the file, and where its data section starts, by the record that names it.
    """

    segment: Number
    put_id: Number
    size: Size
    start: Size


class Wanted(Segment, frozen=True, array_like=True):
    """Ranges of it.

    Attributes:
        ranges: offset in the file and size of each, 8 bytes each, big-endian.
    """

    ranges: Annotated[bytes, Meta(max_length=RANGE_SIZE * RANGES_LIMIT)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    segments: Annotated[tuple[Wanted, ...], Meta(min_length=1, max_length=SEGMENTS_LIMIT)]


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """These are to stay until `LetGo`, or the end of this stream."""

    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=SEGMENTS_LIMIT)]


class LetGo(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Segments with their put ids, which nobody looks at any more. There is no answer."""

    segments: Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=SEGMENTS_LIMIT)]


class Bring(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Of another host, by memory that both ends have registered.

    Attributes:
        member: the id of that host.
        milliseconds: how long it may take.
    """

    member: Annotated[bytes, Meta(min_length=16, max_length=16)]
    milliseconds: Size
    segments: Annotated[tuple[Wanted, ...], Meta(min_length=1, max_length=SEGMENTS_LIMIT)]


class Stage(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Into registered memory of this host, from which the other one reads.

    Attributes:
        transport: by which it reads: both ends must have the same.
        monarch: its version of Monarch: likewise.
    """

    transport: Annotated[str, Meta(max_length=64)]
    monarch: Annotated[str, Meta(max_length=64)]
    segments: Annotated[tuple[Wanted, ...], Meta(min_length=1, max_length=SEGMENTS_LIMIT)]


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """A piece that may be read now.

    Attributes:
        handle: of the memory, for the other side's Monarch.
    """

    handle: Annotated[bytes, Meta(max_length=STAGED_LIMIT - 64)]
    nbytes: Size


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a host can't send what it was asked for: the name of a class of `memstore.errors`, and the text."""

    error: Annotated[str, Meta(max_length=64)]
    text: Annotated[str, Meta(max_length=4096)]


class BadRequestError(MemstoreError):
    """A request that nobody sends who keeps to the protocol: its stream is closed."""


encode = msgspec.msgpack.Encoder().encode
Request = Fetch | Keep | LetGo | Bring | Stage
decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
decode_staged = msgspec.msgpack.Decoder(Staged).decode
decode_failure = msgspec.msgpack.Decoder(Failure).decode
