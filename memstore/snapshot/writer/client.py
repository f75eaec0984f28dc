"""The trainer's side: starts a writer when there is a job and none runs, sends it jobs, and hears of their outcomes.

A thread receives the outcomes. It sleeps in the kernel, so it takes no time of the trainer's; and it learns at once
when the writer dies, whose jobs then fail. The next job starts a new one.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from memstore.engine import syscalls
from memstore.errors import MemstoreError, ResourceLimitError, UnknownOutcomeError
from memstore.snapshot.writer import messages
from memstore.snapshot.writer.messages import Job
from memstore.snapshot.writer.pending import PendingWrite

_CODE = "import sys; from memstore.snapshot.writer.process import main; main(int(sys.argv[1]), float(sys.argv[2]))"
_LAST_WORDS = 2000  # bytes


class _Process(subprocess.Popen[bytes]):
    """One that may outlive this process, without a warning."""

    def __del__(self) -> None:  # Popen's own warns of a process that was not waited for
        pass


class Writer:
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

    def send(self, job: Job, memory: int, pending: PendingWrite) -> bool:
        """Sends it a job. False if the writer has ended, and knows nothing of it."""
        with self._lock:
            if self._channel.fileno() < 0:
                return False
            pending.writer = self.pid
            self._jobs[job.number] = pending  # before it is sent: the outcome may come at once
            try:
                messages.send_job(self._channel, job, memory)
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
        """In a forked child, which has no part in it."""
        self._channel.close()
        self._errors.close()

    def _receive(self) -> None:
        reason: Exception | None = None
        try:
            while (word := messages.receive_outcome(self._channel)) is not None:
                with self._lock:
                    pending = self._jobs.get(word.number)
                    if isinstance(word, messages.Outcome):
                        self._jobs.pop(word.number, None)
                if pending is not None and isinstance(word, messages.Outcome):
                    pending.settle(word)
                elif pending is not None and isinstance(word, messages.Advance):
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
        """The last line of what it wrote to its stderr: of a traceback, the error."""
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
