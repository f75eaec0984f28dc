"""Small values of keys that another host owns: a put of one that lies here, and a get of one that was never here."""

from __future__ import annotations

from tests.benchmarks.on_hosts import not_here, two_hosts
from tests.benchmarks.peers.far import Work
from tests.benchmarks.peers.far_monarch import FarMonarch
from tests.benchmarks.peers.far_sockets import FarSockets
from tests.benchmarks.peers.far_store import FarStore
from tests.benchmarks.report import Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.by_hosts import take_turns
from tests.benchmarks.workloads.put_get import at_most, times_faster

TITLE = "1 KiB and 64 KiB between two hosts"
KINDS = (FarStore, FarMonarch, FarSockets)
GET = Work("get", 1 << 10)
PUTS = (Work("put", 1 << 10, is_put=True), Work("put-64-kib", 64 << 10, is_put=True))


def measure(session: Session) -> Workload:
    nowhere = not_here("remote-small", TITLE)
    if nowhere is not None:
        return nowhere
    with session.started(KINDS, two_hosts(session)) as (peers, absent):
        get = take_turns(GET, peers, session.rounds).series("get of 1 KiB from another host")
        puts = [
            take_turns(work, peers, session.rounds).series(f"put of {work.nbytes >> 10} KiB, owned by another host")
            for work in PUTS
        ]
    sockets = FarSockets.name
    return Workload(
        id="remote-small",
        title=TITLE,
        text="Two hosts are network namespaces on this machine, joined by a virtual cable. Each get is of a version "
        "that its host has never had: one message to the owner. A put leaves the value here and sends its record: one "
        "message too. A plain socket sends a request and receives 1 KiB for a get, and echoes 1 KiB for a put. Monarch "
        "asks an actor twice for a get, as a store that asks first where a value is; for a put it sends the value.",
        series=[get, *puts],
        goals=[
            at_most("get of 1 KiB from another host", get, 5, sockets),
            *times_faster("get of 1 KiB from another host", get, 10),
            *(
                at_most(f"put of {work.nbytes >> 10} KiB owned by another host", put, 8, sockets)
                for work, put in zip(PUTS, puts, strict=True)
            ),
        ],
        absent=absent,
    )
