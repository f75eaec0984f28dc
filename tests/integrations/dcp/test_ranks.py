"""Checkpoints of several ranks: in any layout, saved and loaded by others, in folders and in stores."""

from __future__ import annotations

import os

import pytest

import memstore
from tests.integrations.dcp import models_on_ranks, on_ranks, uses_on_ranks
from tests.ranks.launcher import Ranks
from tests.support.fork_server import ForkServer

FULL = pytest.mark.full
LAYOUTS = [
    ((4,), "0"),
    ((4,), "1"),
    ((4,), "R"),
    ((2, 2), "00"),
    ((2, 2), "01"),
    ((2, 2), "R0"),
    ((2, 2), "1R"),
    ((2, 2), "RR"),
]


@pytest.mark.parametrize(
    "saved", [LAYOUTS[0], LAYOUTS[4], *(pytest.param(one, marks=FULL) for one in LAYOUTS[1:4] + LAYOUTS[5:])], ids=str
)
def test_dtensors_are_loaded_in_any_layout(
    ranks4: Ranks, scratch: str, key: str | None, saved: tuple[on_ranks.Mesh, str]
) -> None:
    assert ranks4.run(on_ranks.reshard, scratch, key, saved, LAYOUTS) == [[True] * len(LAYOUTS)] * 4


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 2), *(pytest.param(i, j, marks=FULL) for i in range(3) for j in range(3) if (i, j) != (1, 2))],
)
def test_sharded_tensors_are_loaded_by_any_spec(
    ranks4: Ranks, scratch: str, key: str | None, first: int, second: int
) -> None:
    assert all(ranks4.run(on_ranks.sharded_tensors, scratch, key, first, second))


@pytest.mark.full
def test_sharded_tensors_are_loaded_as_plain_ones_and_the_other_way(
    ranks4: Ranks, scratch: str, key: str | None
) -> None:
    assert ranks4.run(on_ranks.sharded_and_plain, scratch, key) == [[True] * len(on_ranks.SPECS)] * 4


def test_shards_of_any_sizes_in_wrappers(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(on_ranks.wrapped_shards, scratch, key))


def test_and_in_asynchronous_saves(ranks4: Ranks, scratch: str) -> None:
    assert all(ranks4.run(on_ranks.wrapped_shards, scratch, None, True))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("FSDP2", "TP"),
        ("FSDP1", "FSDP2"),
        pytest.param("HSDP", "FSDP2", marks=FULL),
        pytest.param("FSDP2", "FSDP2", marks=FULL),
        pytest.param("FSDP2 and TP", "HSDP", marks=FULL),
        pytest.param("TP", "FSDP2 and TP", marks=FULL),
        pytest.param("HSDP", "HSDP", marks=FULL),
        pytest.param("FSDP2 and TP", "none", marks=FULL),
        pytest.param("FSDP1", "TP", marks=FULL),
        pytest.param("HSDP1", "FSDP2", marks=FULL),
        pytest.param("DDP", "HSDP", marks=FULL),
        pytest.param("FSDP2", "DDP", marks=FULL),
    ],
)
def test_models_and_optimizers(ranks4: Ranks, scratch: str, key: str | None, saved: str, loaded: str) -> None:
    assert all(ranks4.run(models_on_ranks.model_and_optimizer, scratch, key, saved, loaded))


def test_stages_of_a_pipeline_are_loaded_as_one_model(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(models_on_ranks.load_stages, scratch, key))


@pytest.mark.full
def test_models_on_the_meta_device_are_loaded_and_real(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(models_on_ranks.load_unreal, scratch, key))


@pytest.mark.full
def test_a_part_of_a_model_is_loaded_and_another_part_is_tuned_and_saved(
    ranks4: Ranks, scratch: str, key: str | None
) -> None:
    assert ranks4.run(models_on_ranks.tune, scratch, key) == [["nothing", "step 2"]] * 4


def test_asynchronous_saves_by_threads(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(models_on_ranks.model_and_optimizer, scratch, key, "FSDP2", "FSDP2", True))


def test_training_goes_on_while_memstores_save_runs(ranks4: Ranks, scratch: str) -> None:
    assert ranks4.run(models_on_ranks.train_while_saving, scratch) == [(True, 2.0)] * 4


@pytest.mark.full
def test_asynchronous_saves_that_overlap_are_done_in_order(ranks4: Ranks, scratch: str) -> None:
    assert ranks4.run(uses_on_ranks.overlapping_saves, scratch) == [[0.0, 1.0, 2.0, 3.0, 9.0, 4.0]] * 4


def test_plans_that_are_cached(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert ranks4.run(on_ranks.with_cached_plans, scratch, key) == [[[float(step), step] for step in range(4)]] * 4
    if key is None:
        assert len(os.listdir(scratch)) == 5, "the manifest, and a file of each rank"


def test_ranks_that_save_by_themselves(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert ranks4.run(on_ranks.without_collectives, scratch, key) == [2.0] * 4


def test_a_planners_error_on_one_rank_is_told_on_all_and_nothing_is_saved(
    ranks4: Ranks, scratch: str, key: str | None
) -> None:
    ranks4.run(on_ranks.save_rows, scratch, key, 1.0)
    for said in ranks4.run(on_ranks.save_with_a_failing_planner, scratch, key):
        assert said.startswith("CheckpointException") and "ArithmeticError: rank 2 has no data" in said
    assert ranks4.run(on_ranks.load_rows, scratch, key) == [1.0] * 4
    ranks4.run(on_ranks.save_rows, scratch, key, 2.0)
    assert ranks4.run(on_ranks.load_rows, scratch, key) == [2.0] * 4
    if key is None:
        assert len(os.listdir(scratch)) == 5, "what the save that failed has left is gone"
        return
    with memstore.open(scratch) as store:
        assert store.pending() == (), "what the other ranks had put for it is given back"


@pytest.mark.parametrize("dying", ["write", "read"])
def test_a_rank_that_is_killed_leaves_the_earlier_checkpoint(
    rank_server: ForkServer, scratch: str, key: str | None, dying: str
) -> None:
    with Ranks(rank_server, 2) as ranks:
        ranks.run(on_ranks.save_rows, scratch, key, 1.0)
        if dying == "write":
            ranks.begin(on_ranks.save_rows, scratch, key, 2.0, True)
        else:
            ranks.begin(on_ranks.load_rows, scratch, key, True)
        ranks.workers[1].wait()
        ranks.kill(0)
    with Ranks(rank_server, 2) as ranks:
        assert ranks.run(on_ranks.load_rows, scratch, key) == [1.0] * 2
        ranks.run(on_ranks.save_rows, scratch, key, 3.0)
        assert ranks.run(on_ranks.load_rows, scratch, key) == [3.0] * 2
    if key is None:
        assert len(os.listdir(scratch)) == 3, "what the killed save has left is gone"
