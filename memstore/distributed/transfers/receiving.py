"""The reading host: streams to other hosts, one request on them, and a transfer of many ranges."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from memstore._parsing import UNDECODABLE
from memstore.distributed.links import OtherMemberError
from memstore.distributed.rules import Member
from memstore.distributed.transfers.messages import (
    BUSY,
    CHUNK,
    DIGEST,
    ELSEWHERE,
    ENDED,
    FAILED,
    FAILURE_LIMIT,
    FOLLOWS,
    GONE,
    HEAD,
    LACKING,
    LENGTH,
    RANGES_LIMIT,
    REFER,
    SEGMENTS_LIMIT,
    WHOLE,
    Bring,
    Fetch,
    FetchCopy,
    Numbers,
    Pieces,
    PinSegments,
    Ranges,
    Referral,
    Segment,
    UnpinSegments,
    Wanted,
    decode_failure,
    decode_referral,
    framed,
    limit_waits,
    skip,
)
from memstore.distributed.transfers.relays import Filling, Way, count_of, is_sound
from memstore.engine import Root, SegmentExtent, create_file, syscalls
from memstore.errors import CorruptionError, HomeUnavailableError, LinkRefusedError, MemstoreError, StorageError

# --- By registered memory --------------------------------------------------------------------------------------------
# Whether this host's index process brings bytes of other hosts, by registered memory: a process asks it then.
#
# The index process says so in ROOT/transport, which is read for each large transfer, in a few microseconds. What stands
# there may be old: then whoever asks is told so, or reaches nobody, asks for the bytes over TCP, and leaves the index
# process alone for a while.

TRANSPORT_FILE = "transport"  # the file's
LEAST = 2 << 20  # bytes: less comes sooner over TCP, since a round trip of Monarch takes as long as to send as much
AWAY = 30.0  # seconds for which a host is asked over TCP only
_TCP = b"tcp"


def announce(root: Root, transport: str) -> None:
    """The index process brings bytes by this transport; "tcp": it brings none. Raises OSError."""
    if transport == "tcp":
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(_path(root))
    else:
        create_file(root.state, TRANSPORT_FILE, transport.encode(), root.settings)


def announced(root: Root) -> str:
    """Returns the way of transfers that was announced last; "tcp" if none was."""
    try:
        fd = syscalls.open_file(_path(root), os.O_RDONLY)
    except OSError:
        return "tcp"
    try:
        return (syscalls.read_at(fd, 16, 0) or _TCP).decode(errors="replace")
    except OSError:
        return "tcp"
    finally:
        syscalls.close(fd)


def _path(root: Root) -> str:
    return f"{root.state}/{TRANSPORT_FILE}"


class Bringer:
    """Thread-safe.

    Args:
        members: finds a member of the cluster by its id; None: there is none any more.
    """

    def __init__(self, root: Root, members: Callable[[bytes], Member | None]) -> None:
        self._root, self._members = root, members
        self._away: dict[bytes, float] = {}  # by member: until when it is asked over TCP only (monotonic)

    def way_to(self, member: Member, nbytes: int) -> Member | None:
        """This host, if its index process is to bring so many bytes of the other one; None: ask that one."""
        if nbytes < LEAST or self._away.get(member.id, 0.0) > time.monotonic() or announced(self._root) == "tcp":
            return None
        own = self._members(self._root.member_id())
        return own if own is not None and own.id != member.id else None

    def leave(self, member: Member) -> None:
        """It did not work: the next transfers of that host go over TCP."""
        self._away[member.id] = time.monotonic() + AWAY


# --- Streams ---------------------------------------------------------------------------------------------------------
# Over these connections other hosts send segments to this process. A few are idle, to be used again.

_MOST_IDLE = 4  # of one host


class StreamLinks(Protocol):
    """The maker of streams: memstore/distributed/links."""

    def stream(self, address: str, member: bytes | None, deadline: float) -> socket.socket:
        """One whose handshake is done. Raises HomeUnavailableError, LinkRefusedError."""
        ...


class Stream:
    """A connection over which one request is answered at a time.

    Attributes:
        was_idle: it comes of an earlier transfer, so its host may have closed it meanwhile.
    """

    __slots__ = ("member", "socket", "was_idle")

    def __init__(self, stream: socket.socket, member: Member) -> None:
        self.socket, self.member, self.was_idle = stream, member, False
        stream.settimeout(None)

    def set_patience(self, seconds: float) -> None:
        """Limits how long a step may wait for the host: calls raise BlockingIOError then."""
        limit_waits(self.socket, seconds)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data, socket.MSG_NOSIGNAL)

    def shut(self) -> None:
        """Shuts the socket: whoever waits for something on it fails at once."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


class Streams:
    """Thread-safe. A forked child has none of its parent's, and makes its own.

    Args:
        bringer: whether bytes come by another way; None: never.
        members: finds a member of the cluster by its id; None: there is none any more.

    Attributes:
        bringer, member: the same.
    """

    def __init__(
        self,
        links: StreamLinks,
        bringer: Bringer | None = None,
        members: Callable[[bytes], Member | None] = lambda _: None,
    ) -> None:
        self._links, self.bringer, self.member = links, bringer, members
        self._lock = threading.Lock()
        self._idle: dict[bytes, list[Stream]] = {}
        self._pid = os.getpid()

    def take(self, member: Member, deadline: float, *, fresh: bool = False) -> Stream:
        """A stream to a host, which nobody else uses.

        Args:
            fresh: not one that was idle.

        Raises:
            HomeUnavailableError: the host can't be reached.
            LinkRefusedError.
        """
        self._leave_to_parent()
        with self._lock:
            idle = self._idle.get(member.id)
            if idle and not fresh:
                return idle.pop()
        return Stream(self._links.stream(member.address, member.id, deadline), member)

    def give_back(self, stream: Stream) -> None:
        """Keeps a stream on which all was answered."""
        self._leave_to_parent()
        stream.was_idle = True
        with self._lock:
            idle = self._idle.setdefault(stream.member.id, [])
            if len(idle) < _MOST_IDLE:
                idle.append(stream)
                return
        stream.close()

    def close(self) -> None:
        self._leave_to_parent()
        with self._lock:
            idle, self._idle = self._idle, {}
        for streams in idle.values():
            for stream in streams:
                stream.close()

    def _leave_to_parent(self) -> None:
        """In a forked child, closes its copies of the parent's: the host sees nothing of it."""
        if self._pid == os.getpid():
            return
        self._lock, idle, self._idle = threading.Lock(), self._idle, {}
        self._pid = os.getpid()
        for streams in idle.values():
            for stream in streams:
                stream.close()


# --- One request -----------------------------------------------------------------------------------------------------
# The answer is received where the bytes are to lie.

_LONGEST = 1e6  # seconds
_PIECE = 2 << 20  # bytes, after which others may have what has come
_SIGN_EVERY = 0.25  # seconds, while nothing comes


class SegmentRanges(NamedTuple):
    """Ranges of a segment of another host, and the memory where they are to lie.

    Attributes:
        extent: the segment, by the record that names it.
        ranges: of the file.
        origin: the address where the first byte of the file would lie; or that of each range, for itself.
        filling: the copy that they fill, if it is passed on to others, and may come from others.
    """

    extent: SegmentExtent
    ranges: Ranges
    origin: int | Numbers
    filling: Filling | None = None

    @property
    def pieces(self) -> Pieces:
        """Where the bytes are to lie."""
        return Pieces(self.ranges.starts + self.origin, self.ranges.sizes)

    def split(self, nbytes: int) -> tuple[SegmentRanges, SegmentRanges]:
        """The first so many bytes, and the others."""
        first, rest = self.ranges.split(nbytes)
        if isinstance(self.origin, int):
            return self._replace(ranges=first), self._replace(ranges=rest)
        count = len(self.origin)
        origins = self.origin[: len(first.starts)], self.origin[count - len(rest.starts) :]
        return SegmentRanges(self.extent, first, origins[0]), SegmentRanges(self.extent, rest, origins[1])

    def batches(self, count: int) -> Iterator[SegmentRanges]:
        """So many ranges at a time."""
        for number, ranges in enumerate(self.ranges.batches(count)):
            origin = self.origin
            if not isinstance(origin, int):
                origin = origin[number * count : (number + 1) * count]
            yield self._replace(ranges=ranges, origin=origin)


class ReferredError(Exception):
    """The bytes are to be had of another host.

    Attributes:
        referral: says which.
    """

    def __init__(self, referral: Referral) -> None:
        super().__init__(f"the host {referral.parent.hex()} has them")
        self.referral = referral


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
    """The host has no file or mapping left to send by, or the like.

    `lacks_disk`: it has moved the bytes to a disk that isn't there.
    """

    def __init__(self, message: str, *, lacks_disk: bool = False) -> None:
        super().__init__(message)
        self.lacks_disk = lacks_disk


def batches(parts: Sequence[SegmentRanges]) -> list[list[SegmentRanges]]:
    """As many segments and ranges as a request may have. A segment that may come from a relay has its own."""
    found: list[list[SegmentRanges]] = []
    count = RANGES_LIMIT
    for part in parts:
        for batch in part.batches(RANGES_LIMIT):
            count += len(batch.ranges.starts)
            if part.filling is not None:
                found.append([batch])
                count = RANGES_LIMIT
            elif count > RANGES_LIMIT or len(found[-1]) == SEGMENTS_LIMIT:
                found.append([batch])
                count = len(batch.ranges.starts)
            else:
                found[-1].append(batch)
    return found


def ask(
    stream: Stream, parts: Sequence[SegmentRanges], deadline: float, of: bytes | None = None, lost: bytes = b""
) -> None:
    """Asks for parts, which one request may have; where they are to lie may be unknown yet. Raises OSError.

    Args:
        of: the id of the host where they lie, if this one's index process is to bring them.
        lost: the id of the relay that they could not be had of.
    """
    left = deadline - time.monotonic()
    stream.set_patience(left)
    wanted = tuple(map(_wanted, parts))
    filling = parts[0].filling
    request: Fetch | Bring
    if of is not None:
        request = Bring(of, int(max(min(left, _LONGEST), 0.001) * 1000), wanted)
    elif filling is not None:
        request = Fetch(wanted, filling.reader, lost)
    else:
        request = Fetch(wanted)
    stream.send(framed(request))


def receive(stream: Stream, parts: Sequence[SegmentRanges], deadline: float, way: Way | None = None) -> bool:
    """Receives what was asked for. False: one of the segments holds another put.

    Args:
        way: hears what arrives; None: a new one, where there is a copy that is passed on.

    Raises:
        CorruptionError, CannotSendError, ElsewhereError: the host says so, and the stream can be used again.
        ReferredError: it says so, and checksums of the bytes follow on the stream.
        OSError, BrokenStreamError: the stream is of no use any more.
    """
    kind, nbytes = receive_head(stream)
    if kind == GONE:
        return False
    if kind == FAILED:
        raise _failure(stream, receive_bytes(stream, nbytes))
    if kind == REFER and parts[0].filling is not None:
        raise ReferredError(_referral(receive_bytes(stream, nbytes)))
    if kind != FOLLOWS:
        raise ElsewhereError(receive_bytes(stream, nbytes).decode(errors="replace"), is_busy=kind == BUSY)
    if nbytes != sum(part.ranges.nbytes for part in parts):
        raise BrokenStreamError(f"an answer of {nbytes:,} bytes")
    for part in parts:
        if way is not None:
            way.change_depth(1)
        elif part.filling is not None:
            way = part.filling.begin(part.ranges, 1)
        if way is None:
            _fill_pieces(stream, part.pieces, deadline)
        else:  # it is the only part
            stream.set_patience(min(deadline - time.monotonic(), _SIGN_EVERY))
            _fill_pieces(stream, part.pieces, deadline, way.receive)
            stream.set_patience(deadline - time.monotonic())
    return receive_bytes(stream, 1) == WHOLE


def _referral(text: bytes) -> Referral:
    try:
        return decode_referral(text)
    except UNDECODABLE as error:
        raise BrokenStreamError(f"a referral that can't be read: {error}") from None


def _fill_pieces(stream: Stream, pieces: Pieces, deadline: float, heard: Callable[[int], None] | None = None) -> None:
    """Receives pieces, in order. Arguments as of `_fill`."""
    for group, is_packed in pieces.groups():
        if is_packed:
            buffer = bytearray(int(group.sizes.sum()))
            _fill(stream, [memoryview(buffer)], deadline, heard)
            group.scatter(buffer)
        else:
            _fill(stream, group.parts(), deadline, heard)


class _RelayedPieces:
    """The bytes that a relay sends of a part, in pieces as it has them."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self._left = stream, 0  # bytes of the piece that is being received

    def receive(self, wanted: Pieces, deadline: float, way: Way | None) -> None:
        """Receives the next bytes. Raises OSError, BrokenStreamError; TimeoutError where the relay is silent."""
        while len(wanted.sizes):
            if not self._left:
                (self._left,) = LENGTH.unpack(receive_bytes(self.stream, LENGTH.size))
                if self._left in (ENDED, LACKING):
                    raise BrokenStreamError("it hasn't all of them")
                if not self._left and time.monotonic() > deadline:  # it waits itself, and says so
                    raise TimeoutError("it takes longer than the timeout")
                if way is not None:
                    way.filling.give_sign()
                continue
            now, wanted = wanted.split(self._left)
            _fill_pieces(self.stream, now, deadline, lambda got: _note_sign(way, got))
            self._left -= int(now.sizes.sum())

    def is_ended(self) -> bool:
        """Whether nothing else follows."""
        with contextlib.suppress(OSError, BrokenStreamError):
            return not self._left and receive_bytes(self.stream, LENGTH.size) == LENGTH.pack(ENDED)
        return False


def _note_sign(way: Way | None, got: int) -> None:
    """Raises TimeoutError where the relay is silent."""
    if not got:
        raise TimeoutError(f"nothing has come for {_STALLED:g} s")
    if way is not None:
        way.filling.give_sign()


def ask_to_pin(stream: Stream, extents: Sequence[SegmentExtent], deadline: float) -> bool:
    """Asks that segments stay, as many as a request may have."""
    stream.set_patience(deadline - time.monotonic())
    stream.send(framed(PinSegments(tuple(Segment(one.segment, one.put_id, one.size, one.start) for one in extents))))
    kind, nbytes = receive_head(stream)
    if kind == FAILED:
        raise _failure(stream, receive_bytes(stream, nbytes))
    if nbytes or kind not in (FOLLOWS, GONE):
        raise BrokenStreamError(f"an answer of kind {kind} and {nbytes:,} bytes")
    return kind == FOLLOWS


def unpin(stream: Stream, extents: Sequence[SegmentExtent]) -> None:
    """Says that they need not stay. It waits for nothing. Raises OSError where the stream has no room for that."""
    for at in range(0, len(extents), SEGMENTS_LIMIT):
        batch = extents[at : at + SEGMENTS_LIMIT]
        text = framed(UnpinSegments(tuple((one.segment, one.put_id) for one in batch)))
        if stream.socket.send(text, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) < len(text):
            raise BlockingIOError("the host takes nothing")


def _wanted(part: SegmentRanges) -> Wanted:
    extent, ranges = part.extent, part.ranges
    pairs = np.stack([ranges.starts, ranges.sizes], 1).astype(">u8").tobytes()
    return Wanted(extent.segment, extent.put_id, extent.size, extent.start, pairs)


def _failure(stream: Stream, text: bytes) -> MemstoreError:
    try:
        failure = decode_failure(text)
    except UNDECODABLE as error:
        raise BrokenStreamError(f"a failure that can't be read: {error}") from None
    said = f"{stream.member.label}: {failure.text}"
    if failure.error == "CorruptionError":
        return CorruptionError(said, detail=said)
    return CannotSendError(said, lacks_disk=failure.error == "StorageError")


def receive_head(stream: Stream) -> tuple[int, int]:
    """Receives the kind of an answer, and how many bytes follow: few, but for FOLLOWS.

    Raises OSError, BrokenStreamError.
    """
    kind, nbytes = HEAD.unpack(receive_bytes(stream, HEAD.size))
    if kind not in (FOLLOWS, GONE, FAILED, ELSEWHERE, BUSY, REFER) or (kind != FOLLOWS and nbytes > FAILURE_LIMIT):
        raise BrokenStreamError(f"an answer of kind {kind} and {nbytes:,} bytes")
    return kind, nbytes


def receive_bytes(stream: Stream, size: int) -> bytes:
    """Raises OSError, BrokenStreamError."""
    data = stream.socket.recv(size, socket.MSG_WAITALL) if size else b""
    if len(data) != size:
        raise BrokenStreamError("an answer that ends in the middle")
    return data


def _fill(
    stream: Stream, parts: Sequence[memoryview], deadline: float, heard: Callable[[int], None] | None = None
) -> None:
    """Receives into all of the parts, in order.

    Args:
        heard: called for each few bytes that have come, with their number, and with 0 where none has come within the
            stream's patience. None: that is an error.
    """
    if len(parts) > 1:
        got = stream.socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        parts = skip(parts, got)
        if heard is not None:
            heard(got)
    for part in parts:
        while len(part):
            if time.monotonic() > deadline:
                raise TimeoutError("it takes longer than the timeout")
            most = len(part) if heard is None else min(len(part), _PIECE)
            try:
                got = stream.socket.recv_into(part, most, socket.MSG_WAITALL)  # or what came within the patience
            except BlockingIOError:
                if heard is None:
                    raise
                heard(0)
                continue
            if not got:
                raise BrokenStreamError("an answer that ends in the middle")
            part = part[got:]
            if heard is not None:
                heard(got)


# --- A transfer ------------------------------------------------------------------------------------------------------
# The reader: asks a host for ranges of its segments, and receives them where they are to lie.
#
# Large transfers go over two streams at once, which share the bytes; small ones over one. A stream that is found dead
# was closed by its host while it was idle, or broke: the request is made again over a new one, since it changes
# nothing. Who asks has all of it, or an error, or knows that the bytes are gone; what was received until then counts
# for nothing.
#
# Where this host's index process brings large transfers (`bringer`), it is asked for them, over one stream. If it
# brings none, for whatever reason, they are asked for as all others.

STREAMS = 2  # of a large transfer
LARGE = 4 << 20  # bytes
_TRY_AGAIN = 0.05  # seconds
_STALLED = 1.0  # seconds in which a relay sends nothing, though one that waits itself says so five times a second
_REACHED_WITHIN = 1.0  # seconds: this host's index process; it is there, or is being started again
_SILENCE = 15.0  # seconds in which it sends nothing: it gives up earlier than that what doesn't go on

log = logging.getLogger("memstore")


class Share(NamedTuple):
    """The ranges that are read over one stream.

    Attributes:
        member: the host where it lies.
        via: this host, if its index process is to bring it.
    """

    member: Member
    parts: Sequence[SegmentRanges]
    via: Member | None = None


def ask_ahead(streams: Streams, member: Member, parts: Sequence[SegmentRanges], deadline: float) -> list[Stream]:
    """Asks for what `read_ranges` will be called for, before it is known where it is to lie.

    Returns the streams that it is to be given, or that are to be closed. What fails here is asked for again there.
    """
    asked: list[Stream] = []
    with contextlib.suppress(OSError, MemstoreError):
        for share in _shares(streams, member, parts):
            stream = streams.take(share.via or member, deadline)
            try:
                ask(stream, batches(share.parts)[0], deadline, None if share.via is None else member.id)
            except BaseException:
                stream.close()
                raise
            asked.append(stream)
    return asked


def read_ranges(
    streams: Streams,
    wanted: Sequence[tuple[Member, Sequence[SegmentRanges]]],
    deadline: float,
    asked: Sequence[Stream] = (),
) -> bool:
    """Receives all parts of each host. False: one of the segments holds another put by now, and the memory anything.

    Args:
        asked: what `ask_ahead` has returned for these parts.

    Raises:
        HomeUnavailableError: a host can't be reached, or doesn't answer, until the deadline (monotonic).
        CorruptionError: a host's file is damaged.
        CannotSendError: a host says that it can't.
        StorageError: a host has moved the bytes to a disk that isn't there.
        LinkRefusedError: a host is no member of this cluster, or has another secret.
    """
    transfer = _Transfer(streams, deadline)
    shares = [share for member, parts in wanted for share in _shares(streams, member, parts, asked)]
    ahead = dict(enumerate(asked))
    threads = [
        threading.Thread(target=transfer.note, args=(share, ahead.get(number)), daemon=True)
        for number, share in enumerate(shares[1:], 1)
    ]
    try:
        for thread in threads:
            thread.start()
        is_whole = not shares or transfer.read(shares[0], ahead.get(0))
        for thread in threads:
            thread.join()
    except BaseException:
        transfer.give_up()
        raise
    for error in transfer.errors:
        raise error
    return is_whole and not transfer.is_gone


class _Transfer:
    """State that the threads of one transfer share.

    Attributes:
        errors: of the other threads than the caller's.
        is_gone: what one of these was told.
    """

    def __init__(self, streams: Streams, deadline: float) -> None:
        self._streams, self._deadline = streams, deadline
        self._changed = threading.Condition()
        self._reading: list[Stream] = []
        self._is_given_up = False
        self.errors: list[BaseException] = []
        self.is_gone = False

    def note(self, share: Share, asked: Stream | None) -> None:
        """Reads in a thread of its own, and notes an error."""
        try:
            if not self.read(share, asked):
                self.is_gone = True
        except BaseException as error:
            self.errors.append(error)

    def read(self, share: Share, asked: Stream | None) -> bool:
        """Receives the share, over one stream after the other until it has all. False: gone.

        Args:
            asked: a stream on which the first of its requests was made already.
        """
        member, via, fresh = share.member, share.via, False
        while not self._is_given_up:
            stream, is_asked, asked, is_busy = asked, asked is not None, None, False
            try:
                if stream is None:
                    until = self._deadline if via is None else time.monotonic() + _REACHED_WITHIN
                    stream = self._streams.take(via or member, min(self._deadline, until), fresh=fresh)
                return self._read_over(stream, share.parts, None if via is None else member.id, is_asked=is_asked)
            except ElsewhereError as error:
                why, is_busy = str(error), error.is_busy
            except CannotSendError as error:
                if error.lacks_disk:
                    raise StorageError(str(error), host=member.name) from None
                raise
            except LinkRefusedError as error:
                if via is None and isinstance(error, OtherMemberError):
                    return False  # this host hears soon that the member was removed: the key is looked up again
                if via is None:
                    raise
                why = str(error)
            except (OSError, BrokenStreamError, HomeUnavailableError) as error:
                why = str(error)
                if stream is not None and stream.was_idle and not fresh:
                    fresh = True
                    continue
            if via is not None:
                log.info("bytes of %s come over TCP: %s", member.label, why)
                if self._streams.bringer is not None and not is_busy:
                    self._streams.bringer.leave(member)
                via, fresh = None, False
                continue
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise HomeUnavailableError(
                    f"{member.label} did not send what is stored there within the timeout: {why}"
                )
            time.sleep(min(_TRY_AGAIN, left))
        if asked is not None:
            asked.close()
        return False

    def _read_over(self, stream: Stream, share: Sequence[SegmentRanges], of: bytes | None, *, is_asked: bool) -> bool:
        with self._changed:
            self._reading.append(stream)
            if self._is_given_up:
                stream.shut()
        is_answered = False
        try:
            is_whole = True
            for number, batch in enumerate(batches(share)):
                if is_asked and not number:
                    stream.set_patience(self._deadline - time.monotonic())
                else:
                    ask(stream, batch, self._deadline, of)
                if of is not None:
                    stream.set_patience(min((self._deadline - time.monotonic()) / 2, _SILENCE))
                try:
                    is_whole = receive(stream, batch, self._deadline)
                except ReferredError as found:
                    is_whole = self._read_relayed(stream, batch[0], found.referral)
                if not is_whole:
                    break
            is_answered = True
            return is_whole
        except (CorruptionError, CannotSendError, ElsewhereError):
            is_answered = True
            raise
        finally:
            self._leave(stream, is_usable=is_answered)

    # --- by relays ----------------------------------------------------------------------------------------------------

    def _read_relayed(self, stream: Stream, part: SegmentRanges, referral: Referral) -> bool:
        """Receives a part from the hosts that its origin names, one after the other. False: gone at the origin.

        Args:
            stream: to the origin, on which checksums of the part follow.
        """
        assert part.filling is not None, "it was referred"
        way = part.filling.begin(part.ranges, referral.depth)
        while True:
            there = self._read_over_relay(stream, part, referral, way)
            part = part.split(there)[1]
            if not part.ranges:
                return True
            if self._is_given_up:
                raise BrokenStreamError("it was given up")
            ask(stream, [part], self._deadline, lost=referral.parent)
            try:
                return receive(stream, [part], self._deadline, way)
            except ReferredError as found:
                referral = found.referral
            if way is not None:
                way.change_depth(referral.depth)

    def _read_over_relay(self, origin: Stream, part: SegmentRanges, referral: Referral, way: Way | None) -> int:
        """Receives a part from one host. Returns how many of its bytes are there, as the origin's checksums say.

        Raises OSError, BrokenStreamError: of the origin's stream.
        """
        there, left, sums = 0, part.pieces, count_of(part.ranges.nbytes)
        pieces: _RelayedPieces | None = None
        why = ""
        try:
            while sums:
                chunk, left = left.split(CHUNK)
                try:
                    pieces = pieces or self._open_relay(origin.member, part, referral)
                    pieces.receive(chunk, self._deadline, way)
                except (OSError, BrokenStreamError, MemstoreError) as error:
                    why = str(error)
                    break
                sums -= 1
                if not is_sound(chunk, receive_bytes(origin, DIGEST)):
                    why = "it has sent others"
                    break
                nbytes = int(chunk.sizes.sum())
                there += nbytes
                if way is not None:
                    way.receive(nbytes)
        finally:
            if pieces is not None:
                self._leave(pieces.stream, is_usable=not why and not sums and pieces.is_ended())
        receive_bytes(origin, sums * DIGEST)
        if why:
            log.info("bytes of %s don't come from the host %s: %s", origin.member.label, referral.parent.hex(), why)
        return there

    def _open_relay(self, origin: Member, part: SegmentRanges, referral: Referral) -> _RelayedPieces:
        """Asks a relay for a part. Raises OSError, BrokenStreamError, HomeUnavailableError, LinkRefusedError."""
        member, filling = self._streams.member(referral.parent), part.filling
        if member is None or filling is None:
            raise BrokenStreamError("it is no member")
        fresh = False
        while True:
            until = min(self._deadline, time.monotonic() + _REACHED_WITHIN)
            stream = self._streams.take(member, until, fresh=fresh)
            with self._changed:
                self._reading.append(stream)
                if self._is_given_up:
                    stream.shut()
            try:
                stream.set_patience(min(_STALLED, self._deadline - time.monotonic()))
                stream.send(framed(FetchCopy(origin.id, filling.key, referral.depth, _wanted(part))))
                if receive_head(stream) != (FOLLOWS, part.ranges.nbytes):
                    raise BrokenStreamError("it has not answered what it was asked")
                return _RelayedPieces(stream)
            except (OSError, BrokenStreamError):
                self._leave(stream, is_usable=False)
                if fresh or not stream.was_idle:
                    raise
                fresh = True

    def _leave(self, stream: Stream, *, is_usable: bool) -> None:
        with self._changed:
            self._reading.remove(stream)
            self._changed.notify_all()
        if is_usable and not self._is_given_up:
            self._streams.give_back(stream)
        else:
            stream.close()

    def give_up(self) -> None:
        """When it returns, no thread writes into the memory of the parts any more."""
        with self._changed:
            self._is_given_up = True
            for stream in self._reading:
                stream.shut()
            self._changed.wait_for(lambda: not self._reading)


def _shares(
    streams: Streams, member: Member, parts: Sequence[SegmentRanges], asked: Sequence[Stream] = ()
) -> list[Share]:
    """Shares out the ranges (`_shared`); as one, if this host's index process brings all, or was asked to."""
    via = None
    if asked:
        via = asked[0].member if asked[0].member.id != member.id else None
    elif streams.bringer is not None:
        via = streams.bringer.way_to(member, sum(part.ranges.nbytes for part in parts))
    if via is not None:
        return [Share(member, parts, via)]
    return [Share(member, share) for share in _shared(parts)]


def _shared(parts: Sequence[SegmentRanges]) -> list[list[SegmentRanges]]:
    """The parts, split by their bytes over as many streams as pays."""
    parts = [part for part in parts if part.ranges]
    total = sum(part.ranges.nbytes for part in parts)
    count = STREAMS if total >= LARGE else 1
    shares: list[list[SegmentRanges]] = []
    todo = list(reversed(parts))
    while todo:
        left = max(-(-total // count), 1) if len(shares) < count - 1 else total
        share: list[SegmentRanges] = []
        while todo and left > 0:
            part = todo.pop()
            first, rest = part.split(left)
            if rest.ranges:
                todo.append(rest)
            share.append(first)
            left -= first.ranges.nbytes
        shares.append(share)
    return shares
