"""An engine without Monarch, in one process, whose reads a test may hold up, let fail, or let come late."""

from __future__ import annotations

import threading
import time
from itertools import count

from memstore.distributed.transfers.rdma import EngineError

_names = count(1)


class HeldReading:
    """Attributes:
    has_come: its bytes were written.
    begun: when, monotonic.
    """

    def __init__(self, source: memoryview, into: memoryview, seconds: float) -> None:
        self._source, self._into, self._seconds = source, into, seconds
        self._over = threading.Event()
        self.error: str | None = None
        self.has_come = False
        self.begun = time.monotonic()

    def come(self) -> None:
        """Its bytes are written now, whoever waits, or has given up."""
        self._into[: len(self._source)] = self._source
        self.has_come = True
        self._over.set()

    def fail(self, error: str) -> None:
        self.error = error
        self._over.set()

    def wait(self, seconds: float) -> None:
        if not self._over.wait(seconds):
            raise TimeoutError
        if self.error is not None:
            raise EngineError(self.error)


class HeldEngine:
    """Args:
    registered: memory by its handle, of all engines of a test.

    Attributes:
    sizes: of the memory that was registered, in bytes.
    readings: all that were begun.
    holds: they don't come by themselves.
    fails: how they fail at once.
    refuses: how registering fails.
    """

    def __init__(self, registered: dict[bytes, memoryview]) -> None:
        self._registered = registered
        self.sizes: list[int] = []
        self.readings: list[HeldReading] = []
        self.holds = False
        self.fails: str | None = None
        self.refuses: str | None = None

    def register(self, memory: memoryview) -> bytes:
        if self.refuses is not None:
            raise EngineError(self.refuses)
        name = b"%d" % next(_names)
        self._registered[name] = memory
        self.sizes.append(len(memory))
        return name

    def read(self, handle: bytes, nbytes: int, into: memoryview, seconds: float) -> HeldReading:
        source = self._registered.get(handle)
        if source is None or len(source) != nbytes:
            raise EngineError(f"no handle of {nbytes:,} bytes")
        reading = HeldReading(source, into, seconds)
        self.readings.append(reading)
        if self.fails is not None:
            reading.fail(self.fails)
        elif not self.holds:
            reading.come()
        return reading
