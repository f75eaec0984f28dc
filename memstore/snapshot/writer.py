"""The writer: a process that makes files of memory that a trainer staged. It outlives the trainer.

The trainer's side is `WriterClient`, which starts the process and sends it jobs, and `PendingWrite`, a job seen from
the trainer. The process runs `main`. It is started as a new program, and not forked: so it has neither the trainer's
GIL, threads and locks nor its memory. It loads no torch, has no terminal, and ignores Ctrl-C, which is the trainer's
to handle.

It ends when the trainer has closed its side, or has had no job for long, after all jobs that it was sent. To a trainer
that sends one in the very moment of that end, the kernel says that it was not sent; so it goes to a new writer.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from memstore import errors
from memstore._parsing import UNDECODABLE
from memstore.engine import SharedMemory, syscalls
from memstore.errors import MemstoreError, ResourceLimitError, StoreTimeoutError, UnknownOutcomeError
from memstore.snapshot.buckets import VARIABLES, is_url
from memstore.snapshot.chunks import FilePart, PieceSums
from memstore.snapshot.objects import storage_at
from memstore.snapshot.publishing import finish_part
from memstore.snapshot.storage import hold

# --- The trainer's side ----------------------------------------------------------------------------------------------
# The trainer's side: starts a writer when there is a job and none runs, sends it jobs, and hears of their outcomes.
#
# A thread receives the outcomes. It sleeps in the kernel, so it takes no time of the trainer's; and it learns at once
# when the writer dies, whose jobs then fail. The next job starts a new one.


_CODE = "import sys; from memstore.snapshot.writer import main; main(int(sys.argv[1]), float(sys.argv[2]))"
_LAST_WORDS = 2000  # bytes


class _Process(subprocess.Popen[bytes]):
    """A process that may outlive this one, without a warning."""

    def __del__(self) -> None:  # Popen's own warns of a process that was not waited for
        pass


class WriterClient:
    """A writer's process, and the jobs that it has. Thread-safe.

    Args:
        idle: seconds without a job after which it ends.
        ended: called, in a thread of its own, when it has ended, after its jobs were settled.
    """

    def __init__(self, idle: float, ended: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, PendingWrite] = {}
        self._ended = ended
        self._errors = io.FileIO(syscalls.memory_file("memstore: errors of a writer"))
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _start(theirs.fileno(), idle, self._errors.fileno())
            self.pid = self._process.pid
            threading.Thread(target=self._receive, name="memstore: outcomes of the writer", daemon=True).start()
        except BaseException:
            self._channel.close()
            raise

    def send(self, job: WriteJob, memory: int, pending: PendingWrite) -> bool:
        """Sends it a job. False if the writer has ended, and knows nothing of it."""
        with self._lock:
            if self._channel.fileno() < 0:
                return False
            pending.writer = self.pid
            self._jobs[job.number] = pending  # before it is sent: the outcome may come at once
            try:
                send_job(self._channel, job, memory)
            except BaseException as error:
                del self._jobs[job.number]
                if isinstance(error, BrokenPipeError | ConnectionResetError):
                    return False
                raise
        return True

    def close(self) -> None:
        """Sends no more jobs: the writer ends when it has carried out those that it has. No job waits for that."""
        with self._lock, contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_WR)

    def leave(self) -> None:
        """Closes its descriptors in a forked child, which has no part in it."""
        self._channel.close()
        self._errors.close()

    def _receive(self) -> None:
        reason: Exception | None = None
        try:
            while (word := receive_outcome(self._channel)) is not None:
                with self._lock:
                    pending = self._jobs.get(word.number)
                    if isinstance(word, WriteOutcome):
                        self._jobs.pop(word.number, None)
                if pending is not None and isinstance(word, WriteOutcome):
                    pending.settle(word)
                elif pending is not None and isinstance(word, WriteAdvance):
                    pending.advance(word.nbytes)
        except (OSError, MemstoreError) as error:
            reason = error
        code = self._process.wait()
        with self._lock:
            left = list(self._jobs.values())
            self._jobs.clear()
            self._channel.close()
        for pending in left:
            pending.settle(_killed(self.pid, code, self._last_words() or str(reason or "")))
        self._errors.close()
        self._ended()

    def _last_words(self) -> str:
        """Returns the last line of what it wrote to its stderr: of a traceback, the error."""
        self._errors.seek(max(os.fstat(self._errors.fileno()).st_size - _LAST_WORDS, 0))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _killed(pid: int, code: int, reason: str) -> UnknownOutcomeError:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    because = f" ({reason})" if reason else ""
    return UnknownOutcomeError(
        f"the process that wrote the snapshot (pid {pid}) {how}{because} before it said that it was done: the snapshot "
        "is whole if its manifest is there, else take it again"
    )


def _start(fd: int, idle: float, errors: int) -> _Process:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    try:
        return _Process(
            [sys.executable, "-c", _CODE, str(fd), str(idle)],
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,  # if it were the trainer's, whoever reads that would wait for the end of the writer
            start_new_session=True,
        )
    except OSError as error:
        reason = f"no process could be started to write the snapshot: {error}"
        raise ResourceLimitError(reason, code=error.errno) from error


# --- A job, seen from the trainer ------------------------------------------------------------------------------------


class PendingWrite:
    """Files that a writer is making.

    Args:
        what: is being written, for messages.
        settled: called, in any thread, once the writer needs the memory no more.
        done: called, in a thread of its own, with the bytes that were written since; must not raise.
    """

    def __init__(self, what: str, settled: Callable[[], None], done: Callable[[int], None] | None = None) -> None:
        self._what, self._settled, self._done = what, settled, done
        self._pid = os.getpid()
        self._started = time.monotonic()
        self._end = threading.Event()
        self._result: WriteOutcome | Exception = WriteOutcome(0)
        self.writer = 0  # its pid

    def advance(self, nbytes: int) -> None:
        """Tells that so many more bytes are written."""
        if self._done is not None:
            self._done(nbytes)

    def settle(self, result: WriteOutcome | Exception) -> None:
        """Sets the outcome. The second time nothing happens."""
        if self._end.is_set():
            return
        self._result = result
        settled, self._settled = self._settled, lambda: None  # which would keep the memory as long as this object
        try:
            settled()  # first: who has waited finds the memory free
        finally:
            self._end.set()

    def done(self) -> bool:
        """Returns whether `wait` would return, or raise, at once."""
        self._check_process()
        return self._end.is_set()

    def wait(self, timeout: float | None = None) -> bytes:
        """Waits for the end. Returns what `finish_part` returned, b"" for files that are no part of a snapshot.

        Raises:
            StoreTimeoutError: it takes longer than `timeout` seconds. It goes on, and `wait` can be called again.
            UnknownOutcomeError: the writer was killed. Whether the snapshot is there, the folder tells.
            MemstoreError, OSError: what failed in the writer. What it had written is removed.
        """
        self._check_process()
        if not self._end.wait(timeout):
            raise StoreTimeoutError(
                f"{self._what}: process {self.writer} has been writing for "
                f"{time.monotonic() - self._started:.0f} s, and {timeout:g} s were to be waited: wait longer"
            )
        if isinstance(self._result, Exception):
            raise self._result
        if self._result.failure is not None:
            raise error_of(self._result.failure)
        return self._result.result

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MemstoreError(
                f"{self._what}: process {self._pid} asked for it, and this is {os.getpid()}, a fork of it"
            )


# --- The process -----------------------------------------------------------------------------------------------------


_AT_ONCE = 8 << 20  # bytes that are moved to huge pages before a job is looked for
_INTERVAL = 0.1  # seconds between two words on how a job advances


def main(fd: int, idle: float) -> None:
    """Runs the whole life of a writer. `fd` is its socket, `idle` how many seconds without a job end it."""
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
        received = receive_job(channel)
        if received is None:
            return
        job, fd = received
        memory = SharedMemory(fd=fd)
        outcome = _carry_out(job, memory, _teller(channel, job) if job.told else None)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer is dead, and the snapshot is not
            send_outcome(channel, outcome)
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


def _teller(channel: socket.socket, job: WriteJob) -> Callable[[int], None]:
    """Sums up what is written, and tells the trainer now and then."""
    untold, told_at = 0, time.monotonic()

    def tell(nbytes: int) -> None:
        nonlocal untold, told_at
        untold += nbytes
        if time.monotonic() - told_at >= _INTERVAL:
            told_at = time.monotonic()
            if send_advance(channel, WriteAdvance(job.number, untold)):
                untold = 0

    return tell


def _carry_out(job: WriteJob, memory: SharedMemory, done: Callable[[int], None] | None) -> WriteOutcome:
    try:
        folder = os.fsdecode(job.folder)
        if is_url(folder):
            for name in [name for name in os.environ if name.startswith(VARIABLES)]:
                del os.environ[name]
            os.environ.update(job.variables)
        held = None if is_url(folder) else hold(folder)
        with held or contextlib.nullcontext():  # the trainer holds it too, but may die
            return WriteOutcome(job.number, write_all(job, memory.bytes, done))
    except Exception as error:  # of any kind: whoever waits in the trainer raises it
        return WriteOutcome(job.number, failure=failure_of(error))


def write_all(job: WriteJob, staged: memoryview, done: Callable[[int], None] | None) -> bytes:
    """Makes the files of a job, and its part. Returns what `finish_part` does."""
    storage = storage_at(os.fsdecode(job.folder), job.options, budget=job.budget)
    sums: dict[str, bytes] = {}
    pieces: dict[str, PieceSums] = {}
    try:
        for file in job.files:
            parts, own = _parts_of(file, staged), pieces.setdefault(file.name, {})
            sums[file.name] = storage.write(
                file.name, file.size, parts, durable=job.durable, checksum=job.checksum, done=done, pieces=own
            )
    except BaseException:
        for name in () if storage.is_remote else sums:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                storage.remove(name)
        raise
    # From here on the files stay if something fails: others may count on them already.
    return b"" if job.part is None else finish_part(storage, job.part, sums, job.durable, pieces)


def write_here(job: WriteJob, staged: memoryview, pending: PendingWrite) -> None:
    """Carries a job out in a thread of this process, for storage that other processes don't have. Returns at once."""

    def carry_out() -> None:
        try:
            outcome = WriteOutcome(job.number, write_all(job, staged, pending.advance if job.told else None))
        except Exception as error:  # of any kind: whoever waits raises it
            outcome = WriteOutcome(job.number, failure=failure_of(error))
        pending.settle(outcome)

    pending.writer = os.getpid()
    threading.Thread(target=carry_out, name="memstore: a snapshot in memory", daemon=True).start()


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


# --- Messages --------------------------------------------------------------------------------------------------------
# What a trainer and its writer tell each other: jobs with the memory that they are about, and outcomes.
#
# A message is one packet of a socket (SOCK_SEQPACKET): it arrives whole or not at all. That of a job carries two file
# descriptors, of the job in msgpack and of the memory; that of an outcome is msgpack itself. Structures are typed and
# lengths are checked.


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


class WriteJob(msgspec.Struct, frozen=True):
    """Files to be made of staged memory, and what is done when all of them are there.

    Attributes:
        number: which job of this trainer it is: the outcome has it too.
        folder: where the files go, an absolute path, as the kernel takes it.
        part: of the rank, encoded, where its files are a part of a snapshot; `finish_part` follows then.
        durable, checksum: as `FileStorage.write` has them.
        told: whether the trainer wants to hear how it advances.
        options: for a bucket, where `folder` is a URL.
        variables: of the trainer's environment, for the same: it may have renewed its credentials.
        budget: bytes of memory for an upload, beside the staged memory.
    """

    number: int
    folder: bytes
    files: list[StagedFile]
    part: bytes | None
    durable: bool
    checksum: bool
    told: bool = False
    options: dict[str, Any] | None = None
    variables: dict[str, str] = {}
    budget: int | None = None


class WriteFailure(msgspec.Struct, frozen=True):
    """An error on its way to the process that waits: the name of its class, and what it says."""

    kind: str
    message: str
    code: int | None = None
    path: str | None = None


class WriteAdvance(msgspec.Struct, frozen=True, tag=True):
    """The number of bytes of a job that were written since the last word."""

    number: int
    nbytes: int


class WriteOutcome(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a job: what `finish_part` returned, or why it failed."""

    number: int
    result: bytes = b""
    failure: WriteFailure | None = None


def send_job(channel: socket.socket, job: WriteJob, memory: int) -> None:
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


def receive_job(channel: socket.socket) -> tuple[WriteJob, int] | None:
    """Returns the next job, and its memory, a file descriptor; None when there will be no more."""
    mark, fds, _, _ = socket.recv_fds(channel, len(_JOB), 2)
    if not mark:
        return None
    try:
        if mark != _JOB or len(fds) != 2:
            raise MemstoreError(f"a message of {len(mark)} bytes with {len(fds)} files, and not a job")
        size = syscalls.status(fds[0]).st_size
        if size > JOB_LIMIT:
            raise MemstoreError(f"a job of {size:,} bytes, and {JOB_LIMIT:,} are the most")
        return _decode(syscalls.read_at(fds[0], size, 0), WriteJob, "Job"), fds.pop()
    finally:
        for fd in fds:
            syscalls.close(fd)


def send_outcome(channel: socket.socket, outcome: WriteOutcome) -> None:
    """Raises BrokenPipeError if the trainer has gone."""
    body = msgspec.msgpack.encode(outcome)
    if len(body) > OUTCOME_LIMIT:
        text = f"the last step of a snapshot returned {len(body):,} bytes, and {OUTCOME_LIMIT:,} can be sent"
        body = msgspec.msgpack.encode(WriteOutcome(outcome.number, failure=WriteFailure("", text)))
    channel.send(body)


def send_advance(channel: socket.socket, advance: WriteAdvance) -> bool:
    """Returns whether it was sent: it never waits for a trainer that doesn't listen, or is dead."""
    try:
        channel.send(msgspec.msgpack.encode(advance), socket.MSG_DONTWAIT)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return False
    return True


def receive_outcome(channel: socket.socket) -> WriteOutcome | WriteAdvance | None:
    """Returns the next outcome, or how a job advances; None when there will be no more."""
    body = channel.recv(OUTCOME_LIMIT)
    return _decode(body, WriteOutcome | WriteAdvance, "Outcome") if body else None


def _decode(body: bytes, kind: Any, what: str) -> Any:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNDECODABLE as error:
        raise MemstoreError(f"a message is no {what}: {error}") from None


# --- Errors on their way to the trainer, with their types ------------------------------------------------------------


_LONGEST = OUTCOME_LIMIT // 4  # bytes of a text


def failure_of(error: BaseException) -> WriteFailure:
    """Returns what is sent of an error."""
    if isinstance(error, errors.MemstoreError):
        path = getattr(error, "path", None)
        return WriteFailure(type(error).__name__, _text(error), getattr(error, "errno", None), path and _text(path))
    if isinstance(error, OSError):
        path = _text(error.filename) if error.filename else None
        return WriteFailure("OSError", error.strerror or _text(error), error.errno, path)
    return WriteFailure("", f"{type(error).__name__}: {_text(error)}")


def _text(value: object) -> str:
    """Returns a text that msgpack can carry: a path may be no UTF-8."""
    return str(value).encode(errors="backslashreplace")[:_LONGEST].decode(errors="ignore")


def error_of(failure: WriteFailure) -> Exception:
    """Makes the error again. One of a class that memstore doesn't have becomes a MemstoreError that names it."""
    if failure.kind == "OSError":
        return OSError(failure.code or 0, failure.message, failure.path)  # of the subclass that the code means
    kind = getattr(errors, failure.kind, None) if failure.kind else None
    if not (isinstance(kind, type) and issubclass(kind, errors.MemstoreError)):
        return errors.MemstoreError(failure.message)
    if issubclass(kind, errors.StorageError):
        return kind(failure.message, code=failure.code, path=failure.path)
    if issubclass(kind, errors.StoreFullError | errors.ResourceLimitError) and kind is not errors.QuotaExceededError:
        return kind(failure.message, code=failure.code)
    if issubclass(kind, errors.CorruptionError):
        return kind(failure.message, path=failure.path)
    return kind(failure.message)
