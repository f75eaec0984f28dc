"""Contestants that bring values from one host to another take turns: what `remote` and `remote-small` do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tests.benchmarks.machine import back_memory
from tests.benchmarks.measure import Entrant, Samples, as_series
from tests.benchmarks.peers.far import Far, Taken, Work
from tests.benchmarks.peers.far_store import FarStore
from tests.benchmarks.report import Series

LONGEST_BURST = 64  # calls of a contestant before the next one's turn: as many values are offered at once
BURST_BYTES = 1 << 20


class Laps:
    """What each contestant took, round by round."""

    def __init__(self, work: Work, peers: Sequence[Far], taken: Sequence[Sequence[Sequence[Taken]]]) -> None:
        self.work = work
        self._entrants = [Entrant(peer.name, peer.role, peer.settings) for peer in peers]
        self._taken = taken

    def calls(self) -> list[Samples]:
        return [Samples([[one.call for one in burst] for burst in bursts]) for bursts in self._taken]

    def used(self) -> list[Samples]:
        return [Samples([[one.used for one in burst] for burst in bursts]) for bursts in self._taken]

    def series(self, title: str) -> Series:
        return as_series(self.work.id, title, self._entrants, self.calls(), reference=FarStore.name)

    def series_used(self, title: str) -> Series:
        return as_series(f"{self.work.id}-used", title, self._entrants, self.used(), reference=FarStore.name)


def take_turns(work: Work, peers: Sequence[Far], rounds: int) -> Laps:
    """Values have other numbers in each turn, so that none is where it is wanted before it is asked for.

    The first burst of each warms up; its results are compared with the source, and those of the last.
    """
    burst = max(1, min(LONGEST_BURST, BURST_BYTES // work.moved))
    numbers = _bursts(burst)
    taken: list[list[list[Taken]]] = [[] for _ in peers]
    for peer in peers:
        _burst(peer, work, next(numbers), check=True)
    for turn in range(rounds):
        for place in range(len(peers)):
            i = (turn + place) % len(peers)
            taken[i].append(_burst(peers[i], work, next(numbers), check=False))
    for peer in peers:
        _burst(peer, work, next(numbers), check=True)
    return Laps(work, peers, taken)


def _bursts(size: int) -> Iterator[list[int]]:
    for first in itertools.count(0, size):
        yield list(range(first, first + size))


def _burst(peer: Far, work: Work, numbers: list[int], *, check: bool) -> list[Taken]:
    peer.offer(work, numbers)
    back_memory(work.moved)
    return peer.take(work, numbers, check=check)
