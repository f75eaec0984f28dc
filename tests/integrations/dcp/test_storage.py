"""What is saved is loaded: by torch's calls and memstore's, in folders and in stores, whole and in part."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.stateful import Stateful

import memstore
from memstore.errors import AlreadyExistsError, NotAStoreError
from memstore.integrations import dcp
from memstore.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from tests.integrations.dcp.states import Place, like, load, save, saved_and_loaded, small_state
from tests.support.equality import assert_same


def test_a_state_dict_comes_back_through_torchs_calls(place: Place) -> None:
    state = small_state()
    assert_same(_contiguous(state), saved_and_loaded(state, *place), ties=False)


def test_and_through_memstores_with_keys_that_are_numbers(scratch: str) -> None:
    state = small_state(parameter=0)
    target = like(state)
    dcp.save(state, checkpoint_id=scratch)
    dcp.load(target, checkpoint_id=scratch)
    assert_same(_contiguous(state), target, ties=False)


def _contiguous(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.contiguous().clone()
    if isinstance(state, dict):
        return {key: _contiguous(value) for key, value in state.items()}
    return state


def test_an_asynchronous_save_has_the_values_of_its_call(scratch: str) -> None:
    state = small_state(parameter=0)
    expected, target = copy.deepcopy(state), like(state)
    future: Any = dcp.async_save(state, checkpoint_id=scratch)
    for tensor in (state["model"]["weight"], state["model"]["turned"]):
        tensor.fill_(-1)
    state["optimizer"]["groups"][0]["lr"] = 0
    future.result()
    dcp.load(target, checkpoint_id=scratch)
    assert_same(_contiguous(expected), target, ties=False)


def test_loads_of_another_dtype_cast(place: Place) -> None:
    state = {"w": torch.randn(300, 20), "n": torch.arange(6)}
    save(state, StorageWriter(place[0], key=place[1]))
    target = {"w": torch.zeros(300, 20, dtype=torch.bfloat16), "n": torch.zeros(6, dtype=torch.float64)}
    load(target, StorageReader(place[0], key=place[1]))
    assert torch.equal(target["w"], state["w"].bfloat16()) and torch.equal(target["n"], state["n"].double())


def test_loads_fill_tensors_of_another_layout(place: Place) -> None:
    state = {"w": torch.randn(30, 20), "image": torch.randn(2, 3, 4, 5)}
    save(state, StorageWriter(place[0], key=place[1]))
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    target = {"w": torch.zeros(20, 60)[:, ::2].t(), "image": image}
    load(target, StorageReader(place[0], key=place[1]))
    assert torch.equal(target["w"], state["w"]) and torch.equal(target["image"], state["image"])
    assert target["image"] is image


def test_parameters_that_need_gradients_are_filled(place: Place) -> None:
    model, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    save(dict(model.named_parameters()), StorageWriter(place[0], key=place[1]))
    load(dict(other.named_parameters()), StorageReader(place[0], key=place[1]))
    assert torch.equal(model.weight, other.weight) and other.weight.requires_grad


class Counter(Stateful):
    def __init__(self, count: int) -> None:
        self.count, self.history = count, torch.full((3,), count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.history = state_dict["count"], state_dict["history"]


def test_statefuls_and_modules_are_asked_and_told(place: Place) -> None:
    state = {"counter": Counter(5), "model": torch.nn.Linear(4, 2)}
    save(state, StorageWriter(place[0], key=place[1]), planner=SavePlanner())
    target = {"counter": Counter(0), "model": torch.nn.Linear(4, 2)}
    load(target, StorageReader(place[0], key=place[1]), planner=LoadPlanner())
    assert target["counter"].count == 5 and torch.equal(target["counter"].history, torch.full((3,), 5))
    assert torch.equal(target["model"].weight, state["model"].weight)


def test_a_part_of_a_checkpoint_is_loaded(place: Place) -> None:
    state = small_state()
    save(state, StorageWriter(place[0], key=place[1]))
    target = {"model": {"weight": torch.zeros(30, 20)}}
    load(target, StorageReader(place[0], key=place[1]))
    assert torch.equal(target["model"]["weight"], state["model"]["weight"])


def test_what_is_missing_is_an_error_or_left_alone(place: Place) -> None:
    save({"w": torch.ones(3)}, StorageWriter(place[0], key=place[1]))
    target = {"w": torch.zeros(3), "new": torch.full((2,), 9.0)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        load(target, StorageReader(place[0], key=place[1]))
    load(target, StorageReader(place[0], key=place[1]), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(target["w"], torch.ones(3)) and torch.equal(target["new"], torch.full((2,), 9.0))


def test_torch_rebuilds_a_state_dict_from_the_metadata_alone(place: Place) -> None:
    state = {"model": {"w": torch.randn(4, 3), "layers": [torch.ones(2), torch.zeros(3)]}, "epoch": 3}
    save(state, StorageWriter(place[0], key=place[1]))
    found: dict[str, Any] = {}
    load(found, StorageReader(place[0], key=place[1]), planner=_EmptyStateDictLoadPlanner())
    # torch's load puts back what it has asked for, and an empty dict asks for nothing: so it looks at the planner's own
    assert found == {}
    whole = _load_state_dict_from_keys(storage_reader=StorageReader(place[0], key=place[1]))
    assert_same(state, whole)
    part = _load_state_dict_from_keys("model.w", storage_reader=StorageReader(place[0], key=place[1]))
    assert_same({"model": {"w": state["model"]["w"]}}, part)


def test_the_metadata_is_what_torch_wrote(place: Place) -> None:
    state = small_state()
    writer = StorageWriter(place[0], key=place[1])
    written = save(state, writer)
    reader = StorageReader(place[0], key=place[1])
    found = reader.read_metadata()
    assert found.state_dict_metadata == written.state_dict_metadata
    assert list(found.state_dict_metadata) == list(written.state_dict_metadata)
    assert found.planner_data == written.planner_data and found.version == written.version == "1.0.0"
    assert found.storage_meta is not None and found.storage_meta.load_id == reader.load_id
    assert found.storage_meta.save_id == written.storage_meta.save_id == writer.save_id
    assert str(found.storage_meta.checkpoint_id) == str(writer.checkpoint_id)
    kinds = {type(one) for one in found.state_dict_metadata.values()}
    assert kinds == {TensorStorageMetadata, BytesStorageMetadata}


def test_a_planners_own_data_is_kept(place: Place) -> None:
    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {"layout": [1, (2, "x")], 5: None, "bytes": b"\0"}
            return plans, metadata

    save({"w": torch.ones(3)}, StorageWriter(place[0], key=place[1]), planner=Planner(flatten_state_dict=False))
    found = StorageReader(place[0], key=place[1]).read_metadata()
    assert found.planner_data == {"layout": [1, (2, "x")], 5: None, "bytes": b"\0"}


def test_no_flattening(place: Place) -> None:
    state = {"w": torch.randn(3), "groups": {"lr": 0.1}}
    save(state, StorageWriter(place[0], key=place[1]), planner=SavePlanner(flatten_state_dict=False))
    target = {"w": torch.zeros(3), "groups": {}}
    load(target, StorageReader(place[0], key=place[1]), planner=LoadPlanner(flatten_state_dict=False))
    assert torch.equal(target["w"], state["w"])


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 1}, {"none": torch.empty(0)}], ids=["nothing", "no tensor", "no element"]
)
def test_a_state_without_a_byte_of_tensors(place: Place, state: dict[str, Any]) -> None:
    assert_same(state, saved_and_loaded(state, *place))


def test_a_later_save_takes_the_place_of_an_earlier_one(place: Place) -> None:
    save({"w": torch.ones(300), "gone": torch.ones(5)}, StorageWriter(place[0], key=place[1]))
    state = {"w": torch.full((400,), 2.0)}
    assert_same(state, saved_and_loaded(state, *place))
    assert set(StorageReader(place[0], key=place[1]).read_metadata().state_dict_metadata) == {"w"}
    if place[1] is None:
        assert len(os.listdir(place[0])) == 2, "the manifest, and one file of tensors"


def test_not_without_overwrite(place: Place) -> None:
    save({"w": torch.ones(3)}, StorageWriter(place[0], key=place[1], overwrite=False))
    with pytest.raises(CheckpointException, match="Checkpoint already exists .* overwrite is False"):
        save({"w": torch.zeros(3)}, StorageWriter(place[0], key=place[1], overwrite=False))
    target = {"w": torch.zeros(3)}
    load(target, StorageReader(place[0], key=place[1]))
    assert torch.equal(target["w"], torch.ones(3))


def test_a_snapshot_is_not_overwritten_and_not_taken_for_a_checkpoint(scratch: str) -> None:
    memstore.Snapshot.take(scratch, {"state": memstore.StateDict(w=torch.ones(3))})
    with pytest.raises(CheckpointException, match="a snapshot that is no checkpoint") as raised:
        save({"w": torch.zeros(3)}, StorageWriter(scratch))
    assert any(isinstance(error, AlreadyExistsError) for error in _causes(raised.value))
    with pytest.raises(NotAStoreError, match="no checkpoint"):
        StorageReader(scratch).read_metadata()
    memstore.Snapshot(scratch).verify()


def _causes(error: Any) -> list[BaseException]:
    """The error, and those of ranks that torch has put into one."""
    return [error, *(one for one, _ in getattr(error, "failures", {}).values())]


def test_a_checkpoint_is_a_snapshot_of_safetensors(scratch: str) -> None:
    state = {"model": {"w": torch.randn(30, 20)}, "epoch": 3}
    dcp.save(state, checkpoint_id=scratch)
    snapshot = memstore.Snapshot(scratch)
    snapshot.verify()
    assert torch.equal(snapshot.view()["state"]["model.w"], state["model"]["w"])
    (file,) = Path(scratch).glob("*.safetensors")
    assert torch.equal(load_file(file)["model.w"], state["model"]["w"])
    with memstore.open(f"{scratch}-store") as store:
        store.attach("checkpoint", scratch)
        assert torch.equal(store.get("checkpoint")["state"]["model.w"], state["model"]["w"])


def test_nothing_in_a_checkpoint_of_memstores_planner_is_a_pickle(scratch: str) -> None:
    dcp.save(small_state(), checkpoint_id=scratch)
    for path in Path(scratch).iterdir():
        data = path.read_bytes()
        assert b"PK\x03\x04" not in data and b"\x80\x02}" not in data and b"\x80\x04\x95" not in data, path
