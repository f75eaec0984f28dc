"""Two hosts in one process, with planes: what is put on the one is read on the other, by registered memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import memstore
from memstore.distributed.links import Moved
from memstore.distributed.rules import Member
from memstore.distributed.transfers import Transfers, announce
from memstore.distributed.transfers.messages import Bring, Stage
from memstore.distributed.transfers.rdma import RdmaPlane
from memstore.engine import need_cluster
from tests.distributed.rdma.engines import HeldEngine
from tests.distributed.transfers.hosts import Hosts
from tests.distributed.transfers.wires import PlainLinks, Serving, serving
from tests.inside import root_of

FOREVER = float("inf")
VERSION = "0.7.0"
SETTLES = 20.0  # seconds


class SettlingPlane(RdmaPlane):
    """Knows what is under way: it counts bytes, and gives lanes back, only after a reader has them."""

    _under_way = 0
    _changed = threading.Condition()

    def bring(self, stream: socket.socket, request: Bring) -> None:
        with self._one_more():
            super().bring(stream, request)

    def stage(self, stream: socket.socket, request: Stage) -> None:
        with self._one_more():
            super().stage(stream, request)

    @contextmanager
    def _one_more(self) -> Generator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._changed:
            self._under_way += by
            self._changed.notify_all()

    def settled(self) -> Moved:
        """What has moved, once nothing is under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._under_way, SETTLES), "a transfer goes on and on"
            return self.moved()


@dataclass
class Planes(Hosts):
    """See `Hosts`.

    Attributes:
        own: the index process of the reader's host.
        engine: of that host's plane.
        plane, far: the planes of the reader's host, and of the other one.
    """

    own: Serving
    engine: HeldEngine
    plane: SettlingPlane
    far: SettlingPlane

    @property
    def brought(self) -> int:
        """Bytes that have come by registered memory."""
        return self.plane.settled().received


@contextmanager
def two_planes(
    root: str, capacity: int | None = None, transports: tuple[str, str] = ("monarch", "monarch")
) -> Generator[Planes]:
    with (
        memstore.open(f"{root}-there", checksum=True) as there,
        memstore.open(root, timeout=10.0, capacity=capacity) as here,
        serving(there) as served,
        serving(here) as own,
    ):
        for store in (here, there):
            need_cluster(root_of(store), FOREVER)

        def find(id: bytes) -> Member | None:
            return next((one.member for one in (served, own) if one.member.id == id), None)

        registered: dict[bytes, memoryview] = {}
        engines = HeldEngine(registered), HeldEngine(registered)
        planes = [
            SettlingPlane(root_of(store), PlainLinks(), find, engine, transport, VERSION)
            for store, engine, transport in zip((here, there), engines, transports, strict=True)
        ]
        own.senders.plane, served.senders.plane = planes
        announce(root_of(here), transports[0])
        transfers = Transfers(root_of(here), PlainLinks(), find)
        made = Planes(here, there, served, transfers, own, engines[0], *planes)
        yield made
        made.transfers.close()
        for plane in planes:
            plane.close()
        del made.transfers, made.plane, made.far, made.own, made.served, planes, transfers
