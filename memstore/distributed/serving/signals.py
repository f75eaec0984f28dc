"""Signals that ask a process to end, as something that a poll waits for."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType
from typing import Any

OF_AGENTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # that an agent takes


class Stop:
    """Takes these signals while it is entered, in the main thread. From the first one on `is_set`.

    Attributes:
        name: of the first one; empty: none has come.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}
        self.is_set, self.name = False, ""
        self._reader, self._writer = -1, -1

    def fileno(self) -> int:
        """Readable from the first signal on."""
        return self._reader

    def wait(self, seconds: float) -> bool:
        """Whether one came within that time."""
        if not self.is_set:
            select.select([self], [], [], seconds)
        return self.is_set

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self.is_set:
            self.is_set, self.name = True, signal.Signals(number).name
            os.write(self._writer, b"\n")

    def __enter__(self) -> Stop:
        self._reader, self._writer = os.pipe()
        self._before = {number: signal.signal(number, self._take) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)
