"""Checkpoints of several ranks: in any layout, saved and loaded by others, in folders and in stores."""

from __future__ import annotations

import os

import pytest

import memstore
from tests.integrations.dcp import models_on_ranks, on_ranks
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
    assert ranks4.run(on_ranks.overlapping_saves, scratch) == [[0.0, 1.0, 2.0, 3.0, 9.0, 4.0]] * 4


def test_plans_that_are_cached(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert ranks4.run(on_ranks.with_cached_plans, scratch, key) == [[[float(step), step] for step in range(4)]] * 4
    if key is None:
        assert len(os.listdir(scratch)) == 6, "the manifest, sums of boxes, and a file of each rank"


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
        assert len(os.listdir(scratch)) == 6, "what the save that failed has left is gone"
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
        assert len(os.listdir(scratch)) == 4, "what the killed save has left is gone"


# --- what trainers do with checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("planners", ["memstore", pytest.param("torch", marks=pytest.mark.full)])
def test_a_trainer_goes_on_from_its_parts(ranks4: Ranks, scratch: str, key: str | None, planners: str) -> None:
    assert ranks4.run(on_ranks.train_on, scratch, key, planners) == [(True, True)] * 4


def test_ranks_that_hold_different_tensors_in_different_orders(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(on_ranks.experts, scratch, key))


def test_ranks_that_hold_less_or_nothing_of_a_tensor(ranks4: Ranks, scratch: str, key: str | None) -> None:
    for written, found in ranks4.run(on_ranks.uneven, scratch, key):
        rows = [((row, 0), (1, 4)) for row in range(3)]
        assert [chunk for chunk in written if all(chunk[1])] == rows
        assert found == (rows if key is None else [((0, 0), (3, 4))])


def test_any_rank_may_coordinate_and_some_ranks_may_save_alone(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert ranks4.run(on_ranks.by_another_coordinator, scratch, key) == [2.0, 7.0, 2.0, 7.0]


def test_ranks_load_out_of_a_store_that_they_only_read(ranks4: Ranks, scratch: str) -> None:
    memstore.open(scratch).close()
    assert ranks4.run(on_ranks.read_only, scratch) == [[2.0, 2.0]] * 4


def test_tensors_that_collectives_are_still_to_fill(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(on_ranks.unfinished_collectives, scratch, key))


def test_tensors_with_the_protocol_of_torchs_planners(ranks4: Ranks, scratch: str, key: str | None) -> None:
    assert all(ranks4.run(on_ranks.own_protocol, scratch, key))


# --- torch's process saves what is staged, and goes on after a save that failed ---------------------------------------


@pytest.mark.parametrize("stager", ["memstore", "torch"])
@pytest.mark.parametrize("how", ["FSDP2", "TP", *(pytest.param(one, marks=FULL) for one in ("HSDP", "FSDP2 and TP"))])
def test_what_is_staged_of_a_model_that_is_spread_can_be_sent(ranks4: Ranks, how: str, stager: str) -> None:
    assert all(ranks4.run(models_on_ranks.sent, how, stager))


@pytest.mark.full
@pytest.mark.parametrize("stager", ["memstore", "torch"])
@pytest.mark.parametrize("how", ["none", "FSDP2", "HSDP", "TP", "FSDP2 and TP"])
def test_a_process_of_torch_saves_a_model_that_is_spread(
    ranks4: Ranks, scratch: str, key: str | None, how: str, stager: str
) -> None:
    assert ranks4.run(models_on_ranks.save_by_process, scratch, key, how, stager) == [[True] * 3] * 4
