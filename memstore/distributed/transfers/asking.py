"""One request on a stream, and its answer, which is received where the bytes are to lie."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memstore._parsing import UNDECODABLE
from memstore.distributed.transfers.messages import (
    BUSY,
    ELSEWHERE,
    FAILED,
    FAILURE_LIMIT,
    FOLLOWS,
    GONE,
    HEAD,
    LENGTH,
    RANGES_LIMIT,
    SEGMENTS_LIMIT,
    WHOLE,
    Bring,
    Fetch,
    Keep,
    LetGo,
    Request,
    Segment,
    Wanted,
    decode_failure,
    encode,
)
from memstore.distributed.transfers.pieces import Pieces, skip
from memstore.distributed.transfers.ranges import Numbers, Ranges
from memstore.distributed.transfers.streams import Stream
from memstore.engine import SegmentExtent
from memstore.errors import CorruptionError, MemstoreError

_LONGEST = 1e6  # seconds


class Part(NamedTuple):
    """Ranges of a segment of another host, and the memory where they are to lie.

    Attributes:
        extent: the segment, by the record that names it.
        ranges: of the file.
        origin: the address where the first byte of the file would lie; or that of each range, for itself.
    """

    extent: SegmentExtent
    ranges: Ranges
    origin: int | Numbers

    @property
    def pieces(self) -> Pieces:
        """Where the bytes are to lie."""
        return Pieces(self.ranges.starts + self.origin, self.ranges.sizes)

    def split(self, nbytes: int) -> tuple[Part, Part]:
        """The first so many bytes, and the others."""
        first, rest = self.ranges.split(nbytes)
        if isinstance(self.origin, int):
            return self._replace(ranges=first), self._replace(ranges=rest)
        count = len(self.origin)
        origins = self.origin[: len(first.starts)], self.origin[count - len(rest.starts) :]
        return Part(self.extent, first, origins[0]), Part(self.extent, rest, origins[1])

    def batches(self, count: int) -> Iterator[Part]:
        """So many ranges at a time."""
        for number, ranges in enumerate(self.ranges.batches(count)):
            origin = self.origin
            if not isinstance(origin, int):
                origin = origin[number * count : (number + 1) * count]
            yield Part(self.extent, ranges, origin)


class BrokenStreamError(Exception):
    """The stream has ended, or what came over it is no answer."""


class ElsewhereError(Exception):
    """The bytes are to be asked for over TCP, of the host where they lie.

    Attributes:
        is_busy: this time.
    """

    def __init__(self, why: str, *, is_busy: bool) -> None:
        super().__init__(why)
        self.is_busy = is_busy


class CannotSendError(MemstoreError):
    """The host has no file or mapping left to send by, or the like."""


def batches(parts: Sequence[Part]) -> list[list[Part]]:
    """As many segments and ranges as a request may have."""
    found: list[list[Part]] = []
    count = RANGES_LIMIT
    for part in parts:
        for batch in part.batches(RANGES_LIMIT):
            count += len(batch.ranges.starts)
            if count > RANGES_LIMIT or len(found[-1]) == SEGMENTS_LIMIT:
                found.append([])
                count = len(batch.ranges.starts)
            found[-1].append(batch)
    return found


def ask(stream: Stream, parts: Sequence[Part], deadline: float, of: bytes | None = None) -> None:
    """Asks for parts, which one request may have; where they are to lie may be unknown yet. Raises OSError.

    Args:
        of: the id of the host where they lie, if this one's index process is to bring them.
    """
    left = deadline - time.monotonic()
    stream.set_patience(left)
    wanted = tuple(map(_wanted, parts))
    stream.send(
        _framed(Fetch(wanted) if of is None else Bring(of, int(max(min(left, _LONGEST), 0.001) * 1000), wanted))
    )


def receive(stream: Stream, parts: Sequence[Part], deadline: float) -> bool:
    """Receives what was asked for. False: one of the segments holds another put.

    Raises:
        CorruptionError, CannotSendError, ElsewhereError: the host says so, and the stream can be used again.
        OSError, BrokenStreamError: the stream is of no use any more.
    """
    kind, nbytes = HEAD.unpack(receive_bytes(stream, HEAD.size))
    if kind == GONE:
        return False
    if kind == FAILED and nbytes <= FAILURE_LIMIT:
        raise _failure(stream, receive_bytes(stream, nbytes))
    if kind in (ELSEWHERE, BUSY) and nbytes <= FAILURE_LIMIT:
        raise ElsewhereError(receive_bytes(stream, nbytes).decode(errors="replace"), is_busy=kind == BUSY)
    if kind != FOLLOWS or nbytes != sum(part.ranges.nbytes for part in parts):
        raise BrokenStreamError(f"an answer of kind {kind} and {nbytes:,} bytes")
    for part in parts:
        for group, is_packed in part.pieces.groups():
            if is_packed:
                buffer = bytearray(int(group.sizes.sum()))
                _fill(stream, [memoryview(buffer)], deadline)
                group.scatter(buffer)
            else:
                _fill(stream, group.parts(), deadline)
    return receive_bytes(stream, 1) == WHOLE


def ask_to_keep(stream: Stream, extents: Sequence[SegmentExtent], deadline: float) -> bool:
    """As `ask`, of segments that are to stay, as many as a request may have."""
    stream.set_patience(deadline - time.monotonic())
    stream.send(_framed(Keep(tuple(Segment(one.segment, one.put_id, one.size, one.start) for one in extents))))
    kind, nbytes = HEAD.unpack(receive_bytes(stream, HEAD.size))
    if kind == FAILED and nbytes <= FAILURE_LIMIT:
        raise _failure(stream, receive_bytes(stream, nbytes))
    if nbytes or kind not in (FOLLOWS, GONE):
        raise BrokenStreamError(f"an answer of kind {kind} and {nbytes:,} bytes")
    return kind == FOLLOWS


def let_go(stream: Stream, extents: Sequence[SegmentExtent]) -> None:
    """Says that they need not stay. It waits for nothing. Raises OSError where the stream has no room for that."""
    for at in range(0, len(extents), SEGMENTS_LIMIT):
        batch = extents[at : at + SEGMENTS_LIMIT]
        text = _framed(LetGo(tuple((one.segment, one.put_id) for one in batch)))
        if stream.socket.send(text, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) < len(text):
            raise BlockingIOError("the host takes nothing")


def _framed(request: Request) -> bytes:
    text = encode(request)
    return LENGTH.pack(len(text)) + text


def _wanted(part: Part) -> Wanted:
    extent, ranges, _ = part
    pairs = np.stack([ranges.starts, ranges.sizes], 1).astype(">u8").tobytes()
    return Wanted(extent.segment, extent.put_id, extent.size, extent.start, pairs)


def _failure(stream: Stream, text: bytes) -> MemstoreError:
    try:
        failure = decode_failure(text)
    except UNDECODABLE as error:
        raise BrokenStreamError(f"a failure that can't be read: {error}") from None
    said = f"{stream.name}: {failure.text}"
    return CorruptionError(said, detail=said) if failure.error == "CorruptionError" else CannotSendError(said)


def receive_bytes(stream: Stream, size: int) -> bytes:
    """Raises OSError, BrokenStreamError."""
    data = stream.socket.recv(size, socket.MSG_WAITALL) if size else b""
    if len(data) != size:
        raise BrokenStreamError("an answer that ends in the middle")
    return data


def _fill(stream: Stream, parts: Sequence[memoryview], deadline: float) -> None:
    """Receives into all of the parts, in order."""
    if len(parts) > 1:
        parts = skip(parts, stream.socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0])
    for part in parts:
        while len(part):
            if time.monotonic() > deadline:
                raise TimeoutError("it takes longer than the timeout")
            got = stream.socket.recv_into(part, len(part), socket.MSG_WAITALL)  # or what came within the patience
            if not got:
                raise BrokenStreamError("an answer that ends in the middle")
            part = part[got:]
