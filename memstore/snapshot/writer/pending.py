"""A job that a writer was given, seen from the trainer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from memstore.errors import MemstoreError, StoreTimeoutError
from memstore.snapshot.writer.failures import error_of
from memstore.snapshot.writer.messages import Outcome


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
        self._result: Outcome | Exception = Outcome(0)
        self.writer = 0  # its pid

    def advance(self, nbytes: int) -> None:
        """So many more bytes are written."""
        if self._done is not None:
            self._done(nbytes)

    def settle(self, result: Outcome | Exception) -> None:
        """What has become of it; the second time nothing happens."""
        if self._end.is_set():
            return
        self._result = result
        settled, self._settled = self._settled, _nothing  # which would keep the memory as long as this object
        try:
            settled()  # first: who has waited finds the memory free
        finally:
            self._end.set()

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        self._check_process()
        return self._end.is_set()

    def wait(self, timeout: float | None = None) -> bytes:
        """Waits for the end. Returns what the job's last step returned, b"" if it had none.

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


def _nothing() -> None:
    pass
