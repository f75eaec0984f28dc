"""TorchRL's samplers over a MemstoreStorage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import memstore

data = pytest.importorskip("torchrl.data", reason="`make test-torchrl` has torchrl in an environment of its own")

from memstore.integrations.torchrl import MemstoreStorage, MemstoreWriter  # noqa: E402

LENGTHS = [3, 5, 2, 6]  # of episodes, 16 steps


def episodes(first: int = 0) -> TensorDict:
    numbers = [first + number for number, length in enumerate(LENGTHS) for _ in range(length)]
    steps = [step for length in LENGTHS for step in range(length)]
    ends = [step == length - 1 for length in LENGTHS for step in range(length)]
    return TensorDict(
        {
            "episode": torch.tensor(numbers),
            "step": torch.tensor(steps),
            "next": {"done": torch.tensor(ends)[:, None], "terminated": torch.tensor(ends)[:, None]},
        },
        [len(numbers)],
    )


def buffer(store: memstore.Store, sampler: Any, batch_size: int, slots: int = 100) -> Any:
    storage = MemstoreStorage(slots, store=store, key="rows")
    options: dict[str, Any] = {"sampler": sampler, "batch_size": batch_size}
    return data.TensorDictReplayBuffer(storage=storage, writer=MemstoreWriter(), **options)


def test_without_replacement_each_row_comes_once_a_pass(store: memstore.Store) -> None:
    rb = buffer(store, data.SamplerWithoutReplacement(), 4)
    rb.extend(episodes())
    for _ in range(2):
        index = torch.cat([rb.sample()["index"] for _ in range(4)])
        assert sorted(index.tolist()) == list(range(16))


def slices_of(sample: TensorDict, length: int) -> Any:
    return sample["episode"].view(-1, length), sample["step"].view(-1, length)


@pytest.mark.parametrize("by", ["traj_key", "end_key"])
@pytest.mark.parametrize("cache", [False, True])
def test_slices_are_steps_of_one_episode(store: memstore.Store, by: str, cache: bool) -> None:
    key: Any = "episode" if by == "traj_key" else ("next", "done")
    rb = buffer(store, data.SliceSampler(slice_len=2, cache_values=cache, **{by: key}), 40)
    rb.extend(episodes())
    seen: set[int] = set()
    for _ in range(5):
        numbers, steps = slices_of(rb.sample(), 2)
        assert (numbers[:, 0] == numbers[:, 1]).all() and (steps[:, 1] == steps[:, 0] + 1).all()
        seen |= set(numbers.flatten().tolist())
    assert seen == {0, 1, 2, 3}
    rb.extend(episodes(10))
    for _ in range(20):
        seen |= set(rb.sample()["episode"].tolist())
    assert 13 in seen, "what is cached is out of date when another row is written"


def test_slices_do_not_cross_the_place_that_is_written_next(store: memstore.Store) -> None:
    rb = buffer(store, data.SliceSampler(slice_len=2, traj_key="episode", strict_length=True), 200, slots=20)
    rb.extend(episodes())
    rb.extend(episodes(0))  # the same numbers: where old and new rows meet, only the cursor tells them apart
    assert len(rb) == 20
    _, steps = slices_of(rb.sample(), 2)
    assert (steps[:, 1] == steps[:, 0] + 1).all()


def test_a_row_that_is_corrected_ends_no_episode(store: memstore.Store) -> None:
    rb = buffer(store, data.SliceSampler(slice_len=5, traj_key="episode", strict_length=True), 200, slots=16)
    rb.extend(episodes())
    assert rb.storage._is_full
    rb.storage[4] = rb.storage[4].clone()
    assert rb.storage._last_cursor_index == 15
    numbers, _ = slices_of(rb.sample(), 5)
    assert set(numbers.flatten().tolist()) == {1, 3}, "the episodes of five steps and more"


def test_slices_without_replacement_are_steps_of_one_episode(store: memstore.Store) -> None:
    rb = buffer(store, data.SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode"), 4)
    rb.extend(episodes())
    numbers, steps = slices_of(rb.sample(), 2)
    assert (numbers[:, 0] == numbers[:, 1]).all() and (steps[:, 1] == steps[:, 0] + 1).all()
    assert numbers[0, 0] != numbers[1, 0]


def test_slices_of_rows_that_another_process_has_added_are_found(store: memstore.Store) -> None:
    """Boundaries are cached until the rows' revision changes, which is in the store."""
    rb = buffer(store, data.SliceSampler(slice_len=2, traj_key="episode", cache_values=True), 40)
    rb.extend(episodes())
    rb.sample()
    buffer(store, data.RandomSampler(), 4).extend(episodes(10))
    seen = {number for _ in range(20) for number in rb.sample()["episode"].tolist()}
    assert seen == {0, 1, 2, 3, 10, 11, 12, 13}


def prioritized(**options: Any) -> Any:
    try:
        return data.PrioritizedSampler(100, alpha=1.0, beta=1.0, **options)
    except RuntimeError as error:
        pytest.skip(f"torchrl's extension doesn't load with torch {torch.__version__}: {error}")


def test_rows_of_high_priority_come_more_often(store: memstore.Store) -> None:
    rb = buffer(store, prioritized(), 1000)
    rb.extend(episodes())
    rb.update_priority(torch.arange(16), torch.full((16,), 0.01))
    rb.update_priority(torch.tensor([5]), torch.tensor([100.0]))
    index = rb.sample()["index"]
    assert (index == 5).float().mean() > 0.9
    rb.extend(episodes())
    assert rb.sample()["index"].max() >= 16


def test_a_buffer_of_several_threads_prefetches(store: memstore.Store) -> None:
    storage = MemstoreStorage(100, store=store, key="rows")
    rb = data.TensorDictReplayBuffer(storage=storage, writer=MemstoreWriter(), batch_size=8, prefetch=3)
    rb.extend(episodes())
    for _ in range(5):
        sample = rb.sample()
        assert (sample["step"] == rb[:]["step"][sample["index"]]).all()
    rb.shutdown()


def test_rows_go_through_transforms(store: memstore.Store) -> None:
    rb = buffer(store, data.RandomSampler(), 8)
    rb.append_transform(lambda td: td.set("twice", td["step"] * 2))
    rb.extend(episodes())
    sample = rb.sample()
    assert (sample["twice"] == 2 * sample["step"]).all()


def test_a_writer_of_the_best_rows_keeps_them(store: memstore.Store) -> None:
    storage = MemstoreStorage(4, store=store, key="rows")
    writer = data.TensorDictMaxValueWriter(rank_key="value")
    rb = data.TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=4)
    rb.extend(TensorDict({"value": torch.tensor([5.0, 1.0, 7.0, 3.0, 9.0, 2.0])}, [6]))
    assert sorted(rb[:]["value"].tolist()) == [3, 5, 7, 9]
