from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset

import memstore
from memstore import BlockShuffle

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


def test_torchs_modes_change_nothing() -> None:
    expected = list(BlockShuffle(10, block=4))
    with torch.inference_mode(), torch.device("meta"):
        assert list(memstore.BlockShuffle(10, block=4)) == expected
