"""Stored rows for torch's DataLoader: StoreDataset, a value as its data set, and BlockShuffle, the order of rows.

`count_rows` checks that a value has rows. `read_batch` reads rows, in a worker into shared memory (`BlockPool`). What
`__getitems__` returns is collated: as torch has it, a list of rows that are then stacked, one small tensor by another.
A stored batch is read whole, so its rows only say which batch they are of (`as_rows`). `default_collate` has a table of
functions by type, for others to extend; there `BatchRow` finds `collate_rows`, which returns the batch as it was read.

BlockShuffle is a random order of rows that a cold disk can follow. The order of an epoch follows from length, block,
seed and epoch, and from nothing else:

1. The rows are cut into blocks of `block` rows; the last block may be shorter.
2. The blocks get a random order, and so do the rows in each block. Every row comes once.
3. Of this order a rank takes each `num_replicas`th row, from its own number on. So the ranks of a host read the same
   block at about the same time, and what all of them have used is always the beginning of the order.

The random numbers are raw words of Philox, whose stream numpy doesn't change between versions (NEP 19). Its key is seed
and epoch, and its counter begins with the number of the block. So any place is found without drawing what comes before
it, and an order that was interrupted goes on with later versions of everything.

Workers send batches without a copy, through blocks of shared memory. A worker fills one block after the other
(`BlockPool`), and sends references (`_lend`). The process with the DataLoader maps each block once, and takes the
tensors (`receive`). A block is filled again when nothing refers to its batch.

The first page of a block says who has it: a random token, by which it is known; the *lap*, how many batches it has had;
and a byte for each tensor that was sent, its *ticket*. Whoever receives the tensor gives the ticket back when nothing
refers to the tensor's memory any more. A block without tickets out is filled again. All of it is stores of single
bytes: no lock that somebody could die with, and nothing that has to be sent back.

A fork makes a second holder, who can't be asked. So of what a process has in the moment of a fork, tickets come back as
*lost*, and such a block is never filled again.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import copy
import inspect
import itertools
import math
import operator
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from memstore._compat import child_processes, collate, collate_functions, new_shared_storage
from memstore._threads import Hooks, around_forks
from memstore._wording import an, count_of
from memstore.engine import map_file, syscalls
from memstore.engine.syscalls import Cleanup
from memstore.errors import UnsupportedValueError, VersionGoneError
from memstore.listing import check_store
from memstore.rows import Allocate, of_key, prefetch_rows, read_rows, read_rows_to
from memstore.structure import contiguous_stride, lend_by, modes, over, render_path

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
        self._mapping = map_file(fd, size, shared=True)
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


# --- The data set ----------------------------------------------------------------------------------------------------


class HasView(Protocol):
    """The part of a Store that is used here. (Its module imports that of datasets, which imports this package.)"""

    def view(self, key: str, *, device: torch.device | str | None = None) -> Any: ...


@modes.uncompiled_methods
class StoreDataset(Dataset[Any]):
    """The rows of a stored value, for torch's DataLoader.

    A batch is read by one `read_rows`, and has the containers that were put: TensorDict, tensorclass, dict, list,
    tuple, or one tensor. DataLoader needs no `collate_fn`. Its workers read into shared memory, so a batch isn't copied
    on its way to the training process. A data set stays at the version that it found; to see a later one, make another.

    It is pickled as a reference, so spawned workers receive some hundred bytes, and map the version themselves. (For
    this the store must be open for writing, because a reference takes a lease.)

    Args:
        store: the store.
        key: a value whose tensors all have the same number of rows, along their first dimension. They are read to the
            CPU.
        transform: called with each batch in the process that reads it; the DataLoader returns its result. For `data[3]`
            it is called with that row. It may write to its argument.

    Raises:
        KeyNotFoundError: the store has no such key.
        UnsupportedValueError: the value has a leaf without rows, or with another number of rows.

    Example:
        >>> import memstore, tempfile, torch
        >>> from torch.utils.data import DataLoader
        >>> store = memstore.open(tempfile.mkdtemp())
        >>> version = store.put("train", {"x": torch.arange(6.0).reshape(3, 2), "y": torch.arange(3)})
        >>> data = memstore.StoreDataset(store, "train")
        >>> [batch["y"] for batch in DataLoader(data, batch_size=2)]
        [tensor([0, 1]), tensor([2])]
    """

    def __init__(self, store: HasView, key: str, *, transform: Callable[[Any], Any] | None = None) -> None:
        found = getattr(store, "view", None)
        if found is None or isinstance(store, (str, os.PathLike)) or inspect.iscoroutinefunction(found):
            check_store(store, key)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform is a function of a batch, and not {transform!r:.100}")
        self.key, self.transform = key, transform
        self._view = store.view(key, device="cpu")
        self._length = count_rows(self._view, key)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Returns one row for an integer, and a batch for a list, slice, mask or tensor, as `read_rows` takes them.

        Raises:
            IndexError: a row out of range; the message names the range.
            TypeError: no index of rows.
        """
        try:
            if isinstance(index, (int, np.integer)) or (
                isinstance(index, (torch.Tensor, np.ndarray)) and not index.ndim
            ):
                batch = read_rows(self._view, [operator.index(index)])
                with modes.put_aside():
                    found = row_of(batch, 0)
            else:
                found = read_batch(self._view, index)
        except IndexError as error:
            raise of_key(error, self.key) from None
        return found if self.transform is None else self.transform(found)

    def __getitems__(self, index: Sequence[int]) -> list[BatchRow]:
        """Reads the rows of one batch for DataLoader, whose default collate function makes them whole again."""
        return as_rows(self[index], len(index))

    def prefetch(self, rows: Any) -> None:
        """Lets the disk read rows that will be asked for, and doesn't wait: see `prefetch_rows`."""
        prefetch_rows(self._view, rows)

    def __repr__(self) -> str:
        return f"<memstore.StoreDataset {self.key!r}, {count_of(self._length, 'row', 'rows')}>"


# --- Batches, as DataLoader takes them -------------------------------------------------------------------------------


class ReadBatch:
    """Rows that were read, and perhaps transformed, at once."""

    __slots__ = ("count", "value")

    def __init__(self, value: Any, count: int) -> None:
        self.value, self.count = value, count


def read_batch(source: Any, index: Any) -> Any:
    """Reads rows as `read_rows` does; in a worker of a DataLoader into memory that it shares with its parent."""
    return read_rows(source, index) if get_worker_info() is None else read_rows_to(begin_batch(), source, index)


def as_rows(value: Any, count: int) -> list[BatchRow]:
    """Splits a batch of `count` rows, as `__getitems__` of a data set returns it."""
    batch = ReadBatch(value, count)
    return [BatchRow(batch, place) for place in range(count)]


class BatchRow:
    """One row of a batch, taken out of it only when somebody asks: a collate function of a user.

    Attributes:
        batch: the batch that the row is of.
        place: where in it.
    """

    __slots__ = ("batch", "place")

    def __init__(self, batch: ReadBatch, place: int) -> None:
        self.batch, self.place = batch, place

    @property
    def value(self) -> Any:
        """The row: the stored containers, with tensors without the dimension of rows."""
        return row_of(self.batch.value, self.place)

    def __getitem__(self, key: Any) -> Any:
        """Returns `row.value[key]`, so that most collate functions work as they are."""
        return self.value[key]

    def __repr__(self) -> str:
        return f"<row {self.place} of a batch of {self.batch.count}; .value takes it out>"


def collate_rows(rows: Sequence[BatchRow], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """Returns the batch, if these are its rows in their order; else it stacks them."""
    batch = rows[0].batch
    if len(rows) == batch.count and all(row.batch is batch and row.place == i for i, row in enumerate(rows)):
        return batch.value
    return collate([row.value for row in rows], collate_fn_map=collate_fn_map)


collate_functions[BatchRow] = collate_rows


# --- A value as rows -------------------------------------------------------------------------------------------------


_Path = tuple[Any, ...]


def count_rows(value: Any, key: str) -> int:
    """Returns how many rows every tensor of a stored value has.

    Raises:
        UnsupportedValueError: something in the value has no rows, or another number of them.
    """
    counts = {render_path(path): _count(leaf, path, key) for path, leaf in _leaves(value, ())}
    if not counts:
        raise UnsupportedValueError(f"the value of {key!r} has no tensor, and so no rows", key=key)
    found = sorted(set(counts.values()))
    if len(found) > 1:
        one, other = (next(name for name, count in counts.items() if count == number) for number in found[:2])
        raise UnsupportedValueError(
            f"the tensors of {key!r} have different numbers of rows: {one} has {found[0]:,}, {other} has {found[1]:,}. "
            "Put tensors that don't belong to the rows under a key of their own",
            key=key,
        )
    return found[0]


def _count(leaf: Any, path: _Path, key: str) -> int:
    if not isinstance(leaf, torch.Tensor):
        why = f"is {an(type(leaf))}, and no tensor"
    elif leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        why = f"is a sparse, nested or quantized tensor ({leaf.layout})"
    elif not leaf.ndim:
        why = "has no dimension"
    else:
        return leaf.shape[0]
    raise UnsupportedValueError(
        f"{render_path(path)} of {key!r} {why}: a row is one element of the first dimension of each tensor. "
        "Put it under a key of its own, or as a tensor with a row for each",
        key=key,
    )


def row_of(batch: Any, place: int) -> Any:
    """Returns one row of a batch: the same containers, with the part of each tensor at `place`.

    Raises:
        UnsupportedValueError: something in the batch, which a transform may have made, has no rows.
    """
    if isinstance(batch, torch.Tensor) or _is_collection(batch):
        return batch[place]
    if isinstance(batch, dict):
        row = copy.copy(batch)
        row.update({key: row_of(value, place) for key, value in batch.items()})
        return row
    if isinstance(batch, (list, tuple)):
        values = [row_of(value, place) for value in batch]
        kind: Any = type(batch)
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    raise UnsupportedValueError(
        f"a batch has {an(type(batch))}, which has no rows. To take single rows, let transform= return "
        "tensors, and TensorDicts, dicts, lists and tuples of them"
    )


def _leaves(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    entries: Any = None
    if isinstance(value, dict) or _is_collection(value):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    if entries is None:
        yield path, value
        return
    for name, entry in entries:
        yield from _leaves(entry, (*path, name))


def _is_collection(value: Any) -> bool:
    """Returns whether it is a TensorDict or a tensorclass, and neither a lazy stack nor a value that is no tensor."""
    tensordict: Any = sys.modules.get("tensordict")
    if tensordict is None or not tensordict.is_tensor_collection(value):
        return False
    return not tensordict.is_non_tensor(value) and not isinstance(value, tensordict.LazyStackedTensorDict)


# --- BlockShuffle: the order of rows ---------------------------------------------------------------------------------


_WORD = 1 << 64
_ORDER_OF_BLOCKS = 0  # where the counter begins for the order of the blocks; for rows: 1 + the number of their block
_SAME = ("length", "block", "seed")  # what has to be as it was for an order to go on


@modes.uncompiled_methods
class BlockShuffle(Sampler[int]):
    """Shuffles the rows of a data set by blocks, each row once an epoch; for the `sampler` of a DataLoader.

    It shuffles the blocks, and the rows within each block. So rows that come one after the other are near each other in
    the file, and a data set that is larger than the memory is read from the disk in large pieces. As with torch's
    DistributedSampler, each epoch has its own order only if `set_epoch` is called before it.

    Args:
        length: rows of the data set.
        block: rows of a block. Larger blocks mix better, and take more memory of the page cache. 1, or `length` and
            more: single rows are shuffled.
        seed: from 0 to 2**64 - 1; the same for all ranks.
        rank: which process this is, from 0, as for DistributedSampler.
        num_replicas: how many processes there are. Each gets
            `length // num_replicas` rows. The remaining rows are left out of the epoch: different ones in each.
        prefetch: called with the rows of a block, as a range, one block before they are drawn: `data.prefetch` of a
            `StoreDataset` lets the disk read them meanwhile.

    Raises:
        ValueError, TypeError: a number out of its range, or none.

    Example:
        >>> import memstore
        >>> order = memstore.BlockShuffle(10, block=4, seed=1)
        >>> sorted(order)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> rows = iter(order)
        >>> used = [next(rows), next(rows), next(rows)]
        >>> resumed = memstore.BlockShuffle(10, block=4, seed=1)
        >>> resumed.load_state_dict(order.state_dict())
        >>> used + list(resumed) == list(order)
        True
    """

    def __init__(
        self,
        length: int,
        *,
        block: int = 1024,
        seed: int = 0,
        rank: int = 0,
        num_replicas: int = 1,
        prefetch: Callable[[range], None] | None = None,
    ) -> None:
        super().__init__()
        self.length = _number("length", length, 0)
        self.block = _number("block", block, 1)
        self.seed = _number("seed", seed, 0, _WORD)
        self.num_replicas = _number("num_replicas", num_replicas, 1)
        self.rank = _number("rank", rank, 0, num_replicas)
        self.epoch: int = 0
        self._prefetch = prefetch
        self._drawn = 0  # of this epoch, by this rank
        self._resumes = False  # the next iteration begins at _drawn

    def __len__(self) -> int:
        """Returns the rows of an epoch for this rank, also if it was resumed in the middle."""
        return self.length // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Iterates over this epoch from its beginning.

        After `load_state_dict` it begins once where the state was taken.
        """
        if not self._resumes:
            self._drawn = 0
        self._resumes = False
        return self._draw()

    def _draw(self) -> Iterator[int]:
        for rows in self._by_block(self._drawn * self.num_replicas):
            for row in rows:
                self._drawn += 1
                yield row

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the iterations that follow. The epoch of a loaded state continues at its position."""
        epoch = _number("epoch", epoch, 0, _WORD)
        if epoch != self.epoch:
            self.epoch, self._drawn, self._resumes = epoch, 0, False

    def state_dict(self, rows: int | None = None) -> dict[str, int]:
        """Returns the position in this epoch, for `load_state_dict` on any rank, of any number of ranks.

        Args:
            rows: how many rows of this epoch this rank has used, those before a resumption included. None: all that
                were drawn. That is right without workers, and for torchdata's StatefulDataLoader, which asks at each
                batch; but workers of torch's DataLoader read ahead: there, count what you have used.

        Raises:
            ValueError: more rows than were drawn.
        """
        used = self._drawn if rows is None else _number("rows", rows, 0, self._drawn + 1)
        same = {name: getattr(self, name) for name in _SAME}
        return {**same, "epoch": self.epoch, "rows": used * self.num_replicas}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next iteration continue where the state was taken.

        With another number of ranks, up to `num_replicas - 1` rows come again.

        Raises:
            ValueError: not a state, or that of another order. Nothing has changed then.
        """
        missing = [name for name in (*_SAME, "epoch", "rows") if name not in state_dict]
        if missing:
            raise ValueError(f"no state of a BlockShuffle: it lacks {', '.join(missing)}")
        here = {name: getattr(self, name) for name in _SAME}
        there = {name: state_dict[name] for name in _SAME}
        if here != there:
            raise ValueError(
                f"the state is of another order: {_render(there)}, and this is {_render(here)}. Make the BlockShuffle "
                "as it was, or begin the epoch anew"
            )
        try:
            epoch = _number("epoch of the state", state_dict["epoch"], 0, _WORD)
            rows = _number("rows of the state", state_dict["rows"], 0, self.length + 1)
        except TypeError as error:
            raise ValueError(str(error)) from None
        self.epoch, self._drawn, self._resumes = epoch, rows // self.num_replicas, True

    def _by_block(self, start: int) -> Iterator[list[int]]:
        """Yields this rank's rows from a place of the whole order on, block by block."""
        count = -(-self.length // self.block)
        end = len(self) * self.num_replicas
        order = self._permutation(_ORDER_OF_BLOCKS, count)
        stops = np.where(order == count - 1, self.length - (count - 1) * self.block, self.block).cumsum()
        first = int(stops.searchsorted(start, side="right"))
        self._announce(order[first : first + 1])
        for place in range(first, count):
            block, stop = int(order[place]), int(stops[place])
            self._announce(order[place + 1 : place + 2])
            rows = self._rows(block)
            shuffled = rows.start + self._permutation(1 + block, len(rows))
            begin = stop - len(rows)
            low, high = max(start, begin), max(begin, min(stop, end))
            low += (self.rank - low) % self.num_replicas
            yield shuffled[low - begin : high - begin : self.num_replicas].tolist()

    def _rows(self, block: int) -> range:
        return range(block * self.block, min((block + 1) * self.block, self.length))

    def _announce(self, blocks: npt.NDArray[np.int64]) -> None:
        if self._prefetch is not None:
            for block in blocks.tolist():
                self._prefetch(self._rows(block))

    def _permutation(self, stream: int, count: int) -> npt.NDArray[np.int64]:
        if count < 2:
            return np.arange(count)
        key = np.array([self.seed, self.epoch], np.uint64)
        counter = np.array([0, 0, 0, stream], np.uint64)
        return np.random.Philox(key=key, counter=counter).random_raw(count).argsort(kind="stable")

    def __repr__(self) -> str:
        numbers = {**{name: getattr(self, name) for name in _SAME}, "epoch": self.epoch}
        if self.num_replicas > 1:
            numbers |= {"rank": self.rank, "num_replicas": self.num_replicas}
        return f"BlockShuffle({_render(numbers)})"


def _number(name: str, value: Any, least: int, end: int | None = None) -> int:
    allowed = f"{least} or more" if end is None else f"from {least} to {end - 1}"
    said = f"{name} is an integer, {allowed}, and not {value!r:.100}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(said + (": BlockShuffle(len(dataset))" if hasattr(value, "__getitems__") else ""))
    if not (least <= value and (end is None or value < end)):
        raise ValueError(said)
    return value


def _render(numbers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in numbers.items())
