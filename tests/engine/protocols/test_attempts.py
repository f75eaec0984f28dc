"""Sharded puts, rule by rule: docs/decisions/012-attempts.md. What a death leaves is in tests/crash/test_sharded.py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import lmdb
import pytest

from memstore.engine.catalog.tables import AttemptOutcome, PendingPart
from memstore.engine.format.records import RETIRED
from memstore.engine.protocols import sharded_put
from memstore.engine.protocols.attempts import Participant, ended
from memstore.engine.protocols.change import Content
from memstore.engine.protocols.sharded_put import give_up
from memstore.engine.protocols.sweep import sweep_all
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import (
    CorruptionError,
    PartialCommitError,
    ShardMismatchError,
    StoreFullError,
    UnknownOutcomeError,
    VersionConflictError,
)
from tests.engine import bytes_parts, bytes_store
from tests.engine.bytes_parts import age, check_rows, get, outcome, outcomes_of, part, parts_of, prepare, rank, version
from tests.engine.bytes_store import opened
from tests.inside import counters_of, owes_recovery
from tests.support import faults

A, B, C = b"a" * 5000, b"b" * 70_000, b"c" * 5000
DISAGREES = b"x" * 666_666


@pytest.fixture
def store(scratch: str) -> Iterator[Root]:
    with opened(scratch) as one:
        yield one
        check_rows(one)


def end(store: Root, member: Participant) -> AttemptOutcome:
    return give_up(store, member, ended(member, (), "for a test"), deadline_after(10))


def files(store: Root) -> int:
    return len(os.listdir(store.segments))


def is_clean(store: Root) -> bool:
    """Nobody has to recover."""
    return not owes_recovery(store)


# --- prepare and publish ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("values", [[A, B], [A, b""], [b"", b""]])
def test_all_parts_become_one_version(store: Root, order: tuple[int, int], values: list[bytes]) -> None:
    bytes_store.put(store, b"key", A)
    members = {number: part(store, rank(number), values[number]) for number in order[:1]}
    assert outcome(store, members[order[0]]) is None
    assert [(one.rank, one.key) for one in parts_of(store)] == [(order[0], b"key")]
    assert bytes_store.get(store, b"key") == A
    members[order[1]] = part(store, rank(order[1]), values[order[1]])
    assert [version(store, member) for member in members.values()] == [2, 2]
    assert get(store) == values and parts_of(store) == []
    assert counters_of(store).filling == 0


def test_a_key_and_its_attempts_are_apart_from_others(store: Root) -> None:
    one, other = part(store, rank(0, key=b"key"), A), part(store, rank(0, "second"), B)
    third = part(store, rank(1, key=b"yek"), A)
    assert len({one.number, other.number, third.number}) == 3
    assert [outcome(store, member) for member in (one, other, third)] == [None] * 3
    assert version(store, part(store, rank(1), C)) == 1
    assert get(store) == [A, C]
    assert version(store, part(store, rank(0, key=b"yek"), B)) == 2
    assert get(store, b"yek") == [B, A]


def test_a_rank_that_puts_again_replaces_its_part(store: Root) -> None:
    first = part(store, rank(0), A)
    again = part(store, rank(0), B)
    assert again.number == first.number and len(parts_of(store)) == 1
    assert counters_of(store).retired > 0
    last = part(store, rank(1), C)
    assert [version(store, member) for member in (first, again, last)] == [1, 1, 1]
    assert get(store) == [B, C]


def test_another_world_size_is_refused_and_the_attempt_goes_on(store: Root) -> None:
    first = part(store, rank(0), A)
    with pytest.raises(ShardMismatchError, match="has 2 ranks by rank 0, and 3 by rank 2"):
        prepare(store, rank(2, world=3), B)
    assert is_clean(store) and files(store) == 1
    part(store, rank(1), B)
    assert version(store, first) == 1


def test_who_is_refused_has_ended_what_is_over(store: Root) -> None:
    part(store, rank(0), B)
    over = part(store, rank(0, key=b"other", lease=0.0), A)
    with pytest.raises(ShardMismatchError):
        prepare(store, rank(2, world=3), B)
    assert [one.key for one in parts_of(store)] == [b"key"]
    with pytest.raises(PartialCommitError, match="its lease was over"):
        version(store, over)


def test_a_part_that_comes_late_gets_the_outcome(store: Root) -> None:
    first = part(store, rank(0), A)
    part(store, rank(1), B)
    assert version(store, first) == 1
    late = prepare(store, rank(1), C)
    assert isinstance(late, AttemptOutcome) and late.version == 1 and is_clean(store)
    assert get(store) == [A, B] and files(store) == 2 and parts_of(store) == []


def test_parts_are_no_files_of_dead_writers(store: Root) -> None:
    first = part(store, rank(0), A)
    sweep_all(store, deadline_after(10))
    assert files(store) == 1
    part(store, rank(1), B)
    assert version(store, first) == 1 and get(store) == [A, B]


def test_a_transaction_that_has_to_be_repeated(store: Root) -> None:
    """The catalog's map was full: of a prepare, of a publication, or of an end."""
    commits = frozenset({faults.COMMIT})
    other, first = part(store, rank(0, "other"), A), part(store, rank(0), A)
    with faults.at_step(2, faults.raising(lmdb.MapFullError("injected")), names=commits):  # the first is the claim's
        second = part(store, rank(1), B)
    with faults.at_step(1, faults.raising(lmdb.MapFullError("injected")), names=commits):
        assert version(store, first) == 1
    assert get(store) == [A, B] and version(store, second) == 1
    check_rows(store)
    newer = part(store, rank(0, "newer"), A)
    with faults.at_step(1, faults.raising(lmdb.MapFullError("injected")), names=commits):
        end(store, newer)
    with pytest.raises(PartialCommitError, match="published first"):
        version(store, other)


def test_a_plain_put_and_a_delete_leave_parts_alone(store: Root) -> None:
    first = part(store, rank(0), A)
    assert bytes_store.put(store, b"key", B) == 1
    bytes_store.delete(store, b"key")
    assert [one.number for one in parts_of(store)] == [first.number]
    part(store, rank(1), B)
    assert version(store, first) == 2 and get(store) == [A, B]


def test_a_put_over_a_sharded_value_takes_one_file_of_it_at_most(store: Root) -> None:
    """Puts of one size keep the file that they replace for the next one: here there are two that would suit."""
    for number in range(3):
        bytes_store.put(store, b"other", bytes([number]) * 5000)
    part(store, rank(0), A)
    assert version(store, part(store, rank(1), C)) == 4
    for number in range(6):
        value = bytes([number]) * 5000
        bytes_store.put(store, b"key", value)
        bytes_store.put(store, b"other", value[::-1])
        assert (bytes_store.get(store, b"key"), bytes_store.get(store, b"other")) == (value, value[::-1])
        check_rows(store)


def test_a_full_store_takes_no_part_and_ends_nothing(root: str) -> None:
    with opened(root, capacity=100_000) as store:
        first = part(store, rank(0), A)
        with pytest.raises(StoreFullError):
            prepare(store, rank(1), b"x" * 200_000)
        assert files(store) == 1
        part(store, rank(1), C)
        assert version(store, first) == 1
        check_rows(store)


def test_a_part_whose_file_is_gone(store: Root) -> None:
    first = part(store, rank(0), A)
    part(store, rank(1), B)
    (name, *_) = sorted(os.listdir(store.segments))
    os.unlink(f"{store.segments}/{name}")
    with pytest.raises(CorruptionError, match=r"somebody has removed it") as caught:
        outcome(store, first)
    assert caught.value.path == f"{store.segments}/{name}"
    end(store, first)
    sweep_all(store, deadline_after(10))
    assert files(store) == 0


def test_what_a_part_needs_is_on_disk_before_its_row(disk_root: str) -> None:
    with opened(disk_root, durability="disk") as store:
        part(store, rank(0, "first"), A)
        steps = faults.record(lambda: part(store, rank(1), B))
        commits = [number for number, name in enumerate(steps) if name == faults.COMMIT]
        assert "sync" in steps[commits[0] : commits[1]] and "sync_folder" in steps[commits[0] : commits[1]], steps


# --- who publishes ----------------------------------------------------------------------------------------------------


def test_who_waits_leaves_the_publication_to_the_last_one(store: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all would merge the same parts at once."""
    monkeypatch.setattr(sharded_put, "LOOK_EVERY", 3600.0)
    waits, begun = type(store.doorbell).wait, threading.Semaphore(0)

    def counted(*arguments: Any) -> Any:
        begun.release()
        return waits(*arguments)

    monkeypatch.setattr(type(store.doorbell), "wait", counted)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(version, store, part(store, rank(number, world=4), A), 60.0) for number in range(3)]
        assert all(begun.acquire(timeout=20) for _ in waiting), "each has looked, and found too few parts"
        last = part(store, rank(3, world=4), B)
        for one in waiting:
            with pytest.raises(TimeoutError):
                one.result(0.1)
        assert version(store, last) == 1
        assert [one.result(30) for one in waiting] == [1, 1, 1]


def test_who_waits_publishes_where_the_last_one_does_not(store: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_put, "LOOK_EVERY", 0.05)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(version, store, part(store, rank(number, world=3), A), 30.0) for number in range(2)]
        part(store, rank(2, world=3), B)  # and it dies
        assert [one.result(30) for one in waiting] == [1, 1]


def test_all_publish_at_once(store: Root) -> None:
    for number in range(1, 6):
        members = [part(store, rank(other, str(number), world=4), A) for other in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert {one.result(30) for one in [pool.submit(version, store, one) for one in members]} == {number}
        assert is_clean(store)


@pytest.mark.parametrize("before", [B, DISAGREES])
def test_parts_that_are_replaced_while_they_are_merged(store: Root, before: bytes) -> None:
    """Whatever the merge has found: the parts are looked at again."""
    first = part(store, rank(0), A)
    part(store, rank(1), before)

    def merge(parts: Sequence[PendingPart], said: Sequence[bytes]) -> Content:
        if b"%d" % len(before) in said:
            part(store, rank(1), C)
        return bytes_parts.merge(parts, said)

    found = sharded_put.outcome_of(store, first, merge, deadline_after(0), deadline_after(10))
    assert found is not None and found.version == 1 and get(store) == [A, C]


def test_parts_that_disagree_end_the_attempt_for_all(store: Root) -> None:
    first, second = part(store, rank(0), A), part(store, rank(1), DISAGREES)
    for member in (first, second, first):
        with pytest.raises(ShardMismatchError, match="they disagree"):
            version(store, member)
    assert parts_of(store) == [] and counters_of(store).filling == 0
    assert isinstance(prepare(store, rank(1), C), AttemptOutcome)


# --- versions that are expected ---------------------------------------------------------------------------------------


def test_a_version_that_is_expected(store: Root) -> None:
    part(store, rank(0), A, expect=0)
    assert version(store, part(store, rank(1), B)) == 1
    part(store, rank(0, "second"), B)
    assert version(store, part(store, rank(1, "second"), A, expect=1)) == 2


def test_it_is_looked_at_when_all_parts_are_there(store: Root) -> None:
    first = part(store, rank(0), A, expect=1)
    bytes_store.put(store, b"key", A)
    part(store, rank(1), B)
    assert version(store, first) == 2
    late = part(store, rank(0, "second"), A, expect=2)
    bytes_store.put(store, b"key", A)
    for member in (part(store, rank(1, "second"), B), late):
        with pytest.raises(VersionConflictError) as caught:
            version(store, member)
        assert (caught.value.expected, caught.value.found) == (2, 3)
    assert parts_of(store) == []


def test_ranks_that_expect_different_versions(store: Root) -> None:
    bytes_store.put(store, b"key", A)
    part(store, rank(0), A, expect=1)
    with pytest.raises(VersionConflictError, match="rank 0 1, rank 1 2"):
        version(store, part(store, rank(1), B, expect=2))


# --- give up ----------------------------------------------------------------------------------------------------------


def test_what_is_given_up_is_told_to_all_and_never_published(store: Root) -> None:
    first = part(store, rank(0, world=3), A)
    second = part(store, rank(1, world=3), B)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(version, store, first, 30.0)
        assert end(store, second).error == "PartialCommitError"
        with pytest.raises(PartialCommitError, match="for a test"):
            waiting.result(30)
    assert isinstance(prepare(store, rank(2, world=3), C), AttemptOutcome)
    assert get(store) is None and parts_of(store) == [] and counters_of(store).filling == 0


def test_what_was_published_is_not_given_up(store: Root) -> None:
    first = part(store, rank(0), A)
    assert version(store, part(store, rank(1), B)) == 1
    assert end(store, first).version == 1
    assert end(store, rank(0)).version == 1  # a rank that doesn't know yet that it has put its part
    assert get(store) == [A, B]


def test_a_rank_that_fails_before_it_has_a_part(store: Root) -> None:
    assert end(store, rank(1)).version == 0
    assert isinstance(prepare(store, rank(0), A), AttemptOutcome)
    first = part(store, rank(0, "second"), A)
    end(store, rank(1, "second"))
    with pytest.raises(PartialCommitError):
        version(store, first)


@pytest.mark.parametrize("then", ["nothing", "the same name begun again", "and published"])
def test_a_rank_that_looks_when_its_outcome_was_dropped(store: Root, then: str) -> None:
    """It was stopped for longer than a lease. It can't tell what became of its attempt, and ends nothing."""
    late = part(store, rank(0), A)
    assert version(store, part(store, rank(1), B)) == 1
    age(store, outcomes=True)
    sweep_all(store, deadline_after(10))
    assert outcomes_of(store) == []
    again = None if then == "nothing" else part(store, rank(0), C)
    if again is not None and then == "and published":
        assert version(store, part(store, rank(1), C)) == 2
    before = (parts_of(store), outcomes_of(store))
    with pytest.raises(UnknownOutcomeError, match="nothing is known"):
        outcome(store, late, 10.0)
    with pytest.raises(UnknownOutcomeError, match="nothing is known"):
        end(store, late)
    assert (parts_of(store), outcomes_of(store)) == before and is_clean(store)
    if again is not None:
        part_or_outcome = prepare(store, rank(1), A)
        assert isinstance(part_or_outcome, AttemptOutcome) is (then == "and published")
        assert version(store, again) == 2


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_an_attempt_is_over_when_all_its_parts_are(store: Root) -> None:
    first, second = part(store, rank(0, world=3), A), part(store, rank(1, world=3, lease=0.0), B)
    sweep_all(store, deadline_after(10))
    assert len(parts_of(store)) == 2
    age(store)
    assert outcome(store, first) is None, "until a sweep, what is over counts"
    sweep_all(store, deadline_after(10))
    for member in (first, second):
        with pytest.raises(PartialCommitError, match="its lease was over") as caught:
            version(store, member)
        assert caught.value.missing_ranks == (2,)
    assert files(store) == 0


@pytest.mark.parametrize("how", ["prepare", "put"])
def test_others_end_what_is_over(store: Root, how: str) -> None:
    first = part(store, rank(0, lease=0.0), A)
    if how == "prepare":
        part(store, rank(0, key=b"other"), b"")
    else:
        store.sweeps.looked_for_dead = 0.0
        bytes_store.put(store, b"other", B)
    assert [one.key for one in parts_of(store)] == [b"other"] * (how == "prepare")
    with pytest.raises(PartialCommitError, match="its lease was over"):
        version(store, first)


def test_a_part_that_comes_when_its_attempt_is_over_ends_it_for_all(store: Root) -> None:
    """It raises, so nobody may publish the attempt any more: neither who waits, nor another part of its rank."""
    first = part(store, rank(0, lease=0.0), A)
    late = prepare(store, rank(1), B)
    assert isinstance(late, AttemptOutcome) and late.error == "PartialCommitError"
    assert parts_of(store) == [] and [one.number for one in outcomes_of(store)] == [first.number]
    check_rows(store)
    with pytest.raises(PartialCommitError):
        version(store, first)


@pytest.mark.parametrize("rings", [False, True])
def test_a_rank_that_waits_takes_its_lease_on(store: Root, rings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the bell never rests: it belongs to many keys."""
    monkeypatch.setattr(sharded_put, "LOOK_EVERY", 0.05)
    first = part(store, rank(0, lease=0.5), A)
    (expires,) = (one.expires for one in parts_of(store))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(version, store, first, 60.0)
        deadline = time.monotonic() + 30
        while parts_of(store)[0].expires == expires:
            assert time.monotonic() < deadline
            if rings:
                bytes_store.put(store, b"key", b"inline")
            else:
                time.sleep(0.01)
        published = version(store, part(store, rank(1), B))
        assert waiting.result(30) == published


def test_a_part_does_not_bring_the_expiry_forward(store: Root) -> None:
    part(store, rank(0, lease=1000.0), A)
    (expires,) = (one.expires for one in parts_of(store))
    part(store, rank(0, lease=0.0), A)
    part(store, rank(1, lease=0.0), A)
    assert [one.expires for one in parts_of(store)] == [expires, expires]


def test_an_outcome_outlives_its_parts(store: Root) -> None:
    first = part(store, rank(0, lease=1000.0), A)
    (expires,) = (one.expires for one in parts_of(store))
    end(store, first)
    assert outcomes_of(store)[0].expires >= expires


def test_outcomes_go_in_time(store: Root) -> None:
    for number in range(40):
        end(store, rank(0, str(number)))
    age(store, outcomes=True)
    part(store, rank(0), A)
    assert 40 > len(outcomes_of(store)) >= 20
    for _ in range(20):
        part(store, rank(0), A)
    assert len(outcomes_of(store)) < 10
    sweep_all(store, deadline_after(10))
    assert outcomes_of(store) == []


# --- several attempts -------------------------------------------------------------------------------------------------


def test_a_publication_ends_older_attempts_of_the_key(store: Root) -> None:
    old, other = part(store, rank(0, "old"), A), part(store, rank(0, key=b"other"), A)
    new = part(store, rank(0, "new"), B)
    newest = part(store, rank(0, "newest"), C)
    part(store, rank(0, "old"), C)  # put again: that makes the attempt no newer
    part(store, rank(1, "new"), B)
    assert version(store, new) == 1
    with pytest.raises(PartialCommitError, match="attempt 'new', begun later, was published first"):
        version(store, old)
    assert {one.number for one in parts_of(store)} == {newest.number, other.number}
    with store.guard:
        rows = store.catalog.view(lambda transaction: [row.state for _, row in transaction.segments()])
    assert rows.count(RETIRED) == 2  # both parts of the old attempt


def test_pending_parts_of_a_key(store: Root) -> None:
    part(store, rank(0), A)
    part(store, rank(1, "other", world=3, lease=5.0), A)
    part(store, rank(1, key=b"yek"), A)
    found = sharded_put.pending_parts(store, b"key", inf)
    assert {(one.attempt, one.rank, one.world_size) for one, _ in found} == {("first", 0, 2), ("other", 1, 3)}
    assert sorted(left > 5 for _, left in found) == [False, True]
    assert len(sharded_put.pending_parts(store, None, inf)) == 3
