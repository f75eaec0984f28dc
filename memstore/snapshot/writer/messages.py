"""What a trainer and its writer tell each other: jobs with the memory that they are about, and outcomes.

A message is one packet of a socket (SOCK_SEQPACKET): it arrives whole or not at all. That of a job carries two file
descriptors, of the job in msgpack and of the memory; that of an outcome is msgpack itself. Structures are typed and
lengths are checked.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from memstore.engine import syscalls
from memstore.errors import MemstoreError, ResourceLimitError
from memstore.undecodable import UNDECODABLE

JOB_LIMIT = 1 << 30  # bytes: ten million tensors
OUTCOME_LIMIT = 1 << 16  # bytes, which a socket's buffer has room for

_JOB = b"job"


class StagedFile(msgspec.Struct, frozen=True):
    """A file to be written: `header`, then `pieces` of the staged memory, (offset, bytes), one behind the other."""

    name: str
    header: bytes
    pieces: Sequence[tuple[int, int]]

    @property
    def size(self) -> int:
        return len(self.header) + sum(nbytes for _, nbytes in self.pieces)


class Job(msgspec.Struct, frozen=True):
    """Files to be made of staged memory, and what is done when all of them are there.

    Attributes:
        number: which job of this trainer it is: the outcome has it too.
        folder: where the files go, an absolute path, as the kernel takes it.
        finish: the name of the step that follows, or None; `argument` is for it.
        durable, checksum: as `Storage.write` has them.
        told: whether the trainer wants to hear how it advances.
    """

    number: int
    folder: bytes
    files: list[StagedFile]
    finish: str | None
    argument: bytes
    durable: bool
    checksum: bool
    told: bool = False


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to the process that waits: the name of its class, and what it says."""

    kind: str
    message: str
    code: int | None = None
    path: str | None = None


class Advance(msgspec.Struct, frozen=True, tag=True):
    """How many more bytes of a job are written."""

    number: int
    nbytes: int


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """What became of a job: what its step returned, or why it failed."""

    number: int
    result: bytes = b""
    failure: Failure | None = None


def send_job(channel: socket.socket, job: Job, memory: int) -> None:
    """Sends a job and the file descriptor of its memory. Raises BrokenPipeError if the writer has ended.

    It never waits for a writer that is busy: the job itself travels in a file in memory, and so has any size.
    """
    body = msgspec.msgpack.encode(job)
    if len(body) > JOB_LIMIT:
        raise ResourceLimitError(
            f"names and headers of a snapshot take {len(body):,} bytes, and {JOB_LIMIT:,} can be sent"
        )
    file = syscalls.memory_file("memstore: a job")
    try:
        syscalls.write_at(file, body, 0)
        socket.send_fds(channel, [_JOB], [file, memory])
    finally:
        syscalls.close(file)


def receive_job(channel: socket.socket) -> tuple[Job, int] | None:
    """The next job, and its memory, a file descriptor; None when there will be no more."""
    mark, fds, _, _ = socket.recv_fds(channel, len(_JOB), 2)
    if not mark:
        return None
    try:
        if mark != _JOB or len(fds) != 2:
            raise MemstoreError(f"a message of {len(mark)} bytes with {len(fds)} files, and not a job")
        size = syscalls.status(fds[0]).st_size
        if size > JOB_LIMIT:
            raise MemstoreError(f"a job of {size:,} bytes, and {JOB_LIMIT:,} are the most")
        return _decode(syscalls.read_at(fds[0], size, 0), Job, "Job"), fds.pop()
    finally:
        for fd in fds:
            syscalls.close(fd)


def send_outcome(channel: socket.socket, outcome: Outcome) -> None:
    """Raises BrokenPipeError if the trainer has gone."""
    body = msgspec.msgpack.encode(outcome)
    if len(body) > OUTCOME_LIMIT:
        text = f"the step of a snapshot returned {len(body):,} bytes, and {OUTCOME_LIMIT:,} can be sent"
        body = msgspec.msgpack.encode(Outcome(outcome.number, failure=Failure("", text)))
    channel.send(body)


def send_advance(channel: socket.socket, advance: Advance) -> bool:
    """Whether it was sent: it never waits for a trainer that doesn't listen, or is dead."""
    try:
        channel.send(msgspec.msgpack.encode(advance), socket.MSG_DONTWAIT)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return False
    return True


def receive_outcome(channel: socket.socket) -> Outcome | Advance | None:
    """The next outcome, or how a job advances; None when there will be no more."""
    body = channel.recv(OUTCOME_LIMIT)
    return _decode(body, Outcome | Advance, "Outcome") if body else None


def _decode(body: bytes, kind: Any, what: str) -> Any:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNDECODABLE as error:
        raise MemstoreError(f"a message is no {what}: {error}") from None
