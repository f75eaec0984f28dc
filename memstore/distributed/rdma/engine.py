"""What is said to Monarch about memory: registering it, and reading others' into it.

Threads have no context of Monarch's own, and would begin a client beside it: so they take that of whoever opened this.
"""

from __future__ import annotations

import contextvars
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from memstore._threads import between_forks
from memstore.distributed.actors import first_line

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
