"""Progress that `progress=True` shows: a bar on a terminal, else lines of the logger "memstore"."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from memstore._info import Progress
from memstore._wording import size

_log = logging.getLogger("memstore")

_WIDTH = 30  # characters
_BAR_PAUSE, _LINE_PAUSE = 0.1, 10.0  # seconds between two looks of a bar, and between two lines


def shown(progress: Progress | bool | None, what: str, *, rank: int = 0) -> Progress | None:
    """Returns what is called with the bytes done and those in all; None if nobody wants to know.

    Args:
        progress: a caller's function, or True.
        what: is being done: "writing".
        rank: of several, rank 0 alone shows something; a function is each rank's own.
    """
    if callable(progress):
        return progress
    if progress is not True or rank:
        return None
    if sys.stderr is not None and sys.stderr.isatty():
        return Shown(what).tell
    return Shown(what, _log.info).tell


class Shown:
    """A bar in standard error, or lines.

    Args:
        what: is being done.
        line: writes a line; None: there is a terminal, for a bar.
    """

    def __init__(self, what: str, line: Callable[[str], object] | None = None) -> None:
        self._what, self._line = what, line
        self._started = time.monotonic()
        self._told = self._started if line else 0.0  # a bar is there at once

    def tell(self, done: int, total: int) -> None:
        """Draws the bar anew, or writes a line, if it is time to, or if all is done."""
        now = time.monotonic()
        if done < total and now - self._told < (_BAR_PAUSE if self._line is None else _LINE_PAUSE):
            return
        self._told = now
        part = done / total if total else 1.0
        if self._line is not None:
            self._line(f"{self._what}: {self._numbers(done, total).strip()}")
            return
        bar = "█" * round(_WIDTH * part)
        sys.stderr.write(f"\r{self._what} {bar:<{_WIDTH}} {self._numbers(done, total):<60}")
        sys.stderr.write("\n" if done >= total else "")
        sys.stderr.flush()

    def _numbers(self, done: int, total: int) -> str:
        taken = max(time.monotonic() - self._started, 1e-9)
        part = done / total if total else 1.0
        left = f", {_duration(taken * (1 - part) / part)} left" if 0 < part < 1 else f" in {_duration(taken)}"
        return f"{part:4.0%}  {size(done)} of {size(total)}  {size(done / taken)}/s{left}"


def _duration(seconds: float) -> str:
    """Returns seconds as text: "9 s", "1:05", "2:00:00"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
