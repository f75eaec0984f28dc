"""What it takes to write into a replay buffer: batches of large rows, and single small ones from two processes."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.measure import Entrant, Samples, as_series, spread
from tests.benchmarks.peers.replay import (
    CpprbBuffer,
    PlainCopy,
    ReplayPeer,
    StoreBuffer,
    TorchrlBuffer,
    TorchrlOverStore,
)
from tests.benchmarks.report import Absent, Beside, Figure, Goal, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.by_writers import Lap, Plan, Work, homes, take_laps
from tests.benchmarks.workloads.put_get import at_most

KIB, MIB = 1 << 10, 1 << 20
ROWS, ROW_BYTES, BUFFER_BYTES = 256, 28 * KIB, 112 * MIB
SMALL_BYTES, SMALL_CAPACITY, WRITERS = 64, 65_536, 2
KINDS: tuple[type[ReplayPeer], ...] = (StoreBuffer, TorchrlOverStore, TorchrlBuffer, CpprbBuffer)
COPIES, FASTER = 1.3, 20.0  # the goals: of a memcpy; than TorchRL's


def measure(session: Session) -> Workload:
    rounds, seconds = (1, 0.1) if session.quick else (10, 0.3)
    extended, absent = _extend(session, rounds, seconds)
    added, goals = _add(session, rounds, seconds)
    return Workload(
        id="replay-write",
        title="Writing into replay buffers",
        text=f"One process extends a full buffer by {ROWS} rows of {ROW_BYTES // KIB} KiB again and again, from one "
        f"thread; then {WRITERS} processes add single rows of {SMALL_BYTES} bytes to one buffer. Nobody samples "
        "meanwhile.",
        series=[extended, added],
        goals=[at_most(f"extend by {ROWS} rows of 28 KiB", extended, COPIES, PlainCopy.name), *goals],
        absent=absent,
    )


def _extend(session: Session, rounds: int, seconds: float) -> tuple[Series, list[Absent]]:
    capacity = ROWS * 2 if session.quick else BUFFER_BYTES // ROW_BYTES
    plan = Plan(ROW_BYTES // 8, capacity, ROWS, ROWS)
    with session.started((*KINDS, PlainCopy)) as (peers, absent):
        with homes(peers, plan, writers=1) as found:
            taken = take_laps(found, Work(1, seconds), rounds=rounds)
        samples = [Samples([[_ns_a_call(lap)] for lap in laps]) for laps in taken]
        entrants = [Entrant(peer.name, peer.role, peer.settings) for peer in peers]
        title = f"extend by {ROWS} rows of {ROW_BYTES // KIB} KiB"
        return as_series("extend", title, entrants, samples, reference="memstore"), absent


def _ns_a_call(lap: Lap) -> int:
    (one,) = lap.written
    return round(one.seconds / one.calls * 1e9)


def _add(session: Session, rounds: int, seconds: float) -> tuple[Series, list[Goal]]:
    plan = Plan(SMALL_BYTES // 8, SMALL_CAPACITY, ROWS, ROWS)
    with session.started(KINDS) as (peers, _):
        with homes(peers, plan, writers=WRITERS) as found:
            taken = take_laps(found, Work(WRITERS, seconds, single=True), rounds=rounds)
        rates = {peer.name: [lap.rows_written for lap in laps] for peer, laps in zip(peers, taken, strict=True)}
        title = f"single rows of {SMALL_BYTES} bytes added a second, by {WRITERS} processes together"
        return Series("add", title, "n/s", _figures(peers, rates), "memstore"), _goals(rates)


def _figures(peers: Sequence[ReplayPeer], rates: dict[str, list[float]]) -> list[Figure]:
    ours = rates[StoreBuffer.name]
    return [
        Figure(
            peer.name,
            peer.role,
            spread(rates[peer.name]),
            len(rates[peer.name]),
            spread([own / its for own, its in zip(ours, rates[peer.name], strict=True)]),
            note=peer.settings,
        )
        for peer in peers
    ]


def _goals(rates: dict[str, list[float]]) -> list[Goal]:
    theirs = rates.get(TorchrlBuffer.name)
    if theirs is None:
        return []
    ratio = spread([own / its for own, its in zip(rates[StoreBuffer.name], theirs, strict=True)])
    one = Beside(f"{TorchrlBuffer.name}, a row", 1 / spread(theirs).median)
    return [
        Goal(f"rows of 64 bytes added by 2 processes, against {TorchrlBuffer.name}", ratio, ">=", FASTER, "x", peer=one)
    ]
