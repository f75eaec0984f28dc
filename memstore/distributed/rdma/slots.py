"""Memory that is registered once and kept, in slots: who uses which, and which may not be used again yet.

A read that failed, or took too long, may still write: RDMA knows no "stop". So a slot that it was to fill is *doubted*:
nobody gets it until the read has ended in some way, and a while after that. (A queue pair of Monarch's tries for half a
second, 7 times 67 ms, and is flushed then.) Where too many are doubted, there are no slots, and bytes go over TCP.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from memstore.distributed.rdma.engine import EngineError, Reading
from memstore.distributed.transfers import STAGED_UNIT
from memstore.engine import syscalls

SLOT = 8 * STAGED_UNIT  # bytes
LANE = 3  # slots of a transfer: one is filled, one is on its way, and one is emptied
LANES = 4  # transfers at a time
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
    reading: Reading
    ended: list[float]  # when its end was seen, monotonic


class Slots:
    """Of one side of a process. They are made when they are needed first. Thread-safe.

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

    def take(self) -> Lane | None:
        """As many as a transfer needs. None: others have them. Raises EngineError, OSError: no memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken < LANES * LANE, WAITS)
            self._trust_again()
            if self._taken >= LANES * LANE or len(self._doubted) >= MOST_DOUBTED:
                return None
            while len(self._free) < LANE:
                self._free.append(self._make())
            slots, self._free = self._free[:LANE], self._free[LANE:]
            self._taken += LANE
        return Lane(self, slots)

    def give_back(self, slots: Sequence[Slot], doubted: Sequence[tuple[Slot, Reading]]) -> None:
        with self._changed:
            self._taken -= LANE
            self._free += slots
            self._doubted += [_Doubted(slot, reading, []) for slot, reading in doubted]
            self._changed.notify()

    @property
    def doubted(self) -> int:
        return len(self._doubted)

    def _make(self) -> Slot:
        """What is registered stays so: after a failure the next try goes on with the same memory."""
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


class Lane:
    """The slots of one transfer; use it in a `with`."""

    def __init__(self, slots: Slots, taken: Sequence[Slot]) -> None:
        self._slots, self.slots = slots, tuple(taken)
        self._doubted: dict[int, tuple[Slot, Reading]] = {}

    def doubt(self, slot: Slot, reading: Reading) -> None:
        """It may still be written into."""
        self._doubted[slot.address] = slot, reading

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        good = [slot for slot in self.slots if slot.address not in self._doubted]
        self._slots.give_back(good, list(self._doubted.values()))


def _is_over(reading: Reading) -> bool:
    with contextlib.suppress(EngineError):
        try:
            reading.wait(0.0)
        except TimeoutError:
            return False
    return True
