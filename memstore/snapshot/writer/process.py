"""The writer: a process that makes files of memory that a trainer staged. It outlives the trainer until that is done.

It is started as a new program, and not forked: so it has neither the trainer's threads and locks nor its memory. It
loads no torch, has no terminal, and ignores Ctrl-C, which is the trainer's to handle.

It ends when the trainer has closed its side, or has had no job for long, after all jobs that it was sent. To a trainer
that sends one in the very moment of that end, the kernel says that it was not sent; so it goes to a new writer.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable

from memstore.engine import SharedMemory, syscalls
from memstore.errors import MemstoreError
from memstore.snapshot.storage import FilePart, FileStorage, Storage
from memstore.snapshot.writer import messages
from memstore.snapshot.writer.failures import failure_of
from memstore.snapshot.writer.messages import Advance, Job, Outcome, StagedFile
from memstore.snapshot.writer.steps import step_named

_AT_ONCE = 8 << 20  # bytes that are moved to huge pages before a job is looked for
_INTERVAL = 0.1  # seconds between two words on how a job advances


def main(fd: int, idle: float) -> None:
    """The whole life of a writer. `fd` is its socket, `idle` how many seconds without a job end it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=fd) as channel:
        serve(channel, idle)


def serve(channel: socket.socket, idle: float) -> None:
    """Carries out one job after the other."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    huge: dict[int, int] = {}  # inode of a memory -> its bytes that are in huge pages
    while True:
        if not poll.poll(int(idle * 1000)):
            channel.shutdown(socket.SHUT_RD)  # what arrived before is still received
        received = messages.receive_job(channel)
        if received is None:
            return
        job, fd = received
        memory = SharedMemory(fd=fd)
        outcome = _carry_out(job, memory, _teller(channel, job) if job.told else None)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer is dead, and the snapshot is not
            messages.send_outcome(channel, outcome)
        inode = syscalls.status(fd).st_ino
        huge[inode] = _make_huge(memory, huge.get(inode, 0), poll)
        del memory


def _make_huge(memory: SharedMemory, start: int, poll: select.poll) -> int:
    """Moves the memory to huge pages, for the trainer's next copy into it; it takes seconds, which nobody waits for.

    Where the trainer did it before its first copy, that took three times as long. Returns where it ended, for the next
    time: a job came in between, or huge pages have become dear.
    """
    while start < memory.size and not poll.poll(0):
        end = memory.make_huge(start, _AT_ONCE)
        if end < start + _AT_ONCE:  # what is left over behind the last huge page stays as it is
            return end
        start = end
    return start


def _teller(channel: socket.socket, job: Job) -> Callable[[int], None]:
    """Sums up what is written, and tells the trainer now and then."""
    untold, told_at = 0, time.monotonic()

    def tell(nbytes: int) -> None:
        nonlocal untold, told_at
        untold += nbytes
        if time.monotonic() - told_at >= _INTERVAL:
            told_at = time.monotonic()
            if messages.send_advance(channel, Advance(job.number, untold)):
                untold = 0

    return tell


def _carry_out(job: Job, memory: SharedMemory, done: Callable[[int], None] | None) -> Outcome:
    try:
        return Outcome(job.number, _write_all(job, memory.bytes, done))
    except Exception as error:  # of any kind: whoever waits in the trainer raises it
        return Outcome(job.number, failure=failure_of(error))


def _write_all(job: Job, staged: memoryview, done: Callable[[int], None] | None) -> bytes:
    storage = FileStorage(os.fsdecode(job.folder))
    sums: dict[str, bytes] = {}
    try:
        for file in job.files:
            parts = _parts_of(file, staged)
            sums[file.name] = storage.write(
                file.name, file.size, parts, durable=job.durable, checksum=job.checksum, done=done
            )
        finish = None if job.finish is None else step_named(job.finish)
    except BaseException:
        _remove_all(storage, list(sums))
        raise
    return b"" if finish is None else finish(storage, job.argument, sums, job.durable)


def _parts_of(file: StagedFile, staged: memoryview) -> list[FilePart]:
    parts = [FilePart(0, file.header)]
    offset = len(file.header)
    for start, nbytes in file.pieces:
        if not 0 <= start <= start + nbytes <= len(staged):
            raise MemstoreError(
                f"{file.name}: bytes {start:,} to {start + nbytes:,} of {len(staged):,} that were staged"
            )
        parts.append(FilePart(offset, staged[start : start + nbytes]))
        offset += nbytes
    return parts


def _remove_all(storage: Storage, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            storage.remove(name)
