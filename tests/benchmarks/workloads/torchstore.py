"""A script written for TorchStore, beside TorchStore itself: what one changed import does to its times."""

from __future__ import annotations

from typing import NamedTuple

from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import Entrant, Samples, as_series
from tests.benchmarks.peers import needs
from tests.benchmarks.peers.torchstore_calls import Calls, MemstoreCalls, TorchStoreCalls
from tests.benchmarks.report import Absent, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import MIB, times_faster

TITLE = "TorchStore's calls"
KINDS = (MemstoreCalls, TorchStoreCalls)
MOST_ROUNDS = 15


class Kind(NamedTuple):
    """A value, and how many calls a burst has."""

    value: str
    title: str
    burst: int
    nbytes: int
    calls: tuple[str, ...] = ("put", "get", "fill")


def kinds(quick: bool) -> list[Kind]:
    large, ranks = (16 * MIB, 16_000_000) if quick else (256 * MIB, 208_000_000)
    return [
        Kind("small", "1 KiB", 20, 1024),
        Kind("leaves", "a state_dict of 300 tensors", 3, 0),
        Kind("large", f"{large // MIB} MiB", 1, large),
        Kind("ranks", f"300 tensors, {ranks // 1_000_000} MB, from 4 ranks to 2", 1, ranks, ("put", "fill")),
    ]


TITLES = {"put": "put of {}", "get": "get of {}", "fill": "get of {}, into tensors that are there"}


def measure(session: Session) -> Workload:
    missing = needs("monarch")
    if missing is not None:
        return Workload("torchstore", TITLE, missing, [], [], [Absent(kind.name, missing) for kind in KINDS])
    with session.started(KINDS) as (peers, absent):
        series = {
            (kind.value, call): _series(session, peers, kind, call)
            for kind in kinds(session.quick)
            for call in kind.calls
        }
    goals = [
        *(times_faster(f"{call} of 1 KiB", series["small", call], 10) for call in ("put", "get")),
        *(
            times_faster(TITLES[call].format("300 tensors"), series["leaves", call], 5)
            for call in ("put", "get", "fill")
        ),
        *(
            times_faster(TITLES[call].format("300 tensors from 4 ranks to 2"), series["ranks", call], 1.5)
            for call in ("put", "fill")
        ),
    ]
    return Workload(
        id="torchstore",
        title=TITLE,
        text="One script with TorchStore's calls, run with each of the two: puts under one key, and gets, in the "
        "process that puts; and, as torchtitan's trainer and generator do, a state_dict of 300 float32 DTensors that "
        "4 actors hold by rows and put, and 2 others get by columns into bfloat16 with strict=False, from the first "
        "one's begin to the last one's end. memstore's get without a target maps what is there and copies nothing. "
        "Each has a process of its own, and the time of asyncio is in it.",
        series=list(series.values()),
        goals=[goal for some in goals for goal in some],
        absent=absent,
    )


def _series(session: Session, peers: list[Calls], kind: Kind, call: str) -> Series:
    rounds = min(session.rounds, MOST_ROUNDS)
    samples = [Samples() for _ in peers]
    for peer in peers:
        peer.take(kind.value, call, 1, kind.nbytes)
    for turn in range(rounds):
        for place in range(len(peers)):
            number = (turn + place) % len(peers)
            back_memory(kind.nbytes)
            samples[number].rounds.append(list(peers[number].take(kind.value, call, kind.burst, kind.nbytes)))
    entrants = [Entrant(peer.name, peer.role, peer.settings) for peer in peers]
    title = f"{TITLES[call].format(kind.title)}, by TorchStore's calls"
    return as_series(f"{kind.value}-{call}", title, entrants, samples, reference="memstore")
