"""A plane: what an index process has for bytes beside streams, on both sides."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from memstore.distributed.links import Moved
from memstore.distributed.rdma.bringing import Bringer
from memstore.distributed.rdma.engine import Engine, MonarchEngine
from memstore.distributed.rdma.slots import SLOT, Slots
from memstore.distributed.rdma.staging import stage
from memstore.distributed.rules import Member
from memstore.distributed.transfers import STAGED_UNIT, Bring, Stage, Streamer, Streams, send_elsewhere
from memstore.engine import Root


def open_plane(
    root: Root, links: Streamer, members: Callable[[bytes], Member | None], transport: str, version: str
) -> Plane:
    """Of a process in which Monarch runs (`actors.start_monarch`).

    Args:
        transport: "rdma" or "monarch".
        version: of Monarch.
    """
    return Plane(root, links, members, MonarchEngine(has_ibverbs=transport == "rdma"), transport, version)


class Plane:
    """See `transfers.senders.Plane`. Thread-safe.

    Args:
        members: finds a member of the cluster by its id; None: there is none any more.

    Attributes:
        transport: "rdma" or "monarch".
    """

    def __init__(
        self,
        root: Root,
        links: Streamer,
        members: Callable[[bytes], Member | None],
        engine: Engine,
        transport: str,
        version: str,
    ) -> None:
        self.transport = transport
        self._root, self._version = root, version
        self._streams = Streams(links)
        self.staged = Slots(engine.register, range(STAGED_UNIT, SLOT + 1, STAGED_UNIT))
        self.brought = Slots(engine.register, (SLOT,))  # so that it isn't for each read; nobody is told of it
        self._bringer = Bringer(self._streams, members, engine, self.brought, transport, version)
        self._lock = threading.Lock()
        self._moved = Moved()

    def stage(self, stream: socket.socket, request: Stage) -> None:
        if (request.transport, request.monarch) != (self.transport, self._version):
            own, its = f"{self.transport} (Monarch {self._version})", f"{request.transport} (Monarch {request.monarch})"
            send_elsewhere(stream, f"it has {own}, and was asked by {its}")
            return
        self._count(sent=stage(self._root, self.staged, stream, request))

    def bring(self, stream: socket.socket, request: Bring) -> None:
        self._count(received=self._bringer.bring(stream, request))

    def moved(self) -> Moved:
        """Bytes that were read of registered memory; those on streams the connections count."""
        return self._moved

    def close(self) -> None:
        self._streams.close()

    def _count(self, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._moved = Moved(self._moved.sent + sent, self._moved.received + received)
