"""Hosts of one process, with a store open on each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

import memstore
from memstore.distributed.rules import Roster, group_of
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


def join_anew(cluster: Cluster) -> Roster:
    """Begins the next epoch, with the members as they are now."""
    members = tuple(home.member for home in cluster.homes)
    cluster.roster = msgspec.structs.replace(cluster.roster, epoch=cluster.roster.epoch + 1, members=members)
    for home in cluster.homes:
        home.adopt(cluster.roster)
    return cluster.roster


def await_(what: Callable[[], bool], seconds: float = 20.0) -> None:
    """Looks until it is so: what other threads do by themselves has no moment that could be waited for."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            pytest.fail("it doesn't come")
        time.sleep(0.005)
