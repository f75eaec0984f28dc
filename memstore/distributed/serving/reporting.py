"""How a host is, in numbers: what `memstore status` shows of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from memstore.distributed.catalog import CatalogTables, look
from memstore.distributed.links import Hello, Moved, Traffic
from memstore.distributed.rules import Index, Standing
from memstore.distributed.serving.messages import Reported
from memstore.engine import Root

SHARED = "shared"  # the transport of who reads files in place of streams
_MUTEX_WITHIN = 5.0  # seconds


class Beside(NamedTuple):
    """What goes beside the connections.

    Attributes:
        transport: by which large values go to and from hosts that have the same.
    """

    transport: str = "tcp"
    moved: Moved = Moved()


class Reporter:
    """Args:
    hello: versions, and which start of the index process this is.
    traffic: of its connections.
    beside: what goes another way.
    """

    def __init__(self, root: Root, index: Index, hello: Hello, traffic: Traffic, beside: Callable[[], Beside]) -> None:
        self._root, self._index, self._hello, self._traffic = root, index, hello, traffic
        self._beside = beside
        self._name = socket.gethostname()

    def report(self) -> Reported:
        standing, moved, beside = standing_of(self._root), self._traffic.moved(), self._beside()
        keys, live = self._root.catalog.view(
            lambda transaction: (transaction.count("entries"), transaction.counters().live)
        )
        return Reported(
            name=self._name,
            epoch=0 if standing is None else standing.view.epoch,
            is_settled=standing is not None
            and not standing.missing
            and not standing.is_joining
            and self._index.settled == standing.view.epoch,
            incarnation=self._hello.incarnation,
            pid=os.getpid(),
            keys=keys,
            live_bytes=live,
            transport=beside.transport if self._root.settings.shared is None else SHARED,
            sent=moved.sent + beside.moved.sent,
            received=moved.received + beside.moved.received,
            memstore=self._hello.memstore,
            torch=self._hello.torch,
            monarch=self._hello.monarch,
        )


def standing_of(root: Root) -> Standing | None:
    """What the root knows of its cluster; None: it was never served."""
    return look(root, CatalogTables.standing, time.monotonic() + _MUTEX_WITHIN)
