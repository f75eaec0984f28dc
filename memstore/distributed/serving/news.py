"""What an index process tells its agent, and the agent whoever waits for it: lines in a pipe.

ready               this host is a member, and answers
alive               the index process goes on: for its agent alone
refused TEXT        it can't be, and why; the process ends
lost TEXT           as `refused`, for good: the root is gone, or was removed from the cluster
removed             it was told to end, and that its root goes with it
"""

from __future__ import annotations

import contextlib
import os
from enum import Enum
from typing import NamedTuple

LONGEST = 4000  # bytes: less than a pipe takes at once


class Kind(Enum):
    READY = "ready"
    ALIVE = "alive"
    REFUSED = "refused"
    LOST = "lost"
    REMOVED = "removed"


class News(NamedTuple):
    kind: Kind
    text: str = ""


def tell(fd: int, news: News) -> None:
    """In one write. Nothing happens if nobody reads, or the pipe is full."""
    line = f"{news.kind.value} {news.text}".encode(errors="replace").replace(b"\n", b" ")[:LONGEST]
    with contextlib.suppress(OSError):
        os.write(fd, line + b"\n")


class Lines:
    """Reads what is told through a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""

    def read(self) -> list[News] | None:
        """What has come; waits for something. None: nobody will tell more."""
        received = os.read(self._fd, 1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [_parse(line.decode(errors="replace")) for line in lines] if received else None


def _parse(line: str) -> News:
    kind, _, text = line.partition(" ")
    return News(Kind(kind), text)
