"""Hosts of one process, with a store open on each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

import memstore
from memstore.distributed.rules import Roster, group_of
from memstore.distributed.rules.directory import begin
from tests.distributed.homes import Home, claim, join


@dataclass
class Cluster:
    """`stores[i]` is open on `homes[i]`."""

    homes: list[Home]
    stores: list[memstore.Store]
    roster: Roster
    claimed: set[str] = field(default_factory=set[str])

    def key_at(self, number: int, name: str = "k") -> str:
        """A key that this host owns; others under the same name are of the same group."""
        return next(key for key in self.keys_at(number, name))

    def keys_at(self, number: int, name: str = "k") -> Iterator[str]:
        """Such keys, each of another group."""
        for group in itertools.count():
            key = f"{number}-{group}/{name}"
            if key not in self.claimed:
                claim(self.homes[0], self.homes[number], group_of(key.encode()))
                self.claimed.add(key)
            yield key


@contextmanager
def cluster_of(folder: str, *are_owners: bool) -> Generator[Cluster]:
    """Makes so many hosts; False: one that is never an owner."""
    with ExitStack() as stack:
        paths = [f"{folder}-{number}" for number in range(len(are_owners))]
        stores = [stack.enter_context(memstore.open(path, timeout=20.0)) for path in paths]
        homes = [
            stack.enter_context(Home(path, is_owner=is_owner)) for path, is_owner in zip(paths, are_owners, strict=True)
        ]
        yield Cluster(homes, stores, join(homes))


def hand_over(cluster: Cluster, key: str, taker: int) -> None:
    """Has the group of a key handed over to another host, and waits until it is there."""
    group, homes = group_of(key.encode()), cluster.homes
    giver = next(home for home in homes if home.look(lambda tables: tables.owned(group)) is not None)
    giver.run(lambda tables: begin(tables, group, homes[taker].member.id))

    def is_over() -> bool:
        roster = homes[0].standing().roster  # nobody asks for it here
        for home in homes[1:]:
            if home.standing().roster != roster:
                home.adopt(roster)
                homes[0].hear(home)
        return giver.look(lambda tables: tables.leaving(group)) is None

    await_(is_over)
    assert homes[taker].look(lambda tables: tables.owned(group)) is not None
    cluster.roster = homes[0].standing().roster


def await_(what: Callable[[], bool], seconds: float = 20.0) -> None:
    """Looks until it is so: what other threads do by themselves has no moment that could be waited for."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            pytest.fail("it doesn't come")
        time.sleep(0.005)
