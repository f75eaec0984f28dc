"""Relays by simulation: a broadcast to many hosts, of which some die, stop, lie, or lose what they have.

A round is the time in which a host receives one chunk of a parent that has it. Whom a host is sent to is what the rules
say (`rules/relays.py`); that it waits for hosts of a lesser depth alone, and tells the origin of a parent that is of no
use, is what `transfers` does, and stands here once more, in few words.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from memstore.distributed.rules import Tree, relays

CHUNKS = 16  # of the value
PATIENCE = 4  # rounds without a chunk, after which a parent is given up
LONGEST = 40  # rounds, for each chunk


class Host:
    """A host that fetches the value, over two streams.

    Attributes:
        is_up: it answers; else it has died.
        goes_on: it fetches; else it is stopped.
        is_true: it passes on what it has.
    """

    def __init__(self, id: bytes, chunks: int) -> None:
        self.id, self.ways = id, (Way(self, chunks), Way(self, chunks))
        self.is_up = self.goes_on = self.is_true = True

    @property
    def is_fetching(self) -> bool:
        return self.is_up and self.goes_on and not all(way.is_over for way in self.ways)


class Way:
    """One of its streams.

    Attributes:
        chunks: how many of its half are there, of `of`.
        parent: where it comes from; None: the origin.
        depth: 0: it hasn't begun, or was dropped.
        waits: rounds since the last chunk, or the last sign of the parent.
    """

    def __init__(self, host: Host, of: int) -> None:
        self.host, self.parent, self.of = host, None, of
        self.chunks = self.depth = self.waits = 0
        self.parent: Host | None

    @property
    def is_over(self) -> bool:
        return self.chunks == self.of


class Broadcast:
    """Hosts that fetch one value of an origin.

    Attributes:
        sent: chunks that the origin has sent.
        most: streams that a host served at the same time.
    """

    def __init__(self, count: int, seed: int = 0, chunks: int = CHUNKS) -> None:
        self.random, self.tree, self.chunks = random.Random(seed), Tree(), chunks
        self.hosts = {b"%016d" % number: Host(b"%016d" % number, chunks) for number in range(count)}
        self.sent = self.rounds = self.most = 0

    def ask(self, way: Way, lost: Host | None = None) -> None:
        parent, way.depth = self.tree.source_of(way.host.id, None if lost is None else lost.id)
        way.parent, way.waits = None if parent is None else self.hosts[parent], 0

    def round(self, ways: list[tuple[int, Way]]) -> None:
        self.rounds += 1
        had = {way: way.chunks for _, way in ways}
        served: dict[Host, int] = {}
        for half, way in ways:
            if not way.host.is_up or not way.host.goes_on or way.is_over:
                continue
            parent = way.parent
            if parent is None:
                self.sent += 1
                way.chunks += 1
                continue
            served[parent] = served.get(parent, 0) + 1
            its = parent.ways[half]
            if not parent.is_up or (had[its] > way.chunks and not parent.is_true):
                self.ask(way, parent)
            elif had[its] > way.chunks:
                way.chunks, way.waits = way.chunks + 1, 0
            elif self.is_refused(its, way):
                self.ask(way, parent)
            elif not parent.goes_on:  # it gives no sign; one that waits itself does
                way.waits += 1
                if way.waits > PATIENCE:
                    self.ask(way, parent)
        self.most = max(self.most, *served.values()) if served else self.most

    def is_refused(self, its: Way, way: Way) -> bool:
        """What a host needs isn't there: it waits only for one that is fetching it, of a lesser depth."""
        return its.chunks <= way.chunks and (not its.depth or its.is_over or its.depth >= way.depth)

    def run(self, each_round: Callable[[], None] = lambda: None) -> None:
        """Lets all fetch at once, until all that can have it. Raises AssertionError if that takes too long."""
        every = list(self.hosts.values())
        self.random.shuffle(every)
        ways = [(half, way) for host in every for half, way in enumerate(host.ways)]
        for _, way in ways:
            self.ask(way)
        while any(host.is_fetching for host in every):
            assert self.rounds < LONGEST * self.chunks, "hosts wait for what doesn't come"
            each_round()
            self.round(ways)

    def times_sent(self) -> float:
        return self.sent / (2 * self.chunks)

    def any_host(self) -> Host:
        return self.random.choice(list(self.hosts.values()))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100, 1000, 4000])
def test_the_origin_sends_twice_and_the_time_grows_as_the_logarithm(count: int) -> None:
    broadcast = Broadcast(count)
    broadcast.run()
    assert broadcast.times_sent() == min(count, relays.CHILDREN)
    assert broadcast.rounds <= CHUNKS + count.bit_length()
    assert broadcast.most <= 2 * relays.CHILDREN


@pytest.mark.parametrize("seed", range(20))
def test_hosts_that_die_stop_and_lie_hold_up_nobody(seed: int) -> None:
    broadcast = Broadcast(60, seed)
    bad = broadcast.random.sample(list(broadcast.hosts.values()), 12)

    def go_wrong() -> None:
        if broadcast.random.random() < 0.5 and bad:
            setattr(bad.pop(), broadcast.random.choice(["is_up", "goes_on", "is_true"]), False)

    broadcast.run(go_wrong)
    assert broadcast.times_sent() < 6


@pytest.mark.parametrize("seed", range(10))
def test_a_tenth_of_a_thousand_hosts_dies(seed: int) -> None:
    broadcast = Broadcast(1000, seed)

    def die() -> None:
        for _ in range(100 // CHUNKS):
            broadcast.any_host().is_up = False

    broadcast.run(die)
    assert broadcast.times_sent() < 6


@pytest.mark.parametrize("seed", range(20))
def test_an_origin_that_is_started_again_leaves_no_ring(seed: int) -> None:
    """Some streams ask it anew at once, others go on with parents of which it knows nothing."""
    broadcast = Broadcast(40, seed)

    def restart() -> None:
        if broadcast.rounds % 5 == 4 and broadcast.rounds < 20:
            broadcast.tree = Tree()
            ways = [way for host in broadcast.hosts.values() for way in host.ways if way.chunks < CHUNKS]
            for way in broadcast.random.sample(ways, len(ways)):
                if way.parent is None or broadcast.random.random() < 0.5:
                    broadcast.ask(way)

    broadcast.run(restart)
    assert broadcast.times_sent() < 8


@pytest.mark.parametrize("seed", range(20))
def test_copies_that_are_dropped_are_fetched_elsewhere(seed: int) -> None:
    broadcast = Broadcast(60, seed)

    def drop() -> None:
        host = broadcast.any_host()
        if all(way.chunks == CHUNKS for way in host.ways):
            for way in host.ways:
                way.chunks = way.depth = 0  # it answers that it has nothing
            host.goes_on = False

    broadcast.run(drop)


def test_a_host_that_asks_again_keeps_its_parent() -> None:
    tree = Tree()
    found = [tree.source_of(b"%d" % number) for number in range(7)]
    assert found == [tree.source_of(b"%d" % number) for number in range(7)]
    assert [depth for _, depth in found] == [1, 1, 2, 2, 2, 2, 3]
    assert [parent for parent, _ in found] == [None, None, b"0", b"0", b"1", b"1", b"2"]


def test_the_other_stream_of_a_reader_gets_the_same_new_parent() -> None:
    tree = Tree()
    for number in range(5):
        tree.source_of(b"%d" % number)
    assert tree.source_of(b"4") == (b"1", 2)
    new = tree.source_of(b"4", b"1")
    assert new[0] != b"1" and tree.source_of(b"4", b"1") == new


def test_a_host_that_was_lost_and_is_there_again_gets_children() -> None:
    tree = Tree()
    for number in range(3):
        tree.source_of(b"%d" % number)
    tree.source_of(b"2", b"0")
    parents = {tree.source_of(b"%d" % number)[0] for number in range(3, 9)}
    assert b"0" not in parents
    tree.source_of(b"0")
    assert b"0" in {tree.source_of(b"%d" % number)[0] for number in range(9, 40)}


# --- rules left out ---------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def without_a_bound_of_children(patch: Patch) -> None:
    patch.setattr(relays, "CHILDREN", 1 << 30)
    patch.setattr(Tree, "_choose", lambda self, reader, host, lost: next(iter(self._open), None))


def without_what_was_lost(patch: Patch) -> None:
    patch.setattr(Tree, "_give_up", lambda self, lost: None)


def without_spare_room(patch: Patch) -> None:
    patch.setattr(relays, "SPARE", -relays.CHILDREN)


def without_lesser_depths(patch: Patch) -> None:
    patch.setattr(Broadcast, "is_refused", lambda self, its, way: not its.depth or its.is_over)


def with_the_same_parent_again(patch: Patch) -> None:
    choose = Tree._choose
    patch.setattr(Tree, "_choose", lambda self, reader, host, lost: choose(self, reader, host, None))
    patch.setattr(Tree, "_give_up", lambda self, lost: None)
    patch.setattr(relays, "MOST_LOST", 1 << 30)


def each(test: Callable[[int], None]) -> Callable[[], None]:
    def run() -> None:
        for seed in range(10):
            test(seed)

    return run


MUTATIONS: dict[Callable[[Patch], None], Callable[[], None]] = {
    without_a_bound_of_children: lambda: test_the_origin_sends_twice_and_the_time_grows_as_the_logarithm(100),
    without_what_was_lost: each(test_hosts_that_die_stop_and_lie_hold_up_nobody),
    without_spare_room: each(test_a_tenth_of_a_thousand_hosts_dies),
    without_lesser_depths: each(test_an_origin_that_is_started_again_leaves_no_ring),
    with_the_same_parent_again: each(test_hosts_that_die_stop_and_lie_hold_up_nobody),
}


@pytest.mark.parametrize("leave_out", MUTATIONS, ids=lambda one: one.__name__)
def test_a_rule_that_is_left_out_is_found(leave_out: Callable[[Patch], None], monkeypatch: Patch) -> None:
    leave_out(monkeypatch)
    with pytest.raises(AssertionError):
        MUTATIONS[leave_out]()
