"""The sender: answers what is asked on one stream, from segments of this host. It runs in the index process.

1. Read a request, and check all that it says.
2. Map each segment under a shared lock (`root.storage`), which compares the put id in its header: another put, or
   a locked file, is *gone*. As long as it is mapped, nobody writes into it.
3. Send the ranges from the mapping. The kernel copies them into the socket's buffers, and nobody else copies anything.
   (`sendfile` and MSG_ZEROCOPY save that copy, but took more: 0.27 and 0.24 s of CPU for a GB, and twice as long at the
   receiver, against 0.16. And what the kernel still sends then, when the lock is given up, may be another put's.)
4. Compare the put ids again, and say behind the bytes whether they are whole.

A client that dies ends its stream; one that takes nothing for `STALLED` seconds is dropped. Nothing else comes of it.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence

import numpy as np

from memstore._parsing import UNDECODABLE
from memstore.distributed.transfers import pieces
from memstore.distributed.transfers.messages import (
    ELSEWHERE,
    FAILED,
    FOLLOWS,
    GONE,
    HEAD,
    LENGTH,
    RANGE_SIZE,
    RANGES_LIMIT,
    REQUEST_LIMIT,
    TORN,
    WHOLE,
    BadRequestError,
    Failure,
    Fetch,
    Request,
    Segment,
    Wanted,
    decode_request,
    encode,
)
from memstore.distributed.transfers.ranges import Ranges
from memstore.engine import HEAD_SIZE, Mapping, Root, SegmentExtent, belongs
from memstore.errors import CorruptionError, ResourceLimitError

STALLED = 10.0  # seconds in which a client takes nothing, or sends no more of a request
IDLE = 600.0  # seconds without a request


def prepare(stream: socket.socket) -> None:
    """Whoever is on the other side has so long for each step, and no longer."""
    stream.settimeout(None)
    wait = struct.pack("@ll", *divmod(int(STALLED * 1e6), 1_000_000))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


def next_request(stream: socket.socket, idle: float | None = IDLE) -> Request | None:
    """None where the stream has ended, or nobody asks for anything any more. Raises OSError, BadRequestError.

    Args:
        idle: seconds that a stream may be idle; None: for ever.
    """
    waiting = select.poll()
    waiting.register(stream, select.POLLIN)
    if not waiting.poll(None if idle is None else idle * 1000):
        return None
    head = stream.recv(LENGTH.size, socket.MSG_WAITALL)
    if not head:
        return None
    (size,) = LENGTH.unpack(_whole(head, LENGTH.size))
    if size > REQUEST_LIMIT:
        raise BadRequestError(f"a request of {size:,} bytes, and {REQUEST_LIMIT:,} are the limit")
    text = _whole(stream.recv(size, socket.MSG_WAITALL), size)
    try:
        return decode_request(text)
    except UNDECODABLE as error:
        raise BadRequestError(f"a request that can't be read: {error}") from None


def _whole(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise BadRequestError(f"a request that ends after {len(data):,} of {size:,} bytes")
    return data


def answer(root: Root, stream: socket.socket, request: Fetch) -> None:
    """Sends what was asked for, or why it can't be. Raises OSError and BadRequestError, which end the stream."""
    wanted = ranges_of(request.segments)
    try:
        found = map_segments(root, request.segments)
    except (CorruptionError, OSError) as error:
        send_failure(stream, error)
        return
    if found is None:
        send_all(stream, [memoryview(HEAD.pack(GONE, 0))])
        return
    head = memoryview(HEAD.pack(FOLLOWS, sum(ranges.nbytes for ranges in wanted)))
    for mapping, ranges in zip(found, wanted, strict=True):
        for group, is_packed in pieces.Pieces(ranges.starts + mapping.address, ranges.sizes).groups():
            parts = [group.gather()] if is_packed else group.parts()
            send_all(stream, [head, *parts])
            head = memoryview(b"")
    send_all(stream, [head, memoryview(end_of_answer(root, found, request.segments))])


def end_of_answer(root: Root, mappings: Sequence[Mapping], named: Sequence[Segment]) -> bytes:
    """What is said behind the bytes of these segments."""
    is_whole = all(_is_there(root, mapping, one) for mapping, one in zip(mappings, named, strict=True))
    return WHOLE if is_whole else TORN


def ranges_of(segments: Sequence[Wanted]) -> list[Ranges]:
    """Raises BadRequestError unless a request may name them."""
    found = [_ranges_of(one) for one in segments]
    if sum(len(ranges.starts) for ranges in found) > RANGES_LIMIT:
        raise BadRequestError(f"a request of more than {RANGES_LIMIT:,} ranges")
    return found


def _ranges_of(wanted: Wanted) -> Ranges:
    """Raises BadRequestError unless the ranges lie in the segment, one behind the other."""
    if len(wanted.ranges) % RANGE_SIZE:
        raise BadRequestError(f"{len(wanted.ranges):,} bytes are no ranges")
    numbers = np.frombuffer(wanted.ranges, ">u8").astype(np.uint64)
    starts = numbers[0::2]
    stops = starts + numbers[1::2]  # modulo 2^64
    if np.any(stops <= starts) or np.any(stops > wanted.size):
        raise BadRequestError(f"ranges that don't lie in the {wanted.size:,} bytes of segment {wanted.segment}")
    if np.any(starts[1:] < stops[:-1]):
        raise BadRequestError(f"ranges of segment {wanted.segment} that are not in order")
    return Ranges(starts.astype(np.int64), stops.astype(np.int64))


def send_failure(stream: socket.socket, error: Exception) -> None:
    kind = CorruptionError if isinstance(error, CorruptionError) else ResourceLimitError
    text = encode(Failure(kind.__name__, str(error)[:4096]))
    send_all(stream, [memoryview(HEAD.pack(FAILED, len(text)) + text)])


def send_elsewhere(stream: socket.socket, why: str, kind: int = ELSEWHERE) -> None:
    """It is to be asked for over TCP, of the host where it lies.

    Args:
        kind: ELSEWHERE or BUSY.
    """
    text = why.encode()[:4096]
    send_all(stream, [memoryview(HEAD.pack(kind, len(text)) + text)])


def map_segments(root: Root, named: Sequence[Segment]) -> list[Mapping] | None:
    """None: one of them holds another put by now.

    Raises CorruptionError if a file is none that the record can mean, and OSError.
    """
    found: list[Mapping] = []
    for one in named:
        extent = SegmentExtent(one.segment, one.put_id, one.size, one.start)
        with root.guard:
            mapping = root.storage.map_segment(extent)
        if mapping is None:
            return None
        found.append(mapping)
    return found


def _is_there(root: Root, mapping: Mapping, wanted: Segment) -> bool:
    return belongs(bytes(mapping.view()[:HEAD_SIZE]), wanted.put_id, root.settings.store)


def send_all(stream: socket.socket, parts: Sequence[memoryview]) -> None:
    """Sends all, in order. Raises TimeoutError where nothing is taken for `STALLED` seconds.

    A call may send any number of bytes: after that time it returns how many the client has taken. (Calls of 4 MiB made
    a transfer half as fast.)
    """
    todo = [part for part in parts if len(part)]
    while todo:
        try:
            sent = stream.sendmsg(todo[: pieces.MOST_PARTS], (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise TimeoutError(f"nothing was taken for {STALLED:g} s") from None
        todo = pieces.skip(todo, sent)
