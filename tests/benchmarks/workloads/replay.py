"""Replay buffers that some processes fill while another samples them: how fast, and whether rows are torn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.benchmarks.measure import spread
from tests.benchmarks.peers.replay import (
    CpprbBuffer,
    ReplayPeer,
    StoreBuffer,
    TorchrlBuffer,
    TorchrlOverStore,
    TorchrlWithoutLock,
)
from tests.benchmarks.report import Absent, Beside, Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.by_writers import Home, Lap, Plan, Work, homes, take_laps

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64, 4 * KIB, 28 * KIB, 256 * KIB, 512 * KIB)
WRITERS, USUAL_WRITERS = (1, 2, 4), 2
USUAL_SIZE = 28 * KIB  # a frame stack of 84x84x4
MOST_ROWS, BUFFER_BYTES, BATCH_BYTES = 65_536, 256 * MIB, 2 * MIB
WRITTEN, SAMPLED = 64, 256  # rows, where that many are no more than BATCH_BYTES, and eight times as much
KINDS: tuple[type[ReplayPeer], ...] = (StoreBuffer, TorchrlOverStore, TorchrlBuffer, TorchrlWithoutLock, CpprbBuffer)
FASTER = 3.0  # than TorchRL's: the goal


class Case(NamedTuple):
    size: int
    writers: int


Measured = dict[Case, dict[str, list[Lap]]]  # and by the contestant's name


def plan_of(size: int, *, quick: bool = False) -> Plan:
    capacity = min(MOST_ROWS, (BUFFER_BYTES // 4 if quick else BUFFER_BYTES) // size)
    return Plan(size // 8, capacity, min(WRITTEN, BATCH_BYTES // size), min(SAMPLED, 8 * BATCH_BYTES // size, capacity))


def measure(session: Session) -> Workload:
    rounds, seconds = (1, 0.2) if session.quick else (5, 0.7)
    cases = [Case(size, USUAL_WRITERS) for size in SIZES]
    cases += [Case(USUAL_SIZE, writers) for writers in WRITERS if writers != USUAL_WRITERS]
    found: Measured = {}
    peers: Sequence[ReplayPeer] = ()
    absent: Sequence[Absent] = ()
    for size in SIZES:
        with (
            session.started(KINDS) as (here, missing),
            homes(here, plan_of(size, quick=session.quick), writers=max(WRITERS)) as running,
        ):
            peers, absent = here, missing
            for case in cases:
                if case.size == size:
                    found[case] = _laps(running, Work(case.writers, seconds, samples=True), rounds)
    by_size = [case for case in found if case.writers == USUAL_WRITERS]
    by_writers = [case for case in found if case.size == USUAL_SIZE]
    return Workload(
        id="replay",
        title="Replay buffers, filled while they are sampled",
        text=f"{USUAL_WRITERS} processes extend a full buffer, as fast as they can, while another samples it. All of a "
        "row's numbers are the same, and no two writers have a number in common: a row with two of them is torn. The "
        "time is that of the sampler's calls. TorchRL's buffer is safe by a lock around each call; without the lock "
        "it is shown to see what that costs. cpprb's is C++.",
        series=[
            _rates("size", found, by_size, peers),
            _rates("writers", found, by_writers, peers),
            _written(found, by_size, peers),
            _torn(found, by_size, peers),
        ],
        goals=[*(goal for case in by_size for goal in _goals(case, found[case])), _none_torn(found)],
        absent=list(absent),
    )


def _laps(here: list[Home], work: Work, rounds: int) -> dict[str, list[Lap]]:
    laps = take_laps(here, work, rounds=rounds)
    return {home.peer.name: taken for home, taken in zip(here, laps, strict=True)}


def _sampled(laps: list[Lap]) -> list[float]:
    """Rows a second, lap by lap."""
    return [lap.sampled.rows / lap.sampled.seconds for lap in laps if lap.sampled]


def _ratios(laps: list[Lap], ours: list[Lap]) -> list[float]:
    """How many times as long as memstore this took for a row, lap by lap."""
    return [own / its for own, its in zip(_sampled(ours), _sampled(laps), strict=True)]


def _rates(by: str, found: Measured, cases: list[Case], peers: Sequence[ReplayPeer]) -> Series:
    figures = [
        Figure(
            peer.name,
            peer.role,
            spread(_sampled(found[case][peer.name])),
            sum(lap.sampled.rows for lap in found[case][peer.name] if lap.sampled),
            spread(_ratios(found[case][peer.name], found[case][StoreBuffer.name])),
            x=float(case.size if by == "size" else case.writers),
            note=_note(peer, cases, found, "sizes" if by == "size" else "numbers of writers"),
        )
        for case in cases
        for peer in peers
    ]
    if by == "size":
        title, x_title = f"rows sampled a second, by their size, beside {USUAL_WRITERS} writers", "bytes of a row"
    else:
        title, x_title = f"rows of {USUAL_SIZE // KIB} KiB sampled a second, by the number of writers", "writers"
    unit = "B" if by == "size" else "n"
    return Series(f"sampled-by-{by}", title, "n/s", figures, "memstore", x_title, unit)


def _note(peer: ReplayPeer, cases: list[Case], found: Measured, of_all: str) -> str:
    torn = sum(_torn_of(found[case][peer.name]) for case in cases)
    return f"{peer.settings}{f'; {torn:,} of its rows were torn, over all {of_all}' if torn else ''}"


def _written(found: Measured, cases: list[Case], peers: Sequence[ReplayPeer]) -> Series:
    """What the writers got done meanwhile: a sampler is fast also if it keeps them away."""
    figures = [
        Figure(peer.name, peer.role, spread([lap.rows_written for lap in laps]), len(laps), x=float(case.size))
        for case in cases
        for peer in peers
        for laps in [found[case][peer.name]]
    ]
    title = f"rows written a second by {USUAL_WRITERS} writers meanwhile, by their size"
    return Series("written-by-size", title, "n/s", figures, "", "bytes of a row", "B")


def _torn(found: Measured, cases: list[Case], peers: Sequence[ReplayPeer]) -> Series:
    figures = [
        Figure(peer.name, peer.role, exactly(_torn_of(laps)), _rows_of(laps), x=float(case.size))
        for case in cases
        for peer in peers
        for laps in [found[case][peer.name]]
    ]
    return Series("torn", "torn rows, of all that were sampled", "n", figures, "", "bytes of a row", "B")


def _torn_of(laps: list[Lap]) -> int:
    return sum(lap.sampled.torn for lap in laps if lap.sampled)


def _rows_of(laps: list[Lap]) -> int:
    return sum(lap.sampled.rows for lap in laps if lap.sampled)


def _goals(case: Case, laps: dict[str, list[Lap]]) -> list[Goal]:
    theirs = laps.get(TorchrlBuffer.name)
    if theirs is None:
        return []
    what = f"rows of {case.size // KIB or case.size} {'KiB' if case.size >= KIB else 'B'} sampled beside {case.writers}"
    ratio, rate = spread(_ratios(theirs, laps[StoreBuffer.name])), spread(_sampled(theirs)).median
    one = Beside(f"{TorchrlBuffer.name}, a row", 1 / rate)
    return [Goal(f"{what} writers, against {TorchrlBuffer.name}", ratio, ">=", FASTER, "x", peer=one)]


def _none_torn(found: Measured) -> Goal:
    ours = [laps[StoreBuffer.name] for laps in found.values()]
    what = f"torn rows, of {sum(map(_rows_of, ours)):,} sampled"
    return Goal(what, exactly(sum(map(_torn_of, ours))), "<=", 0, "n")
