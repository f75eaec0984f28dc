"""How far a snapshot is: a callback, or a bar on the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from memstore._info import Progress
from memstore._wording import size
from memstore.errors import in_callers_code

_WIDTH = 30  # characters
_INTERVAL = 0.1  # seconds between two looks of a bar


class ProgressMeter:
    """Counts bytes, and tells them. Thread-safe.

    Args:
        progress: called with the bytes done and those in all; True: a bar, if standard error is a terminal; None.
        total: bytes in all.
        what: what is done, for the bar: "writing".
        rank: of several, rank 0 alone has a bar; a callback is each rank's own.
        keeps_errors: what the callback raises is kept as `failure`, and it is called no more; else it is raised.

    Attributes:
        failure: what the callback has raised.
    """

    def __init__(
        self, progress: Progress | bool | None, total: int, what: str, *, rank: int = 0, keeps_errors: bool = False
    ) -> None:
        self.total, self._done = total, 0
        self.failure: BaseException | None = None
        self._keeps_errors = keeps_errors
        self._lock = threading.Lock()
        self._tell: Progress | None = None
        if callable(progress):
            self._tell = progress
        elif progress is True and rank == 0 and sys.stderr.isatty():
            self._tell = _bar(what)

    @property
    def done(self) -> Callable[[int], None] | None:
        """What is called with the bytes that were passed; None if nobody wants to know."""
        return None if self._tell is None else self._add

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self._done = min(self._done + nbytes, self.total)
            if self._tell is None or self.failure is not None:
                return
            try:
                with in_callers_code():
                    self._tell(self._done, self.total)
            except BaseException as error:  # SystemExit, too, would end the thread that calls this
                if not self._keeps_errors:
                    raise
                self.failure = error

    def finish(self) -> None:
        """All is done, whatever was counted."""
        if self._done < self.total or not self.total:
            self._add(self.total - self._done)


def _bar(what: str) -> Progress:
    started, told = time.monotonic(), 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if done < total and now - told < _INTERVAL:
            return
        told = now
        part = done / total if total else 1.0
        rate = size(done / max(now - started, 1e-9))
        bar = "█" * round(_WIDTH * part)
        sys.stderr.write(f"\r{what} {bar:<{_WIDTH}} {part:4.0%}  {size(done)} of {size(total)}  {rate}/s ")
        sys.stderr.write("\n" if done >= total else "")
        sys.stderr.flush()

    return tell


SILENT = ProgressMeter(None, 0, "")  # tells nobody
