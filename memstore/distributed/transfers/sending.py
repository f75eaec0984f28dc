"""The sending host: its index process answers what is asked on streams, a thread for each, and pins segments."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from memstore._parsing import UNDECODABLE
from memstore.distributed.catalog import look
from memstore.distributed.links import Traffic
from memstore.distributed.rules import Place
from memstore.distributed.transfers import messages
from memstore.distributed.transfers.messages import (
    ELSEWHERE,
    ENDED,
    FAILED,
    FAILURE_LIMIT,
    FOLLOWS,
    GONE,
    HEAD,
    LACKING,
    LENGTH,
    NO_RANGES,
    RANGE_SIZE,
    RANGES_LIMIT,
    REFER,
    REQUEST_LIMIT,
    TORN,
    WHOLE,
    BadRequestError,
    Bring,
    Fetch,
    FetchCopy,
    Numbers,
    Pieces,
    PinSegments,
    Ranges,
    Referral,
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
from memstore.distributed.transfers.relays import PART_COPY_MARK, Origin, SlotRead, Slots
from memstore.engine import (
    HEAD_SIZE,
    Mapping,
    OwnedFile,
    Root,
    SegmentExtent,
    belongs,
    map_file,
    segment_path,
    syscalls,
)
from memstore.engine.syscalls import PAGE
from memstore.errors import CorruptionError, MemstoreError, ResourceLimitError, StorageError

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

_TO_LOOK = 5.0  # seconds for the catalog
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


def answer(root: Root, stream: socket.socket, request: Fetch, origin: Origin) -> None:
    """Sends what was asked for, or why it can't be. Raises OSError and BadRequestError, which end the stream."""
    wanted = ranges_of(request.segments)
    found = mapped(root, stream, request.segments)
    if found is None:
        return
    if request.reader and len(request.segments) == 1:
        one = request.segments[0]
        referral = origin.referral(one.segment, one.put_id, request.reader, request.lost)
        if referral is not None:
            _refer(stream, referral, one, Pieces(wanted[0].starts + found[0].address, wanted[0].sizes), origin)
            return
    ask_disk(root, found, wanted)
    head = memoryview(HEAD.pack(FOLLOWS, sum(ranges.nbytes for ranges in wanted)))
    for mapping, ranges in zip(found, wanted, strict=True):
        for group, is_packed in Pieces(ranges.starts + mapping.address, ranges.sizes).groups():
            parts = [group.gather()] if is_packed else group.parts()
            send_all(stream, [head, *parts])
            head = memoryview(b"")
    send_all(stream, [head, memoryview(end_of_answer(root, found, request.segments))])


def _refer(stream: socket.socket, referral: Referral, wanted: Wanted, pieces: Pieces, origin: Origin) -> None:
    send_answer(stream, REFER, encode(referral))
    for checksum in origin.checksums(wanted.segment, wanted.put_id, wanted.ranges, pieces):
        stream.sendall(checksum, socket.MSG_NOSIGNAL)


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
    kinds = [kind.__name__ for kind in (CorruptionError, StorageError) if isinstance(error, kind)]
    send_answer(stream, FAILED, encode(SendFailure(kinds[0] if kinds else "ResourceLimitError", str(error)[:4096])))


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

    Raises CorruptionError if a file is none that the record can mean, StorageError if the spill folder isn't there, and
    OSError.
    """
    found: list[Mapping] = []
    for one in named:
        extent = SegmentExtent(one.segment, one.put_id, one.size, one.start)
        with root.guard:
            mapping = root.storage.map_segment(extent)
        if mapping is None:
            root.storage.check_spill()
            return None
        found.append(mapping)
    return found


_SAMPLES = 16  # pages of a segment that are looked at; 1 us each
_SHORT = 4 << 20  # bytes of a range: of a longer one the kernel reads ahead


def ask_disk(root: Root, mappings: Sequence[Mapping], wanted: Sequence[Ranges]) -> None:
    """Lets the disk begin to read what is asked of values that were moved there, and nothing else of short ranges.

    The kernel would read 128 KiB or more around the first page of each: for 256 rows of 28 KiB 14 times their bytes.
    """
    if root.storage.spill_folder() is None:
        return
    for mapping, ranges in zip(mappings, wanted, strict=True):
        first = (ranges.starts + mapping.address) // PAGE * PAGE
        sizes = ranges.stops + mapping.address - first
        samples = first[:: max(len(first) // _SAMPLES, 1)].tolist()
        if len(sizes) and int(sizes.max()) <= _SHORT and not all(map(syscalls.is_resident, samples)):
            syscalls.read_no_more(mapping.address, mapping.size)
            syscalls.will_need(first.tolist(), sizes.tolist())


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


# --- Copies that are passed on ---------------------------------------------------------------------------------------
# A relay: sends bytes of another host's segment from the copy that this host has, or that a process of it is filling.
#
# A copy that is being filled is mapped without a lock, and what has arrived is sent (`relays.py` says how that is
# known). Its file doesn't shrink, and is no other put's before the copy is complete. From then on the copy is mapped
# under a shared lock as everything that is sent; where it was dropped before that, the reader is told that the rest is
# lacking. A part's copy is in the table from the beginning, and has a mark for each of its pages that are there.
#
# The reader compares what it gets with checksums of the origin. So nothing is compared here.

_PIECE = 4 << 20  # bytes
_LOOK_EVERY = 0.001  # seconds, for bytes that have arrived
_SIGN_EVERY = 0.2  # seconds, for a reader that waits
_NOTHING_YET = Pieces(NO_RANGES.starts, NO_RANGES.stops)


def pass_on(root: Root, stream: socket.socket, request: FetchCopy, slots: Slots) -> None:
    """Sends what has arrived of a copy, as it arrives. Raises OSError and BadRequestError, which end the stream."""
    (rest,) = ranges_of([request.wanted])
    copy = _CopyRead(root, request, slots)
    stream.sendall(HEAD.pack(FOLLOWS, rest.nbytes), socket.MSG_NOSIGNAL)
    said = time.monotonic()
    while rest:
        ready = copy.ready(rest.split(_PIECE)[0])
        if ready is None:
            send_all(stream, [memoryview(LENGTH.pack(LACKING))])
            return
        if ready is not _NOTHING_YET:
            nbytes = int(ready.sizes.sum())
            head = memoryview(LENGTH.pack(nbytes))
            for group, is_packed in ready.groups():
                send_all(stream, [head, *([group.gather()] if is_packed else group.parts())])
                head = memoryview(b"")
            rest = rest.split(nbytes)[1]
            said = time.monotonic()
        else:
            if time.monotonic() - said > _SIGN_EVERY:
                send_all(stream, [memoryview(LENGTH.pack(0))])
                said = time.monotonic()
            time.sleep(_LOOK_EVERY)
    send_all(stream, [memoryview(LENGTH.pack(ENDED))])


class _CopyRead:
    """A copy of another host's segment, complete or not, that is read for one request."""

    def __init__(self, root: Root, request: FetchCopy, slots: Slots) -> None:
        self._root, self._slots, self._key = root, slots, request.key
        self._start, self._size, self._depth = request.wanted.start, request.wanted.size, request.depth
        self._place = Place(request.host, request.wanted.put_id, request.wanted.segment)
        self._filling: tuple[int, Mapping] | None = None  # mapped without a lock
        self._mapping: Mapping | None = None  # of the copy in the table
        self._shift = 0
        self._marks = np.zeros(0, np.uint8)  # of a part's copy
        self._is_part = False

    def ready(self, wanted: Ranges) -> Pieces | None:
        """Returns where the first of these bytes lie that are there, perhaps none yet. None: they won't come."""
        first, end = int(wanted.starts[0]), int(wanted.stops[0])
        if self._mapping is not None and not self._is_part:
            return _within(self._mapping, wanted.starts + self._shift, wanted.sizes)
        slot = self._slots.find(self._place)  # before the table, where the copy is before the slot is freed
        if self._mapping is None and (slot is None or not slot.segment):
            self._map_copy()
            if self._mapping is not None:
                return self.ready(wanted)
        mapping, shift, reached = self._mapping, 0, first
        if slot is not None:
            reached = min(slot.arrived(first), end)
        if mapping is not None:
            reached = max(reached, _marked_before(self._marks, first, end))
        elif slot is not None:
            mapping, shift = self._map_filling(slot), slot.shift
        if mapping is not None and reached > first:
            return _within(mapping, wanted.starts[:1] + shift, np.array([reached - first], np.int64))
        return _NOTHING_YET if slot is not None and slot.is_coming(first, self._depth) else None

    def _map_copy(self) -> None:
        copy = look(self._root, lambda tables: tables.copy(self._key), time.monotonic() + _TO_LOOK)
        if copy is None or copy.places != (self._place,):
            return
        (local,) = copy.record.segments
        with self._root.guard:
            mapping = self._root.storage.map_segment(local)
        if mapping is None:
            return
        self._is_part = copy.record.description == PART_COPY_MARK
        if self._is_part:
            end = -(-self._size // PAGE) * PAGE
            if mapping.size < end + end // PAGE or local.start != self._start:
                raise BadRequestError("a part that is larger than its copy")
            self._marks = np.asarray(mapping)[end : end + end // PAGE]
        self._shift = local.start - self._start
        self._mapping, self._filling = mapping, None

    def _map_filling(self, slot: SlotRead) -> Mapping | None:
        """Maps the file that is being filled. Returns None where there is none yet, or it was given up."""
        if not slot.segment:
            return None
        if self._filling is None or self._filling[0] != slot.segment:
            path = segment_path(self._root.segments, slot.segment)
            try:
                with self._root.guard, OwnedFile(path, os.O_RDONLY) as file:
                    if syscalls.size_of(file.fd) < slot.size:  # who reads beyond its end would meet SIGBUS
                        return None
                    self._filling = slot.segment, map_file(file.fd, slot.size)
            except FileNotFoundError:
                return None
        return self._filling[1]


def _within(mapping: Mapping, starts: Numbers, sizes: Numbers) -> Pieces:
    """Returns ranges of a file that is mapped. Raises BadRequestError where they don't lie in it."""
    if int(starts[0]) < 0 or int(starts[-1] + sizes[-1]) > mapping.size:
        raise BadRequestError(f"ranges that don't lie in the {mapping.size:,} bytes of a copy")
    return Pieces(starts + mapping.address, sizes)


def _marked_before(marks: np.ndarray[Any, np.dtype[np.uint8]], first: int, end: int) -> int:
    """Returns up to where, from a byte on, the pages of a part's copy are there."""
    absent = np.flatnonzero(marks[first // PAGE : -(-end // PAGE)] == 0)
    return end if not len(absent) else max(first, (first // PAGE + int(absent[0])) * PAGE)


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
        self._origin, self._slots = Origin(), Slots(root)
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
            answer(self._root, stream, request, self._origin)
        elif isinstance(request, FetchCopy):
            pass_on(self._root, stream, request, self._slots)
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
        self._slots.close()


def _end(stream: socket.socket) -> None:
    """Ends a stream: who sends or waits on it fails at once. Its own thread closes it."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
