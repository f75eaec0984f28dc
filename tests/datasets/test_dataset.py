"""Datasets as users call them: rows in place, for all processes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, tensorclass
from torch._subclasses import FakeTensorMode

import memstore
from tests.children import in_child

SPEC = {"x": ((3,), torch.float32), "y": ((), torch.int64), "more": {"z": ((2, 2), torch.bfloat16)}}


@tensorclass
class Transition:
    state: torch.Tensor
    done: torch.Tensor


def batch(count: int, start: int = 0) -> dict[str, Any]:
    number = torch.arange(start, start + count)
    return {
        "x": number[:, None].float().expand(count, 3),
        "y": number,
        "more": {"z": number[:, None, None].bfloat16().expand(count, 2, 2)},
    }


def new(store: memstore.Store) -> memstore.Dataset:
    return store.create_dataset("data", SPEC, capacity=10)


def test_rows_are_seen_by_all_who_have_it_open(store: memstore.Store) -> None:
    data = new(store)
    other = store.open_dataset("data")
    assert (len(other), other.capacity, other.spec) == (0, 10, SPEC)
    assert data.extend(batch(4)) == range(4)
    assert other.extend(batch(2, 4)) == range(4, 6)
    assert len(data) == len(other) == 6
    assert data[:]["y"].tolist() == list(range(6))
    assert other[5]["more", "z"].tolist() == [[5, 5], [5, 5]]
    data[1:3] = batch(2, 100)
    assert other[:]["x"][:, 0].tolist() == [0, 100, 101, 3, 4, 5]


def test_slices_are_the_shared_memory_and_other_indices_copies(store: memstore.Store) -> None:
    data = new(store)
    data.extend(batch(5))
    shared, copy = data[1:4], data[[1, 2, 3]]
    store.open_dataset("data")[1] = {
        "x": torch.ones(3),
        "y": torch.tensor(-1),
        "more": {"z": torch.ones(2, 2).bfloat16()},
    }
    assert shared["y"].tolist() == [-1, 2, 3]
    assert copy["y"].tolist() == [1, 2, 3]
    shared["y"][1] = 77
    assert store.open_dataset("data")[2]["y"] == 77


def test_a_column_is_one_leaf_of_all_rows_over_the_shared_memory(store: memstore.Store) -> None:
    spec = {"obs": ((3,), torch.float32), "next": {"reward": ((), torch.bfloat16)}}
    data = store.create_dataset("columns", spec, capacity=10)
    assert data["obs"].shape == (0, 3)
    data.extend({"obs": torch.ones(4, 3), "next": {"reward": torch.arange(4).to(torch.bfloat16)}})
    column = data["obs"]
    assert column.shape == (4, 3) and data["next", "reward"].tolist() == [0, 1, 2, 3]
    assert data[("obs",)].data_ptr() == column.data_ptr() == data[:]["obs"].data_ptr()
    assert column.untyped_storage().nbytes() == 4 * 3 * 4  # its own, and no more
    assert data["next"].batch_size == (4,)
    data[1] = {"obs": torch.full((3,), 7.0), "next": {"reward": torch.tensor(9, dtype=torch.bfloat16)}}
    assert column[1].tolist() == [7, 7, 7]
    column[2] = 5
    assert store.open_dataset("columns")["obs"][2].tolist() == [5, 5, 5]
    for name in ("reward", ("next", "obs"), ("obs", "x")):
        with pytest.raises(KeyError, match=r"has no leaf .*, but 'obs', \('next', 'reward'\)"):
            data[name]
    with pytest.raises(KeyError, match="rows of one tensor"):
        store.create_dataset_from("bare", torch.arange(3))["data"]
    with pytest.raises(TypeError, match="is a tuple"):
        data[3, "obs"]
    with pytest.raises(memstore.StructureMismatchError):
        data["obs"] = torch.zeros(4, 3)  # data["obs"][:] = ... writes it


def test_iteration_gives_rows(store: memstore.Store) -> None:
    data = new(store)
    data.extend(batch(5))
    assert [int(row["y"]) for row in data] == list(range(5))


@pytest.mark.parametrize(
    "index", [(0, 1), (slice(0, 1), 0), ..., None, True, np.True_, 1.0, b"y", torch.tensor(True), [[0]], [0.5], [None]]
)
def test_what_is_no_index_of_rows(store: memstore.Store, index: Any) -> None:
    data = new(store)
    data.extend(batch(5))
    for call in (lambda: data[index], lambda: data.__setitem__(index, batch(1))):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert data[:]["y"].tolist() == list(range(5))


@pytest.mark.parametrize(
    "spec",
    [
        TensorDict({"state": torch.zeros(4), "done": torch.zeros((), dtype=torch.bool)}),
        Transition(state=torch.zeros(4), done=torch.zeros((), dtype=torch.bool), batch_size=[]),
        {"state": torch.zeros(4), "done": ((), torch.bool)},
    ],
    ids=["TensorDict", "tensorclass", "dict"],
)
def test_a_spec_may_be_an_example_of_a_row(store: memstore.Store, spec: Any) -> None:
    data = store.create_dataset("data", spec, capacity=4)
    assert data.spec == {"state": ((4,), torch.float32), "done": ((), torch.bool)}
    if isinstance(spec, Transition):
        data.extend(Transition(state=torch.ones(2, 4), done=torch.ones(2, dtype=torch.bool), batch_size=[2]))
        assert isinstance(data[0], Transition) and data[0].state.sum() == 4
    else:
        data.extend({"state": torch.ones(2, 4), "done": torch.ones(2, dtype=torch.bool)})
    assert data.batch_size == torch.Size([2]) and data[:].batch_size == torch.Size([2])
    data.seal()
    assert isinstance(store.get("data"), type(data[:]))


def test_rows_may_be_bare_tensors(store: memstore.Store) -> None:
    data = store.create_dataset("data", ((2,), torch.float8_e4m3fn), capacity=4, length=1)
    data.extend(torch.ones(2, 2).to(torch.float8_e4m3fn))
    assert data[:].float().tolist() == [[0, 0], [1, 1], [1, 1]]
    assert data.spec == ((2,), torch.float8_e4m3fn) and data.batch_size == torch.Size([3])


def test_a_dataset_is_made_of_a_batch(store: memstore.Store) -> None:
    store.put("source", TensorDict(batch(6), batch_size=[6]))
    data = store.create_dataset_from("data", store.view("source"), capacity=8)
    assert (len(data), data.capacity) == (6, 8)
    assert data[:]["y"].tolist() == list(range(6))
    assert len(store.create_dataset_from("exact", np.arange(5))) == 5
    with pytest.raises(memstore.AlreadyExistsError, match="'data' is there already"):
        store.create_dataset_from("data", torch.zeros(3))


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(8).reshape(2, 4).T,
        torch.arange(8)[:, None].expand(8, 2)[::2],
        torch.arange(8.0).reshape(4, 2).requires_grad_().long(),
        np.arange(8).reshape(4, 2),
    ],
)
def test_batches_of_any_layout(store: memstore.Store, source: Any) -> None:
    data = store.create_dataset("data", ((2,), torch.int64), capacity=4)
    data.extend(source)
    assert torch.equal(data[:], torch.as_tensor(source))


def test_conjugated_and_trained_tensors_are_stored_as_their_values(store: memstore.Store) -> None:
    data = store.create_dataset("data", {"c": ((), torch.complex64), "w": ((), torch.float32)}, capacity=4)
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    data.extend({"c": numbers.conj(), "w": torch.nn.Parameter(torch.ones(2))})
    assert data[:]["c"].tolist() == [1 - 2j, 3 + 4j]
    assert not data[:]["w"].requires_grad


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_whole(store: memstore.Store) -> None:
    data = new(store)
    data.extend(batch(3))
    wrong = batch(2) | {"x": torch.zeros(2, 4), "y": torch.zeros(2), "w": torch.zeros(2)}
    with pytest.raises(memstore.StructureMismatchError) as caught:
        data.extend(wrong)
    for part in ("value['w'] isn't in the spec", "value['x'] is torch.float32 of shape [2, 4]", "takes torch.int64"):
        assert part in str(caught.value)
    with pytest.raises(memstore.StructureMismatchError, match=r"value\['more'\]\['z'\] is missing"):
        data.extend({"x": torch.zeros(1, 3), "y": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(memstore.StructureMismatchError, match="2 and 3 rows"):
        data.extend(batch(2) | {"y": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ValueError, match="2 rows for 1 place;"):
        data[0:1] = batch(2)
    with pytest.raises(IndexError, match="row 3 of 'data', which has 3 by now"):
        data[3] = _row()
    with pytest.raises(IndexError):
        data[-4]
    with pytest.raises(memstore.StoreFullError, match="3 of at most 10 rows, and 8 more"):
        data.extend(batch(8))
    assert data[:]["y"].tolist() == [0, 1, 2]


def _row() -> dict[str, Any]:
    return {"x": torch.ones(3), "y": torch.tensor(9), "more": {"z": torch.ones(2, 2).bfloat16()}}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(2, device="meta"), "meta tensor"),
        (torch.zeros(2).to_sparse(), "layout"),
        ("text", "is a str"),
        (None, "NoneType"),
        (FakeTensorMode().from_tensor(torch.zeros(2)), "fake tensor: it has a shape, but no bytes"),
        (np.array(["a", "b"]), "a numpy array of <U1"),
        (np.zeros(2, ">f4"), "a numpy array of >f4"),
        (NonTensorData("text", batch_size=[2]), "NonTensorData"),
        (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "nested"),
    ],
    ids=["meta", "sparse", "text", "none", "fake", "strings", "big-endian", "non-tensor", "nested"],
)
def test_what_has_no_bytes_is_refused(store: memstore.Store, value: Any, what: str) -> None:
    data = store.create_dataset("data", {"x": ((), torch.float32)}, capacity=4)
    with pytest.raises(memstore.UnsupportedValueError, match=what) as caught:
        data.extend({"x": value})
    assert caught.value.key == "data" and len(data) == 0
    with pytest.raises(memstore.UnsupportedValueError):
        store.create_dataset_from("other", {"x": value})


def _deep(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = {"x": inner}
    return inner


def test_what_nests_too_deeply_is_refused(store: memstore.Store) -> None:
    endless: dict[str, Any] = {}
    endless["x"] = endless
    data = store.create_dataset("data", _deep(200, ((), torch.int8)), capacity=4)
    data.extend(_deep(200, torch.ones(2, dtype=torch.int8)))
    for value in (_deep(201, torch.ones(2)), _deep(5000, torch.ones(2)), endless):
        for call in (
            lambda value=value: data.extend(value),
            lambda value=value: store.create_dataset("other", value, capacity=2),
            lambda value=value: store.create_dataset_from("other", value),
        ):
            with pytest.raises(memstore.UnsupportedValueError, match="more than 200 levels"):
                call()
    assert len(data) == 2 and data.seal()


@pytest.mark.filterwarnings("error")
def test_numpy_arrays_of_any_strides(store: memstore.Store) -> None:
    numbers = np.arange(12, dtype=np.int32).reshape(3, 4)
    arrays = [numbers, numbers[::-1], numbers[:, ::-1], np.broadcast_to(numbers[0], (2, 4)), np.asfortranarray(numbers)]
    arrays.append(np.frombuffer(numbers.tobytes(), np.int32).reshape(3, 4))  # read-only
    data = store.create_dataset_from("data", arrays[1], capacity=30)
    for array in arrays:
        data.extend(array)
    assert np.array_equal(data[3:].numpy(), np.concatenate(arrays))


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({}, ValueError),
        (None, TypeError),
        ({"x": torch.float32}, TypeError),
        ({"x": ((2,), "float32")}, TypeError),
        ({"x": ((-1,), torch.float32)}, ValueError),
        ({"x": ((1.5,), torch.float32)}, ValueError),
        ({1: ((), torch.float32)}, TypeError),
        ({"x": {}}, ValueError),
        ({"x": ((), torch.qint8)}, memstore.UnsupportedValueError),
        ({"x": "no spec"}, TypeError),
        (TensorDict({}), ValueError),
        (TensorDict({"x": "text"}), memstore.UnsupportedValueError),
        ({"x": ((1 << 60,), torch.float64)}, memstore.UnsupportedValueError),
    ],
    ids=repr,
)
def test_a_spec_that_is_none_says_what_one_is(store: memstore.Store, spec: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        store.create_dataset("data", spec, capacity=4)
    assert "data" not in store


@pytest.mark.parametrize(("capacity", "length"), [(0, 0), (-1, 0), (2.0, 0), (True, 0), (2, 3), (2, -1), (1 << 60, 0)])
def test_a_capacity_that_makes_no_sense(store: memstore.Store, capacity: Any, length: Any) -> None:
    with pytest.raises(ValueError if type(capacity) is int else TypeError, match="capacity|length"):
        store.create_dataset("data", ((), torch.int8), capacity=capacity, length=length)
    assert "data" not in store


def test_a_capacity_beyond_the_room_is_refused_at_once(store: memstore.Store) -> None:
    with pytest.raises(memstore.StoreFullError, match="has no room for 'data'"):
        store.create_dataset("data", ((1 << 20,), torch.float32), capacity=1 << 24)
    assert "data" not in store and store.stats().filling_bytes == 0


@pytest.mark.parametrize("nbytes", [8, 100_000])
def test_other_calls_name_the_one_to_use(store: memstore.Store, nbytes: int) -> None:
    data = new(store)
    value = torch.zeros(nbytes, dtype=torch.uint8)
    calls = [
        lambda: store.get("data"),
        lambda: store.get_many(["data"]),
        lambda: store.ref("data"),
        lambda: store.wait("data"),
        lambda: store.put("data", value),
        lambda: store.put_many({"other": value, "data": value}),
        lambda: store.put_sharded("data", value, attempt="a", rank=0, world_size=1),
        lambda: store.export("data", "/nowhere"),
        lambda: store.save_model("data", torch.nn.Linear(1, 1)),
        lambda: store.load_model("data", torch.nn.Linear(1, 1)),
    ]
    for call in calls:
        with pytest.raises(memstore.MutableEntryError, match=r"store.open_dataset\('data'\)") as caught:
            call()
        assert caught.value.key == "data"
    assert "other" not in store
    data.extend(batch(1))
    assert store.verify().ok


def test_who_reads_writes_nothing(store: memstore.Store, root: str) -> None:
    data = new(store)
    data.extend(batch(2))
    reader = store.open_dataset("data", "r")
    for call in (lambda: reader.extend(batch(1)), reader.seal, reader.flush, lambda: reader.__setitem__(0, _row())):
        with pytest.raises(memstore.ReadOnlyError, match="mode 'r'"):
            call()
    reader[0]["y"].fill_(5)  # of this process's own
    assert data[0]["y"] == 0
    with memstore.open(root, "r") as only_reads:
        assert only_reads.open_dataset("data", "r")[1]["y"] == 1
        with pytest.raises(memstore.ReadOnlyError):
            only_reads.open_dataset("data")


# --- its life ---------------------------------------------------------------------------------------------------------


def test_a_seal_makes_an_ordinary_entry(store: memstore.Store) -> None:
    data = new(store)
    data.extend(batch(4))
    other, version = store.open_dataset("data"), store.version("data")
    assert data.seal() > version
    assert store.get("data")["y"].tolist() == [0, 1, 2, 3]
    assert store.info("data").kind in ("inline", "segment")
    assert other[:]["y"].tolist() == [0, 1, 2, 3]
    for call in (lambda: other.extend(batch(1)), other.seal, lambda: other.__setitem__(0, _row())):
        with pytest.raises(memstore.MutableEntryError, match="was sealed"):
            call()
    store.put("data", 1)


def test_a_deleted_one_says_so_to_who_has_it_open(store: memstore.Store) -> None:
    data = new(store)
    data.extend(batch(4))
    store.delete("data")
    for call in (lambda: data.extend(batch(1)), data.seal, lambda: data.__setitem__(0, _row())):
        with pytest.raises(memstore.MutableEntryError, match="was deleted"):
            call()
    assert data[:]["y"].tolist() == [0, 1, 2, 3]
    store.gc()
    fresh = store.create_dataset("data", SPEC, capacity=10)
    assert (len(fresh), len(data)) == (0, 4)


def test_its_file_is_kept_while_it_is_open_and_given_back_after(store: memstore.Store) -> None:
    data = new(store)
    data.extend(batch(4))
    rows = data[:]
    store.delete("data")
    store.gc()
    assert store.stats().pinned_bytes > 0
    del data
    assert rows["y"].tolist() == [0, 1, 2, 3]


def test_it_is_pickled_by_reference(store: memstore.Store) -> None:
    data = new(store)
    packed = pickle.dumps(data)
    assert len(packed) < 1000
    received = pickle.loads(packed)
    received.extend(batch(3))
    assert data[:]["y"].tolist() == [0, 1, 2]
    data.seal()
    with pytest.raises(memstore.VersionGoneError, match="'data'"):
        pickle.loads(packed)


def test_it_lives_on_when_its_store_is_closed(root: str) -> None:
    with memstore.open(root) as store:
        data = store.create_dataset("data", SPEC, capacity=10)
    data.extend(batch(2))
    assert data.seal() and len(data) == 2


def test_a_forked_child_goes_on_with_it(store: memstore.Store) -> None:
    data = new(store)
    data.extend(batch(2))
    assert in_child(lambda: data.extend(batch(3, 2))) == range(2, 5)
    assert in_child(data.seal) == store.version("data")
    assert store.get("data")["y"].tolist() == list(range(5))


def test_a_view_has_the_rows_of_its_beginning_and_shows_what_is_written(store: memstore.Store) -> None:
    data = new(store)
    data.extend(batch(3))
    view = store.view("data")
    assert view.batch_size == torch.Size([3])
    data.extend(batch(3, 3))
    data[1] = _row()
    assert len(view["y"]) == 3
    assert memstore.read_rows(view, [2, 1])["y"].tolist() == [2, 9]
    memstore.prefetch_rows(view, [0])
    assert pickle.loads(pickle.dumps(view))["y"].tolist() == [0, 9, 2]
    assert pickle.loads(pickle.dumps(view["y"][1:])).tolist() == [9, 2]


def test_what_is_told_of_it(store: memstore.Store) -> None:
    new(store)
    info = store.info("data")
    assert (info.kind, info.leaves[0].shape[0], len(info.files)) == ("dataset", 10, 1)
    assert "data" in store and list(store.keys()) == ["data"] and store.stats().live_bytes >= info.nbytes
    report = store.verify()
    assert (report.ok, report.unchecked) == (True, 1)
    assert "dataset" in store._repr_html_()


def test_on_a_disk_flushed_rows_are_noted(disk_store: memstore.Store) -> None:
    data = disk_store.create_dataset("data", SPEC, capacity=10)
    data.extend(batch(6))
    data.flush(slice(3, 5))  # doesn't join on
    data.flush(slice(0, 2))
    data.flush()
    data.seal()
    assert disk_store.get("data")["y"].tolist() == list(range(6))
    assert disk_store.verify().checked == 1
