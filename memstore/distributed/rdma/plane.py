"""A plane: what an index process has for bytes beside streams, on both sides."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from memstore._parsing import UNDECODABLE
from memstore.distributed.links import Moved
from memstore.distributed.rdma.memory import (
    SLOT,
    Engine,
    EngineError,
    MonarchEngine,
    Reading,
    Slot,
    Slots,
    TransferSlots,
)
from memstore.distributed.rules import Member
from memstore.distributed.transfers import (
    BUSY,
    ELSEWHERE,
    FAILED,
    FAILURE_LIMIT,
    FOLLOWS,
    GONE,
    HEAD,
    LENGTH,
    STAGED_LIMIT,
    STAGED_UNIT,
    Bring,
    BrokenStreamError,
    Pieces,
    Stage,
    Staged,
    Stream,
    Streamer,
    Streams,
    decode_staged,
    encode,
    end_of_answer,
    map_segments,
    ranges_of,
    receive_bytes,
    send_all,
    send_elsewhere,
    send_failure,
)
from memstore.engine import Root, syscalls
from memstore.errors import CorruptionError, HomeUnavailableError, LinkRefusedError

# --- The host where bytes lie ----------------------------------------------------------------------------------------
# The host where bytes lie: puts them into registered memory, a piece after the other, for another host to read.
#
# 1. The segments are mapped under shared locks, and their put ids compared, as for a stream
# (`distributed/transfers/sending.py`).
# 2. A piece is copied into a slot, ranges behind one another, and the other host is told where it lies.
# 3. It says when it has read a piece; the slot takes another one then.
# 4. What is no whole unit goes over the stream; then the put ids are compared again.
#
# A reader that dies, or is cut off, ends its stream, and its slots are anybody's again. If a read of its is still under
# way, it brings it bytes of another value: into memory that nobody looks at, since its transfer has failed.


READ = b"\1"  # said of a piece


def stage(root: Root, slots: Slots, stream: socket.socket, request: Stage) -> int:
    """Returns how many bytes were read of slots. Raises OSError and BadRequestError, which end the stream."""
    wanted = ranges_of(request.segments)
    try:
        found = map_segments(root, request.segments)
    except (CorruptionError, OSError) as error:
        send_failure(stream, error)
        return 0
    if found is None:
        send_all(stream, [memoryview(HEAD.pack(GONE, 0))])
        return 0
    try:
        taken = slots.take()
    except (EngineError, OSError) as error:
        send_elsewhere(stream, f"there is no registered memory: {error}")
        return 0
    if taken is None:
        send_elsewhere(stream, "all registered memory is in use", BUSY)
        return 0
    with taken:
        addresses = [ranges.starts + one.address for one, ranges in zip(found, wanted, strict=True)]
        pieces = Pieces(np.concatenate(addresses), np.concatenate([ranges.sizes for ranges in wanted]))
        total = int(pieces.sizes.sum())
        send_all(stream, [memoryview(HEAD.pack(FOLLOWS, total))])
        rest = total % STAGED_UNIT
        pieces = _stage_pieces(stream, taken, pieces, total - rest)
        if rest:
            last = bytearray(rest)
            pieces.copy_to(syscalls.buffer_address(last))
            send_all(stream, [memoryview(last)])
        unread = min((total - rest + SLOT - 1) // SLOT, len(taken.slots))
        for _ in range(unread):
            _wait_until_read(stream)
        # Last: whoever reads a slot late, when others use it again, is never told that all was whole.
        send_all(stream, [memoryview(end_of_answer(root, found, request.segments))])
    return total - rest


def _stage_pieces(stream: socket.socket, taken: TransferSlots, pieces: Pieces, nbytes: int) -> Pieces:
    """Returns what is left of the pieces."""
    count = len(taken.slots)
    for number, start in enumerate(range(0, nbytes, SLOT)):
        if number >= count:
            _wait_until_read(stream)
        slot, size = taken.slots[number % count], min(SLOT, nbytes - start)
        first, pieces = pieces.split(size)
        first.copy_to(slot.address)
        said = encode(Staged(slot.handles[size // STAGED_UNIT - 1], size))
        send_all(stream, [memoryview(LENGTH.pack(len(said)) + said)])
    return pieces


def _wait_until_read(stream: socket.socket) -> None:
    """Raises OSError: nothing was said for long, or the stream has ended."""
    if stream.recv(len(READ)) != READ:
        raise ConnectionError("the reader has ended")


# --- The host where bytes are needed ---------------------------------------------------------------------------------
# The host where bytes are needed: its index process reads them out of the other one's slots, for a process of its own.
#
# 1. It asks the other host to *stage* what its process has asked for, on a stream.
# 2. As soon as it is told where a piece lies, it begins to read it into a slot of its own: two at a time.
# 3. What has come goes on to the process, over the process's stream, which takes it where it is to lie.
#
# If the other host hasn't this transport, or there is no room, the process is told *elsewhere*. What fails later ends
# its stream. In both cases the process asks for all of it over TCP. A slot into which a read was under way is doubted.


AT_ONCE = 2  # reads under way
PIECE_WITHIN = 5.0  # seconds for a piece
ENDED_WITHIN = 0.5  # seconds: reads under way, once another has failed, or the process is gone
AWAY, LONGEST_AWAY = (
    30.0,
    600.0,
)  # seconds for which a host that could not be read is left alone: twice as long each time


class _Away(NamedTuple):
    """Attributes:
    until: monotonic.
    """

    until: float
    seconds: float
    why: str


class Bringer:
    """Thread-safe.

    Args:
        streams: to other hosts.
        members: finds a member of the cluster by its id; None: there is none any more.
        transport, version: of this process; the other's must be the same.
    """

    def __init__(
        self,
        streams: Streams,
        members: Callable[[bytes], Member | None],
        engine: Engine,
        slots: Slots,
        transport: str,
        version: str,
    ) -> None:
        self._streams, self._members, self._engine, self._slots = streams, members, engine, slots
        self._transport, self._version = transport, version
        self._away: dict[bytes, _Away] = {}  # by member

    def bring(self, stream: socket.socket, request: Bring) -> int:
        """Returns how many bytes were read of slots. Raises OSError, which ends the stream."""
        away = self._away.get(request.member)
        if away is not None and away.until > time.monotonic():
            send_elsewhere(stream, away.why)
            return 0
        member = self._members(request.member)
        if member is None:
            send_elsewhere(stream, "that host has left the cluster")
            return 0
        try:
            taken = self._slots.take()
        except (EngineError, OSError) as error:
            return self._refuse(stream, member, f"there is no registered memory: {error}")
        if taken is None:
            send_elsewhere(stream, "all registered memory is in use", BUSY)
            return 0
        with taken:
            return self._bring(stream, member, request, taken)

    def _refuse(self, stream: socket.socket, member: Member, why: str) -> int:
        self._leave(member, why)
        send_elsewhere(stream, why)
        return 0

    def _leave(self, member: Member, why: str) -> None:
        """For a while: whoever asks meanwhile need not wait for it as this one did."""
        before = self._away.get(member.id)
        seconds = AWAY if before is None else min(2 * before.seconds, LONGEST_AWAY)
        self._away[member.id] = _Away(time.monotonic() + seconds, seconds, why)

    def _bring(self, stream: socket.socket, member: Member, request: Bring, taken: TransferSlots) -> int:
        deadline = time.monotonic() + request.milliseconds / 1000
        try:
            source, kind, nbytes = self._ask(member, request, deadline)
        except (OSError, BrokenStreamError, HomeUnavailableError, LinkRefusedError) as error:
            return self._refuse(stream, member, str(error))
        is_over = False
        try:
            if kind != FOLLOWS:
                text = receive_bytes(source, nbytes)
                is_over = True
                if kind == ELSEWHERE:
                    return self._refuse(stream, member, text.decode(errors="replace"))
                send_all(stream, [memoryview(HEAD.pack(kind, len(text)) + text)])
                return 0
            send_all(stream, [memoryview(HEAD.pack(FOLLOWS, nbytes))])
            _Transfer(self._engine, source, stream, taken, deadline).run(nbytes)
            is_over = True
            self._away.pop(member.id, None)
            return nbytes - nbytes % STAGED_UNIT
        except (EngineError, BrokenStreamError) as error:
            self._leave(member, str(error))
            raise ConnectionError(f"{source.name}: {error}") from error
        finally:
            if is_over:
                self._streams.give_back(source)
            else:
                source.close()

    def _ask(self, member: Member, request: Bring, deadline: float) -> tuple[Stream, int, int]:
        """A stream, and the head of its answer."""
        stage = encode(Stage(self._transport, self._version, request.segments))
        fresh = False
        while True:
            source = self._streams.take(member, min(deadline, time.monotonic() + PIECE_WITHIN), fresh=fresh)
            try:
                source.set_patience(min(deadline - time.monotonic(), PIECE_WITHIN))
                source.send(LENGTH.pack(len(stage)) + stage)
                kind, nbytes = HEAD.unpack(receive_bytes(source, HEAD.size))
                if kind not in (FOLLOWS, GONE, FAILED, ELSEWHERE, BUSY) or (kind != FOLLOWS and nbytes > FAILURE_LIMIT):
                    raise BrokenStreamError(f"an answer of kind {kind} and {nbytes:,} bytes")
                return source, kind, nbytes
            except BaseException as error:
                source.close()
                if not isinstance(error, OSError | BrokenStreamError) or not source.was_idle or fresh:
                    raise
                fresh = True


class _Transfer:
    """From one host's slots through ours to a process."""

    def __init__(
        self, engine: Engine, source: Stream, target: socket.socket, taken: TransferSlots, deadline: float
    ) -> None:
        self._engine, self._owner, self._target = engine, source, target
        self._taken, self._deadline = taken, deadline
        self._under_way: deque[tuple[Slot, Reading, int]] = deque()

    def run(self, nbytes: int) -> None:
        """Raises OSError, BrokenStreamError, EngineError."""
        try:
            free, left = deque(self._taken.slots), nbytes - nbytes % STAGED_UNIT
            while left or self._under_way:
                while left and len(self._under_way) < AT_ONCE:
                    left -= self._begin(free.popleft(), left)
                slot, size = self._end_first()
                if left:
                    left -= self._begin(free.popleft(), left)
                send_all(self._target, [slot.memory[:size]])
                free.append(slot)
        finally:
            self._end_others()
        rest = self._hear(nbytes % STAGED_UNIT + 1)  # and whether all were whole
        send_all(self._target, [memoryview(rest)])

    def _begin(self, slot: Slot, most: int) -> int:
        """Begins to read the next piece into a slot. Returns its size."""
        (length,) = LENGTH.unpack(self._hear(LENGTH.size))
        if length > STAGED_LIMIT:
            raise BrokenStreamError(f"{length:,} bytes about a piece")
        try:
            staged = decode_staged(self._hear(length))
        except UNDECODABLE as error:
            raise BrokenStreamError(f"a piece that can't be read: {error}") from None
        size = staged.nbytes
        if not 0 < size <= min(most, SLOT) or size % STAGED_UNIT:
            raise BrokenStreamError(f"a piece of {size:,} bytes")
        reading = self._engine.read(staged.handle, size, slot.memory, self._patience())
        self._under_way.append((slot, reading, size))
        return size

    def _end_first(self) -> tuple[Slot, int]:
        slot, reading, size = self._under_way[0]
        try:
            reading.wait(self._patience())
        except TimeoutError:
            raise EngineError(f"{size:,} bytes did not come within {PIECE_WITHIN:g} s") from None
        self._under_way.popleft()
        try:
            self._owner.send(READ)
        except OSError as error:
            raise BrokenStreamError(str(error)) from error
        return slot, size

    def _end_others(self) -> None:
        """After a failure: those that come all the same leave nothing to doubt."""
        until = time.monotonic() + ENDED_WITHIN
        for slot, reading, _ in self._under_way:
            try:
                reading.wait(max(until - time.monotonic(), 0.0))
            except (TimeoutError, EngineError):
                self._taken.doubt(slot, reading)

    def _hear(self, size: int) -> bytes:
        """From the other host: what is wrong there is not the process's stream, whose errors are OSErrors."""
        try:
            return receive_bytes(self._owner, size)
        except OSError as error:
            raise BrokenStreamError(str(error) or "it says nothing") from error

    def _patience(self) -> float:
        return max(min(self._deadline - time.monotonic(), PIECE_WITHIN), 0.0)


# --- Both ------------------------------------------------------------------------------------------------------------


def open_plane(
    root: Root, links: Streamer, members: Callable[[bytes], Member | None], transport: str, version: str
) -> Plane:
    """Opens the plane of a process in which Monarch runs (`actors.start_monarch`).

    Args:
        transport: "rdma" or "monarch".
        version: of Monarch.
    """
    return Plane(root, links, members, MonarchEngine(has_ibverbs=transport == "rdma"), transport, version)


class Plane:
    """See `transfers.senders.Plane`. Thread-safe.

    Args:
        members: finds a member of the cluster by its id; None: there is none any more.

    Attributes:
        transport: "rdma" or "monarch".
    """

    def __init__(
        self,
        root: Root,
        links: Streamer,
        members: Callable[[bytes], Member | None],
        engine: Engine,
        transport: str,
        version: str,
    ) -> None:
        self.transport = transport
        self._root, self._version = root, version
        self._streams = Streams(links)
        self.staged = Slots(engine.register, range(STAGED_UNIT, SLOT + 1, STAGED_UNIT))
        self.brought = Slots(engine.register, (SLOT,))  # so that it isn't for each read; nobody is told of it
        self._bringer = Bringer(self._streams, members, engine, self.brought, transport, version)
        self._lock = threading.Lock()
        self._moved = Moved()

    def stage(self, stream: socket.socket, request: Stage) -> None:
        if (request.transport, request.monarch) != (self.transport, self._version):
            own, its = f"{self.transport} (Monarch {self._version})", f"{request.transport} (Monarch {request.monarch})"
            send_elsewhere(stream, f"it has {own}, and was asked by {its}")
            return
        self._count(sent=stage(self._root, self.staged, stream, request))

    def bring(self, stream: socket.socket, request: Bring) -> None:
        self._count(received=self._bringer.bring(stream, request))

    def moved(self) -> Moved:
        """Bytes that were read of registered memory; those on streams the connections count."""
        return self._moved

    def close(self) -> None:
        self._streams.close()

    def _count(self, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._moved = Moved(self._moved.sent + sent, self._moved.received + received)
