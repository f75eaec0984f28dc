"""A trainer publishes the weights of a model; a worker that serves the model copies them into its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import Entrant, Samples, as_series
from tests.benchmarks.peers.sharded import DcpFolders, ShardedPeer, StoreShards, TorchStore, WarmCopies
from tests.benchmarks.peers.updates import GlooBroadcast, RayStore, SafetensorsFiles
from tests.benchmarks.report import Beside, Goal, Series, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads import by_ranks
from tests.benchmarks.workloads.by_ranks import TENSORS, Handed, Plan
from tests.benchmarks.workloads.put_get import times_faster
from tests.ranks.launcher import Ranks

KINDS = (StoreShards, SafetensorsFiles, GlooBroadcast, RayStore, DcpFolders, TorchStore, WarmCopies)
MOST_ROUNDS = 7


def measure(session: Session) -> Workload:
    side = 256 if session.quick else 1448  # 512 MiB: with 1 GiB, all peers together need more than 23
    plan = Plan(publishers=(0,), followers=(1,), side=side)
    with session.started(KINDS) as (peers, absent), by_ranks.started(plan, peers) as ranks:
        woken, late = _take_turns(ranks, peers, plan, min(session.rounds, MOST_ROUNDS))
    size = f"{plan.nbytes >> 20} MiB"
    kept = [peer for peer in peers if peer.id != GlooBroadcast.id]  # a broadcast leaves nothing for who comes later
    handing = [peer for peer in peers if peer.role != "limit"]
    whole = _samples(handing, woken, lambda lap: lap.filled - lap.start)
    put = _samples(kept, late, lambda lap: lap.published - lap.start)
    fill = _samples(kept, late, lambda lap: lap.filled - lap.published)
    update = Samples([[lap.filled - lap.published] for lap in woken[StoreShards.id]])
    series = [
        _series("update", "from the begin of the trainer's call until the worker has filled", handing, whole),
        _series("publish", "the trainer's call", kept, put),
        _series("fill", "a worker fills from what is there", kept, fill),
    ]
    return Workload(
        id="engine",
        title=f"{size} of a trainer's weights, copied into a worker's model",
        text=f"A trainer has {TENSORS} float32 tensors of {plan.side:,} x {plan.side:,}, and a worker the same ones; "
        "each is a process with one thread. First the worker waits, and the trainer publishes a step: time runs until "
        "the worker's tensors have it. Then the trainer publishes, and afterwards the worker fills: this is what a "
        "worker does that comes late, or is started again. Each step has other values, and all of it is compared. "
        "vLLM's own worker has a script: tests/benchmarks/scripts/vllm_updates.py.",
        series=series,
        goals=[
            *times_faster(f"{size} of weights, {series[0].title}", series[0], 2),
            _against_memcpy(f"{size} of weights, {series[1].title}", put, 1.2),
            _against_memcpy(f"{size} of weights, {series[2].title}", fill, 1.15),
            Goal(
                f"{size} of weights, a late worker's fill, against one that has waited",
                fill[StoreShards.id].ratio_to(update),
                "<=",
                1.3,
                "x",
                limit=Beside("from the end of the trainer's call", median(update.all())),
            ),
        ],
        absent=absent,
    )


def _against_memcpy(what: str, samples: dict[str, Samples], goal: float) -> Goal:
    """The goal that memstore takes at most so many times what a copy takes the same rank."""
    own, limit = samples[StoreShards.id], samples[WarmCopies.id]
    return Goal(
        f"{what}, against memcpy",
        own.ratio_to(limit),
        "<=",
        goal,
        "x",
        limit=Beside(WarmCopies.name, median(limit.all())),
    )


def _take_turns(
    ranks: Ranks, peers: Sequence[ShardedPeer], plan: Plan, rounds: int
) -> tuple[dict[str, list[Handed]], dict[str, list[Handed]]]:
    """Returns the laps in which the worker waits, and those in which it comes late; the first of each warms up."""
    late = [number for number, peer in enumerate(peers) if peer.id != GlooBroadcast.id]
    found: list[dict[str, list[Handed]]] = []
    for action, numbers in ((by_ranks.wake_and_fill, range(len(peers))), (by_ranks.hand_over, late)):
        laps: dict[str, list[Handed]] = {peers[number].id: [] for number in numbers}
        for turn in range(rounds + 1):
            for place in range(len(numbers)):
                number = numbers[(turn + place) % len(numbers)]
                ranks.run(by_ranks.clear, number)
                back_memory(plan.nbytes)
                handed = ranks.run(action, number)
                ranks.run(by_ranks.check, number)
                if turn:
                    laps[peers[number].id].append(_together(handed))
        found.append(laps)
    return found[0], found[1]


def _together(handed: Sequence[Handed]) -> Handed:
    return Handed(
        min(one.start for one in handed), max(one.published for one in handed), max(one.filled for one in handed)
    )


def _samples(
    peers: Sequence[ShardedPeer], laps: dict[str, list[Handed]], ns: Callable[[Handed], int]
) -> dict[str, Samples]:
    return {peer.id: Samples([[ns(lap)] for lap in laps[peer.id]]) for peer in peers}


def _series(id: str, title: str, peers: Sequence[ShardedPeer], samples: dict[str, Samples]) -> Series:
    entrants = [Entrant(peer.name, peer.role, peer.settings) for peer in peers]
    return as_series(id, title, entrants, [samples[peer.id] for peer in peers], reference=StoreShards.name)
