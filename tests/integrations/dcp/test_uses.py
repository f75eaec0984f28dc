"""What trainers do with checkpoints: parts that say their own state, experts, uneven shards, groups of some ranks."""

from __future__ import annotations

import pytest

import memstore
from tests.integrations.dcp import uses_on_ranks
from tests.ranks.launcher import Ranks


@pytest.mark.parametrize("planners", ["memstore", pytest.param("torch", marks=pytest.mark.full)])
def test_a_trainer_goes_on_from_its_parts(ranks4: Ranks, scratch: str, key: str | None, planners: str) -> None:
    assert ranks4.run(uses_on_ranks.train_on, scratch, key, planners) == [(True, True)] * 4


def test_ranks_that_hold_different_tensors_in_different_orders(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(uses_on_ranks.experts, scratch, key))


def test_ranks_that_hold_less_or_nothing_of_a_tensor(ranks4: Ranks, scratch: str, key: str | None) -> None:
    for written, found in ranks4.run(uses_on_ranks.uneven, scratch, key):
        rows = [((row, 0), (1, 4)) for row in range(3)]
        assert [chunk for chunk in written if all(chunk[1])] == rows
        assert found == (rows if key is None else [((0, 0), (3, 4))])


def test_any_rank_may_coordinate_and_some_ranks_may_save_alone(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert ranks4.run(uses_on_ranks.by_another_coordinator, scratch, key) == [2.0, 7.0, 2.0, 7.0]


def test_ranks_load_out_of_a_store_that_they_only_read(ranks4: Ranks, scratch: str) -> None:
    memstore.open(scratch).close()
    assert ranks4.run(uses_on_ranks.read_only, scratch) == [[2.0, 2.0]] * 4


def test_tensors_that_collectives_are_still_to_fill(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(uses_on_ranks.unfinished_collectives, scratch, key))


def test_tensors_with_the_protocol_of_torchs_planners(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(uses_on_ranks.own_protocol, scratch, key))
