"""How an index process ends: whoever finds a reason says it here, and the main thread does it."""

from __future__ import annotations

import threading

from memstore.distributed.serving.news import Kind


class Ended(Exception):
    """Raised in a thread that finds that the process is about to end."""


class Ending:
    """The first reason counts.

    Attributes:
        reason: a text with its kind; None: the process was told to end, and it is no failure.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self.reason: tuple[Kind, str] | None = None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def end(self) -> None:
        """From a signal handler too: it takes no lock."""
        self._event.set()

    def fail(self, kind: Kind, text: str) -> None:
        with self._lock:
            if not self._event.is_set():
                self.reason = (kind, text)
                self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Raises Ended if the process ends meanwhile."""
        if self._event.wait(seconds):
            raise Ended
