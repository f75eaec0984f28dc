"""Shared memory without a name, which other processes get as a file descriptor."""

from __future__ import annotations

from typing import Any

from memstore.engine import syscalls
from memstore.engine.files.huge_pages import allocate_rest, collapse_extents, touch_extents


class SharedMemory:
    """Memory of this process that others can map: a file in memory that has no name.

    It is given back when nothing refers to it any more, here and in the processes that were sent its descriptor.

    Args:
        size: in bytes, at least 1.

    Raises:
        OSError: no file descriptors, or no addresses, are left.

    Attributes:
        address: of the first byte; from 2 MiB on a multiple of that.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._fds: list[int] = []
        self._fds.append(syscalls.memory_file("memstore"))
        syscalls.truncate(self.fd, size)
        self._mapping, start, skipped = syscalls.reserve(size)
        self.address = start + skipped
        syscalls.map_shared(self.address, self.fd, size)

    def make_huge(self, start: int, stop: int) -> None:
        """Allocates what it can of a run in huge pages. One core clears one run: several may be done at once."""
        touch_extents(self.fd, stop, start)
        collapse_extents(self.address + start, stop - start)

    def allocate(self) -> None:
        """Allocates what isn't yet. Raises OSError if the machine has not so much memory."""
        allocate_rest(self.fd, self.address, self.size)

    @property
    def fd(self) -> int:
        return self._fds[0]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """All of it, as bytes. An array of numpy that is made of this keeps it."""
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}

    def __del__(self) -> None:
        syscalls.close_all(self._fds)
