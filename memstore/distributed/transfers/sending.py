"""The sending host: its index process answers what is asked on streams, a thread for each, and pins segments."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from memstore._parsing import UNDECODABLE
from memstore.distributed.links import Traffic
from memstore.distributed.transfers import messages
from memstore.distributed.transfers.messages import (
    ELSEWHERE,
    FAILED,
    FAILURE_LIMIT,
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
    Bring,
    Fetch,
    PinSegments,
    Ranges,
    Request,
    Segment,
    SendFailure,
    Stage,
    UnpinSegments,
    Wanted,
    decode_request,
    encode,
    limit_waits,
)
from memstore.engine import HEAD_SIZE, Mapping, Root, SegmentExtent, belongs
from memstore.errors import CorruptionError, MemstoreError, ResourceLimitError

# --- One request -----------------------------------------------------------------------------------------------------
# The sender: answers what is asked on one stream, from segments of this host. It runs in the index process.
#
# 1. Read a request, and check all that it says.
# 2. Map each segment under a shared lock (`root.storage`), which compares the put id in its header: another put, or
#    a locked file, is *gone*. As long as it is mapped, nobody writes into it.
# 3. Send the ranges from the mapping. The kernel copies them into the socket's buffers, and nobody else copies
#    anything. (`sendfile` and MSG_ZEROCOPY save that copy, but took more: 0.27 and 0.24 s of CPU for a GB, and twice as
#    long at the receiver, against 0.16. And what the kernel still sends then, when the lock is given up, may be another
#    put's.)
# 4. Compare the put ids again, and say behind the bytes whether they are whole.
#
# A client that dies ends its stream; one that takes nothing for `STALLED` seconds is dropped. Nothing else comes of it.

STALLED = 10.0  # seconds in which a client takes nothing, or sends no more of a request
IDLE = 600.0  # seconds without a request


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
    found = mapped(root, stream, request.segments)
    if found is None:
        return
    head = memoryview(HEAD.pack(FOLLOWS, sum(ranges.nbytes for ranges in wanted)))
    for mapping, ranges in zip(found, wanted, strict=True):
        for group, is_packed in messages.Pieces(ranges.starts + mapping.address, ranges.sizes).groups():
            parts = [group.gather()] if is_packed else group.parts()
            send_all(stream, [head, *parts])
            head = memoryview(b"")
    send_all(stream, [head, memoryview(end_of_answer(root, found, request.segments))])


def end_of_answer(root: Root, mappings: Sequence[Mapping], named: Sequence[Segment]) -> bytes:
    """Returns the answer's end, behind the bytes of these segments."""
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


def send_answer(stream: socket.socket, kind: int, text: bytes = b"") -> None:
    """Sends an answer without bytes of segments. With ELSEWHERE or BUSY the text says why."""
    text = text[:FAILURE_LIMIT]
    stream.sendall(HEAD.pack(kind, len(text)) + text, socket.MSG_NOSIGNAL)


def _send_failure(stream: socket.socket, error: Exception) -> None:
    kind = CorruptionError if isinstance(error, CorruptionError) else ResourceLimitError
    send_answer(stream, FAILED, encode(SendFailure(kind.__name__, str(error)[:4096])))


def mapped(root: Root, stream: socket.socket, named: Sequence[Segment]) -> list[Mapping] | None:
    """Maps segments. If they can't be, says why on the stream, and returns None."""
    try:
        found = map_segments(root, named)
    except (CorruptionError, OSError) as error:
        _send_failure(stream, error)
        return None
    if found is None:
        send_answer(stream, GONE)
    return found


def map_segments(root: Root, named: Sequence[Segment]) -> list[Mapping] | None:
    """Maps segments. Returns None where one of them holds another put by now.

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
            sent = stream.sendmsg(todo[: messages.MOST_PARTS], (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise TimeoutError(f"nothing was taken for {STALLED:g} s") from None
        todo = messages.skip(todo, sent)


# --- Segments that readers of other hosts look at --------------------------------------------------------------------
# The host's side of lazy views elsewhere: segments that readers of other hosts look at stay as long as they do.
#
# A reader says on a stream of its own which segments it looks at. They are mapped under a shared lock, as by a process
# of this host that has got them: so nobody uses their files again, whatever is put. The mappings go when the reader
# says so, or its stream ends, which is when it dies, and with the index process. Nothing is written anywhere.

MOST_PINNING_STREAMS = 512
MOST_PINNED_SEGMENTS = 16_384  # each is a mapping, of which the kernel allows a process some 65,000


class PinnedSegments:
    """Segments pinned for all streams of an index process. Thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._pinned: dict[socket.socket, dict[tuple[int, int], Mapping]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many streams keep something."""
        return len(self._pinned)

    def are_of(self, stream: socket.socket) -> bool:
        return stream in self._pinned

    def answer(self, stream: socket.socket, request: PinSegments) -> None:
        """Keeps all of the segments, or none. Raises OSError, which ends the stream."""
        mappings = mapped(self._root, stream, request.segments)
        if mappings is None:
            return
        found = {(one.segment, one.put_id): mapping for one, mapping in zip(request.segments, mappings, strict=True)}
        try:
            self._pin(stream, found)
        except ResourceLimitError as error:
            _send_failure(stream, error)
        else:
            send_answer(stream, FOLLOWS)

    def _pin(self, stream: socket.socket, found: dict[tuple[int, int], Mapping]) -> None:
        with self._lock:
            if stream not in self._pinned and len(self._pinned) >= MOST_PINNING_STREAMS:
                raise ResourceLimitError(
                    f"{MOST_PINNING_STREAMS:,} processes of other hosts look at lazy views of this one"
                )
            own = self._pinned.get(stream, {})
            fresh = [name for name in found if name not in own]
            if self._count + len(fresh) > MOST_PINNED_SEGMENTS:
                raise ResourceLimitError(f"other hosts look at lazy views of {self._count:,} values of this one")
            self._pinned[stream] = {**own, **found}
            self._count += len(fresh)

    def unpin(self, stream: socket.socket, request: UnpinSegments) -> None:
        with self._lock:
            own = self._pinned.get(stream, {})
            gone = [own.pop(name, None) for name in request.segments]
            self._count -= len(gone) - gone.count(None)
            if not own:
                self._pinned.pop(stream, None)

    def forget(self, stream: socket.socket) -> None:
        """It has ended."""
        with self._lock:
            self._count -= len(self._pinned.pop(stream, {}))


# --- The threads -----------------------------------------------------------------------------------------------------
# An index process has one for each stream of another host.

log = logging.getLogger("memstore")

MOST_STREAMS = 64
_JOIN = 5.0  # seconds for threads to end


class Plane(Protocol):
    """Another way for bytes than streams: see `rdma.py`. Both raise OSError, which ends the stream."""

    def stage(self, stream: socket.socket, request: Stage) -> None:
        """For an index process of another host."""
        ...

    def bring(self, stream: socket.socket, request: Bring) -> None:
        """For a process of this host."""
        ...


class Senders:
    """Serves streams until it is closed.

    Args:
        root: whose segments are sent.
        most: streams at one time, beside those that keep something.
        traffic: counts what they move.

    Attributes:
        pinned: what readers of other hosts look at.
        plane: set once there is one.
    """

    def __init__(self, root: Root, *, most: int = MOST_STREAMS, traffic: Traffic | None = None) -> None:
        self._root, self._most = root, most
        self._traffic = Traffic() if traffic is None else traffic
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, None] = {}  # those that nobody asks anything, the longest idle first
        self.pinned = PinnedSegments(root)
        self.plane: Plane | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """How many streams there are."""
        return len(self._threads)

    def serve(self, stream: socket.socket) -> None:
        """Takes a stream whose handshake is done, and returns at once.

        Where there are too many, the one that was idle for longest ends, and its client makes another when it needs
        one. If none is idle, the new one ends, and its client tries again.
        """
        thread = threading.Thread(target=self._run, args=(stream,), name="memstore-sender", daemon=True)
        with self._lock:
            is_full = len(self._threads) - len(self.pinned) >= self._most
            if is_full and self._idle:
                longest = next(iter(self._idle))
                del self._idle[longest]
                _end(longest)
            elif is_full or self._is_closed:
                stream.close()
                return
            self._threads[stream] = thread
            self._idle[stream] = None
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: its client tries again
            log.warning("%s: a stream can't be served: %s", self._root.path, str(error))
            self._forget(stream)

    def _run(self, stream: socket.socket) -> None:
        try:
            self._traffic.begin(stream)
            stream.settimeout(None)
            limit_waits(stream, STALLED)
            while (request := next_request(stream, None if self.pinned.are_of(stream) else IDLE)) is not None:
                with self._lock:
                    self._idle.pop(stream, None)
                self._answer(stream, request)
                del request
                if not self.pinned.are_of(stream):
                    with self._lock:
                        self._idle[stream] = None
        except (OSError, MemstoreError) as error:
            log.debug("%s: a stream ended: %s: %s", self._root.path, type(error).__name__, str(error))
        finally:
            self._forget(stream)

    def _answer(self, stream: socket.socket, request: Request) -> None:
        if isinstance(request, Fetch):
            answer(self._root, stream, request)
        elif isinstance(request, PinSegments):
            self.pinned.answer(stream, request)
        elif isinstance(request, UnpinSegments):
            self.pinned.unpin(stream, request)
        elif self.plane is None:
            send_answer(stream, ELSEWHERE, b"bytes of this host go over TCP")
        elif isinstance(request, Bring):
            self._traffic.end(stream)  # what goes on to a process of this host is not sent to others
            self.plane.bring(stream, request)
        else:
            self.plane.stage(stream, request)

    def _forget(self, stream: socket.socket) -> None:
        with self._lock:
            self._threads.pop(stream, None)
            self._idle.pop(stream, None)
        self.pinned.forget(stream)
        self._traffic.end(stream)
        stream.close()

    def close(self) -> None:
        """Ends all streams, and waits for their threads."""
        with self._lock:
            self._is_closed = True
            running = list(self._threads.items())
        for stream, _ in running:
            _end(stream)
        for _, thread in running:
            thread.join(_JOIN)


def _end(stream: socket.socket) -> None:
    """Ends a stream: who sends or waits on it fails at once. Its own thread closes it."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
