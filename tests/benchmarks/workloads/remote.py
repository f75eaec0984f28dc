"""Values whose bytes lie on another host: a large tensor, slices of one, a state_dict, several readers at once."""

from __future__ import annotations

from typing import NamedTuple

from tests.benchmarks.measure import spread
from tests.benchmarks.on_hosts import READER, TwoHosts, not_here, two_hosts
from tests.benchmarks.peers.far import ROW, Work
from tests.benchmarks.peers.far_monarch import FarMonarch
from tests.benchmarks.peers.far_readers import FarReaders
from tests.benchmarks.peers.far_sockets import FarSockets
from tests.benchmarks.peers.far_store import FarStore
from tests.benchmarks.peers.sharded import TorchStore
from tests.benchmarks.report import Absent, Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.by_hosts import take_turns
from tests.benchmarks.workloads.put_get import at_most, times_faster

TITLE = "Large values and slices between two hosts"
KINDS = (FarStore, FarMonarch, FarSockets)
MOST_ROUNDS, CROWD_ROUNDS = 11, 5
READERS = 8
ONE_TRANSFER = 1.02  # of the value's bytes: headers and acknowledgements too
LEAVES = 300
MIB = 1 << 20


def measure(session: Session) -> Workload:
    nowhere = not_here("remote", TITLE)
    if nowhere is not None:
        return nowhere
    hosts = two_hosts(session)
    rounds = min(session.rounds, MOST_ROUNDS)
    large = Work("large", (16 if session.quick else 256) * MIB)
    slices = Work("slices", (16 if session.quick else 64) * MIB, picks=1000)
    state = Work("state-dict", (16 if session.quick else 64) * MIB // LEAVES // 64 * 64, leaves=LEAVES)
    with session.started(KINDS, hosts) as (peers, absent):
        laps = {work.id: take_turns(work, peers, rounds) for work in (large, slices, state)}
        store = next(peer for peer in peers if isinstance(peer, FarStore))
        asked = {work.id: store.asked(work, -1) for work in (large, slices, state)}
        crowd = _crowd(hosts, store, large, min(session.rounds, CROWD_ROUNDS))
    size = f"{large.nbytes // MIB} MiB"
    got = f"first get of {size} of another host"
    call, used = laps["large"].series(got), laps["large"].series_used(f"{got}, until summed")
    rows = laps["slices"].series(f"{slices.picks:,} slices of {ROW >> 10} KiB of another host's value")
    what = f"state_dict of {LEAVES} leaves of another host"
    leaves = laps["state-dict"].series(f"{what}, {state.moved // MIB} MiB")
    sockets = FarSockets.name
    return Workload(
        id="remote",
        title=TITLE,
        text="Two hosts are network namespaces on this machine, joined by a virtual cable; each value is a version "
        "that the reader's host has never had. A get brings it into the store of the reader's host and maps it; rows "
        "come into the reader's own memory. Plain sockets send from memory that is there, and receive into memory that "
        "is warm. Monarch reads through an RDMABuffer over its TCP fallback, since there is no ibverbs here; its "
        "handle was handed over before, and rows are put into one piece by their owner.",
        series=[call, used, rows, leaves, crowd.series(size)],
        goals=[
            at_most(got, call, 1.25, sockets),
            at_most(f"{got}, until summed", used, 1.25, sockets),
            *times_faster(got, call, 4),
            at_most(f"{slices.picks:,} slices", rows, 1.25, sockets),
            *times_faster(f"{slices.picks:,} slices", rows, 4),
            at_most(what, leaves, 1.1, sockets),
            Goal(f"{what}: messages to its owner", exactly(float(asked[state.id].messages)), "<=", 1, "n"),
            Goal(f"{what}: sent, of its bytes", exactly(asked[state.id].sent / state.moved), "<=", ONE_TRANSFER, "x"),
            Goal(
                f"{size} for {READERS} readers of another host: sent, of its bytes",
                spread([sent / large.moved for sent in crowd.sent]),
                "<=",
                ONE_TRANSFER,
                "x",
            ),
        ],
        absent=[
            *absent,
            Absent("Ray", "nobody has written how to start its nodes on two hosts of one machine"),
            Absent(TorchStore.name, TorchStore.missing() or ""),
        ],
        notes=[
            f"{work}: messages to the owner {one.messages}, requests for bytes {one.requests} a call."
            for work, one in asked.items()
        ],
    )


class Crowd(NamedTuple):
    """What several readers of a host took at once, in turns with one reader."""

    seconds: dict[int, list[float]]  # by the number of readers, until the last had summed
    sent: list[int]  # bytes that left the owner's host for all of them

    def series(self, size: str) -> Series:
        alone = self.seconds[1]
        figures = [
            Figure(
                name=f"{count} reader{'s' if count > 1 else ''} of one host",
                role="memstore",
                value=spread(taken),
                calls=len(taken),
                ratio=spread([one / other for one, other in zip(taken, alone, strict=True)]),
            )
            for count, taken in self.seconds.items()
        ]
        title = f"{size} of another host, until all readers have summed it"
        return Series("readers", title, "s", figures, reference=figures[0].name)


def _crowd(hosts: TwoHosts, store: FarStore, work: Work, rounds: int) -> Crowd:
    crowd = Crowd({1: [], READERS: []}, [])
    readers = FarReaders(hosts.process_on(READER), READERS)
    for number in range(rounds):
        for count, taken in crowd.seconds.items():
            store.offer(work, [number])
            before = store.owner.sent_bytes()
            taken.append(readers.read(work, number, count, check=number in (0, rounds - 1)))
            if count == READERS:
                crowd.sent.append(store.owner.sent_bytes() - before)
    readers.close()
    return crowd
