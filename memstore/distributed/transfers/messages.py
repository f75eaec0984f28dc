"""Messages of a stream, the ranges of bytes that they name, and their way through a socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from memstore.engine import syscalls
from memstore.errors import MemstoreError

# --- Requests and answers --------------------------------------------------------------------------------------------
# What is said on a stream, behind its handshake: requests, and the bytes that answer them.
#
#     request   length (4), msgpack of `Fetch`, `PinSegments`, `UnpinSegments`, `Bring`, `Stage` or `FetchCopy`
#     answer    what follows (1), how many bytes (8); these bytes; behind bytes of segments, whether they are whole (1)
#
# Numbers are big-endian. One request is answered before the next one is read. The bytes of an answer are the ranges, in
# the order of the request, without anything between them; or, where it failed, msgpack of `SendFailure`. To
# `PinSegments` the answer has no bytes, and to `UnpinSegments` there is none.
#
# `Bring` is what a process asks its own host's index process; its answer is that of `Fetch`. `Stage` is what that one
# asks the other host: the bytes come by registered memory. Behind the head the host says of each piece where it lies,
# as soon as it lies there (length (4), msgpack of `Staged`), and is told when it was read (1). The bytes that are no
# whole STAGED_UNIT follow on the stream, and whether all were whole (1). *Elsewhere* says that they are to be asked for
# over TCP, and *busy* that they are this time; a text follows.
#
# *Refer* answers a `Fetch` that names its reader: the bytes are to be had of another host (`Referral`), by `FetchCopy`.
# Behind that come checksums of the bytes, of DIGEST bytes for each CHUNK of them, as soon as they are computed. Whoever
# answers a `FetchCopy` sends, behind the head, pieces as they arrive: length (4), bytes. An empty one says that it
# waits itself. ENDED is behind the last one, or LACKING, where the rest is to be had elsewhere.

SEGMENTS_LIMIT = 1024  # of one request
RANGES_LIMIT = 1 << 16  # of one request
RANGE_SIZE = 16  # bytes: offset and size
REQUEST_LIMIT = RANGE_SIZE * RANGES_LIMIT + 64 * SEGMENTS_LIMIT + 256  # bytes
FAILURE_LIMIT = 1 << 16  # bytes
STAGED_LIMIT = 1 << 16  # bytes: what is said of a piece
STAGED_UNIT = 1 << 20  # bytes: pieces are so many of them

CHUNK = 8 << 20  # bytes that have one checksum
DIGEST = 8  # bytes: XXH3, 64 bits, big-endian
ENDED, LACKING = 0xFFFF_FFFF, 0xFFFF_FFFE  # in place of the length of a piece

FOLLOWS, GONE, FAILED, ELSEWHERE, BUSY, REFER = range(6)  # what an answer's head says
WHOLE, TORN = b"\1", b"\0"  # what is said behind the bytes
LENGTH = struct.Struct(">I")
HEAD = struct.Struct(">BQ")

_Number = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A segment of the host that is asked.

    Attributes:
        size, start: of the file, and where its data section starts, by the record that names it.
    """

    segment: _Number
    put_id: _Number
    size: _Size
    start: _Size


class Wanted(Segment, frozen=True, array_like=True):
    """Ranges of it.

    Attributes:
        ranges: offset in the file and size of each, 8 bytes each, big-endian.
    """

    ranges: Annotated[bytes, Meta(max_length=RANGE_SIZE * RANGES_LIMIT)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Asks for bytes.

    Attributes:
        reader: the id of a host that keeps them, and passes them on; empty: nobody does.
        lost: the id of the host that it was referred to, and could not have them from; empty: it comes first.
    """

    segments: Annotated[tuple[Wanted, ...], Meta(min_length=1, max_length=SEGMENTS_LIMIT)]
    reader: Annotated[bytes, Meta(max_length=16)] = b""
    lost: Annotated[bytes, Meta(max_length=16)] = b""


class PinSegments(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """These are to stay until `UnpinSegments`, or the end of this stream."""

    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=SEGMENTS_LIMIT)]


class UnpinSegments(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Segments with their put ids, which nobody looks at any more. There is no answer."""

    segments: Annotated[tuple[tuple[_Number, _Number], ...], Meta(max_length=SEGMENTS_LIMIT)]


class Bring(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Asks for bytes of another host, by memory that both ends have registered.

    Attributes:
        member: the id of that host.
        milliseconds: how long it may take.
    """

    member: Annotated[bytes, Meta(min_length=16, max_length=16)]
    milliseconds: _Size
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


class FetchCopy(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Asks for bytes of another host's segment, of which this host has a copy, or is making one.

    Attributes:
        host: where the segment lies.
        key: of the copy.
        depth: of the reader: it waits for no host that has as much.
        wanted: of that segment.
    """

    host: Annotated[bytes, Meta(min_length=16, max_length=16)]
    key: Annotated[bytes, Meta(min_length=1, max_length=2048)]
    depth: Annotated[int, Meta(ge=1, le=1 << 32)]
    wanted: Wanted


class Referral(msgspec.Struct, frozen=True, array_like=True):
    """The answer *refer*.

    Attributes:
        parent: the id of the host that has the bytes, or is fetching them.
        depth: of the reader: see `rules/relays.py`.
    """

    parent: Annotated[bytes, Meta(min_length=16, max_length=16)]
    depth: Annotated[int, Meta(ge=1, le=1 << 32)]


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """A piece that may be read now.

    Attributes:
        handle: of the memory, for the other side's Monarch.
    """

    handle: Annotated[bytes, Meta(max_length=STAGED_LIMIT - 64)]
    nbytes: _Size


class SendFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a host can't send what it was asked for: the name of a class of `memstore.errors`, and the text."""

    error: Annotated[str, Meta(max_length=64)]
    text: Annotated[str, Meta(max_length=4096)]


class BadRequestError(MemstoreError):
    """A request that nobody sends who keeps to the protocol: its stream is closed."""


encode = msgspec.msgpack.Encoder().encode
Request = Fetch | PinSegments | UnpinSegments | Bring | Stage | FetchCopy


def framed(message: Request | Staged) -> bytes:
    """Returns a message behind its length."""
    text = encode(message)
    return LENGTH.pack(len(text)) + text


decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
decode_staged = msgspec.msgpack.Decoder(Staged).decode
decode_referral = msgspec.msgpack.Decoder(Referral).decode
decode_failure = msgspec.msgpack.Decoder(SendFailure).decode


def limit_waits(stream: socket.socket, seconds: float) -> None:
    """Limits how long a step may wait for the other side: calls raise BlockingIOError then."""
    wait = struct.pack("@ll", *divmod(max(int(seconds * 1e6), 1000), 1_000_000))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


# --- Ranges ----------------------------------------------------------------------------------------------------------
# Ranges of bytes: sorted, apart, and none of them empty. Which are wanted, and which are there already. Pure.
#
# They are arrays, since a slice of columns has a range for each row.

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_NONE: Numbers = np.zeros(0, np.int64)


class Ranges(NamedTuple):
    """Attributes:
    starts, stops: the first byte of each range, and the one behind its last.
    """

    starts: Numbers
    stops: Numbers

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    @property
    def sizes(self) -> Numbers:
        return self.stops - self.starts

    def meets(self, others: Ranges) -> bool:
        """Whether a byte lies in both."""
        if not self or not others:
            return False
        at = np.searchsorted(others.stops, self.starts, side="right")  # the first that ends behind the start
        found = at < len(others.stops)
        return bool(np.any(others.starts[at[found]] < self.stops[found]))

    def cut(self, first: int, last: int) -> Ranges:
        """Returns the parts that lie in one range."""
        starts, stops = np.maximum(self.starts, first), np.minimum(self.stops, last)
        kept = starts < stops
        return Ranges(starts[kept], stops[kept])

    def split(self, nbytes: int) -> tuple[Ranges, Ranges]:
        """The first so many bytes of them, and the others."""
        ends = np.cumsum(self.sizes)
        at = int(np.searchsorted(ends, nbytes))
        if at >= len(ends):
            return self, NO_RANGES
        middle = int(self.stops[at]) - (int(ends[at]) - nbytes)
        last = self.stops[-1:].tolist()[0]
        return self.cut(int(self.starts[0]), middle), self.cut(middle, last)

    def batches(self, count: int) -> Iterator[Ranges]:
        """So many at a time."""
        for first in range(0, len(self.starts), count):
            yield Ranges(self.starts[first : first + count], self.stops[first : first + count])

    def without(self, others: Ranges) -> Ranges:
        """Returns the parts that lie in none of the others."""
        if not self or not others:
            return self
        edges = np.unique(np.concatenate([*self, *others]))
        starts, stops = edges[:-1], edges[1:]
        kept = _cover(self, starts) & ~_cover(others, starts)
        return merged(starts[kept], stops[kept])


NO_RANGES = Ranges(_NONE, _NONE)


def one_range(start: int, stop: int) -> Ranges:
    return Ranges(np.array([start], np.int64), np.array([stop], np.int64)) if start < stop else NO_RANGES


def merged(starts: Numbers, stops: Numbers, gap: int = 0) -> Ranges:
    """Any ranges, sorted and joined where they touch, overlap, or have no more than `gap` bytes between them."""
    kept = starts < stops
    starts, stops = starts[kept], stops[kept]
    if not len(starts):
        return NO_RANGES
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(stops[order])
    new = np.empty(len(starts), bool)
    new[0] = True
    np.greater(starts[1:], reached[:-1] + gap, out=new[1:])
    return Ranges(starts[new], reached[np.append(new[1:], True)])


def together(found: Sequence[Ranges], gap: int = 0) -> Ranges:
    """All of them, `merged`."""
    if not found:
        return NO_RANGES
    return merged(np.concatenate([one.starts for one in found]), np.concatenate([one.stops for one in found]), gap)


def _cover(ranges: Ranges, places: Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Tells of each place whether it lies in one of the ranges."""
    at = np.searchsorted(ranges.starts, places, side="right") - 1
    return (at >= 0) & (places < ranges.stops[np.maximum(at, 0)])


# --- Pieces of memory ------------------------------------------------------------------------------------------------
# Ranges of memory on their way through a socket: large ones from and to where they lie, small ones packed.
#
# The kernel takes 1,024 parts a call. To make a part of each range costs 0.2 us, so ranges of less than 256 bytes are
# gathered into one buffer, and scattered from one, by an index of each byte.

MOST_PARTS = 1024  # that one call takes, on Linux
_SMALL = 256  # bytes
_PACKED = 4096  # ranges that are packed at once: 1 MiB at most, and the index takes eight times as much

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Pieces(NamedTuple):
    """Memory in pieces, in the order in which they go through the socket: their addresses and sizes."""

    addresses: Numbers
    sizes: Numbers

    def groups(self) -> Iterator[tuple[Pieces, bool]]:
        """As many as go through one call, and whether they are to be packed."""
        is_small = self.sizes < _SMALL
        edges = [0, *(np.flatnonzero(is_small[1:] != is_small[:-1]) + 1).tolist(), len(self.sizes)]
        for first, last in zip(edges, edges[1:], strict=False):
            small = bool(is_small[first])
            step = _PACKED if small else MOST_PARTS
            for at in range(first, last, step):
                stop = min(at + step, last)
                yield Pieces(self.addresses[at:stop], self.sizes[at:stop]), small and stop > at + 1

    def parts(self) -> list[memoryview]:
        """The memory of each."""
        first, size = self._hull()
        window = syscalls.memory_at(first, size)
        starts, stops = (self.addresses - first).tolist(), (self.addresses - first + self.sizes).tolist()
        return [window[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def split(self, nbytes: int) -> tuple[Pieces, Pieces]:
        """The first so many bytes of them, and the others."""
        ends = np.cumsum(self.sizes)
        at = int(np.searchsorted(ends, nbytes))
        if at >= len(ends):
            return self, Pieces(self.addresses[:0], self.sizes[:0])
        over = int(ends[at]) - nbytes
        first = Pieces(self.addresses[: at + 1], np.array(self.sizes[: at + 1]))
        first.sizes[-1] -= over
        if not over:
            return first, Pieces(self.addresses[at + 1 :], self.sizes[at + 1 :])
        rest = Pieces(np.array(self.addresses[at:]), np.array(self.sizes[at:]))
        rest.addresses[0] += rest.sizes[0] - over
        rest.sizes[0] = over
        return first, rest

    def copy_to(self, address: int) -> None:
        """One behind the other."""
        for group, is_packed in self.groups():
            if is_packed:
                data = group.gather()
                syscalls.copy(address, syscalls.buffer_address(data), len(data))
                address += len(data)
            else:
                for start, size in zip(group.addresses.tolist(), group.sizes.tolist(), strict=True):
                    syscalls.copy(address, start, size)
                    address += size

    def gather(self) -> memoryview:
        """A copy of all of them."""
        return self._window()[self._index()].data

    def scatter(self, data: bytearray) -> None:
        """The opposite of `gather`."""
        self._window()[self._index()] = np.frombuffer(data, np.uint8)

    def _hull(self) -> tuple[int, int]:
        """The address of the first, and how many bytes there are to the end of the last."""
        first = int(self.addresses.min())
        return first, int((self.addresses + self.sizes).max()) - first

    def _window(self) -> Bytes:
        return np.frombuffer(syscalls.memory_at(*self._hull()), np.uint8)

    def _index(self) -> Numbers:
        """Where each byte lies, in the window."""
        ends = np.cumsum(self.sizes)
        shifts = self.addresses - self.addresses.min() - (ends - self.sizes)
        return np.repeat(shifts, self.sizes) + np.arange(int(ends[-1]), dtype=np.int64)


def skip(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The parts without their first bytes."""
    for at, part in enumerate(parts):
        if nbytes < len(part):
            return [part[nbytes:], *parts[at + 1 :]]
        nbytes -= len(part)
    return []
