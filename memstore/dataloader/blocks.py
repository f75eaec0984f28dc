"""Blocks of shared memory, through which workers of a DataLoader send batches without a copy.

A worker fills one block after the other (`BlockPool`), and sends references (`_lend`). The process with the DataLoader
maps each block once, and takes the tensors (`receive`). A block is filled again when nothing refers to its batch.

The first page of a block says who has it: a random token, by which it is known; the *lap*, how many batches it has had;
and a byte for each tensor that was sent, its *ticket*. Whoever receives the tensor gives the ticket back when nothing
refers to the tensor's memory any more. A block without tickets out is filled again. All of it is stores of single
bytes: no lock that somebody could die with, and nothing that has to be sent back.

A fork makes a second holder, who can't be asked. So of what a process has in the moment of a fork, tickets come back as
*lost*, and such a block is never filled again.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import msgspec
import numpy as np
import torch

from memstore._compat import child_processes, new_shared_storage
from memstore._threads import Hooks, around_forks
from memstore.engine import Mapping, map_file, syscalls
from memstore.engine.syscalls import Cleanup
from memstore.errors import VersionGoneError
from memstore.rows import Allocate
from memstore.structure import contiguous_stride, lend_by, modes, over

# --- One block -------------------------------------------------------------------------------------------------------


BACK, OUT, HELD, LOST = range(4)  # what a ticket is, and what a worker's own tensors are
LAP_AT, TICKETS_AT = 16, 64
START = syscalls.PAGE  # of the tensors
MOST_TICKETS = START - TICKETS_AT
# A ticket is given back by a plain store behind the last load: elsewhere the two may change places.
IS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")

_when_dropped = [BACK]


def _lose_before_fork() -> None:
    global _when_dropped
    _when_dropped[0] = LOST
    _when_dropped = [BACK]


around_forks(Hooks(before=_lose_before_fork))


class BlockPart(msgspec.Struct, gc=False):
    """Bytes of a block, for numpy. With its last reference they are given back, in C alone, and before the mapping.

    That order is the order of slots, and slots are in that of their names.
    """

    address: int
    size: int
    _cleanup: Cleanup
    _memory: SharedBlock

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}


class SharedBlock:
    """A block that this process has mapped.

    Args:
        fd: its file, which the caller closes.
        size: its bytes, with the first page.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._mapping: Mapping = map_file(fd, size, shared=True)
        head = self._mapping.view()[:START]
        self.token, self.tickets = head[:LAP_AT], head[TICKETS_AT:]
        self.lap = head[LAP_AT:TICKETS_AT].cast("Q")  # the first word

    @property
    def address(self) -> int:
        return self._mapping.address

    def populate(self) -> None:
        """Maps its pages at once, if it can, so that the first batch takes no longer than others."""
        syscalls.populate(self._mapping.address, self.size)

    def part(self, start: int, size: int, dropped: Callable[[int, int], None], place: int) -> BlockPart:
        """Lends the bytes from `start` on. When they are dropped, `dropped` is called with `place` and BACK or LOST."""
        return BlockPart(self._mapping.address + start, size, Cleanup(dropped, (place,), _when_dropped), self)


@modes.uncompiled
def tensor_over(
    part: BlockPart, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Makes a tensor that keeps the part, as does all that is made of it. `offset` counts elements."""
    memory = np.asarray(part)
    storage = torch.from_numpy(memory).untyped_storage()
    storage._memstore_mapping = memory  # type: ignore[attr-defined] - for aliases, after share_memory_
    return over(storage, dtype, offset, shape, stride)


# --- The worker's side -----------------------------------------------------------------------------------------------


MOST_BLOCKS = 16  # of a worker; what a loader keeps beyond, if it keeps its batches, is in new memory each time
_ALIGNMENT = 64
_SPARE = 8  # a new block has room for a batch that is larger by this part than the largest so far


class LentBlock(SharedBlock):
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

    def begin(self) -> BlockPart:
        """Begins a new batch. The result keeps the block for it, until its tensors do."""
        self._own = bytearray()
        self.tickets[:] = bytes(MOST_TICKETS)
        self._sent = itertools.count()
        self.lap[0] += 1
        return self.take(0, 0)

    def take(self, start: int, size: int) -> BlockPart:
        """Bytes for a tensor of this process."""
        own = self._own
        own.append(OUT)
        return self.part(START + start, size, own.__setitem__, len(own) - 1)

    def send(self) -> int | None:
        """Returns a ticket for a tensor that is about to be sent; None if no ticket is left."""
        ticket = next(self._sent)
        if ticket >= MOST_TICKETS:
            return None
        self.tickets[ticket] = OUT
        return ticket

    def is_in_use(self) -> bool:
        tickets = self.tickets.tobytes()
        return OUT in self._own or OUT in tickets or HELD in tickets

    def is_lost(self) -> bool:
        """Returns whether another process than its receiver may have a batch of it, too."""
        return LOST in self._own or LOST in self.tickets.tobytes()

    def close(self) -> None:
        """Gives its memory back, also where it stays mapped.

        If a part is lost, that is when the last holder drops it.
        """
        if not self.is_lost():
            syscalls.free_blocks(self._fd, self.size)
        syscalls.close(self._fd)


class BlockPool:
    """The blocks of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._blocks: list[LentBlock] = []
        self._lock = threading.Lock()
        self._largest = 0  # batch so far, in bytes

    def begin(self) -> BatchAllocator:
        """Begins a new batch. The first has no block: nobody knows how large it will be."""
        with self._lock:
            block = self._free_block() if self._largest else None
            return BatchAllocator(self, block, None if block is None else block.begin())

    def note(self, nbytes: int) -> None:
        self._largest = max(self._largest, nbytes)

    def find(self, address: int) -> LentBlock | None:
        """Returns the block that has the address."""
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


class BatchAllocator:
    """Allocator that `read_rows_to` asks for the tensors of one batch."""

    def __init__(self, pool: BlockPool, block: LentBlock | None, whole: BlockPart | None) -> None:
        self._pool, self._block, self._whole = pool, block, whole
        self._nbytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor in the block, or behind its end in new shared memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        start = self._nbytes
        self._nbytes += nbytes + -nbytes % _ALIGNMENT
        self._pool.note(self._nbytes)
        block = self._block
        if block is None or not nbytes or START + self._nbytes > block.size:
            return new_shared(shape, dtype)
        return tensor_over(block.take(start, nbytes), dtype, 0, shape, contiguous_stride(shape))


_pool: BlockPool | None = None


def begin_batch() -> Allocate:
    """Makes the tensors of a batch, of a shape and a dtype each, in memory that a DataLoader's worker shares."""
    global _pool
    if _pool is None or _pool.pid != os.getpid():  # a forked child has no right to its parent's
        _pool = BlockPool() if IS_IN_ORDER and _may_be_opened() else None
    return new_shared if _pool is None else _pool.begin().allocate


def _may_be_opened() -> bool:
    """Returns whether other processes of this user may open this one's files, as `receive` does."""
    try:
        return os.stat("/proc/self").st_uid == os.geteuid()
    except OSError:
        return False


def _lend(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Pickles a tensor for multiprocessing: as a reference, if it lies in a block of this process."""
    pool = _pool
    if pool is None or pool.pid != os.getpid() or get_spawning_popen() is not None:
        return None
    storage = tensor.untyped_storage()
    block = pool.find(storage.data_ptr())
    ticket = None if block is None else block.send()
    if block is None or ticket is None:
        return None
    place = (block.lap[0], ticket, storage.data_ptr() - block.address, storage.nbytes())
    shown = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return receive, (block.reference, place, shown)


lend_by(_lend)


# --- Memory outside of blocks ----------------------------------------------------------------------------------------


def new_shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor in memory that torch sends as it is. A tensor elsewhere it would copy into such memory first."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = new_shared_storage(nbytes)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # pyright: ignore[reportCallIssue]


# --- The side of the process with the DataLoader ---------------------------------------------------------------------


BlockReference = tuple[int, int, bytes, int]  # pid and fd of the worker, token, size
PlaceInBlock = tuple[int, int, int, int]  # lap, ticket, start, size
TensorForm = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]  # dtype, offset, shape, stride

_mapped: weakref.WeakValueDictionary[bytes, SharedBlock] = weakref.WeakValueDictionary()  # by token
# What stays mapped between two batches, as long as anybody has the Process of the worker: its loader has.
_kept: weakref.WeakKeyDictionary[Any, list[SharedBlock]] = weakref.WeakKeyDictionary()

around_forks(Hooks(before=_kept.clear))  # a child would keep it in memory, and so would the parent what the fork loses


def receive(reference: BlockReference, place: PlaceInBlock, shown: TensorForm) -> torch.Tensor:
    """Receives the tensor that a worker has sent. Its memory is the worker's again when nothing refers to it any more.

    Raises:
        VersionGoneError: the worker is dead, or the tensor was received before: a batch is received once.
    """
    block = _mapped.get(reference[2]) or _map(reference)
    lap, ticket, start, size = place
    tickets = block.tickets
    if block.lap[0] != lap or tickets[ticket] != OUT:
        raise VersionGoneError("a batch of a DataLoader's worker is unpickled once, and this one was before")
    tickets[ticket] = HELD
    with modes.put_aside():
        return tensor_over(block.part(start, size, tickets.__setitem__, ticket), *shown)


def _map(reference: BlockReference) -> SharedBlock:
    pid, number, token, size = reference
    try:
        fd = syscalls.open_file_of(pid, number)
    except OSError as error:
        raise VersionGoneError(f"process {pid}, which has read this batch, has ended: {error}") from error
    try:
        block = SharedBlock(fd, size) if syscalls.size_of(fd) == size else None
    finally:
        syscalls.close(fd)
    if block is None or bytes(block.token) != token:
        raise VersionGoneError(f"process {pid}, which has read this batch, has ended, or has no room for it any more")
    block.populate()
    _mapped[token] = block
    # The Process, if it is a child of this one. (`active_children` would reap children that a loader waits for.)
    worker = next((child for child in child_processes() if child.pid == pid), None)
    if worker is not None:
        _kept.setdefault(worker, []).append(block)
    return block
