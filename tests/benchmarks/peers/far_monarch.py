"""Monarch between hosts: an actor on the owner's host, which is asked, and whose memory is read by RDMABuffer.

There is no RDMA between namespaces, so Monarch falls back to TCP, as it does wherever there is no ibverbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from tests.benchmarks.on_hosts import OWNER, READER
from tests.benchmarks.peers import Value, needs
from tests.benchmarks.peers.far import ROW, Far, Taken, Work, take_each

PORT = 26600
SMALL = 1 << 20  # bytes; below, an answer carries the value


class FarMonarch(Far):
    id: ClassVar[str] = "monarch"
    name: ClassVar[str] = "Monarch"
    settings: ClassVar[str] = "1 KiB: two actor round trips; else RDMABuffer over TCP, whose handle is there before"

    @classmethod
    def missing(cls) -> str | None:
        return needs("monarch")

    def setup(self) -> None:
        address = f"tcp://{self.hosts.address(OWNER)}:{PORT}"
        self.owner, self.reader = self.hosts.process_on(OWNER), self.hosts.process_on(READER)
        self.owner.begin(work_for_ever, address)
        self.reader.run(attach, self.hosts.address(READER), address)

    def offer(self, work: Work, numbers: Sequence[int]) -> None:
        self.reader.run(offer, work, numbers)

    def take(self, work: Work, numbers: Sequence[int], *, check: bool) -> list[Taken]:
        return self.reader.run(take, work, numbers, check)

    def close(self) -> None:
        for name in ("owner", "reader"):
            if hasattr(self, name):
                getattr(self, name).close()


# --- on the owner's host ----------------------------------------------------------------------------------------------


def work_for_ever(address: str) -> None:
    import monarch  # pyright: ignore[reportMissingTypeStubs]
    from monarch.actor import run_worker_loop_forever  # pyright: ignore[reportMissingTypeStubs]

    monarch.configure(rdma_allow_tcp_fallback=True)
    run_worker_loop_forever(address=address, ca="trust_all_connections")


# --- on the reader's host ---------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.target = torch.zeros(0, dtype=torch.int64)
        self.buffer: Any = None

    def drop_buffer(self) -> None:
        if self.buffer is not None:
            self.buffer.drop().get()
            self.buffer = None


_reader: list[_Reader] = []


def attach(own_ip: str, address: str) -> None:
    import monarch  # pyright: ignore[reportMissingTypeStubs]
    from monarch.actor import attach_to_workers, enable_transport  # pyright: ignore[reportMissingTypeStubs]

    from tests.benchmarks.peers.far_monarch_actor import Holder

    monarch.configure(rdma_allow_tcp_fallback=True)
    enable_transport(f"tcp://{own_ip}:0")
    mesh = attach_to_workers(ca="trust_all_connections", workers=[address])
    _reader[:] = [_Reader(mesh.spawn_procs().spawn("holder", Holder))]


def offer(work: Work, numbers: Sequence[int]) -> None:
    here = _reader[0]
    here.drop_buffer()
    if not work.is_put:
        here.actor.hold.call_one(work, numbers).get()
    if not work.picks and work.moved >= SMALL:
        here.buffer = here.actor.readable.call_one(None).get()


def take(work: Work, numbers: Sequence[int], check: bool) -> list[Taken]:
    here = _reader[0]
    if here.target.nbytes != work.moved:
        here.target = torch.zeros(work.moved // 8, dtype=torch.int64)
    return take_each(_keep if work.is_put else _ask_twice if work.moved < SMALL else _read, work, numbers, check)


def _keep(work: Work, number: int, value: torch.Tensor) -> None:
    _reader[0].actor.keep.call_one(value).get()


def _ask_twice(work: Work, number: int, _: None) -> Value:
    actor = _reader[0].actor
    actor.where.call_one(number).get()
    return actor.value.call_one(number).get()


def _read(work: Work, number: int, picks: torch.Tensor | None) -> Value:
    here = _reader[0]
    if picks is not None:  # its owner puts them into one piece
        here.buffer = here.actor.readable.call_one(picks).get()
    here.buffer.read_into(here.target.view(torch.uint8)).get()
    if work.leaves > 1:
        return dict(zip(work.names, here.target.chunk(work.leaves), strict=True))
    return here.target.reshape(-1, min(ROW, work.nbytes) // 8)
