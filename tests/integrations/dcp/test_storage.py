"""What is saved is loaded: by torch's calls and memstore's, in folders and in stores, whole and in part."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.stateful import Stateful

import memstore
from memstore.errors import AlreadyExistsError, CorruptionError, MemstoreError, NotAStoreError, UnsupportedValueError
from memstore.integrations import dcp
from memstore.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from memstore.integrations.dcp.planners import decode_object, encode_object
from memstore.snapshot import storage
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
        assert len(os.listdir(place[0])) == 3, "the manifest, sums of boxes, and one file of tensors"


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


# --- a read of a part reads that part; and what is compared with checksums --------------------------------------------


ROWS, COLUMNS = 12 << 10, 1024  # 48 MiB: three chunks


class BoxPlanner(DefaultLoadPlanner):
    """Loads one box of each tensor, into a tensor of its shape."""

    def __init__(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self._chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self.committed: list[str] = []

    def create_local_plan(self) -> Any:
        metadata: Any = self.metadata
        plan = super().create_local_plan() if not self.state_dict else None
        items = [
            item
            for name in self.state_dict
            for item in create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], [self._chunk])
        ]
        return dataclasses.replace(plan, items=items) if plan is not None else _plan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self.state_dict[index.fqn]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)


def _plan(items: Any) -> Any:
    from torch.distributed.checkpoint.planner import LoadPlan

    return LoadPlan(items)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each run that is read of a file of tensors."""
    found: list[int] = []
    real = storage.read_run

    def read_run(file: Any, path: str, run: Any, *, sums: Any) -> None:
        found.append(run.nbytes)
        real(file, path, run, sums=sums)

    monkeypatch.setattr(storage, "read_run", read_run)
    return found


@pytest.mark.parametrize("box", [((3000, 0), (16, COLUMNS)), ((3000, 64), (200, 32)), ((0, 0), (0, 5))], ids=str)
def test_a_narrow_read_reads_the_narrow_box(scratch: str, box: Any, counted: list[int]) -> None:
    whole = torch.randn(ROWS, COLUMNS)
    save({"w": whole}, StorageWriter(scratch, durability="process"))
    target, planner = {"w": torch.zeros(box[1])}, BoxPlanner(*box)
    load(target, StorageReader(scratch), planner=planner)
    (row, column), (rows, columns) = box
    assert torch.equal(target["w"], whole[row : row + rows, column : column + columns])
    assert sum(counted) <= rows * COLUMNS * 4, "the rows, with what lies between two of them"


def test_and_of_a_stores_entry(scratch: str) -> None:
    whole = torch.randn(2048, 1024)
    with memstore.open(scratch) as store:
        save({"w": whole}, StorageWriter(store, key="w"))
        before = memstore.bytes_read()
        target = {"w": torch.zeros(4, 16)}
        load(target, StorageReader(store, key="w"), planner=BoxPlanner((100, 32), (4, 16)))
        assert torch.equal(target["w"], whole[100:104, 32:48])
        assert memstore.bytes_read() - before <= 4 * 1024 * 4


def test_a_planner_is_told_when_its_tensor_is_there(scratch: str) -> None:
    save({"w": torch.ones(6, 4)}, StorageWriter(scratch))
    planner = BoxPlanner((2, 0), (2, 4))
    load({"w": torch.zeros(2, 4)}, StorageReader(scratch), planner=planner)
    assert planner.committed == ["w"]


def test_damage_is_found_where_most_of_a_chunk_is_read(scratch: str) -> None:
    whole = torch.randn(ROWS, COLUMNS)
    save({"w": whole}, StorageWriter(scratch, durability="process"))
    (path,) = Path(scratch).glob("*.safetensors")
    with open(path, "r+b") as file:
        file.seek(20 << 20)
        file.write(b"\xff\xff")
    with pytest.raises(CheckpointException, match="don't fit their checksum") as raised:
        load({"w": torch.zeros(ROWS, COLUMNS)}, StorageReader(scratch))
    assert any(isinstance(error, CorruptionError) for error, _ in raised.value.failures.values())
    target = {"w": torch.zeros(16, COLUMNS)}
    load(target, StorageReader(scratch), planner=BoxPlanner((0, 0), (16, COLUMNS)))
    assert torch.equal(target["w"], whole[:16])


def test_without_checksums_none_are_written(scratch: str) -> None:
    save({"w": torch.ones(5)}, StorageWriter(scratch, checksum=False))
    target = {"w": torch.zeros(5)}
    load(target, StorageReader(scratch))
    assert torch.equal(target["w"], torch.ones(5))
    assert '"sums":""' in Path(scratch, "memstore_snapshot.json").read_text()


# --- bytes items are stored without pickle, and nothing that is loaded runs code --------------------------------------


@dataclass
class Settings:
    rate: float
    names: tuple[str, ...]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        1.5,
        "é",
        b"\0",
        (1, [2, {"x": 3.0}]),
        OrderedDict(a=1),
        np.arange(6).reshape(2, 3),
        {"inner": torch.arange(3), 5: torch.ones(2).bfloat16()},
        torch.float16,
        timedelta(days=1),
        {1, 2},
    ],
    ids=repr,
)
def test_objects_come_back(value: Any) -> None:
    assert_same(value, decode_object("x", encode_object("x", value)))


def test_streams_come_back_where_they_were(scratch: str) -> None:
    stream = io.BytesIO(b"what a trainer has pickled itself")
    stream.seek(5)
    target: dict[str, Any] = {"losses": None, "empty": None}
    dcp.save({"losses": stream, "empty": io.BytesIO()}, checkpoint_id=scratch)
    dcp.load(target, checkpoint_id=scratch)
    assert target["losses"].tell() == 5 and target["losses"].getvalue() == stream.getvalue()
    assert target["empty"].getvalue() == b""
    with pytest.raises(CorruptionError, match="it is cut"):
        decode_object("losses", encode_object("losses", stream)[:20])


def test_what_only_pickle_could_store_is_refused_by_name(scratch: str) -> None:
    with pytest.raises(CheckpointException, match="run.setting: .*memstore's planner doesn't pickle") as raised:
        dcp.save({"run": {"setting": io.StringIO()}}, checkpoint_id=scratch)
    assert isinstance(raised.value.failures[0][0], UnsupportedValueError)


def test_items_of_torchs_planner_are_read_without_running_code(scratch: str) -> None:
    save({"epoch": 3, "betas": [0.9, "x"]}, StorageWriter(scratch))
    target = {"epoch": 0, "betas": [0.0, ""]}
    dcp.load(target, checkpoint_id=scratch)
    assert target == {"epoch": 3, "betas": [0.9, "x"]}


class Evil:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def test_a_pickle_that_runs_code_is_refused(scratch: str) -> None:
    save({"x": Evil(f"{scratch}-made")}, StorageWriter(scratch))
    with pytest.raises(CheckpointException, match="saved by another planner, with pickle") as raised:
        dcp.load({"x": None}, checkpoint_id=scratch)
    assert isinstance(raised.value.failures[0][0], UnsupportedValueError)
    assert not os.path.exists(f"{scratch}-made")
    with pytest.raises(CheckpointException):
        load({"x": None}, StorageReader(scratch), planner=LoadPlanner())
    assert not os.path.exists(f"{scratch}-made")


_WHOLE = encode_object("x", {"a": [1, 2.0, "three"], "t": torch.arange(4)})


@given(st.data())
def test_changed_bytes_are_read_or_refused(data: st.DataObject) -> None:
    changed = bytearray(_WHOLE)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    try:
        decode_object("x", bytes(changed[:cut] if data.draw(st.booleans()) else changed))
    except MemstoreError as error:
        assert isinstance(error, CorruptionError | UnsupportedValueError)


def test_an_item_without_bytes_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="EOFError"):  # which torch raises without a word
        decode_object("x", b"")


class Whole(LoadPlanner, _EmptyStateDictLoadPlanner):
    """As docs/coming-from/dcp.md makes it."""


def test_what_save_wrote_is_loaded_without_a_template(scratch: str) -> None:
    state = {"model": {"w": torch.randn(4, 3), "layers": [torch.ones(2), "text"]}, "epoch": 3, "of": Settings(0.1, ())}
    dcp.save(state, checkpoint_id=scratch)
    planner = Whole()
    load({}, StorageReader(scratch), planner=planner)
    assert_same(state, planner.original_state_dict)
    part = Whole(keys={"model.w", "epoch"})
    load({}, StorageReader(scratch), planner=part)
    assert_same({"model": {"w": state["model"]["w"]}, "epoch": 3}, part.original_state_dict)


def test_torchs_planners_cannot_read_what_save_wrote_of_objects(scratch: str) -> None:
    dcp.save({"epoch": 3}, checkpoint_id=scratch)
    with pytest.raises(CheckpointException, match="UnpicklingError"):
        load({}, StorageReader(scratch), planner=_EmptyStateDictLoadPlanner())
