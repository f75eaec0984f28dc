"""Stored rows through torch's own DataLoader, with workers of each kind."""

from __future__ import annotations

import os
import pickle
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import BatchSampler, DataLoader, StackDataset, Subset, default_collate

import memstore
from memstore import BlockShuffle, StoreDataset
from tests.dataloader.loaders import fails, named, rows_in, value, where_it_was_read

METHODS = ["fork", *[pytest.param(name, marks=pytest.mark.full) for name in ("forkserver", "spawn")]]


def load(data: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"batch_size": 8, **options}
    return DataLoader(data, **settings)


@contextmanager
def running(loader: Any) -> Generator[Any]:
    """Its batches; afterwards the workers have ended, whose mappings the store would still count."""
    batches = iter(loader)
    yield batches
    if loader.num_workers:
        batches._shutdown_workers()
    loader._iterator = None  # of persistent workers


def train(store: memstore.Store, **options: Any) -> StoreDataset:
    store.put("train", value())
    return StoreDataset(store, "train", **options)


def test_a_batch_is_collated_without_a_touch(store: memstore.Store) -> None:
    data = train(store)
    rows = data.__getitems__([4, 9, 4])
    assert len(rows) == 3
    assert default_collate(rows) is rows[0].batch.value
    assert rows_in(default_collate(rows)) == [4, 9, 4]


def test_rows_of_several_batches_are_stacked(store: memstore.Store) -> None:
    store.put("x", torch.arange(10))
    data = StoreDataset(store, "x")
    one, other = data.__getitems__([1, 2]), data.__getitems__([7])
    assert default_collate([*one, *other]).tolist() == [1, 2, 7]
    assert default_collate([one[1], one[0]]).tolist() == [2, 1]
    assert default_collate(one[:1]).tolist() == [1]
    assert repr(one[1]) == "<row 1 of a batch of 2; .value takes it out>"


def test_a_collate_function_of_rows_works(store: memstore.Store) -> None:
    def collate(rows: list[Any]) -> torch.Tensor:
        return torch.stack([row["td"]["inner", "row"] for row in rows])

    assert torch.equal(torch.cat(list(load(train(store), collate_fn=collate))), torch.arange(100))


def test_a_transform_whose_result_has_no_rows_is_named_when_one_is_taken(store: memstore.Store) -> None:
    data = train(store, transform=named)
    assert next(iter(load(data)))["name"] == "digits"
    with pytest.raises(memstore.UnsupportedValueError, match="a batch has a str"):
        data.__getitems__([1])[0].value  # noqa: B018


def test_other_data_sets_of_torch_take_it(store: memstore.Store) -> None:
    data = train(store)
    stacked = StackDataset[Any](data, Subset(data, range(99, -1, -1)))
    for first, second in load(stacked):
        assert rows_in(first) == [99 - row for row in rows_in(second)]


def test_a_sampler_of_batches_reads_them_by_one_index(store: memstore.Store) -> None:
    order = BatchSampler(BlockShuffle(100, block=16), 8, drop_last=True)
    expected = list(order)
    assert [rows_in(batch) for batch in load(train(store), batch_size=1, batch_sampler=order)] == expected
    store.put("x", {"x": torch.arange(100)})
    plain = StoreDataset(store, "x")
    assert [batch["x"].tolist() for batch in load(plain, batch_size=None, sampler=order)] == expected


@pytest.mark.parametrize("method", METHODS)
def test_workers_read_each_row_once_into_shared_memory(store: memstore.Store, method: str) -> None:
    data = train(store, transform=where_it_was_read)
    order = BlockShuffle(len(data), block=32)
    loader = load(data, sampler=order, num_workers=2, persistent_workers=True, multiprocessing_context=method)
    before = memstore.bytes_read()
    for epoch in range(2):
        order.set_epoch(epoch)
        batches = list(loader)
        assert [row for batch in batches for row in rows_in(batch)] == list(order)
        assert all(batch["seen"][0] == 1 for batch in batches)
        workers = {int(batch["seen"][1]) for batch in batches}
        assert len(workers) == 2
        assert os.getpid() not in workers
    assert memstore.bytes_read() == before
    with running(loader):
        pass


def test_workers_go_on_when_the_key_is_overwritten(store: memstore.Store) -> None:
    data = train(store)
    loader = load(data, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    rows = rows_in(next(batches))
    store.put("train", {"x": torch.zeros(3)})
    store.gc()
    for batch in batches:
        rows += rows_in(batch)
    assert rows == list(range(100))
    store.delete("train")
    store.gc()
    late = load(data, num_workers=1, multiprocessing_context="forkserver")  # unpickled when the version is replaced
    assert [row for batch in late for row in rows_in(batch)] == list(range(100))


def test_blocks_are_prefetched_from_a_disk(disk_store: memstore.Store) -> None:
    data = train(disk_store)
    order = BlockShuffle(len(data), block=16, prefetch=data.prefetch)
    loader = load(data, sampler=order, num_workers=1, multiprocessing_context="fork")
    assert [row for batch in loader for row in rows_in(batch)] == list(BlockShuffle(len(data), block=16))


def test_batches_that_are_kept_stay_as_they_are(store: memstore.Store) -> None:
    kept = list(load(train(store), num_workers=2, multiprocessing_context="fork"))
    assert [row for batch in kept for row in rows_in(batch)] == list(range(100))


def test_an_epoch_goes_on_in_the_middle_while_workers_read_ahead(store: memstore.Store) -> None:
    data = train(store)

    def begin(order: BlockShuffle) -> Iterator[Any]:
        return iter(load(data, sampler=order, num_workers=2, prefetch_factor=3, multiprocessing_context="fork"))

    order = BlockShuffle(100, block=16, seed=1)
    order.set_epoch(4)
    batches = begin(order)
    used = [rows_in(next(batches)) for _ in range(4)]
    assert order.state_dict()["rows"] > 32  # what the workers were sent
    state = pickle.loads(pickle.dumps(order.state_dict(32)))
    resumed = BlockShuffle(100, block=16, seed=1)
    resumed.load_state_dict(state)
    used += [rows_in(batch) for batch in begin(resumed)]
    assert used == list(BatchSampler(order, 8, drop_last=False))


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_asks_for_the_state_itself(store: memstore.Store, workers: int) -> None:
    stateful: Any = pytest.importorskip("torchdata.stateful_dataloader")
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    data, order = train(store), BlockShuffle(100, block=16)
    order.set_epoch(2)
    loader = stateful.StatefulDataLoader(data, 8, sampler=order, **options)
    batches = iter(loader)
    used = [rows_in(next(batches)) for _ in range(5)]
    resumed = stateful.StatefulDataLoader(data, 8, sampler=BlockShuffle(100, block=16), **options)
    resumed.load_state_dict(loader.state_dict())
    assert used + [rows_in(batch) for batch in resumed] == list(BatchSampler(order, 8, drop_last=False))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_row_is_an_error_of_the_loader(store: memstore.Store, workers: int) -> None:
    data = train(store)
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    wrong_row = pytest.raises(IndexError, match=r"row 100 of 'train', which has 100")
    with running(load(data, sampler=range(98, 101), **options)) as batches, wrong_row:
        next(batches)


def test_an_error_of_a_transform_reaches_the_loop(store: memstore.Store) -> None:
    data = train(store, transform=fails)
    loader = load(data, num_workers=1, multiprocessing_context="fork")
    with running(loader) as batches, pytest.raises(RuntimeError, match="no such picture"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_data_set_has_no_batch(store: memstore.Store, workers: int) -> None:
    store.put("none", TensorDict({"x": torch.zeros(0, 3)}, [0]))
    data = StoreDataset(store, "none")
    options: Any = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    assert list(load(data, **options)) == []
    assert list(load(data, sampler=BlockShuffle(0), **options)) == []


def test_a_store_that_is_read_only_forks_and_does_not_spawn(root: str) -> None:
    with memstore.open(root) as writer:
        writer.put("train", value())
    with memstore.open(root, "r") as store:
        data = StoreDataset(store, "train")
        forked = load(data, num_workers=1, multiprocessing_context="fork")
        assert [row for batch in forked for row in rows_in(batch)] == list(range(100))
        with pytest.raises(memstore.ReadOnlyError, match=r"open it with 'r\+'"):
            iter(load(data, num_workers=1, multiprocessing_context="forkserver"))
