"""Sharded puts that fail, on all ranks, soon, and with the reason; and the next put works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import memstore
from memstore.errors import (
    PartialCommitError,
    ShardMismatchError,
    StoreFullError,
    StoreTimeoutError,
    UnsupportedValueError,
    VersionConflictError,
)
from tests.ranks import calls
from tests.ranks.launcher import PATIENCE, Ranks
from tests.support.fork_server import ForkServer

LONG = 10 * PATIENCE  # a timeout that no test waits for: the answer comes before


def check_that_the_next_put_works(root: str, ranks: Ranks) -> None:
    (version,) = set(ranks.run(calls.put, root))
    with memstore.open(root) as store:
        assert store.version("key") == version and store.pending() == ()
        assert torch.equal(store.get("key")["w"][:, 0], torch.arange(float(ranks.world_size)).repeat_interleave(2))


def test_a_partial_is_refused_on_all_ranks(root: str, ranks4: Ranks) -> None:
    for error in ranks4.errors(calls.put_partial, root, LONG):
        assert isinstance(error, UnsupportedValueError), error
        assert "value['a']['w']" in str(error) and "Partial" in str(error)
    check_that_the_next_put_works(root, ranks4)


@pytest.mark.parametrize("bad", [0, 2])
def test_what_one_rank_cant_store_all_are_told(root: str, ranks4: Ranks, bad: int) -> None:
    errors = ranks4.errors(calls.put_unless, root, bad, LONG)
    assert isinstance(errors.pop(bad), UnsupportedValueError)
    for error in errors:
        assert isinstance(error, PartialCommitError) and error.missing_ranks == (bad,), error
        assert f"rank {bad} failed" in str(error) and "value['other']" in str(error)
    check_that_the_next_put_works(root, ranks4)


@pytest.mark.parametrize("bad", [0, 3])
def test_a_full_store_is_told_to_all_and_holds_no_part(root: str, ranks4: Ranks, bad: int) -> None:
    with memstore.open(root, capacity="8 MiB"):
        pass
    errors = ranks4.errors(calls.put_more_than_there_is_room_for, root, bad)
    assert isinstance(errors.pop(bad), StoreFullError)
    for error in errors:
        assert isinstance(error, PartialCommitError) and f"rank {bad} failed: StoreFullError" in str(error), error
    with memstore.open(root) as store:
        assert store.stats().pending_bytes == 0
    check_that_the_next_put_works(root, ranks4)


def test_other_shapes_are_named_with_their_ranks(root: str, ranks4: Ranks) -> None:
    for error in ranks4.errors(calls.put_shapes, root, 3):
        assert isinstance(error, ShardMismatchError), error
        assert "value['w'] has shape [8, 3] on rank 0 and [8, 4] on rank 3" in str(error)
    check_that_the_next_put_works(root, ranks4)


def test_replicas_that_differ_are_named_with_their_ranks(root: str, ranks4: Ranks) -> None:
    for error in ranks4.errors(calls.put_replicas, root, 3):
        assert isinstance(error, ShardMismatchError), error
        assert "value['layer']['w']: ranks 1 and 3 hold [2:4, 0:3]" in str(error)
    check_that_the_next_put_works(root, ranks4)


def test_an_expected_version_is_looked_at_once_for_all(root: str, ranks2: Ranks) -> None:
    (version,) = set(ranks2.run(calls.put_expecting, root, 0))
    for error in ranks2.errors(calls.put_expecting, root, 0):
        assert isinstance(error, VersionConflictError), error
    assert ranks2.run(calls.put_expecting, root, version)[0] > version


def test_many_puts_stay_in_step_whatever_fails(root: str, ranks4: Ranks) -> None:
    answers = ranks4.run(calls.put_and_look, root, 20)
    assert all(answer == answers[0] for answer in answers)
    assert [version > 0 for version in answers[0]] == [i % 2 == 0 for i in range(20)]


def test_a_rank_that_never_comes_is_named(root: str, ranks4: Ranks) -> None:
    """And later puts work: it has missed one, so the ranks are told apart by their groups."""
    ranks4.begin(_put_with_patience, root, 2, ranks=[0, 1, 2])
    for rank in (0, 1, 2):
        answer = ranks4.answer(rank)
        assert isinstance(answer.error, StoreTimeoutError), answer
        assert "rank 3 of 4 had put nothing within 2 s" in str(answer.error)
    assert isinstance(_late(root, ranks4, 3), StoreTimeoutError)
    check_that_the_next_put_works(root, ranks4)


def _put_with_patience(root: str, timeout: float) -> object:
    return calls.put(root, timeout=timeout)


def _late(root: str, ranks: Ranks, rank: int) -> Exception | None:
    """What it gets when it comes after all: what the others got."""
    ranks.begin(_put_with_patience, root, 60, ranks=[rank])
    return ranks.answer(rank).error


def test_rank_0_that_never_comes_is_named(root: str, ranks2: Ranks) -> None:
    ranks2.begin(_put_with_patience, root, 1, ranks=[1])
    answer = ranks2.answer(1)
    assert isinstance(answer.error, StoreTimeoutError), answer
    assert "rank 1 waited 1 s for rank 0" in str(answer.error)
    assert answer.seconds < 10
    ranks2.begin(_put_with_patience, root, 1, ranks=[0])
    assert "rank 1 of 2 had put nothing" in str(ranks2.answer(0).error)
    check_that_the_next_put_works(root, ranks2)


def test_puts_that_are_named_meet_by_their_names(root: str, ranks2: Ranks) -> None:
    assert ranks2.run(calls.put_named_steps, root, 1) == [[[0.0], [2.0], [3.0]]] * 2


def test_a_later_group_with_the_same_store_hears_nothing_of_the_one_before(root: str, ranks2: Ranks) -> None:
    one, two = ranks2.run(calls.put_in_a_later_group, root)
    assert one == two


@pytest.mark.full
def test_a_rank_that_leaves_a_call_out_is_one_behind(root: str, ranks2: Ranks) -> None:
    ranks2.begin(_put_with_patience, root, 1, ranks=[0])
    assert isinstance(ranks2.answer(0).error, StoreTimeoutError)
    for _ in range(3):
        for error in ranks2.errors(_put_with_patience, root, 1):
            assert isinstance(error, StoreTimeoutError), error
    with memstore.open(root) as store:
        assert "key" not in store and store.pending() == ()


def test_a_killed_rank_is_named(root: str, rank_server: ForkServer) -> None:
    with Ranks(rank_server, 3) as ranks:
        ranks.run(calls.put, root)
        ranks.kill(2)
        ranks.begin(_put_with_patience, root, 1, ranks=[0, 1])
        for rank in (0, 1):
            error = ranks.answer(rank).error
            assert isinstance(error, StoreTimeoutError) and "rank 2 of 3 had put nothing" in str(error)
    with memstore.open(root) as store:
        assert store.pending() == ()


def test_a_killed_rank_0_takes_the_groups_store_with_it(root: str, rank_server: ForkServer) -> None:
    with Ranks(rank_server, 2) as ranks:
        ranks.run(calls.put, root)
        ranks.kill(0)
        ranks.begin(_put_with_patience, root, LONG, ranks=[1])
        error = ranks.answer(1).error
    assert isinstance(error, PartialCommitError), error
    assert "rank 1 can't reach the store of its process group" in str(error)


def test_a_group_without_this_process_is_refused(root: str, ranks2: Ranks) -> None:
    for error in ranks2.errors(calls.put_in_a_group_of_others, root):
        assert isinstance(error, TypeError) and "this process is none of its ranks" in str(error)


def test_a_process_group_may_end_and_another_begin(root: str, rank_server: ForkServer, tmp_path: Path) -> None:
    with Ranks(rank_server, 2) as ranks:
        ranks.run(calls.put, root)
        for number in range(2):
            ranks.run(calls.begin_again, str(tmp_path / f"group{number}"))
            check_that_the_next_put_works(root, ranks)


def test_groups_that_follow_each_other_in_one_store_dont_mix(root: str, rank_server: ForkServer) -> None:
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    with Ranks(rank_server, 2) as ranks:
        versions: list[int] = []
        for number in range(3):
            ranks.run(calls.begin_again_in_one_store, store.port, f"group {number}")
            for _ in range(3):
                one, two = ranks.run(calls.put, root)
                assert one == two
                versions.append(one)
    assert versions == list(range(1, 10))
    with memstore.open(root) as opened:
        assert opened.pending() == ()
