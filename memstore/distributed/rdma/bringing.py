"""The host where bytes are needed: its index process reads them out of the other one's slots, for a process of its own.

1. It asks the other host to *stage* what its process has asked for, on a stream.
2. As soon as it is told where a piece lies, it begins to read it into a slot of its own: two at a time.
3. What has come goes on to the process, over the process's stream, which takes it where it is to lie.

If the other host hasn't this transport, or there is no room, the process is told *elsewhere*. What fails later ends
its stream. In both cases the process asks for all of it over TCP. A slot into which a read was under way is doubted.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from memstore._parsing import UNDECODABLE
from memstore.distributed.rdma.engine import Engine, EngineError, Reading
from memstore.distributed.rdma.slots import SLOT, Lane, Slot, Slots
from memstore.distributed.rdma.staging import READ
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
    Stage,
    Stream,
    Streams,
    decode_staged,
    encode,
    receive_bytes,
    send_all,
    send_elsewhere,
)
from memstore.errors import HomeUnavailableError, LinkRefusedError

AT_ONCE = 2  # reads under way
STALLED = 5.0  # seconds for a piece
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
            lane = self._slots.take()
        except (EngineError, OSError) as error:
            return self._refuse(stream, member, f"there is no registered memory: {error}")
        if lane is None:
            send_elsewhere(stream, "all registered memory is in use", BUSY)
            return 0
        with lane:
            return self._bring(stream, member, request, lane)

    def _refuse(self, stream: socket.socket, member: Member, why: str) -> int:
        self._leave(member, why)
        send_elsewhere(stream, why)
        return 0

    def _leave(self, member: Member, why: str) -> None:
        """For a while: whoever asks meanwhile need not wait for it as this one did."""
        before = self._away.get(member.id)
        seconds = AWAY if before is None else min(2 * before.seconds, LONGEST_AWAY)
        self._away[member.id] = _Away(time.monotonic() + seconds, seconds, why)

    def _bring(self, stream: socket.socket, member: Member, request: Bring, lane: Lane) -> int:
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
            _Transfer(self._engine, source, stream, lane, deadline).run(nbytes)
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
            source = self._streams.take(member, min(deadline, time.monotonic() + STALLED), fresh=fresh)
            try:
                source.set_patience(min(deadline - time.monotonic(), STALLED))
                source.send(LENGTH.pack(len(stage)) + stage)
                kind, nbytes = HEAD.unpack(receive_bytes(source, HEAD.size))
                if kind not in (FOLLOWS, GONE, FAILED, ELSEWHERE, BUSY) or (kind != FOLLOWS and nbytes > FAILURE_LIMIT):
                    raise BrokenStreamError(f"an answer of kind {kind} and {nbytes:,} bytes")
                return source, kind, nbytes
            except BaseException as error:
                source.close()
                if not isinstance(error, OSError | BrokenStreamError) or not source.was_kept or fresh:
                    raise
                fresh = True


class _Transfer:
    """From one host's slots through ours to a process."""

    def __init__(self, engine: Engine, source: Stream, target: socket.socket, lane: Lane, deadline: float) -> None:
        self._engine, self._owner, self._target = engine, source, target
        self._lane, self._deadline = lane, deadline
        self._under_way: deque[tuple[Slot, Reading, int]] = deque()

    def run(self, nbytes: int) -> None:
        """Raises OSError, BrokenStreamError, EngineError."""
        try:
            free, left = deque(self._lane.slots), nbytes - nbytes % STAGED_UNIT
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
            raise EngineError(f"{size:,} bytes did not come within {STALLED:g} s") from None
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
                self._lane.doubt(slot, reading)

    def _hear(self, size: int) -> bytes:
        """From the other host: what is wrong there is not the process's stream, whose errors are OSErrors."""
        try:
            return receive_bytes(self._owner, size)
        except OSError as error:
            raise BrokenStreamError(str(error) or "it says nothing") from error

    def _patience(self) -> float:
        return max(min(self._deadline - time.monotonic(), STALLED), 0.0)
