"""Values of another host by registered memory, through Monarch over its TCP fallback, beside its bare RDMABuffer."""

from __future__ import annotations

from tests.benchmarks.on_hosts import not_here, two_hosts
from tests.benchmarks.peers.far import ROW, Work
from tests.benchmarks.peers.far_monarch import FarMonarch
from tests.benchmarks.peers.far_store import FarStore
from tests.benchmarks.report import Absent, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.by_hosts import take_turns
from tests.benchmarks.workloads.put_get import at_most

TITLE = 'Large values between two hosts, by transport="monarch"'
BY = "by transport=monarch"  # in the headings: `remote` has the same by TCP
MOST_ROUNDS = 11
MIB = 1 << 20


def measure(session: Session) -> Workload:
    nowhere = not_here("remote-rdma", TITLE)
    if nowhere is not None:
        return nowhere
    lacking = FarMonarch.missing()
    if lacking is not None:
        return Workload("remote-rdma", TITLE, "", [], [], absent=[Absent("any of it", lacking)])
    rounds = min(session.rounds, MOST_ROUNDS)
    large = Work("large", (16 if session.quick else 256) * MIB)
    slices = Work("slices", (16 if session.quick else 64) * MIB, picks=1000)
    with session.started([FarStore, FarMonarch], two_hosts(session, "monarch")) as (peers, absent):
        laps = {work.id: take_turns(work, peers, rounds) for work in (large, slices)}
    what = f"first get of {large.nbytes // MIB} MiB of another host"
    call = laps["large"].series(f"{what}, {BY}")
    used = laps["large"].series_used(f"{what}, until summed, {BY}")
    rows = laps["slices"].series(f"{slices.picks:,} slices of {ROW >> 10} KiB of another host's value, {BY}")
    bare = FarMonarch.name
    goals = [at_most(series.title, series, 1.2, bare) for series in (call, used)]
    return Workload(
        id="remote-rdma",
        title=TITLE,
        text="Two hosts as in `remote`, served with `--transport monarch`: index processes read each other's "
        "registered memory through Monarch. It falls back to TCP, since there is no ibverbs here: so this shows what "
        "the way costs, and not what RDMA would bring. Monarch reads one RDMABuffer of the whole value into warm "
        "memory, its handle was handed over before, and rows are put into one piece by their owner.",
        series=[call, used, rows],
        goals=goals if any(peer.name == bare for peer in peers) else [],
        absent=absent,
    )
