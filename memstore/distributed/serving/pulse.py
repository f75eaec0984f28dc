"""The index process's word to its agent that it goes on: see `watchdog.py`, which waits for it."""

from __future__ import annotations

import os
import threading

from memstore.distributed.links import Listener
from memstore.distributed.serving.news import Kind, News, tell


class Pulse:
    """A thread that tells the agent, again and again, that this process lives.

    From `follow` on it does so only as long as the listener's thread comes round: whoever asks would wait in vain
    otherwise, however well the rest of the process is.

    Args:
        news: the pipe to the agent. From now on nobody waits to write into it: an agent that is stopped for days must
            not stop its index process.
        every: seconds.
    """

    def __init__(self, news: int, every: float) -> None:
        self._news, self._every = news, every
        self._listener: Listener | None = None
        self._is_over = threading.Event()
        os.set_blocking(news, False)

    def start(self) -> None:
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def follow(self, listener: Listener) -> None:
        """Call it when the listener has started."""
        self._listener = listener

    def close(self) -> None:
        """It tells nothing any more."""
        self._is_over.set()

    def _run(self) -> None:
        while True:
            listener = self._listener
            before = -1 if listener is None else listener.turns
            if listener is not None:
                listener.nudge()
            if self._is_over.wait(self._every):
                return
            if listener is None or listener.turns != before:
                tell(self._news, News(Kind.ALIVE))
