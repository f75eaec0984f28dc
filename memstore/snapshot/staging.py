"""Staging: tensors are copied into warm shared memory, and a process of its own makes files of that.

    staged = stage(tensors)                                # when it returns, the tensors may change
    pending = staged.write(folder, files, part=...)
    pending.wait()                                         # whether that was the last part

The steps of an asynchronous snapshot:

    1. a block of the memory is taken, or waited for (`StagingPool.take`)
    2. all tensors are copied into it; from here on they may change (`copy_into`)
    3. the job and the block go to the writer; if the trainer dies from here on, the snapshot is completed
    4. its outcome comes, and the block is free for the next snapshot

The writer ends when it has had no job for ten minutes, and then the memory is given back too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore._threads import Hooks, around_forks
from memstore.engine import ALIGNMENT, SharedMemory, syscalls
from memstore.errors import ResourceLimitError, StoreTimeoutError, UnsupportedValueError, lack_of, way_out
from memstore.snapshot.buckets import is_url, variables
from memstore.snapshot.chunks import in_parallel
from memstore.snapshot.writer import PendingWrite, StagedFile, WriteJob, WriterClient, write_here
from memstore.structure import CopyPlan, GatheredCopy, PlainCopy, copy_tensors, modes, why_no_memory

# --- The steps -------------------------------------------------------------------------------------------------------


IDLE = 600.0  # seconds
TIMEOUT = 600.0  # seconds, for earlier snapshots to be written
_MOST_WRITERS = 5  # that are tried for a job

_numbers = itertools.count(1)


class StagedTensors:
    """Copies of tensors, in memory that the writer can have. Write it, or release it.

    Attributes:
        places: of each tensor, where its elements lie in the memory: (offset, nbytes).
    """

    def __init__(self, stager: StagingArea, block: StagingBlock, places: list[StagedPlace]) -> None:
        self._stager = stager
        self._block: StagingBlock | None = block
        self.places = places
        self._users = _BlockUsers(stager.pool, block)
        self._release = weakref.finalize(self, self._users.leave)
        self._release.atexit = False

    @property
    def block(self) -> StagingBlock:
        """Returns the memory. Raises ValueError once it is the writer's, or given back."""
        if self._block is None:
            raise ValueError("what was staged has been written or released")
        return self._block

    @property
    def memory(self) -> memoryview:
        """Returns all of it, as bytes."""
        return self.block.bytes.data

    def write(
        self,
        folder: str | os.PathLike[str],
        files: Sequence[StagedFile],
        *,
        part: bytes | None = None,
        durable: bool = True,
        checksum: bool = True,
        done: Callable[[int], None] | None = None,
        options: dict[str, Any] | None = None,
        budget: int | None = None,
        lane: int = 0,
        more: bool = False,
    ) -> PendingWrite:
        """Hands the memory to the writer, which makes files of it. Returns at once.

        Args:
            folder: where they go. It exists.
            files: what they consist of.
            part: of a rank, encoded, where the files are a part of a snapshot (`publishing.finish_part`).
            durable, checksum: as for `FileStorage.write`.
            done: called, in a thread of its own, with the bytes that were written since; must not raise.
            options: for a bucket, where `folder` is a URL.
            budget: bytes of memory for an upload, beside the staged memory.
            lane: which writer does it. Each carries out its jobs one after the other.
            more: whether the memory is to be written once more, to another folder. Else this is the last time.

        Raises:
            ResourceLimitError: no writer could be started, or there are too many names and headers.
        """
        block, users = self.block, self._users
        users.enter()
        path = str(folder) if is_url(folder) else os.path.abspath(folder)
        pending = PendingWrite(f"the snapshot in {path}", users.leave, done)
        place = os.fsencode(path)
        number, told = next(_numbers), done is not None
        bucket, environment = (options, variables()) if is_url(path) else (None, {})
        job = WriteJob(number, place, list(files), part, durable, checksum, told, bucket, environment, budget)
        try:
            if path.startswith("memory://"):  # of this process
                write_here(job, block.bytes.data, pending)
            else:
                self._stager.send(job, block.fd, pending, lane)
        except BaseException:  # an exception of a signal's handler may come when the writer has the memory already
            users.drop()
            self.release()
            raise
        if not more:
            self.release()
        return pending

    def release(self) -> None:
        """Gives the memory back, once it isn't being written."""
        self._block = None
        self._release()


class _BlockUsers:
    """The number of those who need a block: who staged it, and each write. The last one gives it back. Thread-safe."""

    def __init__(self, pool: StagingPool, block: StagingBlock) -> None:
        self._pool = pool
        self._block: StagingBlock | None = block
        self._count = 1
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            block = None if self._count else self._block
            if not self._count:
                self._block = None
        if block is not None:
            self._pool.give_back(block)

    def drop(self) -> None:
        """Gives up the block, which a writer may still read: nobody else gets it."""
        with self._lock:
            block, self._block = self._block, None
        if block is not None:
            self._pool.drop(block)


class StagingArea:
    """The memory and the writers of one process.

    Args:
        limit: bytes of snapshots that are in flight. A single one may be larger, where the machine has the memory.
        idle: seconds without a job after which the writer ends and the memory is given back.
    """

    def __init__(self, limit: int | None = None, idle: float = IDLE) -> None:
        self.pool = StagingPool(default_limit() if limit is None else limit)
        self._idle = idle
        self._lock = threading.Lock()
        self._writers: dict[int, WriterClient] = {}  # by lane

    def stage(
        self, tensors: Sequence[torch.Tensor], *, names: Sequence[str] = (), timeout: float = TIMEOUT
    ) -> StagedTensors:
        """Copies the tensors. See `stage`."""
        places, nbytes = place_tensors(tensors)
        writer = next(iter(self._writers.values()), None)
        try:
            block = self.pool.take(nbytes, timeout, writer.pid if writer is not None else 0)
        except ResourceLimitError as error:
            raise _naming_the_largest(error, places, names) from error.__cause__
        try:
            on_cuda = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
            if on_cuda is not None:
                block.pin(on_cuda)
            copy_into(block.bytes, tensors, places)
        except BaseException:
            self.pool.drop(block)
            raise
        return StagedTensors(self, block, places)

    def send(self, job: WriteJob, memory: int, pending: PendingWrite, lane: int = 0) -> None:
        """Sends a job to the writer of a lane, or to a new one if that has ended."""
        with self._lock:
            for _ in range(_MOST_WRITERS):
                writer = self._writers.get(lane)
                if writer is not None and writer.send(job, memory, pending):
                    return
                self._writers[lane] = WriterClient(self._idle, self.pool.trim)
        raise ResourceLimitError(f"{_MOST_WRITERS} processes, started to write a snapshot, ended at once", code=0)

    def close(self) -> None:
        """Lets the writer end, once it has carried out its jobs; the memory is given back then."""
        with self._lock:
            for writer in self._writers.values():
                writer.close()

    def leave(self) -> None:
        """Leaves memory and writer to the parent, in a forked child: the writer must not wait for its jobs."""
        for writer in self._writers.values():
            writer.leave()


_stager: StagingArea | None = None
_lock = threading.Lock()


def _naming_the_largest(
    error: ResourceLimitError, places: list[StagedPlace], names: Sequence[str]
) -> ResourceLimitError:
    """Says which tensor takes most: it may be expanded, and have a few bytes only before it is copied."""
    if not names:
        return error
    name, place = max(zip(names, places, strict=True), key=lambda one: one[1].nbytes)
    return ResourceLimitError(f"{error.message}; {name} alone takes {place.nbytes:,} bytes", code=error.errno)


def stage(tensors: Sequence[torch.Tensor], *, names: Sequence[str] = (), timeout: float = TIMEOUT) -> StagedTensors:
    """Copies tensors into shared memory. When it returns, they may change.

    Args:
        tensors: plain ones, on any device and with any strides; of each, the elements are copied in C order.
        names: of the tensors, for errors.
        timeout: seconds to wait for earlier snapshots, if too many bytes of these are still to be written. At most a
            quarter of the machine's memory may be; a single snapshot may take more, where there is more.

    Raises:
        StoreTimeoutError: they still were.
        ResourceLimitError: the machine has not so much memory.
        UnsupportedValueError: a tensor's storage was freed.
    """
    global _stager
    with _lock:
        stager = _stager = _stager or StagingArea()
    return stager.stage(tensors, names=names, timeout=timeout)


def _after_fork_in_child() -> None:
    global _stager, _lock
    _lock = threading.Lock()
    if _stager is not None:
        _stager.leave()
    _stager = None
    leave_blocks()


around_forks(Hooks(before=lambda: None, after_in_parent=lambda: None, after_in_child=_after_fork_in_child))


# --- Tensors into memory, one after the other, each in C order -------------------------------------------------------


_BRIEF = 1 << 18  # bytes: up to here no other thread of Python runs meanwhile
_SHARE = 16 << 20  # bytes that one thread copies at a time

Memory = np.ndarray[Any, np.dtype[np.uint8]]


class StagedPlace(NamedTuple):
    """The place of a tensor's elements in the memory, in bytes."""

    offset: int
    nbytes: int


class _Move(NamedTuple):
    target: int  # addresses
    source: int
    nbytes: int


def place_tensors(tensors: Sequence[torch.Tensor]) -> tuple[list[StagedPlace], int]:
    """Returns an aligned place for each tensor, and how many bytes there are in all."""
    places: list[StagedPlace] = []
    end = 0
    for tensor in tensors:
        places.append(StagedPlace(end, tensor.numel() * tensor.dtype.itemsize))
        end = -(-(end + places[-1].nbytes) // ALIGNMENT) * ALIGNMENT
    return places, end


def copy_into(memory: Memory, tensors: Sequence[torch.Tensor], places: Sequence[StagedPlace]) -> None:
    """Copies the elements of each tensor to its place. When it returns, no tensor is needed any more."""
    with modes.put_aside(), torch.no_grad():
        brief, long, others = _sorted_out(memory, tensors, places)
        if brief:
            targets, sources, sizes = zip(*brief, strict=True)
            deque(map(syscalls.copy_briefly, targets, sources, sizes), maxlen=0)
        in_parallel(partial(_copy_share, (memory, tensors)), _shares(long), lambda _: None)
        devices = {tensors[i].device for i in others if tensors[i].is_cuda}
        with own_streams(devices):
            copy_tensors(_copies(tensors, places, others), tensors, memory)


def _sorted_out(
    memory: Memory, tensors: Sequence[torch.Tensor], places: Sequence[StagedPlace]
) -> tuple[list[_Move], list[_Move], list[int]]:
    """Returns short moves, long moves, and tensors that torch has to copy: of devices, or not as they lie in memory."""
    base = memory.ctypes.data
    brief: list[_Move] = []
    long: list[_Move] = []
    others: list[int] = []
    for i, (tensor, (offset, nbytes)) in enumerate(zip(tensors, places, strict=True)):
        reason = why_no_memory(tensor)
        if reason is not None:
            raise UnsupportedValueError(f"tensor {i} of the snapshot, of shape {list(tensor.shape)}: {reason}")
        if not nbytes:
            continue
        if tensor.is_cpu and _is_plain(tensor):
            (brief if nbytes < _BRIEF else long).append(_Move(base + offset, tensor.data_ptr(), nbytes))
        else:
            others.append(i)
    return brief, long, others


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _shares(moves: Sequence[_Move]) -> list[list[_Move]]:
    """Returns the moves, cut and grouped, so that each group is about as long."""
    shares: list[list[_Move]] = []
    left = 0
    for target, source, nbytes in moves:
        for start in range(0, nbytes, _SHARE):
            if left <= 0:
                shares.append([])
                left = _SHARE
            size = min(nbytes - start, _SHARE)
            shares[-1].append(_Move(target + start, source + start, size))
            left -= size
    return shares


def _copy_share(_: object, share: Sequence[_Move]) -> None:
    """Copies a share. The first argument keeps what the addresses belong to, whoever is interrupted."""
    for move in share:
        syscalls.copy(*move)


def _copies(tensors: Sequence[torch.Tensor], places: Sequence[StagedPlace], chosen: Sequence[int]) -> CopyPlan:
    plain = [PlainCopy(i, *places[i]) for i in chosen if _is_plain(tensors[i])]
    gathered = [
        GatheredCopy(i, places[i].offset, tensors[i].is_conj() or tensors[i].is_neg())
        for i in chosen
        if not _is_plain(tensors[i])
    ]
    return CopyPlan(plain, gathered, [], [tensor.is_cpu for tensor in tensors])


# --- Memory that CUDA devices copy into directly, and streams of their own for that ----------------------------------


_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


class Pinned:
    """Memory that is registered with CUDA, where that accepts it. (Where not, copies go through a buffer of CUDA's.)

    Args:
        address, size: of the memory, in bytes.
        device: one that this process uses. A thread that has chosen none would take the first, and begin to use that.
    """

    def __init__(self, address: int, size: int, device: torch.device) -> None:
        self._address, self._device = address, device
        with torch.cuda.device(device):
            self._is_registered = int(_runtime().cudaHostRegister(address, size, _FOR_ALL_DEVICES)) == 0

    def close(self) -> None:
        """Unregisters the memory. It must come before the memory is unmapped."""
        if self._is_registered:
            self._is_registered = False
            with torch.cuda.device(self._device):
                _runtime().cudaHostUnregister(self._address)


def _runtime() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


@contextlib.contextmanager
def own_streams(devices: Iterable[torch.device]) -> Generator[None]:
    """Gives each CUDA device a new current stream in the block, which first waits for what was queued before."""
    with contextlib.ExitStack() as stack:
        for device in devices:
            before = torch.cuda.current_stream(device)
            stream = torch.cuda.Stream(device)
            stream.wait_stream(before)
            stack.enter_context(torch.cuda.stream(stream))
        yield


# --- Blocks of shared memory, used again and again, and bounded ------------------------------------------------------


_RUN = 64 << 20  # bytes that one thread allocates at a time
_AVAILABLE = "/proc/meminfo"


_blocks: weakref.WeakSet[StagingBlock] = weakref.WeakSet()  # all of this process


class StagingBlock:
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
        """Leaves the memory to the parent, in a forked child, however long that lives."""
        self._pinned = None
        self._memory.leave()

    def close(self) -> None:
        """Gives the memory back, unless somebody still holds an array of it."""
        if self._pinned is not None:
            self._pinned.close()


def leave_blocks() -> None:
    """Leaves all blocks to the parent, in a forked child."""
    for block in list(_blocks):
        block.leave()
    _blocks.clear()


class StagingPool:
    """Blocks that are in use, and some that were. Thread-safe.

    Args:
        limit: bytes of all blocks together. A single one may be larger, if the machine has room for it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._changed = threading.Condition()
        self._in_use = 0
        self._pid = os.getpid()
        self._free: list[StagingBlock] = []  # the one that was used last at the end

    def take(self, nbytes: int, timeout: float, writer: int = 0) -> StagingBlock:
        """Takes a block of at least so many bytes. Waits while too many are in use by the process `writer`.

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

    def _fitting(self, size: int) -> StagingBlock | None:
        """Returns a block that was used before and isn't twice as large as needed. Else makes room for a new one."""
        fitting = [block for block in self._free if size <= block.size <= 2 * size]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self._free.remove(block)
            return block
        while self._free and self._in_use + size + sum(block.size for block in self._free) > self.limit:
            self._free.pop(0).close()
        return None

    def give_back(self, block: StagingBlock) -> None:
        """Takes a block back. It is kept for the next snapshot, unless it is larger than all may be."""
        if os.getpid() != self._pid:
            return  # in a forked child, whose lock may be held by a thread that it doesn't have
        with self._changed:
            if block.size <= self.limit:
                self._free.append(block)
            else:
                block.close()
        self._forget(block.size)

    def drop(self, block: StagingBlock) -> None:
        """Gives up a block that the writer may still read: nobody else gets it."""
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
    """Returns a quarter of the machine's or container's memory, shared with the ranks that torchrun started on it."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    total = min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *container_limits()])
    return total // 4 // max(int(ranks) if ranks.isdecimal() else 1, 1)


def _whole_pages(nbytes: int) -> int:
    page = syscalls.HUGE_PAGE if nbytes >= syscalls.HUGE_PAGE else syscalls.PAGE
    return max(-(-nbytes // page), 1) * page


def _new_block(size: int, limit: int) -> StagingBlock:
    if size > limit and size > _available_bytes():
        raise ResourceLimitError(
            f"to stage the snapshot takes {size:,} bytes of memory, and the machine has {_available_bytes():,} left: "
            "use Snapshot.take or dcp.save, which copy a few tensors at a time"
        )
    try:
        return StagingBlock(size)
    except OSError as error:
        way = f"; or {way_out(error.errno)}" if lack_of(error) is not None and error.errno else ""
        raise ResourceLimitError(
            f"there is no memory of {size:,} bytes to stage the snapshot in ({error.strerror}): use "
            f"Snapshot.take or dcp.save, which copy a few tensors at a time{way}",
            code=error.errno,
        ) from error


def _available_bytes() -> int:
    """Returns what the kernel would find for a process without swapping."""
    with open(_AVAILABLE) as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


# --- How much memory a container may have ----------------------------------------------------------------------------


_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def container_limits(groups: Path = _GROUPS, root: Path = _ROOT) -> list[int]:
    """Returns the memory limits of this process's control group and of those above it, in bytes.

    Args:
        groups: which groups the process is in, as the kernel lists them.
        root: where the groups are mounted, as a whole or from the container's own on.
    """
    limits: list[int] = []
    with contextlib.suppress(OSError):  # no control groups
        for line in groups.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                limits += _limits_of(root, group, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits_of(root / "memory", group, "memory.limit_in_bytes")
    return limits


def _limits_of(mounted: Path, group: str, file: str) -> list[int]:
    own = mounted / group.strip("/")
    limits: list[int] = []
    for folder in (own, *own.parents):
        if folder.is_relative_to(mounted):
            with contextlib.suppress(OSError, ValueError):  # the root has no such file; "max" is no limit
                limits.append(int((folder / file).read_text()))
    return limits
