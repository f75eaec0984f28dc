"""The calls that torch makes of a writer and a reader, and what it may do between them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import os
import pickle
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import memstore
from memstore.errors import MemstoreError, StructureMismatchError, UnsupportedValueError, VersionGoneError
from memstore.integrations import dcp
from memstore.integrations.dcp import LoadPlanner, Stager, StorageReader, StorageWriter
from tests.integrations.dcp.states import Place, load, save

Call = tuple[str, dict[str, Any]]


def _noting(kind: Any, calls: list[Call]) -> Any:
    """A class whose methods note their calls."""

    def note(name: str) -> Any:
        real = getattr(kind, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, kwargs))
            return real(self, *args, **kwargs)

        return noted

    names = [name for name in vars(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    return type(kind.__name__, (kind,), {name: note(name) for name in names if name != "validate_checkpoint_id"})


def test_torch_calls_them_in_this_order(scratch: str) -> None:
    calls: list[Call] = []
    save({"w": torch.ones(3)}, _noting(StorageWriter, calls)("/nowhere"), checkpoint_id=scratch)
    order = [
        "reset",
        "storage_meta",
        "set_up_storage_writer",
        "prepare_local_plan",
        "prepare_global_plan",
        "write_data",
    ]
    assert [name for name, _ in calls] == [*order, "finish"]
    assert dict(calls)["set_up_storage_writer"] == {"rank": 0, "use_collectives": True}
    calls.clear()
    load({"w": torch.zeros(3)}, _noting(StorageReader, calls)("/nowhere"), checkpoint_id=scratch)
    order = [
        "reset",
        "read_metadata",
        "set_up_storage_reader",
        "prepare_local_plan",
        "prepare_global_plan",
        "read_data",
    ]
    assert [name for name, _ in calls] == order


def test_one_writer_and_one_reader_serve_many_checkpoints(scratch: str) -> None:
    writer, reader = StorageWriter(scratch), StorageReader(scratch)
    for step in range(3):
        save({"w": torch.full((3,), float(step))}, writer, checkpoint_id=f"{scratch}/step-{step}")
    for step in range(3):
        target = {"w": torch.zeros(3)}
        load(target, reader, checkpoint_id=Path(f"{scratch}/step-{step}"))
        assert target["w"][0] == step
    assert writer.checkpoint_id == f"{scratch}/step-2" and reader.checkpoint_id == f"{scratch}/step-2"


def test_of_a_store_the_checkpoint_id_is_the_key(scratch: str) -> None:
    with memstore.open(scratch) as store:
        save({"w": torch.ones(3)}, StorageWriter(store), checkpoint_id="step-1")
        target = {"w": torch.zeros(3)}
        load(target, StorageReader(store), checkpoint_id="step-1")
        assert torch.equal(target["w"], torch.ones(3)) and list(store.keys()) == ["step-1"]
        with pytest.raises(CheckpointException, match="which key of the store"):
            save({"w": torch.ones(3)}, StorageWriter(store))


@pytest.mark.parametrize("in_store", [False, True], ids=["folder", "store"])
def test_a_writer_that_is_pickled_writes_elsewhere(scratch: str, in_store: bool) -> None:
    key = "checkpoint" if in_store else None
    if in_store:
        memstore.open(scratch).close()
    writer = StorageWriter(scratch, key=key)
    save({"w": torch.ones(3)}, writer)
    for again in (pickle.loads(pickle.dumps(writer)), pickle.loads(pickle.dumps(StorageWriter(scratch, key=key)))):
        save({"w": torch.full((3,), 2.0)}, again)
        target = {"w": torch.zeros(3)}
        load(target, pickle.loads(pickle.dumps(StorageReader(scratch, key=key))))
        assert torch.equal(target["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("id", "possible"),
    [
        ("/dev/shm/memstore-nowhere/step-1", True),
        (Path("relative"), True),
        ("s3://bucket/a", True),
        ("hdfs://bucket/a", False),
        ("/dev/null/a", False),
    ],
    ids=str,
)
def test_which_checkpoint_ids_are_possible(id: Any, possible: bool) -> None:
    assert StorageWriter.validate_checkpoint_id(id) is possible
    assert StorageReader.validate_checkpoint_id(id) is possible


@pytest.mark.parametrize("path", ["", "hdfs://bucket/a", "a\0b"])
def test_what_is_no_path_is_refused_at_once(path: str) -> None:
    with pytest.raises(ValueError, match="no path of a folder|there is no storage"):
        StorageWriter(path)


def test_no_folder_is_made_that_looks_like_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointException, match='"~" is taken as a name: os.path.expanduser makes'):
        dcp.save({"w": torch.ones(3)}, checkpoint_id="~/runs/step-1")
    assert not os.listdir()
    os.mkdir("~")  # somebody means it
    dcp.save({"w": torch.ones(3)}, checkpoint_id="~/runs/step-1")


def test_errors_are_in_the_future(scratch: str) -> None:
    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise ArithmeticError("no data")

    writer, planner = StorageWriter(scratch), Planner()
    planner.set_up_planner({"w": torch.ones(3)}, None, True)
    plans, _ = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    future = writer.write_data(plan, planner)
    with pytest.raises(ArithmeticError, match="no data"):
        future.wait()
    with pytest.raises(MemstoreError, match="dropped what the storage writer"):
        writer.write_data(dataclasses.replace(plan, storage_data=None), planner).wait()
    save({"w": torch.ones(3)}, StorageWriter(scratch))
    reader = StorageReader(scratch)
    reader.read_metadata()
    with pytest.raises(VersionGoneError, match="was overwritten"):
        reader.read_data(LoadPlan([], storage_data="another"), DefaultLoadPlanner()).wait()


def test_a_reader_is_set_up_with_metadata_that_another_one_read(scratch: str) -> None:
    save({"w": torch.ones(3)}, StorageWriter(scratch))
    metadata = StorageReader(scratch).read_metadata()
    reader, planner, target = StorageReader(scratch), DefaultLoadPlanner(), {"w": torch.zeros(3)}
    planner.set_up_planner(target, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(plan, planner).wait()
    assert torch.equal(target["w"], torch.ones(3))


def test_planners_that_make_other_tensors_than_they_planned(scratch: str) -> None:
    class Casting(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return super().transform_object(write_item, object).bfloat16()

    class Cutting(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return super().transform_object(write_item, object)[:2]

    whole = torch.randn(5)
    save({"w": whole}, StorageWriter(scratch), planner=Casting())
    target = {"w": torch.zeros(5)}
    load(target, StorageReader(scratch))
    assert torch.equal(target["w"], whole.bfloat16().float())
    with pytest.raises(CheckpointException, match=r"a part of shape \[5\], and the tensor for it is of shape \[2\]"):
        save({"w": whole}, StorageWriter(scratch), planner=Cutting())
    load(target, StorageReader(scratch))
    assert torch.equal(target["w"], whole.bfloat16().float()), "the earlier one is whole"


def test_planners_that_give_what_is_no_tensor_and_no_bytes(scratch: str) -> None:
    class Planner(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return 5

    for state, text in (({"w": torch.ones(3)}, "int for a tensor"), ({"x": 1}, "int for a bytes item")):
        with pytest.raises(CheckpointException, match=text) as raised:
            save(state, StorageWriter(scratch), planner=Planner())
        assert isinstance(raised.value.failures[0][0], UnsupportedValueError)
    assert not os.path.exists(scratch)


def test_tensors_without_values_are_refused_by_name(place: Place) -> None:
    state = {"model": {"w": torch.ones(3), "unreal": torch.ones(3, device="meta")}}
    with pytest.raises(CheckpointException, match="model.unreal: a meta tensor") as raised:
        save(state, place.writer())
    assert isinstance(raised.value.failures[0][0], UnsupportedValueError)


def test_bytes_items_may_be_bytes(scratch: str) -> None:
    class Saving(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return b"some bytes"

    class Loading(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = value.read()

    save({"x": 1}, StorageWriter(scratch), planner=Saving(flatten_state_dict=False))
    target: dict[str, Any] = {"x": None}
    load(target, StorageReader(scratch), planner=Loading(flatten_state_dict=False))
    assert target == {"x": b"some bytes"}


@pytest.mark.parametrize(
    ("offsets", "sizes", "target"),
    [((0, 0), (3, 4), (3, 4)), ((0, 0), (2, 5), (2, 5)), ((1,), (1,), (1,)), ((0, 0), (2, 4), (4, 2))],
    ids=str,
)
def test_plans_that_read_what_is_not_there(scratch: str, offsets: Any, sizes: Any, target: Any) -> None:
    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            (item,) = plan.items
            changed = dataclasses.replace(item, storage_offsets=torch.Size(offsets), lengths=torch.Size(sizes))
            return dataclasses.replace(plan, items=[changed])

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.zeros(target)

    save({"w": torch.ones(2, 4)}, StorageWriter(scratch))
    with pytest.raises(CheckpointException, match="w: the plan reads") as raised:
        load({"w": torch.zeros(2, 4)}, StorageReader(scratch), planner=Planner())
    assert isinstance(raised.value.failures[0][0], StructureMismatchError)


def test_a_plan_of_a_writer_of_others_is_refused(scratch: str) -> None:
    text = "storage_data is a str, of another storage: .* for all planners called DefaultSavePlanner"
    with pytest.raises(MemstoreError, match=text):
        StorageWriter(scratch).write_data(SavePlan([], storage_data="theirs"), DefaultSavePlanner()).wait()


def test_calls_have_the_arguments_of_the_contract() -> None:
    with pytest.raises(TypeError):
        dcp.save({}, "positional")
    with pytest.raises(ValueError, match="durability"):
        StorageWriter("/tmp/x", durability="often")


# --- memstore's own calls, with torch's arguments ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["save", "load", "async_save"])
def test_calls_take_the_arguments_of_torchs(name: str) -> None:
    """By name, kind and default, in torch's order."""

    def arguments(call: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(inspect.unwrap(call)).parameters.values()
        return [(one.name, one.kind, one.default) for one in found]

    assert arguments(getattr(dcp, name)) == arguments(getattr(torch_dcp, name))


@pytest.fixture
def with_a_group() -> Any:
    """One rank, whose default group says that others could be there."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def through(call: str, state: dict[str, Any], **arguments: Any) -> Any:
    made = getattr(dcp, call)(state, **arguments)
    return made if call == "save" else made.result()


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_calls_use_the_storage_that_they_are_given(call: str, scratch: str) -> None:
    with memstore.open(scratch) as store:
        through(call, {"n": 1}, storage_writer=StorageWriter(store), checkpoint_id="a")
        through(call, {"n": 2}, storage_writer=StorageWriter(store, key="b"))
        for key, value in (("a", 1), ("b", 2)):
            state = {"n": 0}
            dcp.load(state, storage_reader=StorageReader(store), checkpoint_id=key)
            assert state == {"n": value}
    own = torch_dcp.FileSystemWriter(f"{scratch}/torch")
    through(call, {"n": 3, "w": torch.ones(2)}, storage_writer=own)
    state = {"n": 0, "w": torch.zeros(2)}
    torch_dcp.load(state, checkpoint_id=f"{scratch}/torch", no_dist=True)  # by torch's planner
    assert state["n"] == 3
    dcp.load(state, storage_reader=torch_dcp.FileSystemReader(f"{scratch}/torch"))


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_calls_use_the_planner_that_they_are_given(call: str, scratch: str) -> None:
    class Planner(dcp.SavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            seen.append(write_item.index.fqn)
            return super().transform_object(write_item, object)

    class Reading(dcp.LoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            seen.append(read_item.dest_index.fqn)
            super().load_bytes(read_item, value)

    seen: list[str] = []
    through(call, {"n": 1}, checkpoint_id=scratch, planner=Planner())
    dcp.load({"n": 0}, checkpoint_id=scratch, planner=Reading())
    assert seen == ["n", "n"]


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_calls_save_with_the_ranks_that_they_are_told(call: str, scratch: str, with_a_group: Any) -> None:
    through(call, {"n": 1}, checkpoint_id=f"{scratch}/a", no_dist=True)
    through(call, {"n": 2}, checkpoint_id=f"{scratch}/b", process_group=with_a_group)
    through(call, {"n": 3}, checkpoint_id=f"{scratch}/c", use_collectives=False)
    assert os.listdir(f"{scratch}/c") == ["rank-0"]
    for name, value, how in (("a", 1, {"no_dist": True}), ("b", 2, {"process_group": with_a_group}), ("c", 3, {})):
        state = {"n": 0}
        dcp.load(state, checkpoint_id=f"{scratch}/{name}", **how)
        assert state == {"n": value}
    with pytest.raises(ValueError, match="exclude each other"):
        getattr(dcp, call)({"n": 1}, checkpoint_id=f"{scratch}/d", process_group=with_a_group, no_dist=True)


def test_an_asynchronous_save_uses_the_stager_that_it_is_given(scratch: str) -> None:
    class Staging(dcp.Stager):
        def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            staged.append(list(state_dict))
            return super().stage(state_dict, **kwargs)

    staged: list[Any] = []
    done: Any = dcp.async_save({"n": 1}, checkpoint_id=scratch, async_stager=Staging())
    assert not isinstance(done, torch_dcp.state_dict_saver.AsyncSaveResponse)
    done.result()
    assert staged == [["n"]]


@pytest.mark.parametrize("call", ["save", "async_save", "load"])
def test_calls_without_a_place_or_with_what_is_none_say_what_they_need(call: str) -> None:
    name = "storage_reader" if call == "load" else "storage_writer"
    with pytest.raises(ValueError, match=f"checkpoint_id=, the path of a folder, or {name}="):
        getattr(dcp, call)({"n": 1})
    with pytest.raises(TypeError, match=f"{name} is a Storage.* and not a str"):
        getattr(dcp, call)({"n": 1}, **{name: "/tmp"})


# --- what a failed save leaves ---------------------------------------------------------------------------------------


class Refusing(dcp.SavePlanner):
    """Fails when the bytes of the last item are wanted."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "z":
            raise ArithmeticError("no data")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("call", ["save", "async_save"])
@pytest.mark.parametrize("fault", ["object", "planner", "write", "publication"])
def test_a_failed_save_leaves_no_folder(scratch: str, call: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the checkpoint's nor those above it that it has made; what was there stays, also an empty folder."""
    state: dict[str, Any] = {"w": torch.ones(3), "z": (lambda: 0) if fault == "object" else torch.ones(3)}
    place = "memstore.integrations.dcp.places"

    def fail(*_: Any, **__: Any) -> Any:
        os.makedirs(path, exist_ok=True)
        raise OSError(28, "No space left on device")

    if fault == "write":
        monkeypatch.setattr(f"{place}.write_boxes", fail)
    if fault == "publication":
        monkeypatch.setattr(f"{place}.publish_planned", fail)
    os.makedirs(f"{scratch}/there")
    for path in (f"{scratch}/run/step-1", f"{scratch}/there"):
        with pytest.raises((CheckpointException, UnsupportedValueError)):
            through(call, state, checkpoint_id=path, planner=Refusing() if fault == "planner" else None)
        assert os.listdir(scratch) == ["there"] and not os.listdir(f"{scratch}/there")


@pytest.mark.parametrize("fault", ["write_boxes", "publish_planned"])
def test_a_failed_save_through_torchs_own_call_leaves_no_folder(
    scratch: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"memstore.integrations.dcp.places.{fault}", fail)
    os.makedirs(scratch)
    writer = StorageWriter(f"{scratch}/run/step-1")
    with pytest.raises(CheckpointException):
        save({"w": torch.ones(3)}, writer)
    assert not os.listdir(scratch)


# --- readers that are pickled or copied once they were used -----------------------------------------------------------


def unpickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("in_store", [False, True], ids=["folder", "store"])
@pytest.mark.parametrize("copied", [unpickled, copy.deepcopy, copy.copy])
def test_a_reader_that_was_used_can_be_copied(scratch: str, copied: Any, in_store: bool) -> None:
    key = "checkpoint" if in_store else None
    if in_store:
        memstore.open(scratch).close()
    save({"w": torch.ones(3)}, StorageWriter(scratch, key=key))
    reader, target = StorageReader(scratch, key=key), {"w": torch.zeros(3)}
    load(target, reader)
    other = copied(reader)
    del reader
    with open(f"{scratch}.log", "w") as log:  # has the number of the folder that was closed
        load(target, other)
        save({"w": torch.full((3,), 2.0)}, StorageWriter(scratch, key=key))
        again = copied(other)
        load(target, again)
        assert torch.equal(target["w"], torch.full((3,), 2.0))
        del other, again
        log.write("still open")
    assert Path(f"{scratch}.log").read_text() == "still open"


def test_a_reader_that_is_sent_during_a_load_reads_the_same_checkpoint(scratch: str) -> None:
    save({"w": torch.ones(3)}, StorageWriter(scratch))
    reader, planner, target = StorageReader(scratch), DefaultLoadPlanner(), {"w": torch.zeros(3)}
    planner.set_up_planner(target, reader.read_metadata(), True)
    (plan,) = reader.prepare_global_plan([planner.create_local_plan()])
    sent = pickle.dumps(reader)
    pickle.loads(sent).read_data(plan, planner).wait()
    assert torch.equal(target["w"], torch.ones(3))
    save({"w": torch.full((3,), 2.0)}, StorageWriter(scratch))
    late = pickle.loads(sent)
    with pytest.raises(VersionGoneError, match="was overwritten while it was about to be read: load it again"):
        late.read_data(plan, planner).wait()
    load(target, late)
    assert torch.equal(target["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize("in_store", [False, True], ids=["folder", "store"])
def test_a_copied_reader_of_what_a_rank_saved_by_itself_reads_that(scratch: str, in_store: bool) -> None:
    key = "checkpoint" if in_store else None
    if in_store:
        memstore.open(scratch).close()
    save({"w": torch.ones(3)}, StorageWriter(scratch, key=key))
    if in_store:
        save({"w": torch.full((3,), 2.0)}, StorageWriter(scratch, key="checkpoint/rank-0"))
    else:
        save({"w": torch.full((3,), 2.0)}, StorageWriter(f"{scratch}/rank-0"))
    reader, planner, target = StorageReader(scratch, key=key), DefaultLoadPlanner(), {"w": torch.zeros(3)}
    planner.set_up_planner(target, reader.read_metadata(rank=0), True)
    (plan,) = reader.prepare_global_plan([planner.create_local_plan()])
    copy.deepcopy(reader).read_data(plan, planner).wait()
    assert torch.equal(target["w"], torch.full((3,), 2.0))


def test_a_reader_of_a_store_that_is_only_read_can_be_copied(scratch: str) -> None:
    memstore.open(scratch).close()
    save({"w": torch.ones(3)}, StorageWriter(scratch, key="checkpoint"))
    with memstore.open(scratch, "r") as store:
        reader, target = StorageReader(store, key="checkpoint"), {"w": torch.zeros(3)}
        load(target, reader)
        for copied in (unpickled, copy.deepcopy, copy.copy):
            target["w"].zero_()
            load(target, copied(reader))
            assert target["w"].tolist() == [1.0] * 3


def test_ranks_that_only_read_are_told_if_they_have_opened_two_versions(scratch: str) -> None:
    memstore.open(scratch).close()
    readers = [StorageReader(scratch, key="checkpoint") for _ in range(2)]
    for number, reader in enumerate(readers):
        save({"w": torch.full((3,), float(number))}, StorageWriter(scratch, key="checkpoint"))
        reader.read_metadata()
    (plan,) = readers[0].prepare_global_plan([LoadPlan([])])
    readers[0].read_data(unpickled(plan), LoadPlanner()).wait()
    with pytest.raises(VersionGoneError, match="have versions 1 and 2: load again"):
        readers[1].read_data(unpickled(plan), LoadPlanner()).wait()


# --- asynchronous saves -----------------------------------------------------------------------------------------------


class Fresh(Mapping[str, torch.Tensor]):
    """Makes each tensor when it is asked for one, as lazy stacks do."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.full((3,), float(key))

    def __iter__(self) -> Iterator[str]:
        return iter(map(str, range(100)))

    def __len__(self) -> int:
        return 100


def test_tensors_that_are_made_on_access_are_staged_as_they_are() -> None:
    staged: Any = Stager().stage({"stack": Fresh()})
    assert all(torch.equal(tensor, torch.full((3,), float(key))) for key, tensor in staged["stack"].items())


def test_torchs_wrappers_of_shards_are_staged() -> None:
    parts = [torch.arange(6.0).view(3, 2), torch.arange(6.0, 12.0).view(3, 2)]
    expected = [part.clone() for part in parts]
    offsets = [(4, 0), (4, 2)]
    staged: Any = Stager().stage({"w": LocalShardsWrapper(parts, offsets), "none": LocalShardsWrapper([], [])})
    for part in parts:
        part.zero_()
    assert list(map(tuple, staged["w"].local_offsets())) == offsets
    assert all(torch.equal(one, other) for one, other in zip(staged["w"].local_shards(), expected, strict=True))
    assert staged["none"].local_shards() == []


def state(number: float) -> dict[str, Any]:
    return {"w": torch.full((100, 100), number), "n": number}


def number_in(path: str) -> float:
    target = state(0.0)
    dcp.load(target, checkpoint_id=path)
    assert torch.equal(target["w"], state(target["n"])["w"]), "parts of two saves"
    return target["n"]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes when saves begin and end. The first one ends when another one has begun, or half a second later."""
    told, begun = list[str](), threading.Event()
    real_set_up, real_finish = StorageWriter.set_up_storage_writer, StorageWriter.finish

    def set_up(self: Any, *args: Any, **kwargs: Any) -> None:
        if told:
            begun.set()
        told.append(f"{Path(self.checkpoint_id).name} begins")
        real_set_up(self, *args, **kwargs)

    def finish(self: Any, metadata: Any, results: Any) -> None:
        if len(told) == 1:
            begun.wait(0.5)
        real_finish(self, metadata, results)
        told.append(f"{Path(self.checkpoint_id).name} ends")

    monkeypatch.setattr(StorageWriter, "set_up_storage_writer", set_up)
    monkeypatch.setattr(StorageWriter, "finish", finish)
    yield told


def test_saves_that_overlap_are_done_one_after_the_other(scratch: str, held: list[str]) -> None:
    futures: list[Any] = [dcp.async_save(state(i), checkpoint_id=f"{scratch}/{i:g}") for i in (1.0, 2.0)]
    dcp.save(state(3.0), checkpoint_id=f"{scratch}/3")
    assert held == [f"{number} {what}" for number in (1, 2, 3) for what in ("begins", "ends")]
    assert all(future.done() for future in futures)
    assert [number_in(f"{scratch}/{number}") for number in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_of_saves_to_one_path_the_last_one_stays_and_one_that_fails_holds_up_none(scratch: str) -> None:
    futures: list[Any] = [dcp.async_save(state(i), checkpoint_id=scratch) for i in (1.0, 2.0)]
    unsaved: Any = dcp.async_save({"x": lambda: None}, checkpoint_id=scratch)
    futures.append(dcp.async_save(state(4.0), checkpoint_id=scratch))
    assert "memstore's planner doesn't pickle" in str(unsaved.exception())
    assert [future.exception() for future in futures] == [None] * 3
    assert number_in(scratch) == 4.0


def test_what_is_expanded_far_beyond_its_memory_is_refused_by_name(scratch: str) -> None:
    huge = {"model": {"w": torch.zeros(1).expand(1 << 40)}}
    with pytest.raises(UnsupportedValueError, match=r"\['model'\]\['w'\].* save what it is expanded from"):
        dcp.async_save(huge, checkpoint_id=scratch)


def test_one_process_is_no_reason_for_a_warning(scratch: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3):
            future: Any = dcp.async_save(state(float(number)), checkpoint_id=scratch)
        future.result()
        dcp.load(state(0.0), checkpoint_id=scratch)
    assert [str(one.message) for one in told if "torch.distributed is disabled" in str(one.message)] == []
