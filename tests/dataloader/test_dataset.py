from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorClass, TensorDict

import memstore
from memstore import StoreDataset, UnsupportedValueError
from tests.dataloader.loaders import rows_in, value


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Sample(TensorClass):
    x: torch.Tensor
    y: torch.Tensor


def train(store: memstore.Store) -> StoreDataset:
    store.put("train", value())
    return StoreDataset(store, "train")


def test_a_batch_is_read_by_an_index(store: memstore.Store) -> None:
    data = train(store)
    assert len(data) == 100
    for index in ([3, 99, 3, -1], slice(10, 20, 3), range(5), torch.tensor([4, 2]), np.array([7]), []):
        expected = range(100)[index] if isinstance(index, slice) else [int(row) % 100 for row in index]
        assert rows_in(data[index]) == list(expected)
    assert rows_in(data[torch.arange(100) == 8]) == [8]


def test_an_integer_is_one_row(store: memstore.Store) -> None:
    data = train(store)
    for index in (5, -95, np.int32(5), torch.tensor(5), np.array(5)):
        row = data[index]
        assert row["x"].shape == (3, 2)
        assert row["td"].batch_size == ()
        assert (row["td"]["inner", "row"].item(), row["pair"][0].item(), row["pair"][1][0].item()) == (5, 10, False)
    assert len(data[torch.tensor([5])]["x"]) == 1


def test_rows_can_be_iterated_to_their_end(store: memstore.Store) -> None:
    store.put("three", torch.arange(3))
    assert [int(row) for row in StoreDataset(store, "three")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("index", "error", "named"),
    [
        (100, IndexError, "100.*rows are from -100 to 99"),
        (-101, IndexError, "-101"),
        ([0, 100], IndexError, "100"),
        ("x", TypeError, "str is no index of rows"),
        (1.0, TypeError, "float"),
        ([0.5], TypeError, "float64"),
        (torch.tensor(2.5), TypeError, "integer"),
        (np.array(2.5), TypeError, "integer"),
        (None, TypeError, "NoneType"),
        ([[1, 2]], ValueError, "one dimension"),
        (torch.ones(3, dtype=torch.bool), IndexError, "mask of 3"),
    ],
)
def test_a_wrong_index_is_named(store: memstore.Store, index: Any, error: type[Exception], named: str) -> None:
    data = train(store)
    with pytest.raises(error, match=named):
        data[index]


@pytest.mark.parametrize("kind", ["tensor", "parameter", "list", "tuple", "named tuple", "ordered", "tensorclass"])
def test_containers_are_those_that_were_put(store: memstore.Store, kind: str) -> None:
    x, y = torch.randn(6, 2), torch.arange(6)
    stored: dict[str, Any] = {
        "tensor": x,
        "parameter": torch.nn.Parameter(x.clone()),
        "list": [x, y],
        "tuple": (x, y),
        "named tuple": Pair(x, y),
        "ordered": OrderedDict(y=y, x=x),
        "tensorclass": Sample(x=x, y=y, batch_size=[6]),
    }
    store.put(kind, stored[kind])
    data = StoreDataset(store, kind)
    for index, expected in (([4, 1], [4, 1]), (3, 3)):
        found = data[index]
        assert type(found) is (torch.Tensor if kind == "parameter" else type(stored[kind]))
        if kind in ("tensor", "parameter"):
            assert torch.equal(found, x[expected])
            assert not found.requires_grad
        elif kind in ("list", "tuple"):
            assert torch.equal(found[0], x[expected])
            assert torch.equal(found[1], y[expected])
        else:
            pair: Any = (found["x"], found["y"]) if kind == "ordered" else (found.x, found.y)
            assert torch.equal(pair[0], x[expected])
            assert torch.equal(pair[1], y[expected])


def test_what_is_read_may_be_written(store: memstore.Store) -> None:
    data = train(store)
    data[[1, 2]]["x"].fill_(7)
    data[1]["x"].fill_(7)
    assert rows_in(data[[1, 2]]) == [1, 2]


def test_a_transform_gets_batches_and_rows(store: memstore.Store) -> None:
    store.put("x", torch.arange(10))
    data = StoreDataset(store, "x", transform=lambda x: (x.shape, x + 1))
    assert data[3] == ((), torch.tensor(4))
    shape, batch = data[[3, 4]]
    assert shape == (2,)
    assert batch.tolist() == [4, 5]
    (row, _) = data.__getitems__([3, 4])
    assert row.batch.value[1].tolist() == [4, 5]


def test_a_value_without_rows_is_empty(store: memstore.Store) -> None:
    store.put("none", {"x": torch.zeros(0, 3), "y": torch.zeros(0)})
    data = StoreDataset(store, "none")
    assert len(data) == 0
    assert data[[]]["x"].shape == (0, 3)
    with pytest.raises(IndexError, match="it is empty"):
        data[0]


X = torch.zeros(4, 2)
REFUSED: list[tuple[str, Any, str]] = [
    ("a string", {"x": X, "name": "digits"}, r"value\['name'\] of 'it' is a str.*key of its own"),
    ("a number", [X, 3], r"value\[1\] of 'it' is an int"),
    ("None", {"x": X, "mask": None}, "NoneType"),
    ("an array", {"x": np.zeros(4)}, r"value\['x'\] of 'it' is a ndarray"),
    ("a string of a TensorDict", TensorDict({"x": X, "name": "digits"}, [4]), r"value\['name'\].*NonTensorData"),
    ("strings", TensorDict({"x": X, "s": NonTensorStack(*"abcd")}, [4]), "NonTensorStack"),
    ("a lazy stack", LazyStackedTensorDict(*[TensorDict({"x": X}) for _ in range(3)]), "LazyStackedTensorDict"),
    ("a scalar", {"x": X, "mean": torch.tensor(0.5)}, r"value\['mean'\] of 'it' has no dimension"),
    ("a sparse tensor", {"x": X.to_sparse()}, "sparse"),
    ("no tensor", {"x": {}}, "the value of 'it' has no tensor"),
    ("a weight beside rows", {"x": X, "mean": torch.zeros(2)}, r"value\['mean'\] has 2, value\['x'\] has 4"),
]


@pytest.mark.parametrize(("stored", "named"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_has_no_rows_is_refused_by_name(store: memstore.Store, stored: Any, named: str) -> None:
    store.put("it", stored)
    with pytest.raises(UnsupportedValueError, match=named) as caught:
        StoreDataset(store, "it")
    assert caught.value.key == "it"


def test_a_missing_key_and_a_closed_store_are_the_stores_errors(root: str) -> None:
    with memstore.open(root) as store, pytest.raises(memstore.KeyNotFoundError):
        StoreDataset(store, "none")
    with pytest.raises(memstore.StoreClosedError):
        StoreDataset(store, "none")


def test_it_stays_at_the_version_that_it_found(root: str) -> None:
    with memstore.open(root) as store:
        store.put("train", value())
        data = StoreDataset(store, "train")
        store.put("train", {"x": torch.zeros(3)})
        assert rows_in(data[[50, 60]]) == [50, 60]
        store.delete("train")
        store.gc()
    assert rows_in(data[[70, 80]]) == [70, 80]


def test_it_is_pickled_as_a_reference(store: memstore.Store) -> None:
    store.put("train", {"x": torch.zeros(100_000, 10), "y": torch.arange(100_000)})
    data = StoreDataset(store, "train", transform=len)
    sent = pickle.dumps(data)
    assert len(sent) < 2000
    arrived = pickle.loads(sent)
    assert (len(arrived), arrived.key, arrived.transform) == (100_000, "train", len)
    assert repr(arrived) == "<memstore.StoreDataset 'train', 100,000 rows>"
    arrived.transform = None
    assert arrived[[99_999]]["y"].tolist() == [99_999]


def test_torchs_modes_change_nothing(store: memstore.Store) -> None:
    data = train(store)
    with torch.inference_mode():
        assert rows_in(data[[3]]) == [3]
        assert data[3]["x"].sum() == 18
    with torch.device("meta"):
        assert rows_in(data[[3]]) == [3]


def test_prefetch_reads_nothing_and_names_wrong_rows(disk_store: memstore.Store) -> None:
    disk_store.put("train", value())
    data = StoreDataset(disk_store, "train")
    before = memstore.bytes_read()
    data.prefetch(range(100))
    assert memstore.bytes_read() == before
    with pytest.raises(IndexError, match="100"):
        data.prefetch([100])
