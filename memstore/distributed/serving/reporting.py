"""How a host is, in numbers: what `memstore status` shows of it."""

from __future__ import annotations

import os
import socket
import time

from memstore.distributed.catalog import CatalogTables, look
from memstore.distributed.links import Hello, Traffic
from memstore.distributed.rules import Index, Standing
from memstore.distributed.serving.messages import Reported
from memstore.engine import Root

TRANSPORT, SHARED = "tcp", "shared"
_MUTEX_WITHIN = 5.0  # seconds


class Reporter:
    """Args:
    hello: versions, and which start of the index process this is.
    traffic: of its connections.
    """

    def __init__(self, root: Root, index: Index, hello: Hello, traffic: Traffic) -> None:
        self._root, self._index, self._hello, self._traffic = root, index, hello, traffic
        self._name = socket.gethostname()

    def report(self) -> Reported:
        standing, moved = standing_of(self._root), self._traffic.moved()
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
            transport=TRANSPORT if self._root.shared is None else SHARED,
            sent=moved.sent,
            received=moved.received,
            memstore=self._hello.memstore,
            torch=self._hello.torch,
            monarch=self._hello.monarch,
        )


def standing_of(root: Root) -> Standing | None:
    """What the root knows of its cluster; None: it was never served."""
    return look(root, CatalogTables.standing, time.monotonic() + _MUTEX_WITHIN)
