"""The host where bytes lie: puts them into registered memory, a piece after the other, for another host to read.

1. The segments are mapped under shared locks, and their put ids compared, as for a stream (`transfers/sending.py`).
2. A piece is copied into a slot, ranges behind one another, and the other host is told where it lies.
3. It says when it has read a piece; the slot takes another one then.
4. What is no whole unit goes over the stream; then the put ids are compared again.

A reader that dies, or is cut off, ends its stream, and its slots are anybody's again. If a read of its is still under
way, it brings it bytes of another value: into memory that nobody looks at, since its transfer has failed.
"""

from __future__ import annotations

import socket

import numpy as np

from memstore.distributed.rdma.engine import EngineError
from memstore.distributed.rdma.slots import SLOT, Lane, Slots
from memstore.distributed.transfers import (
    BUSY,
    FOLLOWS,
    GONE,
    HEAD,
    LENGTH,
    STAGED_UNIT,
    Pieces,
    Stage,
    Staged,
    encode,
    end_of_answer,
    map_segments,
    ranges_of,
    send_all,
    send_elsewhere,
    send_failure,
)
from memstore.engine import Root, syscalls
from memstore.errors import CorruptionError

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
        lane = slots.take()
    except (EngineError, OSError) as error:
        send_elsewhere(stream, f"there is no registered memory: {error}")
        return 0
    if lane is None:
        send_elsewhere(stream, "all registered memory is in use", BUSY)
        return 0
    with lane:
        addresses = [ranges.starts + one.address for one, ranges in zip(found, wanted, strict=True)]
        pieces = Pieces(np.concatenate(addresses), np.concatenate([ranges.sizes for ranges in wanted]))
        total = int(pieces.sizes.sum())
        send_all(stream, [memoryview(HEAD.pack(FOLLOWS, total))])
        rest = total % STAGED_UNIT
        pieces = _stage_pieces(stream, lane, pieces, total - rest)
        if rest:
            last = bytearray(rest)
            pieces.copy_to(syscalls.buffer_address(last))
            send_all(stream, [memoryview(last)])
        unread = min((total - rest + SLOT - 1) // SLOT, len(lane.slots))
        for _ in range(unread):
            _wait_until_read(stream)
        # Last: whoever reads a slot late, when others use it again, is never told that all was whole.
        send_all(stream, [memoryview(end_of_answer(root, found, request.segments))])
    return total - rest


def _stage_pieces(stream: socket.socket, lane: Lane, pieces: Pieces, nbytes: int) -> Pieces:
    """Returns what is left of the pieces."""
    count = len(lane.slots)
    for number, start in enumerate(range(0, nbytes, SLOT)):
        if number >= count:
            _wait_until_read(stream)
        slot, size = lane.slots[number % count], min(SLOT, nbytes - start)
        first, pieces = pieces.split(size)
        first.copy_to(slot.address)
        said = encode(Staged(slot.handles[size // STAGED_UNIT - 1], size))
        send_all(stream, [memoryview(LENGTH.pack(len(said)) + said)])
    return pieces


def _wait_until_read(stream: socket.socket) -> None:
    """Raises OSError: nothing was said for long, or the stream has ended."""
    if stream.recv(len(READ)) != READ:
        raise ConnectionError("the reader has ended")
