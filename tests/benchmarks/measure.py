"""Interleaved timing.

Contestants take turns (A B C, then B C A, ...). In each round a contestant makes a burst of calls, each timed by
itself; a round's ratio compares the medians of two bursts that ran within the same fraction of a second, so that
whatever else the machine did falls on both. What a call returned is dropped after its time was taken.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from tests.benchmarks.report import Figure, Role, Series, Spread

WARM_UP_CALLS, FEW_CALLS = 3, 100
LONGEST_BURST = 64


def _nothing() -> None: ...


def _drop(result: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Contestant:
    """A call to time. `before` and `after` run outside the time; `most` bounds its calls, where each leaves bytes."""

    name: str
    role: Role
    call: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[object], object] = _drop
    most: int = 100_000
    note: str = ""


@dataclass(slots=True)
class Samples:
    """What a contestant took: ns, call by call, round by round."""

    rounds: list[list[int]] = field(default_factory=list)

    def all(self) -> list[float]:
        return [ns * 1e-9 for burst in self.rounds for ns in burst]

    def ratio_to(self, other: Samples) -> Spread:
        """How many times `other`'s time this took, round by round."""
        return spread([median(own) / median(its) for own, its in zip(self.rounds, other.rounds, strict=True)])


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise ValueError("a spread of no measurements")
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)])


def take_turns(contestants: Sequence[Contestant], *, rounds: int, burst_seconds: float = 0.03) -> list[Samples]:
    bursts = [_burst_size(contestant, rounds, burst_seconds) for contestant in contestants]
    samples = [Samples() for _ in contestants]
    for turn in range(rounds):
        gc.collect()
        for place in range(len(contestants)):
            i = (turn + place) % len(contestants)
            samples[i].rounds.append([_time_one(contestants[i]) for _ in range(bursts[i])])
    return samples


def _burst_size(contestant: Contestant, rounds: int, burst_seconds: float) -> int:
    """Warms up, and fits a burst into its time."""
    warm_up = [_time_one(contestant) for _ in range(WARM_UP_CALLS if contestant.most > FEW_CALLS else 1)]
    fitting = int(burst_seconds * 1e9 / max(min(warm_up), 1))
    return max(1, min(fitting, LONGEST_BURST, (contestant.most - WARM_UP_CALLS) // rounds))


def _time_one(contestant: Contestant) -> int:
    contestant.before()
    call = contestant.call
    start = time.perf_counter_ns()
    result = call()
    elapsed = time.perf_counter_ns() - start
    contestant.after(result)
    return elapsed


def compare(
    id: str, title: str, contestants: Sequence[Contestant], *, rounds: int, reference: str, burst_seconds: float = 0.03
) -> Series:
    """Times the contestants in turns. Every figure's ratio says how many times `reference`'s time it took."""
    samples = take_turns(contestants, rounds=rounds, burst_seconds=burst_seconds)
    entrants = [Entrant(contestant.name, contestant.role, contestant.note) for contestant in contestants]
    return as_series(id, title, entrants, samples, reference=reference)


class Entrant(NamedTuple):
    """Who was measured, as a figure says it."""

    name: str
    role: Role
    note: str = ""


def as_series(
    id: str, title: str, entrants: Sequence[Entrant], samples: Sequence[Samples], *, reference: str
) -> Series:
    """A figure for each, with how many times `reference`'s time it took."""
    base = next(sample for entrant, sample in zip(entrants, samples, strict=True) if entrant.name == reference)
    figures = [
        Figure(
            name=entrant.name,
            role=entrant.role,
            value=spread(sample.all()),
            calls=sum(map(len, sample.rounds)),
            ratio=sample.ratio_to(base),
            note=entrant.note,
        )
        for entrant, sample in zip(entrants, samples, strict=True)
    ]
    return Series(id=id, title=title, unit="s", figures=figures, reference=reference)
