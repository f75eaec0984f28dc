"""What is fetched from another host, or put under a key that it owns; and the interface of those that do it.

Both sides make a value from its number alone, so that what arrived is compared without the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.benchmarks.on_hosts import TwoHosts
from tests.benchmarks.peers import Peer, Value, same

ROW = 16 << 10  # bytes of a slice
ELEMENT = 8  # bytes: all is int64


class Work(NamedTuple):
    """What one call moves.

    Attributes:
        nbytes: of a leaf.
        leaves: more than one: a state_dict.
        picks: so many rows of `ROW` bytes are read, other ones each time; 0: all of it.
        is_put: the reader puts it, instead of getting what the owner has put.
    """

    id: str
    nbytes: int
    leaves: int = 1
    picks: int = 0
    is_put: bool = False

    @property
    def names(self) -> list[str]:
        return [f"layers.{number}.weight" for number in range(self.leaves)]

    @property
    def moved(self) -> int:
        """The bytes that a call is about."""
        return self.picks * ROW or self.nbytes * self.leaves


class Taken(NamedTuple):
    """ns of one call: until it has returned, and until all that it brought was summed."""

    call: int
    used: int


class Far(Peer):
    """A way to bring values from one host to another. It has processes on both; its methods are called outside."""

    def __init__(self, root: Path, hosts: TwoHosts) -> None:
        super().__init__(root)
        self.hosts = hosts

    def offer(self, work: Work, numbers: Sequence[int]) -> None:
        """From now on the owner has these values. Not timed."""

    def take(self, work: Work, numbers: Sequence[int], *, check: bool) -> list[Taken]:
        """Gets them one after another, or puts them, on the reader's host."""
        raise NotImplementedError


# --- on the hosts -----------------------------------------------------------------------------------------------------


def value_of(work: Work, number: int) -> Value:
    """A tensor with rows of `ROW` bytes, or of one row if it is smaller; or a dict of flat ones."""
    whole = _base(work) + number
    if work.leaves > 1:
        return dict(zip(work.names, whole.chunk(work.leaves), strict=True))
    return whole.reshape(-1, min(ROW, work.nbytes) // ELEMENT)


def expected(work: Work, number: int) -> Value:
    whole = value_of(work, number)
    return whole[picks_of(work, number)] if work.picks and isinstance(whole, torch.Tensor) else whole


def picks_of(work: Work, number: int) -> torch.Tensor:
    """The rows that are read of the value of this number: in no order."""
    return torch.randperm(work.nbytes // ROW, generator=torch.Generator().manual_seed(number))[: work.picks]


def take_each(
    call: Callable[[Work, int, Any], Value | None], work: Work, numbers: Sequence[int], check: bool
) -> list[Taken]:
    """Times the call with each number; it is given what was made before: the value to put, or the rows to pick."""
    taken: list[Taken] = []
    for number in numbers:
        ready = value_of(work, number) if work.is_put else picks_of(work, number) if work.picks else None
        start = time.perf_counter_ns()
        found = call(work, number, ready)
        called = time.perf_counter_ns()
        if found is not None:
            _use(found)
        taken.append(Taken(called - start, time.perf_counter_ns() - start))
        if check and found is not None and not same(found, expected(work, number)):
            raise ValueError(f"{work.id}: what was got is not value {number}")
    return taken


def _use(found: Value) -> None:
    for tensor in [found] if isinstance(found, torch.Tensor) else found.values():
        tensor.sum()


@cache
def _base(work: Work) -> torch.Tensor:
    count = work.leaves * work.nbytes // ELEMENT
    return torch.randint(1 << 40, (count,), generator=torch.Generator().manual_seed(work.nbytes))
