"""Bytes of other hosts by RDMA, through Monarch. Experimental: it has run over Monarch's TCP fallback only.

One index process reads memory of another's. Both have registered it once, and keep it: slots, into which values are
copied on the one side and out of which on the other. No file of a store is ever registered: whoever has the handle of
memory may write into it, and may do so late. What is read, and when, is said on a stream (`transfers`), as all else:
Monarch moves bytes, and nothing is asked of its actors. This module imports no Monarch: a plane does that as it opens.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import math
import mmap
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from memstore._parsing import UNDECODABLE
from memstore._threads import between_forks
from memstore.distributed.links import Moved
from memstore.distributed.rules import Member
from memstore.distributed.transfers.messages import (
    BUSY,
    ELSEWHERE,
    FOLLOWS,
    HEAD,
    LENGTH,
    STAGED_LIMIT,
    STAGED_UNIT,
    Bring,
    Pieces,
    Stage,
    Staged,
    decode_staged,
    framed,
)
from memstore.distributed.transfers.receiving import (
    BrokenStreamError,
    Stream,
    StreamLinks,
    Streams,
    receive_bytes,
    receive_head,
)
from memstore.distributed.transfers.sending import ask_disk, end_of_answer, mapped, ranges_of, send_all, send_answer
from memstore.engine import Root, syscalls
from memstore.errors import HomeUnavailableError, LinkRefusedError

# --- Monarch ---------------------------------------------------------------------------------------------------------
# What is said to Monarch about memory: registering it, and reading others' into it.
#
# Threads have no context of Monarch's own, and would begin a client beside it: they take that of whoever opened this.

_MOST = 1 << 31  # seconds
_NATIVE = "_buffer"  # of Monarch's RDMABuffer: what its compiled code has made
_OF_JSON = "_RdmaBuffer"  # makes one of its JSON, which is all that pickle would have of it


class EngineError(Exception):
    """Monarch's, of any class."""


def _first_line(error: Exception) -> str:
    """Returns the first line of one of Monarch's errors, which may have a hundred."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:500]


class PendingRead(Protocol):
    """A read that was begun."""

    def wait(self, seconds: float) -> None:
        """Until the bytes are there. Raises TimeoutError: not yet; EngineError: they never will be."""
        ...


class Engine(Protocol):
    """Thread-safe."""

    def register(self, memory: memoryview) -> bytes:
        """Memory that others may read from now on. Returns its handle. Raises EngineError."""
        ...

    def read(self, handle: bytes, nbytes: int, into: memoryview, seconds: float) -> PendingRead:
        """Begins to read so many bytes, all that the handle stands for, within a time. Raises EngineError."""
        ...


class MonarchEngine:
    """The engine of a process in which Monarch runs. Its handles are JSON: nothing of them is unpickled.

    Args:
        has_ibverbs: RDMA, and nothing else; False: Monarch's TCP fallback, also where there is RDMA.
    """

    def __init__(self, *, has_ibverbs: bool) -> None:
        with between_forks():
            monarch: Any = importlib.import_module("monarch")
            self._rdma: Any = importlib.import_module("monarch.rdma")
            self._native: Any = importlib.import_module("monarch._rust_bindings.rdma")
        monarch.configure(rdma_allow_tcp_fallback=not has_ibverbs, rdma_disable_ibverbs=not has_ibverbs)
        warnings.simplefilter("ignore", self._rdma.RDMATcpFallbackWarning)  # it was asked for
        self._context = contextvars.copy_context()
        self._registered: list[Any] = []  # as long as the process lives

    def register(self, memory: memoryview) -> bytes:
        try:
            make: Callable[[memoryview], object] = self._rdma.RDMABuffer
            buffer = self._context.copy().run(make, memory)
            handle: str = vars(buffer)[_NATIVE].__reduce__()[1][0]
        except Exception as error:  # of any class: Monarch's are many, and its own affair
            raise EngineError(_first_line(error)) from error
        self._registered.append((buffer, memory))
        return handle.encode()

    def read(self, handle: bytes, nbytes: int, into: memoryview, seconds: float) -> PendingRead:
        return self._context.copy().run(self._read, handle, nbytes, into, seconds)

    def _read(self, handle: bytes, nbytes: int, into: memoryview, seconds: float) -> PendingRead:
        try:
            buffer = self._rdma.RDMABuffer.__new__(self._rdma.RDMABuffer)
            setattr(buffer, _NATIVE, getattr(self._native, _OF_JSON)(handle.decode()))
            if buffer.size() != nbytes:
                raise EngineError(f"a handle of {buffer.size():,} bytes, and {nbytes:,} are to be read")
            action = self._rdma.RDMAAction().read_remote(into, buffer)
            return _Reading(action.submit(timeout=math.ceil(min(max(seconds, 1), _MOST))), self._context)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(_first_line(error)) from error


class _Reading:
    def __init__(self, future: Any, context: contextvars.Context) -> None:
        self._future, self._context = future, context

    def wait(self, seconds: float) -> None:
        try:
            self._context.copy().run(self._future.get, max(seconds, 0.0))
        except TimeoutError:
            raise
        except Exception as error:
            raise EngineError(_first_line(error)) from error


def has_ibverbs() -> bool:
    """Whether Monarch finds RDMA here. It imports Monarch."""
    with between_forks():
        rdma: Any = importlib.import_module("monarch.rdma")
    return rdma.is_ibverbs_available()


# --- Slots -----------------------------------------------------------------------------------------------------------
# Memory that is registered once and kept, in slots: who uses which, and which may not be used again yet.
#
# A read that failed, or took too long, may still write: RDMA knows no "stop". So a slot that it was to fill is
# *doubted*: nobody gets it until the read has ended in some way, and a while after that. (A queue pair of Monarch's
# tries for half a second, 7 times 67 ms, and is flushed then.) Where too many are doubted, there are no slots, and
# bytes go over TCP.

SLOT = 8 * STAGED_UNIT  # bytes
SLOTS_OF_TRANSFER = 3  # slots of a transfer: one is filled, one is on its way, and one is emptied
MOST_TRANSFERS = 4  # transfers at a time
WAITS = 1.0  # seconds for which others wait; then they go over TCP
MOST_DOUBTED = 16  # slots
DOUBTED_FOR = 60.0  # seconds


class Slot(NamedTuple):
    """Attributes:
    handles: of its first 1, 2, ... units, for the other side's engine.
    """

    memory: memoryview
    address: int
    handles: tuple[bytes, ...]


class _Doubted(NamedTuple):
    slot: Slot
    reading: PendingRead
    ended: list[float]  # when its end was seen, monotonic


class Slots:
    """Slots of one side of a process. They are made when they are needed first. Thread-safe.

    Args:
        register: makes a handle of new memory.
        parts: the bytes of a slot's parts that are registered each: its first so many. A read takes all that its handle
            stands for.
    """

    def __init__(self, register: Callable[[memoryview], bytes], parts: Sequence[int]) -> None:
        self._register, self._parts = register, parts
        self._begun: tuple[memoryview, list[bytes]] | None = None  # the next slot, if registering it failed
        self._changed = threading.Condition()
        self._free: list[Slot] = []
        self._doubted: list[_Doubted] = []
        self._taken = 0

    def take(self) -> TransferSlots | None:
        """As many as a transfer needs. None: others have them. Raises EngineError, OSError: no memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken < MOST_TRANSFERS * SLOTS_OF_TRANSFER, WAITS)
            self._trust_again()
            if self._taken >= MOST_TRANSFERS * SLOTS_OF_TRANSFER or len(self._doubted) >= MOST_DOUBTED:
                return None
            while len(self._free) < SLOTS_OF_TRANSFER:
                self._free.append(self._make())
            slots, self._free = self._free[:SLOTS_OF_TRANSFER], self._free[SLOTS_OF_TRANSFER:]
            self._taken += SLOTS_OF_TRANSFER
        return TransferSlots(self, slots)

    def give_back(self, slots: Sequence[Slot], doubted: Sequence[tuple[Slot, PendingRead]]) -> None:
        with self._changed:
            self._taken -= SLOTS_OF_TRANSFER
            self._free += slots
            self._doubted += [_Doubted(slot, reading, []) for slot, reading in doubted]
            self._changed.notify()

    @property
    def doubted(self) -> int:
        return len(self._doubted)

    def _make(self) -> Slot:
        """Registers memory, which stays so: after a failure the next try goes on with the same."""
        if self._begun is None:
            self._begun = memoryview(mmap.mmap(-1, SLOT)), []
        memory, handles = self._begun
        for size in self._parts[len(handles) :]:
            handles.append(self._register(memory[:size]))
        self._begun = None
        return Slot(memory, syscalls.buffer_address(memory), tuple(handles))

    def _trust_again(self) -> None:
        now = time.monotonic()
        for one in list(self._doubted):
            if not one.ended and _is_over(one.reading):
                one.ended.append(now)
            if one.ended and now - one.ended[0] >= DOUBTED_FOR:
                self._doubted.remove(one)
                self._free.append(one.slot)


class TransferSlots:
    """The slots of one transfer; use it in a `with`."""

    def __init__(self, slots: Slots, taken: Sequence[Slot]) -> None:
        self._slots, self.slots = slots, tuple(taken)
        self._doubted: dict[int, tuple[Slot, PendingRead]] = {}

    def doubt(self, slot: Slot, reading: PendingRead) -> None:
        """It may still be written into."""
        self._doubted[slot.address] = slot, reading

    def __enter__(self) -> TransferSlots:
        return self

    def __exit__(self, *_: object) -> None:
        good = [slot for slot in self.slots if slot.address not in self._doubted]
        self._slots.give_back(good, list(self._doubted.values()))


def _is_over(reading: PendingRead) -> bool:
    with contextlib.suppress(EngineError):
        try:
            reading.wait(0.0)
        except TimeoutError:
            return False
    return True


# --- The host where bytes lie ----------------------------------------------------------------------------------------
# It puts them into registered memory, a piece after the other, for another host to read.
#
# 1. The segments are mapped under shared locks, and their put ids compared, as for a stream (`sending.py`).
# 2. A piece is copied into a slot, ranges behind one another, and the other host is told where it lies.
# 3. It says when it has read a piece; the slot takes another one then.
# 4. What is no whole unit goes over the stream; then the put ids are compared again.
#
# A reader that dies, or is cut off, ends its stream, and its slots are anybody's again. If a read of its is still under
# way, it brings it bytes of another value: into memory that nobody looks at, since its transfer has failed.

READ = b"\1"  # said of a piece
_ALL_IN_USE = b"all registered memory is in use"


def stage(root: Root, slots: Slots, stream: socket.socket, request: Stage) -> int:
    """Returns how many bytes were read of slots. Raises OSError and BadRequestError, which end the stream."""
    wanted = ranges_of(request.segments)
    found = mapped(root, stream, request.segments)
    if found is None:
        return 0
    try:
        taken = slots.take()
    except (EngineError, OSError) as error:
        send_answer(stream, ELSEWHERE, f"there is no registered memory: {error}".encode())
        return 0
    if taken is None:
        send_answer(stream, BUSY, _ALL_IN_USE)
        return 0
    with taken:
        ask_disk(root, found, wanted)
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
        send_all(stream, [memoryview(framed(Staged(slot.handles[size // STAGED_UNIT - 1], size)))])
    return pieces


def _wait_until_read(stream: socket.socket) -> None:
    """Raises OSError: nothing was said for long, or the stream has ended."""
    if stream.recv(len(READ)) != READ:
        raise ConnectionError("the reader has ended")


# --- The host where bytes are needed ---------------------------------------------------------------------------------
# Its index process reads them out of the other one's slots, for a process of its own.
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
AWAY, LONGEST_AWAY = 30.0, 600.0  # seconds for which a host that can't be read is left alone: each time twice as long


class _PieceTransfer:
    """From one host's slots through ours to a process."""

    def __init__(
        self, engine: Engine, source: Stream, target: socket.socket, taken: TransferSlots, deadline: float
    ) -> None:
        self._engine, self._source, self._target = engine, source, target
        self._taken, self._deadline = taken, deadline
        self._under_way: deque[tuple[Slot, PendingRead, int]] = deque()

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
            self._source.send(READ)
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
            return receive_bytes(self._source, size)
        except OSError as error:
            raise BrokenStreamError(str(error) or "it says nothing") from error

    def _patience(self) -> float:
        return max(min(self._deadline - time.monotonic(), PIECE_WITHIN), 0.0)


# --- Both ------------------------------------------------------------------------------------------------------------


def open_plane(
    root: Root, links: StreamLinks, members: Callable[[bytes], Member | None], transport: str, version: str
) -> RdmaPlane:
    """Opens the plane of a process in which Monarch runs.

    Args:
        transport: "rdma" or "monarch".
        version: of Monarch.
    """
    return RdmaPlane(root, links, members, MonarchEngine(has_ibverbs=transport == "rdma"), transport, version)


class _Away(NamedTuple):
    """Attributes:
    until: monotonic.
    """

    until: float
    seconds: float
    why: str


class RdmaPlane:
    """See `transfers.sending.Plane`. Thread-safe.

    Args:
        members: finds a member of the cluster by its id; None: there is none any more.
        transport, version: the other host's must be the same.

    Attributes:
        transport: "rdma" or "monarch".
    """

    def __init__(
        self,
        root: Root,
        links: StreamLinks,
        members: Callable[[bytes], Member | None],
        engine: Engine,
        transport: str,
        version: str,
    ) -> None:
        self.transport = transport
        self._root, self._members, self._engine, self._version = root, members, engine, version
        self._streams = Streams(links)
        self.staged = Slots(engine.register, range(STAGED_UNIT, SLOT + 1, STAGED_UNIT))
        self.brought = Slots(engine.register, (SLOT,))  # so that it isn't for each read; nobody is told of it
        self._away: dict[bytes, _Away] = {}  # by member
        self._lock = threading.Lock()
        self._moved = Moved()

    def moved(self) -> Moved:
        """Bytes that were read of registered memory; those on streams the connections count."""
        return self._moved

    def _count(self, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._moved = Moved(self._moved.sent + sent, self._moved.received + received)

    def close(self) -> None:
        self._streams.close()

    def stage(self, stream: socket.socket, request: Stage) -> None:
        if (request.transport, request.monarch) != (self.transport, self._version):
            own, its = f"{self.transport} (Monarch {self._version})", f"{request.transport} (Monarch {request.monarch})"
            send_answer(stream, ELSEWHERE, f"it has {own}, and was asked by {its}".encode())
            return
        self._count(sent=stage(self._root, self.staged, stream, request))

    def bring(self, stream: socket.socket, request: Bring) -> None:
        away = self._away.get(request.member)
        if away is not None and away.until > time.monotonic():
            send_answer(stream, ELSEWHERE, away.why.encode())
            return
        member = self._members(request.member)
        if member is None:
            send_answer(stream, ELSEWHERE, b"that host has left the cluster")
            return
        try:
            taken = self.brought.take()
        except (EngineError, OSError) as error:
            self._refuse(stream, member, f"there is no registered memory: {error}")
            return
        if taken is None:
            send_answer(stream, BUSY, _ALL_IN_USE)
            return
        with taken:
            self._bring(stream, member, request, taken)

    def _bring(self, stream: socket.socket, member: Member, request: Bring, taken: TransferSlots) -> None:
        deadline = time.monotonic() + request.milliseconds / 1000
        try:
            source, kind, nbytes = self._ask(member, request, deadline)
        except (OSError, BrokenStreamError, HomeUnavailableError, LinkRefusedError) as error:
            self._refuse(stream, member, str(error))
            return
        is_over = False
        try:
            if kind == FOLLOWS:
                send_all(stream, [memoryview(HEAD.pack(FOLLOWS, nbytes))])
                _PieceTransfer(self._engine, source, stream, taken, deadline).run(nbytes)
                is_over = True
                self._away.pop(member.id, None)
                self._count(received=nbytes - nbytes % STAGED_UNIT)
                return
            text = receive_bytes(source, nbytes)
            is_over = True
            if kind == ELSEWHERE:
                self._refuse(stream, member, text.decode(errors="replace"))
            else:
                send_answer(stream, kind, text)
        except (EngineError, BrokenStreamError) as error:
            self._leave(member, str(error))
            raise ConnectionError(f"{source.member.label}: {error}") from error
        finally:
            if is_over:
                self._streams.give_back(source)
            else:
                source.close()

    def _ask(self, member: Member, request: Bring, deadline: float) -> tuple[Stream, int, int]:
        """A stream, and the head of its answer."""
        stage = framed(Stage(self.transport, self._version, request.segments))
        fresh = False
        while True:
            source = self._streams.take(member, min(deadline, time.monotonic() + PIECE_WITHIN), fresh=fresh)
            try:
                source.set_patience(min(deadline - time.monotonic(), PIECE_WITHIN))
                source.send(stage)
                return source, *receive_head(source)
            except BaseException as error:
                source.close()
                if not isinstance(error, OSError | BrokenStreamError) or not source.was_idle or fresh:
                    raise
                fresh = True

    def _refuse(self, stream: socket.socket, member: Member, why: str) -> None:
        self._leave(member, why)
        send_answer(stream, ELSEWHERE, why.encode())

    def _leave(self, member: Member, why: str) -> None:
        """For a while: whoever asks meanwhile need not wait for it as this one did."""
        before = self._away.get(member.id)
        seconds = AWAY if before is None else min(2 * before.seconds, LONGEST_AWAY)
        self._away[member.id] = _Away(time.monotonic() + seconds, seconds, why)
