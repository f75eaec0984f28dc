"""A worker's side of blocks: it reads batches into them, and sends references."""

from __future__ import annotations

import itertools
import math
import os
import threading
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from memstore.dataloader.blocks import (
    HELD,
    IS_IN_ORDER,
    LAP_AT,
    LOST,
    MOST_TICKETS,
    OUT,
    START,
    Block,
    Part,
    tensor_over,
)
from memstore.dataloader.borrowing import receive
from memstore.dataloader.shared_memory import new_shared
from memstore.engine import syscalls
from memstore.rows import Allocate
from memstore.structure import contiguous_stride, lend_by

MOST_BLOCKS = 16  # of a worker; what a loader keeps beyond, if it keeps its batches, is in new memory each time
_ALIGNMENT = 64
_SPARE = 8  # a new block has room for a batch that is larger by this part than the largest so far


class LentBlock(Block):
    """A block of this worker's own."""

    def __init__(self, size: int) -> None:
        self._fd = syscalls.memory_file("memstore: batches")
        try:
            syscalls.truncate(self._fd, size)
            super().__init__(self._fd, size)
            self.token[:] = os.urandom(LAP_AT)
            self.populate()
        except BaseException:
            syscalls.close(self._fd)
            raise
        self.reference = (os.getpid(), self._fd, bytes(self.token), size)
        self._own = bytearray()  # its tensors in this process, each OUT until it is dropped
        self._sent = itertools.count()

    def begin(self) -> Part:
        """For a new batch. What is returned keeps the block for it, until its tensors do."""
        self._own = bytearray()
        self.tickets[:] = bytes(MOST_TICKETS)
        self._sent = itertools.count()
        self.lap += 1
        return self.take(0, 0)

    def take(self, start: int, size: int) -> Part:
        """Bytes for a tensor of this process."""
        own = self._own
        own.append(OUT)
        return self.part(START + start, size, own.__setitem__, len(own) - 1)

    def send(self) -> int | None:
        """A ticket for a tensor that is about to be sent; None if there is none left."""
        ticket = next(self._sent)
        if ticket >= MOST_TICKETS:
            return None
        self.tickets[ticket] = OUT
        return ticket

    def is_in_use(self) -> bool:
        tickets = self.tickets.tobytes()
        return OUT in self._own or OUT in tickets or HELD in tickets

    def is_lost(self) -> bool:
        """Whether another process than its receiver may have a batch of it, too."""
        return LOST in self._own or LOST in self.tickets.tobytes()

    def close(self) -> None:
        """Its memory is given back, also where it stays mapped; if it is lost, when the last holder drops it."""
        if not self.is_lost():
            syscalls.free_blocks(self._fd, self.size)
        syscalls.close(self._fd)


class Pool:
    """The blocks of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._blocks: list[LentBlock] = []
        self._lock = threading.Lock()
        self._largest = 0  # batch so far, in bytes

    def begin(self) -> Batch:
        """A new batch. The first has no block: nobody knows how large it will be."""
        with self._lock:
            block = self._free_block() if self._largest else None
            return Batch(self, block, None if block is None else block.begin())

    def note(self, nbytes: int) -> None:
        self._largest = max(self._largest, nbytes)

    def find(self, address: int) -> LentBlock | None:
        """The block that has the address."""
        for block in self._blocks:
            if 0 <= address - block.address < block.size:
                return block
        return None

    def _free_block(self) -> LentBlock | None:
        for block in [block for block in self._blocks if not block.is_in_use()]:
            if block.size >= START + self._largest and not block.is_lost():
                return block
            self._blocks.remove(block)
            block.close()
        if len(self._blocks) >= MOST_BLOCKS:
            return None
        size = START + self._largest + self._largest // _SPARE
        try:
            block = LentBlock(size + -size % syscalls.PAGE)
        except OSError:  # too many files or mappings: the batch goes without
            return None
        self._blocks.append(block)
        return block


class Batch:
    """What `read_rows_to` asks for the tensors of one batch."""

    def __init__(self, pool: Pool, block: LentBlock | None, whole: Part | None) -> None:
        self._pool, self._block, self._whole = pool, block, whole
        self._nbytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the block, or behind its end in new shared memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._nbytes
        self._nbytes += nbytes + -nbytes % _ALIGNMENT
        self._pool.note(self._nbytes)
        block = self._block
        if block is None or not nbytes or START + self._nbytes > block.size:
            return new_shared(shape, dtype)
        return tensor_over(block.take(start, nbytes), dtype, 0, shape, contiguous_stride(shape))


_pool: Pool | None = None


def begin_batch() -> Allocate:
    """Makes the tensors of a batch, of a shape and a dtype each, in memory that a DataLoader's worker shares."""
    global _pool
    if _pool is None or _pool.pid != os.getpid():  # a forked child has no right to its parent's
        _pool = Pool() if IS_IN_ORDER and _may_be_opened() else None
    return new_shared if _pool is None else _pool.begin().allocate


def _may_be_opened() -> bool:
    """Whether other processes of this user may open this one's files, as `receive` does."""
    try:
        return os.stat("/proc/self").st_uid == os.geteuid()
    except OSError:
        return False


def _lend(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """For the pickler of multiprocessing: a reference, if the tensor lies in a block of this process."""
    pool = _pool
    if pool is None or pool.pid != os.getpid() or get_spawning_popen() is not None:
        return None
    storage = tensor.untyped_storage()
    block = pool.find(storage.data_ptr())
    ticket = None if block is None else block.send()
    if block is None or ticket is None:
        return None
    place = (block.lap, ticket, storage.data_ptr() - block.address, storage.nbytes())
    shown = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return receive, (block.reference, place, shown)


lend_by(_lend)
