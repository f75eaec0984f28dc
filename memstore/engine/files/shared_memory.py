"""Shared memory without a name, which other processes get as a file descriptor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from memstore.engine import syscalls
from memstore.engine.files.huge_pages import allocate_huge, allocate_rest, move_to_huge


class SharedMemory:
    """Memory that several processes have: a file in memory that has no name.

    It is given back when nothing refers to it any more in any of them.

    Args:
        size: of new memory, in bytes, at least 1.
        fd: instead, of memory that another process made; it is closed with this object.

    Raises:
        OSError: no file descriptors, or no addresses, are left.

    Attributes:
        size: in bytes.
        address: of the first byte; from 2 MiB on a multiple of that.
    """

    def __init__(self, size: int = 0, *, fd: int | None = None) -> None:
        self._fds: list[int] = []
        self._fds.append(syscalls.memory_file("memstore") if fd is None else fd)
        if fd is None:
            syscalls.truncate(self.fd, size)
        self.size = syscalls.status(self.fd).st_size
        self._mapping, start, skipped = syscalls.reserve(self.size)
        self.address = start + skipped
        syscalls.map_shared(self.address, self.fd, self.size)

    @property
    def fd(self) -> int:
        return self._fds[0]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """All of it, as bytes. An array of numpy that is made of this keeps it."""
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}

    @property
    def bytes(self) -> memoryview:
        """All of it, while this object is there."""
        return syscalls.memory_at(self.address, self.size)

    def populate(self, start: int, stop: int) -> None:
        """Allocates a run of it, if it can, so that the first touch takes no longer than others. In many threads."""
        syscalls.populate(self.address + start, stop - start)

    def allocate(self) -> None:
        """Allocates what isn't yet. Raises OSError if the machine has not so much memory."""
        allocate_rest(self.fd, self.address, self.size)

    def allocate_huge(self, start: int, stop: int) -> int:
        """Allocates a run of new memory in huge pages, while these cost no more than small ones. Returns where it ends.

        The run starts on a multiple of 2 MiB. In many threads.

        Raises OSError if the machine, or the file system of a file, has not so much memory.
        """
        end = allocate_huge(self.fd, self.address, start, stop)
        if end > start:
            syscalls.allocate(self.fd, end - start, start)  # extents that the kernel has left out for the moment
        return end

    def make_huge(self, start: int, size: int) -> int:
        """Moves a run to huge pages, for all processes, whatever they do meanwhile.

        Returns where it ended: before the end where the kernel refuses, or where it has just cost too much.
        """
        return start + move_to_huge(self.address + start, min(size, self.size - start))

    def keep_from_children(self) -> None:
        """Children that are forked from now on don't have it at all."""
        syscalls.keep_from_children(self.address, self.size)

    def leave(self) -> None:
        """Gives it back, as far as this process has it. What still refers to it finds zeros of this process's own.

        A forked child leaves what its parent goes on with.
        """
        syscalls.map_nothing(self.address, self.size)
        syscalls.close_all(self._fds)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "SharedMemory can't be pickled or copied: send its file descriptor through a socket, or a copy of its bytes"
        )

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():  # as of an OwnedFile
            syscalls.close_all(self._fds)
