"""Four ranks publish 64 MiB of weights, again and again; two ranks of another mesh follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import Entrant, Samples, as_series
from tests.benchmarks.peers.sharded import DcpFolders, ShardedPeer, StoreShards, TorchStore, WarmCopies
from tests.benchmarks.report import Goal, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.workloads import by_ranks
from tests.benchmarks.workloads.by_ranks import Followed, Handed, Plan
from tests.benchmarks.workloads.put_get import times_faster
from tests.ranks.launcher import Ranks

KINDS = (StoreShards, DcpFolders, TorchStore, WarmCopies)
STEPS = 8  # of a lap in which nobody waits for anybody
MOST_ROUNDS = 7


class Lap(NamedTuple):
    """What each rank did in one round: a step that followers wait for, and then steps one right after the other."""

    woken: list[Handed]
    followed: list[Followed]  # empty for a limit, which hands nothing over

    @property
    def from_start(self) -> int:
        return max(rank.filled for rank in self.woken) - min(rank.start for rank in self.woken)

    @property
    def from_publication(self) -> int:
        """From the first return of a publisher's call to the last follower's. A limit only copies meanwhile."""
        if not self.followed:
            return max(rank.filled - rank.start for rank in self.woken)
        return max(rank.filled for rank in self.woken) - min(rank.published for rank in self.woken if rank.published)

    def ns_a_step(self, ranks: Sequence[int]) -> int:
        """What a step took the slowest of these ranks, of those that it published or filled."""
        return max(round(self.followed[rank].seconds / self.followed[rank].steps * 1e9) for rank in ranks)


class Part(NamedTuple):
    """What of a lap a table shows."""

    id: str
    title: str
    ns: Callable[[Lap], int]
    with_limit: bool

    def series(self, peers: Sequence[ShardedPeer], laps: Sequence[list[Lap]]) -> Series:
        shown = [(peer, of) for peer, of in zip(peers, laps, strict=True) if self.with_limit or peer.role != "limit"]
        entrants = [Entrant(peer.name, peer.role, peer.settings) for peer, _ in shown]
        samples = [Samples([[self.ns(lap)] for lap in taken]) for _, taken in shown]
        return as_series(self.id, self.title, entrants, samples, reference=StoreShards.name)


def measure(session: Session) -> Workload:
    plan = Plan(publishers=(0, 1, 2, 3), followers=(4, 5), side=128 if session.quick else 512)
    with session.started(KINDS) as (peers, absent), by_ranks.started(plan, peers) as ranks:
        laps = _take_turns(ranks, peers, plan, min(session.rounds, MOST_ROUNDS))
    size = f"{plan.nbytes >> 20} MiB"
    series, goals = _results(plan, peers, laps, size)
    return Workload(
        id="follow",
        title=f"{size} of weights, followed by ranks of another mesh",
        text=f"4 ranks hold {size} of float32 weights in {by_ranks.TENSORS} tensors as Shard(0) and publish them; 2 "
        "other ranks wait for them and fill tensors of their own, which are Shard(1). A rank is a process with one "
        f"thread. Latency is of one step that is waited for. Then {STEPS} steps are published one right after the "
        "other, and followers fill the newest that is there until they have the last.",
        series=series,
        goals=goals,
        absent=absent,
    )


def _take_turns(ranks: Ranks, peers: Sequence[ShardedPeer], plan: Plan, rounds: int) -> list[list[Lap]]:
    """For each peer its laps, the first of which warms up and is not among them."""
    laps: list[list[Lap]] = [[] for _ in peers]
    for turn in range(rounds + 1):
        for place in range(len(peers)):
            number = (turn + place) % len(peers)
            lap = _lap(ranks, number, plan, peers[number])
            if turn:
                laps[number].append(lap)
    return laps


def _lap(ranks: Ranks, number: int, plan: Plan, peer: ShardedPeer) -> Lap:
    """What the followers have is compared bit for bit after either part."""
    ranks.run(by_ranks.clear, number)
    back_memory(plan.nbytes)
    woken = ranks.run(by_ranks.wake_and_fill, number)
    ranks.run(by_ranks.check, number)
    if peer.role == "limit":
        return Lap(woken, [])
    ranks.run(by_ranks.clear, number)
    back_memory(plan.nbytes * STEPS)  # a folder a step
    followed = ranks.run(by_ranks.follow, number, STEPS)
    ranks.run(by_ranks.check, number)
    return Lap(woken, followed)


def _results(
    plan: Plan, peers: Sequence[ShardedPeer], laps: Sequence[list[Lap]], size: str
) -> tuple[list[Series], list[Goal]]:
    parts = (
        Part(
            "latency", "from the publication until all have filled", lambda lap: lap.from_publication, with_limit=True
        ),
        Part(
            "from-start",
            "from the start of the call until all have filled",
            lambda lap: lap.from_start,
            with_limit=True,
        ),
        Part("filled", "time a step that followers fill", lambda lap: lap.ns_a_step(plan.followers), with_limit=False),
        Part(
            "published", "time a step that is published", lambda lap: lap.ns_a_step(plan.publishers), with_limit=False
        ),
    )
    series = [part.series(peers, laps) for part in parts]
    torn = sum(rank.torn for taken in laps for lap in taken for rank in lap.followed)
    return series, [
        *times_faster(f"{size} followed by 2 of 4 ranks, {parts[0].title}", series[0], 2),
        *times_faster(f"the same, {parts[2].title}", series[2], 2),
        Goal("the same, steps of which a follower had a part", exactly(float(torn)), "<=", 0, "n"),
    ]
