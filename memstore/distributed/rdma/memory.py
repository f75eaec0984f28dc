"""Registered memory: what is said to Monarch about it, and the slots that transfers use in turn."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import math
import mmap
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from memstore._threads import between_forks
from memstore.distributed.actors import first_line
from memstore.distributed.transfers import STAGED_UNIT
from memstore.engine import syscalls

# --- Monarch ---------------------------------------------------------------------------------------------------------
# What is said to Monarch about memory: registering it, and reading others' into it.
#
# Threads have no context of Monarch's own, and would begin a client beside it: so they take that of whoever opened
# this.


_MOST = 1 << 31  # seconds
_NATIVE = "_buffer"  # of Monarch's RDMABuffer: what its compiled code has made
_OF_JSON = "_RdmaBuffer"  # makes one of its JSON, which is all that pickle would have of it


class EngineError(Exception):
    """Monarch's, of any class."""


class Reading(Protocol):
    """A read that was begun."""

    def wait(self, seconds: float) -> None:
        """Until the bytes are there. Raises TimeoutError: not yet; EngineError: they never will be."""
        ...


class Engine(Protocol):
    """Thread-safe."""

    def register(self, memory: memoryview) -> bytes:
        """Memory that others may read from now on. Returns its handle. Raises EngineError."""
        ...

    def read(self, handle: bytes, nbytes: int, into: memoryview, seconds: float) -> Reading:
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
            raise EngineError(first_line(error)) from error
        self._registered.append((buffer, memory))
        return handle.encode()

    def read(self, handle: bytes, nbytes: int, into: memoryview, seconds: float) -> Reading:
        return self._context.copy().run(self._read, handle, nbytes, into, seconds)

    def _read(self, handle: bytes, nbytes: int, into: memoryview, seconds: float) -> Reading:
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
            raise EngineError(first_line(error)) from error


class _Reading:
    def __init__(self, future: Any, context: contextvars.Context) -> None:
        self._future, self._context = future, context

    def wait(self, seconds: float) -> None:
        try:
            self._context.copy().run(self._future.get, max(seconds, 0.0))
        except TimeoutError:
            raise
        except Exception as error:
            raise EngineError(first_line(error)) from error


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
    reading: Reading
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

    def give_back(self, slots: Sequence[Slot], doubted: Sequence[tuple[Slot, Reading]]) -> None:
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
        self._doubted: dict[int, tuple[Slot, Reading]] = {}

    def doubt(self, slot: Slot, reading: Reading) -> None:
        """It may still be written into."""
        self._doubted[slot.address] = slot, reading

    def __enter__(self) -> TransferSlots:
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
