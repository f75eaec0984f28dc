"""Errors in any call of a planner or a storage: torch tells them, and the earlier checkpoint stays as it was."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import memstore
from memstore.errors import CorruptionError, MemstoreError
from memstore.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from tests.integrations.dcp import failing_on_ranks
from tests.integrations.dcp.states import Place, load, number_in, save, save_number
from tests.ranks.launcher import Ranks


def failing(kind: Any, name: str) -> Any:
    """A class whose method of this name fails."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ArithmeticError(f"in {name}")

    return type(kind.__name__, (kind,), {name: fail})


def check_failed_save(place: Place, kind: Any, planner: Any, name: str) -> None:
    save_number(place, 1.0)
    state = {"w": torch.full((1000,), 2.0), "n": 2.0}
    with pytest.raises(CheckpointException, match=f"in {name}") as raised:
        save(state, kind(place.source, key=place.key), planner=planner())
    assert isinstance(raised.value.failures[0][0], ArithmeticError)
    assert number_in(place) == 1.0
    del raised
    gc.collect()  # the error refers to the writer, by its traceback
    save_number(place, 3.0)
    assert number_in(place) == 3.0 and place.leftovers() == []


@pytest.mark.parametrize(
    "name", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "lookup_object"]
)
def test_a_planner_that_fails_in_a_save(place: Place, name: str) -> None:
    check_failed_save(place, StorageWriter, failing(DefaultSavePlanner, name), name)


@pytest.mark.parametrize("name", ["resolve_data", "transform_object"])
def test_memstores_planner_that_fails_in_a_save(place: Place, name: str) -> None:
    check_failed_save(place, StorageWriter, failing(SavePlanner, name), name)


@pytest.mark.parametrize(
    "name",
    ["storage_meta", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"],
)
def test_a_writer_that_fails(place: Place, name: str) -> None:
    check_failed_save(place, failing(StorageWriter, name), DefaultSavePlanner, name)


def check_failed_load(place: Place, kind: Any, planner: Any, name: str) -> None:
    save_number(place, 1.0)
    target = {"w": torch.zeros(1000), "n": 0.0}
    with pytest.raises(CheckpointException, match=f"in {name}"):
        load(target, kind(place.source, key=place.key), planner=planner())
    assert number_in(place) == 1.0 and place.leftovers() == []


@pytest.mark.parametrize(
    "name", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes"]
)
def test_a_planner_that_fails_in_a_load(place: Place, name: str) -> None:
    check_failed_load(place, StorageReader, failing(DefaultLoadPlanner, name), name)


@pytest.mark.parametrize("name", ["resolve_tensor", "commit_tensor", "load_bytes"])
def test_memstores_planner_that_fails_in_a_load(place: Place, name: str) -> None:
    check_failed_load(place, StorageReader, failing(LoadPlanner, name), name)


@pytest.mark.parametrize(
    "name", ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"]
)
def test_a_reader_that_fails(place: Place, name: str) -> None:
    check_failed_load(place, failing(StorageReader, name), DefaultLoadPlanner, name)


# --- values under the key that no save has put ------------------------------------------------------------------------

GOOD = {"description": b"", "planner_data": None}


@pytest.mark.parametrize(
    "value",
    [
        {"dcp": 5},
        {"dcp": GOOD},
        {"dcp": GOOD | {"description": b"\x80"}},
        {"dcp": GOOD, "state": torch.ones(2)},
        {"dcp": GOOD, "state": {"w": "text"}},
        {"dcp": GOOD, "state": {5: torch.ones(2)}},
        {"dcp": torch.ones(3), "bytes": [torch.ones(2)]},
    ],
    ids=str,
)
def test_entries_that_are_no_checkpoints_are_refused(scratch: str, value: Any) -> None:
    with memstore.open(scratch) as store:
        store.put("w", value)
        with pytest.raises(MemstoreError):
            StorageReader(store, key="w").read_metadata()
        with pytest.raises(CheckpointException, match="global metadata read failed"):
            load({"w": torch.zeros(2)}, StorageReader(store, key="w"))


def test_entries_whose_tensors_are_others_are_refused(scratch: str) -> None:
    with memstore.open(scratch) as store:
        save({"w": torch.ones(3)}, StorageWriter(store, key="w"))
        found = store.get("w")
        for state in ({}, {"w": torch.ones(3), "more": torch.ones(1)}, torch.ones(3), {"w": {"w": torch.ones(3)}}):
            store.put("other", found | {"state": state})
            with pytest.raises(CorruptionError):
                StorageReader(store, key="other").read_metadata()
        store.put("other", found)
        assert list(StorageReader(store, key="other").read_metadata().state_dict_metadata) == ["w"]


def test_a_damaged_checkpoint_is_not_replaced_by_what_a_rank_saved_by_itself(scratch: str) -> None:
    save({"w": torch.zeros(3)}, StorageWriter(scratch), use_collectives=False)
    save({"w": torch.ones(3)}, StorageWriter(scratch))
    manifest = f"{scratch}/memstore_snapshot.json"
    with open(manifest, "r+b") as file:
        file.write(b"{}")
    with pytest.raises(CheckpointException, match="rank local metadata read failed: .*memstore_snapshot.json"):
        load({"w": torch.zeros(3)}, StorageReader(scratch))


# --- on one rank of several -------------------------------------------------------------------------------------------


def test_torch_tells_which_rank_failed_in_a_save_and_the_earlier_checkpoint_stays(
    ranks4: Ranks, scratch: str, key: str | None
) -> None:
    expected = [([(one.rank, True)], 1.0) for one in failing_on_ranks.SAVES]
    assert ranks4.run(failing_on_ranks.fail_saves, scratch, key) == [expected] * 4
    if key is None:
        assert len(os.listdir(scratch)) == 5, "what the saves that failed have left is gone"
        return
    with memstore.open(scratch) as store:
        assert store.pending() == () and list(store.keys()) == [key]


def test_torch_tells_which_rank_failed_in_a_load(ranks4: Ranks, scratch: str, key: str | None) -> None:
    expected = [([(one.rank, True)], 1.0) for one in failing_on_ranks.LOADS]
    assert ranks4.run(failing_on_ranks.fail_loads, scratch, key) == [expected] * 4


@pytest.mark.parametrize("rank", [0, 2])
def test_a_save_that_fails_on_one_rank_leaves_no_folder_on_any(ranks4: Ranks, scratch: str, rank: int) -> None:
    """The ranks that have written give up as well, and the last of them finds the files of all."""
    os.makedirs(scratch, exist_ok=True)
    assert ranks4.run(failing_on_ranks.save_in_vain, f"{scratch}/run/step-1", rank) == [True] * 4
    assert os.listdir(scratch) == []
