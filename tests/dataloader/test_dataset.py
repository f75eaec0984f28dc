"""StoreDataset and BlockShuffle."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorClass, TensorDict
from torch.utils.data import BatchSampler, DataLoader, Dataset

import memstore
from memstore import BlockShuffle, StoreDataset, UnsupportedValueError
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


# --- BlockShuffle -----------------------------------------------------------------------------------------------------


lengths, blocks = st.integers(0, 300), st.integers(1, 320)
seeds = epochs = st.integers(0, 2**64 - 1)


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@given(lengths, blocks, seeds, epochs)
def test_every_row_comes_once_and_blocks_stay_together(length: int, block: int, seed: int, epoch: int) -> None:
    order = BlockShuffle(length, block=block, seed=seed)
    order.set_epoch(epoch)
    rows = list(order)
    assert sorted(rows) == list(range(length))
    assert len(order) == length
    entered = [row // block for place, row in enumerate(rows) if not place or row // block != rows[place - 1] // block]
    assert len(entered) == len(set(entered))  # no block is entered twice


@given(lengths, blocks, seeds, st.integers(1, 5))
def test_ranks_share_the_order_of_one_process(length: int, block: int, seed: int, ranks: int) -> None:
    whole = list(BlockShuffle(length, block=block, seed=seed))
    each = [list(BlockShuffle(length, block=block, seed=seed, rank=rank, num_replicas=ranks)) for rank in range(ranks)]
    assert each == [whole[rank : length // ranks * ranks : ranks] for rank in range(ranks)]
    assert {len(rows) for rows in each} == {len(BlockShuffle(length, rank=0, num_replicas=ranks))}


@given(st.data(), lengths, blocks, st.integers(1, 3))
def test_an_epoch_goes_on_where_its_state_was_taken(data: Any, length: int, block: int, ranks: int) -> None:
    def make() -> BlockShuffle:
        return BlockShuffle(length, block=block, seed=3, rank=ranks - 1, num_replicas=ranks)

    order = make()
    order.set_epoch(5)
    drawn = data.draw(st.integers(0, len(order)))
    used = data.draw(st.integers(0, drawn))
    rows = iter(order)
    first = [next(rows) for _ in range(drawn)]
    for state, begun in ((order.state_dict(), first), (order.state_dict(used), first[:used])):
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(state)))
        resumed.set_epoch(5)  # as a loop over epochs does: it stays in the middle
        assert resumed.state_dict() == state
        assert begun + list(resumed) == list(order)
        assert list(resumed) == list(order)  # only the first iteration goes on
        order.load_state_dict(order.state_dict(0))
        assert [next(rows) for rows in [iter(order)] for _ in range(drawn)] == first


def test_other_ranks_go_on_where_all_ranks_were() -> None:
    whole = list(BlockShuffle(100, block=8))
    four = [BlockShuffle(100, block=8, rank=rank, num_replicas=4) for rank in range(4)]
    for order in four:
        rows = iter(order)
        assert [next(rows) for _ in range(9)] == whole[order.rank : 36 : 4]
    assert len({json.dumps(order.state_dict()) for order in four}) == 1
    for ranks in (1, 2, 3):
        resumed = [BlockShuffle(100, block=8, rank=rank, num_replicas=ranks) for rank in range(ranks)]
        for order in resumed:
            order.load_state_dict(four[0].state_dict())
            assert list(order) == whole[36 + order.rank : 100 // ranks * ranks : ranks]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def rows(seed: int, epoch: int) -> tuple[int, ...]:
        order = BlockShuffle(64, block=16, seed=seed)
        order.set_epoch(epoch)
        return tuple(order)

    assert len({rows(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16
    assert rows(1, 2) == rows(1, 2)


def test_the_order_is_the_same_in_all_versions() -> None:
    assert list(BlockShuffle(11, block=4)) == [2, 0, 1, 3, 8, 9, 10, 5, 7, 4, 6]  # an interrupted training needs it


def test_set_epoch_leaves_the_middle_of_another_epoch() -> None:
    order = BlockShuffle(20, block=4)
    rows = iter(order)
    for _ in range(7):
        next(rows)
    order.load_state_dict(order.state_dict())
    order.set_epoch(1)
    assert order.state_dict()["rows"] == 0
    assert len(list(order)) == 20


def test_an_epoch_that_was_used_up_has_no_rows_left() -> None:
    order = BlockShuffle(20, block=4)
    list(order)
    resumed = BlockShuffle(20, block=4)
    resumed.load_state_dict(order.state_dict())
    assert list(resumed) == []
    assert len(list(resumed)) == 20


def test_blocks_are_announced_one_ahead() -> None:
    events: list[Any] = []
    order = BlockShuffle(10, block=4, prefetch=events.append)
    for row in order:
        events.append(row)
    announced = [event for event in events if isinstance(event, range)]
    assert sorted((rows.start, rows.stop) for rows in announced) == [(0, 4), (4, 8), (8, 10)]
    for rows in announced[1:]:
        before = announced[announced.index(rows) - 1]
        assert events.index(rows) < min(events.index(row) for row in before)


def test_a_resumed_epoch_announces_what_is_left() -> None:
    events: list[range] = []
    order = BlockShuffle(12, block=4, prefetch=events.append)
    rows = iter(order)
    in_last_block = [next(rows) for _ in range(9)][-1]
    events.clear()
    order.load_state_dict(order.state_dict())
    list(order)
    assert [in_last_block in block for block in events] == [True]


def test_a_loader_without_workers_can_be_resumed_by_what_was_drawn() -> None:
    order = BlockShuffle(50, block=8)
    batches = [batch.tolist() for batch in DataLoader(Numbers(), batch_size=4, sampler=order)]
    loader = iter(DataLoader(Numbers(), batch_size=4, sampler=order))
    first = [next(loader).tolist() for _ in range(5)]
    resumed = BlockShuffle(50, block=8)
    resumed.load_state_dict(order.state_dict())
    rest = [batch.tolist() for batch in DataLoader(Numbers(), batch_size=4, sampler=resumed)]
    assert first + rest == batches


def test_it_is_drawn_by_torchs_batch_sampler_and_pickled() -> None:
    order = pickle.loads(pickle.dumps(BlockShuffle(10, block=4, seed=7)))
    batches = BatchSampler(order, 3, drop_last=False)
    assert [row for batch in batches for row in batch] == list(BlockShuffle(10, block=4, seed=7))
    assert repr(order) == "BlockShuffle(length=10, block=4, seed=7, epoch=0)"
    ranked = BlockShuffle(10, rank=1, num_replicas=2)
    assert repr(ranked) == "BlockShuffle(length=10, block=1024, seed=0, epoch=0, rank=1, num_replicas=2)"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"length": -1}, "length is an integer, 0 or more, and not -1"),
        ({"length": 2.0}, "length"),
        ({"length": True}, "length"),
        ({"block": 0}, "block is an integer, 1 or more, and not 0"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"rank": 2, "num_replicas": 2}, "rank is an integer, from 0 to 1, and not 2"),
    ],
)
def test_numbers_out_of_range_are_named(options: dict[str, Any], named: str) -> None:
    is_number = all(type(value) is int for value in options.values())
    with pytest.raises(ValueError if is_number else TypeError, match=named):
        BlockShuffle(**{"length": 10, **options})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"length": 11}, "length=11.*length=10"),
        ({"block": 5}, "block=5"),
        ({"seed": 1}, "seed=1"),
        ({"rows": 11}, "rows of the state is an integer, from 0 to 10, and not 11"),
        ({"rows": -1}, "rows"),
        ({"rows": "3"}, "rows"),
        ({"epoch": None}, "epoch"),
    ],
)
def test_a_state_of_another_order_is_refused_and_nothing_changes(change: dict[str, Any], named: str) -> None:
    order = BlockShuffle(10, block=4)
    before = order.state_dict()
    with pytest.raises(ValueError, match=named):
        order.load_state_dict({**before, **change})
    assert order.state_dict() == before


def test_a_state_that_is_none_is_refused() -> None:
    order = BlockShuffle(10, block=4)
    with pytest.raises(ValueError, match="lacks length, block, seed, epoch, rows"):
        order.load_state_dict({"yielded": 3})
    with pytest.raises(ValueError, match="epoch is an integer"):
        order.set_epoch(-1)
    with pytest.raises(ValueError, match="rows is an integer, from 0 to 0, and not 1"):
        order.state_dict(1)


def test_torchs_modes_change_no_order() -> None:
    expected = list(BlockShuffle(10, block=4))
    with torch.inference_mode(), torch.device("meta"):
        assert list(memstore.BlockShuffle(10, block=4)) == expected
