"""What a process has for its asynchronous snapshots: memory, and a writer while there is something to write.

    1. a block of the memory is taken, or waited for
    2. all tensors are copied into it; from here on they may change
    3. the job and the block go to the writer; if the trainer dies from here on, the snapshot is completed
    4. its outcome comes, and the block is free for the next snapshot

The writer ends when it has had no job for ten minutes, and then the memory is given back too.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from memstore.errors import ResourceLimitError
from memstore.late_imports import Hooks, around_forks
from memstore.snapshot.staging.copying import Place, copy_into, place_tensors
from memstore.snapshot.staging.memory import Block, Pool, default_limit, leave_blocks
from memstore.snapshot.writer import Job, PendingWrite, StagedFile, Writer

IDLE = 600.0  # seconds
TIMEOUT = 600.0  # seconds, for earlier snapshots to be written
_MOST_WRITERS = 5  # that are tried for a job

_numbers = itertools.count(1)


class Staged:
    """Copies of tensors, in memory that the writer can have. Write it, or release it.

    Attributes:
        places: of each tensor, where its elements lie in the memory: (offset, nbytes).
    """

    def __init__(self, stager: Stager, block: Block, places: list[Place]) -> None:
        self._stager = stager
        self._block: Block | None = block
        self.places = places
        self._release = weakref.finalize(self, stager.pool.give_back, block)
        self._release.atexit = False

    @property
    def block(self) -> Block:
        """The memory. Raises ValueError once it is the writer's, or given back."""
        if self._block is None:
            raise ValueError("what was staged has been written or released")
        return self._block

    @property
    def memory(self) -> memoryview:
        """All of it, as bytes."""
        return self.block.bytes.data

    def write(
        self,
        folder: str | os.PathLike[str],
        files: Sequence[StagedFile],
        *,
        finish: str | None = None,
        argument: bytes = b"",
        durable: bool = True,
        checksum: bool = True,
        done: Callable[[int], None] | None = None,
    ) -> PendingWrite:
        """Hands the memory to the writer, once, which makes files of it. Returns at once.

        Args:
            folder: where they go. It exists.
            files: what they consist of.
            finish: what comes when all are written, a name in writer/steps.py, with `argument` for it.
            durable, checksum: as for `Storage.write`. The sums go to `finish`.
            done: called, in a thread of its own, with the bytes that were written since; must not raise.

        Raises:
            ResourceLimitError: no writer could be started, or there are too many names and headers.
        """
        block, pool = self.block, self._stager.pool
        self._release.detach()
        self._block = None
        path = os.path.abspath(folder)
        pending = PendingWrite(f"the snapshot in {path}", lambda: pool.give_back(block), done)
        place = os.fsencode(path)
        job = Job(next(_numbers), place, list(files), finish, argument, durable, checksum, done is not None)
        try:
            self._stager.send(job, block.fd, pending)
        except BaseException:  # an exception of a signal's handler may come when the writer has the memory already
            pool.drop(block)
            raise
        return pending

    def release(self) -> None:
        """Gives the memory back, if it isn't written."""
        self._block = None
        self._release()


class Stager:
    """The memory and the writer of one process.

    Args:
        limit: bytes of snapshots that are in flight. A single one may be larger, where the machine has the memory.
        idle: seconds without a job after which the writer ends and the memory is given back.
    """

    def __init__(self, limit: int | None = None, idle: float = IDLE) -> None:
        self.pool = Pool(default_limit() if limit is None else limit)
        self._idle = idle
        self._lock = threading.Lock()
        self._writer: Writer | None = None

    def stage(self, tensors: Sequence[torch.Tensor], *, names: Sequence[str] = (), timeout: float = TIMEOUT) -> Staged:
        """Copies the tensors. See `stage`."""
        places, nbytes = place_tensors(tensors)
        writer = self._writer
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
        return Staged(self, block, places)

    def send(self, job: Job, memory: int, pending: PendingWrite) -> None:
        """Sends a job to the writer, or to a new one if that has ended."""
        with self._lock:
            for _ in range(_MOST_WRITERS):
                if self._writer is not None and self._writer.send(job, memory, pending):
                    return
                self._writer = Writer(self._idle, self.pool.trim)
        raise ResourceLimitError(f"{_MOST_WRITERS} processes, started to write a snapshot, ended at once", code=0)

    def close(self) -> None:
        """Lets the writer end, once it has carried out its jobs; the memory is given back then."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()

    def leave(self) -> None:
        """In a forked child, which must neither use the memory nor keep the writer waiting for jobs."""
        if self._writer is not None:
            self._writer.leave()


_stager: Stager | None = None
_lock = threading.Lock()


def _naming_the_largest(error: ResourceLimitError, places: list[Place], names: Sequence[str]) -> ResourceLimitError:
    """Says which tensor takes most: it may be expanded, and have a few bytes only before it is copied."""
    if not names:
        return error
    name, place = max(zip(names, places, strict=True), key=lambda one: one[1].nbytes)
    return ResourceLimitError(f"{error.message}; {name} alone takes {place.nbytes:,} bytes", code=error.errno)


def stage(tensors: Sequence[torch.Tensor], *, names: Sequence[str] = (), timeout: float = TIMEOUT) -> Staged:
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
        stager = _stager = _stager or Stager()
    return stager.stage(tensors, names=names, timeout=timeout)


def _after_fork_in_child() -> None:
    global _stager, _lock
    _lock = threading.Lock()
    if _stager is not None:
        _stager.leave()
    _stager = None
    leave_blocks()


around_forks(Hooks(before=lambda: None, after_in_parent=lambda: None, after_in_child=_after_fork_in_child))
