"""Sharded puts by hand: what schedules seldom come to."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.distributed.rules import Change, Client, PutPart, give_up_part, put_part, turn
from memstore.distributed.rules.messages import Forgotten, GiveUp, Look, PartsChanged, Pending, Publish
from memstore.engine import AttemptOutcome, Failure, PendingPart
from memstore.errors import HomeUnavailableError, ShardMismatchError, UnknownOutcomeError
from tests.distributed.rules.test_membership import cluster, key_at, run
from tests.distributed.rules.world import SECOND, Host, Process, World

LEASE = 10 * SECOND


def part_of(host: Host, key: bytes, rank: int = 0, world_size: int = 2) -> PutPart:
    put_id = host.tables.fill(7)
    return PutPart(PendingPart(key, "a", 0, rank, world_size, put_id, put_id, waits_ns=LEASE, host=host.id))


def prepare(world: World, process: Process, own: PutPart) -> AttemptOutcome | None:
    until = process.host.tables.now() + 5 * SECOND
    return run(world, process, put_part(process.client, own, b"said", until), seconds=0.5)


def look(world: World, process: Process, own: PutPart) -> AttemptOutcome | Pending:
    def merge(parts: Any, contents: Any) -> bytes:
        return b"7"

    return run(world, process, turn(process.client, own, merge, 0, was_complete=False, publishes=True), seconds=0.5)


def asked(host: Host, world: World, request: Any) -> Any:
    assert host.index is not None
    return world.answer(host, host.index, request)


def test_a_rank_that_looks_later_than_outcomes_are_kept_is_told_so() -> None:
    world = cluster(2)
    home, rank = world.hosts["h0"], world.start_process(world.hosts["h1"])
    own = part_of(rank.host, key_at(world, home))
    assert prepare(world, rank, own) is None
    world.run(20)  # the part's lease is over
    ended = look(world, rank, own)
    assert isinstance(ended, AttemptOutcome) and ended.failure is not None and "lease was over" in ended.failure.text
    home.tables.ends.clear()
    part = own.part
    assert asked(home, world, Look(part.key, "a", own.number)) == Forgotten()
    with pytest.raises(UnknownOutcomeError):
        look(world, rank, own)
    with pytest.raises(UnknownOutcomeError):
        run(world, rank, give_up_part(rank.client, own, Failure("PartialCommitError", "")))
    again = part_of(rank.host, part.key)
    assert prepare(world, rank, again) is None and again.number != own.number
    assert asked(home, world, Look(part.key, "a", own.number)) == Forgotten()  # that one is another


def test_parts_that_were_not_merged_are_neither_published_nor_given_up() -> None:
    world = cluster(2)
    home, rank = world.hosts["h0"], world.start_process(world.hosts["h1"])
    key = key_at(world, home)
    first, second = part_of(rank.host, key), part_of(rank.host, key)
    for own in (first, second):
        prepare(world, rank, own)
    third = part_of(rank.host, key, rank=1)
    prepare(world, rank, third)
    merged = (first.part.place, third.part.place)  # by somebody who had looked before the first was put again
    number = third.number
    assert asked(home, world, Publish(key, "a", number, merged, b"7")) == PartsChanged()
    failure = Failure("ShardMismatchError", "they differ")
    assert asked(home, world, GiveUp(key, "a", number, failure, parts=merged)) == PartsChanged()
    published = look(world, rank, third)
    assert isinstance(published, AttemptOutcome) and published.version
    assert home.tables.records[key].places == (second.part.place, third.part.place)
    world.run(5)
    assert first.part.place.put_id not in rank.host.tables.segments


def test_another_number_of_ranks_is_refused_and_the_attempt_goes_on() -> None:
    world = cluster(2)
    home, rank = world.hosts["h0"], world.start_process(world.hosts["h1"])
    key = key_at(world, home)
    own = part_of(rank.host, key)
    prepare(world, rank, own)
    other = part_of(rank.host, key, rank=2, world_size=3)
    with pytest.raises(ShardMismatchError, match="2 ranks by rank 0, and 3 by rank 2"):
        prepare(world, rank, other)
    assert other.part.place.put_id not in rank.host.tables.segments
    assert isinstance(look(world, rank, own), Pending)


def test_a_part_that_was_never_answered_can_not_come_after_its_rank_has_given_up() -> None:
    world = cluster(2)
    home, rank = world.hosts["h0"], world.start_process(world.hosts["h1"])
    key = key_at(world, home)
    run(world, rank, rank.client.commit([Change(key, b"x")], 1 << 62))  # it has a session there
    world.cut("h1", "h0", one_way=True)
    own = part_of(rank.host, key)
    with pytest.raises(HomeUnavailableError):
        prepare(world, rank, own)
    assert own.lane is not None
    world.heal()
    ended = run(world, rank, give_up_part(rank.client, own, Failure("StoreTimeoutError", "too late")))
    assert ended.failure == Failure("StoreTimeoutError", "too late") and ended.number == 0
    home.tables.ends.clear()
    assert own.lane is None and isinstance(rank.client, Client)
    world.run(20)
    assert not home.tables.pending
    assert not rank.host.tables.segments  # the audit has asked
