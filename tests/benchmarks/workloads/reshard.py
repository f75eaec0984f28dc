"""1 GiB that four ranks hold by rows and put; two ranks get it by columns, into tensors that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import Entrant, Samples, as_series
from tests.benchmarks.peers.sharded import DcpFolders, ShardedPeer, StoreShards, StoreShardsAnew, WarmCopies
from tests.benchmarks.report import Beside, Goal, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads import by_ranks
from tests.benchmarks.workloads.by_ranks import TENSORS, Handed, Plan
from tests.ranks.launcher import Ranks

KINDS = (StoreShards, StoreShardsAnew, DcpFolders, WarmCopies)
MOST_ROUNDS = 7


class Part(NamedTuple):
    """What of a lap a table shows."""

    id: str
    title: str
    ns: Callable[[Handed], int]


PARTS = (
    Part("whole", "put by 4 ranks, then got by 2", lambda lap: lap.filled - lap.start),
    Part("put", "put by 4 ranks", lambda lap: lap.published - lap.start),
    Part("get", "got by 2 ranks", lambda lap: lap.filled - lap.published),
)


def measure(session: Session) -> Workload:
    plan = Plan(publishers=(0, 1, 2, 3), followers=(0, 1), side=512 if session.quick else 2048)
    with session.started(KINDS) as (peers, absent), by_ranks.started(plan, peers) as ranks:
        laps = _take_turns(ranks, peers, plan, min(session.rounds, MOST_ROUNDS))
    entrants = [Entrant(peer.name, peer.role, peer.settings) for peer in peers]
    samples = [[Samples([[part.ns(lap)] for lap in taken]) for taken in laps] for part in PARTS]
    size = f"{plan.nbytes >> 20} MiB"
    return Workload(
        id="reshard",
        title=f"{size} of DTensors from one mesh to another",
        text=f"{TENSORS} float32 tensors of {plan.side:,} x {plan.side:,}, which 4 ranks hold as Shard(0) and put; 2 "
        "ranks get them as Shard(1), into memory that is there. A rank is a process with one thread, in a gloo group; "
        "the first two do both. Each step has other values. Rank 0 looks at the clock between barriers of all ranks.",
        series=[
            as_series(part.id, part.title, entrants, of_part, reference=StoreShards.name)
            for part, of_part in zip(PARTS, samples, strict=True)
        ],
        goals=_goals(size, peers, samples[0]),
        absent=absent,
    )


def _take_turns(ranks: Ranks, peers: Sequence[ShardedPeer], plan: Plan, rounds: int) -> list[list[Handed]]:
    """For each peer what rank 0 saw of each lap. The first warms up and is checked, as the last is."""
    for number in range(len(peers)):
        _lap(ranks, number, plan)
        ranks.run(by_ranks.check, number)
    laps: list[list[Handed]] = [[] for _ in peers]
    for turn in range(rounds):
        for place in range(len(peers)):
            number = (turn + place) % len(peers)
            laps[number].append(_lap(ranks, number, plan))
            if turn == rounds - 1:
                ranks.run(by_ranks.check, number)
            ranks.run(by_ranks.clear, number)
    return laps


def _lap(ranks: Ranks, number: int, plan: Plan) -> Handed:
    ranks.run(by_ranks.clear, number)
    back_memory(plan.nbytes)
    return ranks.run(by_ranks.hand_over, number)[0]


def _goals(size: str, peers: Sequence[ShardedPeer], samples: Sequence[Samples]) -> list[Goal]:
    """For an overwrite and for a new key: so many times as fast as the peer."""
    by_name = dict(zip([peer.name for peer in peers], samples, strict=True))
    peer, limit = by_name.get(DcpFolders.name), by_name[WarmCopies.name]
    if peer is None:
        return []
    return [
        Goal(
            f"{size} from 4 ranks to 2, {kind.name}, against {DcpFolders.name}",
            peer.ratio_to(by_name[kind.name]),
            ">=",
            5,
            "x",
            limit=Beside(WarmCopies.name, median(limit.all())),
            peer=Beside(DcpFolders.name, median(peer.all())),
        )
        for kind in (StoreShards, StoreShardsAnew)
    ]
