"""Hosts of one process, with a store open on each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec
import pytest

import memstore
from memstore.distributed.rules import View
from tests.distributed.homes import Home, join


@dataclass
class Cluster:
    """`stores[i]` is open on `homes[i]`."""

    homes: list[Home]
    stores: list[memstore.Store]
    view: View

    def key_at(self, number: int, name: str = "k") -> str:
        """A key whose home is that host; others under the same name are of the same group."""
        return next(key for key in self.keys_at(number, name))

    def keys_at(self, number: int, name: str = "k") -> Iterator[str]:
        """Such keys, each of another group."""
        for group in itertools.count():
            key = f"{group}/{name}"
            if self.view.home_of(key.encode()) == self.homes[number].member.id:
                yield key


@contextmanager
def cluster_of(folder: str, *are_homes: bool) -> Generator[Cluster]:
    """So many hosts; False: one that is no home."""
    with ExitStack() as stack:
        paths = [f"{folder}-{number}" for number in range(len(are_homes))]
        stores = [stack.enter_context(memstore.open(path, timeout=20.0)) for path in paths]
        homes = [
            stack.enter_context(Home(path, is_home=is_home)) for path, is_home in zip(paths, are_homes, strict=True)
        ]
        yield Cluster(homes, stores, join(homes))


def join_anew(cluster: Cluster) -> View:
    """The next epoch, with the members as they are now. What they were homes of before moves."""
    members = tuple(home.member for home in cluster.homes)
    view = msgspec.structs.replace(
        cluster.view, epoch=cluster.view.epoch + 1, members=members, before=cluster.view.homes
    )
    for home in cluster.homes:
        home.adopt(view)
    return view


def await_(what: Callable[[], bool], seconds: float = 20.0) -> None:
    """Looks until it is so: what other threads do by themselves has no moment that could be waited for."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            pytest.fail("it doesn't come")
        time.sleep(0.005)
