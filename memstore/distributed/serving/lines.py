"""What an agent and its index process print: one line an event, on stderr, for people."""

from __future__ import annotations

import logging
import os
import sys
import time

_TIME = "%Y-%m-%d %H:%M:%S"


def say(text: str) -> None:
    """In one write, so that lines of the two don't mix."""
    sys.stderr.write(f"{_now()}memstore: {text.rstrip()}\n")
    sys.stderr.flush()


def log_by_lines() -> None:
    """Warnings of the library's log are such lines too. Unless MEMSTORE_LOG_LEVEL has said how."""
    log = logging.getLogger("memstore")
    if not log.handlers:
        log.addHandler(_Lines())


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def _now() -> str:
    """Nothing where systemd's journal writes the time beside each line."""
    return "" if "JOURNAL_STREAM" in os.environ else f"{time.strftime(_TIME)} "
