"""The memory that snapshots are staged in: shared with the writer, warm, used again and again, and bounded."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch

from memstore.engine import SharedMemory, syscalls
from memstore.errors import ResourceLimitError, StoreTimeoutError, lack_of, way_out
from memstore.snapshot.parallel import in_parallel
from memstore.snapshot.staging.containers import container_limits
from memstore.snapshot.staging.pinning import Pinned

_RUN = 64 << 20  # bytes that one thread allocates at a time
_AVAILABLE = "/proc/meminfo"


_blocks: weakref.WeakSet[Block] = weakref.WeakSet()  # all of this process


class Block:
    """Memory of one snapshot at a time.

    Attributes:
        size: in bytes, whole pages.
        bytes: all of it, as numpy's array.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = SharedMemory(size)
        starts = range(0, size, _RUN)
        in_parallel(lambda start: self._memory.populate(start, min(start + _RUN, size)), starts, lambda _: None)
        self._memory.allocate()
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.asarray(self._memory)
        self._pinned: Pinned | None = None
        _blocks.add(self)

    @property
    def fd(self) -> int:
        return self._memory.fd

    def pin(self, device: torch.device) -> None:
        """Lets CUDA devices write to it directly, from now on. `device` is one that this process uses."""
        if self._pinned is None:
            self._pinned = Pinned(self._memory.address, self.size, device)

    def leave(self) -> None:
        """In a forked child: neither writes to the parent's memory nor keeps it, however long the child lives."""
        self._pinned = None
        self._memory.leave()

    def close(self) -> None:
        """Gives the memory back, unless somebody still holds an array of it."""
        if self._pinned is not None:
            self._pinned.close()


def leave_blocks() -> None:
    """In a forked child: all that it has from its parent."""
    for block in list(_blocks):
        block.leave()
    _blocks.clear()


class Pool:
    """Blocks that are in use, and some that were. Thread-safe.

    Args:
        limit: bytes of all blocks together. A single one may be larger, if the machine has room for it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._changed = threading.Condition()
        self._in_use = 0
        self._pid = os.getpid()
        self._free: list[Block] = []  # the one that was used last at the end

    def take(self, nbytes: int, timeout: float, writer: int = 0) -> Block:
        """A block of at least so many bytes; waits while too many are in use. `writer` is the pid of who uses them.

        Raises:
            StoreTimeoutError: they still are after `timeout` seconds.
            ResourceLimitError: the machine has not so much memory.
        """
        size = _whole_pages(nbytes)
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._in_use and self._in_use + size > self.limit:
                if not self._changed.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() >= deadline:
                    raise StoreTimeoutError(
                        f"after {timeout:g} s, process {writer} is still to write {self._in_use:,} bytes of earlier "
                        f"snapshots, and with {size:,} more the limit of {self.limit:,} would be passed: wait for these"
                    )
            block = self._fitting(size)
            self._in_use += block.size if block else size
        if block is not None:
            return block
        try:
            return _new_block(size, self.limit)
        except BaseException:
            self._forget(size)
            raise

    def _fitting(self, size: int) -> Block | None:
        """A block that was used before, and is not twice as large as it need be. Else makes room for a new one."""
        fitting = [block for block in self._free if size <= block.size <= 2 * size]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self._free.remove(block)
            return block
        while self._free and self._in_use + size + sum(block.size for block in self._free) > self.limit:
            self._free.pop(0).close()
        return None

    def give_back(self, block: Block) -> None:
        """Its bytes are needed no more. It is kept for the next snapshot, unless it is larger than all may be."""
        if os.getpid() != self._pid:
            return  # in a forked child, whose lock may be held by a thread that it doesn't have
        with self._changed:
            if block.size <= self.limit:
                self._free.append(block)
            else:
                block.close()
        self._forget(block.size)

    def drop(self, block: Block) -> None:
        """As `give_back`, of a block that the writer may still read: nobody else gets it."""
        block.close()
        self._forget(block.size)

    def _forget(self, size: int) -> None:
        with self._changed:
            self._in_use -= size
            self._changed.notify_all()

    def trim(self) -> None:
        """Gives all that isn't in use back to the machine."""
        with self._changed:
            for block in self._free:
                block.close()
            self._free.clear()


def default_limit() -> int:
    """A quarter of the machine's memory, or of its container's, shared with the ranks that torchrun started on it."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    total = min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *container_limits()])
    return total // 4 // max(int(ranks) if ranks.isdecimal() else 1, 1)


def _whole_pages(nbytes: int) -> int:
    page = syscalls.HUGE_PAGE if nbytes >= syscalls.HUGE_PAGE else syscalls.PAGE
    return max(-(-nbytes // page), 1) * page


def _new_block(size: int, limit: int) -> Block:
    if size > limit and size > _available_bytes():
        raise ResourceLimitError(
            f"to stage the snapshot takes {size:,} bytes of memory, and the machine has {_available_bytes():,} left: "
            "use Snapshot.take or dcp.save, which copy a few tensors at a time"
        )
    try:
        return Block(size)
    except OSError as error:
        way = f"; or {way_out(error.errno)}" if lack_of(error) is not None and error.errno else ""
        raise ResourceLimitError(
            f"there is no memory of {size:,} bytes to stage the snapshot in ({error.strerror}): use "
            f"Snapshot.take or dcp.save, which copy a few tensors at a time{way}",
            code=error.errno,
        ) from error


def _available_bytes() -> int:
    """What the kernel would find for a process without swapping."""
    with open(_AVAILABLE) as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0
