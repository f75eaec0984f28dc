"""MemstoreStorage as TorchRL's replay buffers use it, beside a storage of TorchRL's own."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch._subclasses import FakeTensorMode

import memstore

data = pytest.importorskip("torchrl.data", reason="`make test-torchrl` has torchrl in an environment of its own")

from memstore.integrations.torchrl import MemstoreStorage, MemstoreWriter  # noqa: E402


@tensorclass
class Transition:
    state: torch.Tensor
    done: torch.Tensor


def batch(count: int, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + count)
    return TensorDict({"x": number.float()[:, None].expand(count, 3).clone(), "n": {"y": number}}, [count])


def buffer(storage: Any, writer: Any = None, batch_size: int = 8, **options: Any) -> Any:
    writer = writer or data.TensorDictRoundRobinWriter()
    return data.TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=batch_size, **options)


@pytest.fixture(params=["own writer", "TorchRL's writer"])
def writer(request: pytest.FixtureRequest) -> Any:
    """Makes one: what fixtures hold, they hold for longer than the test of leaks likes."""
    return MemstoreWriter if request.param == "own writer" else data.TensorDictRoundRobinWriter


INDICES = [
    0,
    -1,
    slice(None),
    slice(2, 7, 2),
    [3, 1],
    range(2, 5),
    torch.tensor([4, 4, 0]),
    torch.tensor([[1, 2], [3, 4]]),
    torch.arange(10) % 3 == 0,
    (torch.tensor([5, 6]),),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_gives_what_a_storage_of_torchrl_gives(store: memstore.Store, index: Any) -> None:
    ours, theirs = MemstoreStorage(20, store=store, key="rows"), data.LazyTensorStorage(20)
    for storage in (ours, theirs):
        storage.set(range(10), batch(10))
    found, expected = ours.get(index), theirs.get(index)
    assert found.batch_size == expected.batch_size
    assert (found == expected).all()
    assert (ours._rand_given_ndim(50) < 10).all() and len(ours) == len(theirs) == 10
    assert ours.shape == theirs.shape


@pytest.mark.parametrize("index", [3, slice(2, 7, 2), [3, 1], torch.tensor([4, 0])], ids=str)
def test_what_is_set_is_where_torchrl_would_set_it(store: memstore.Store, index: Any) -> None:
    ours, theirs = MemstoreStorage(20, store=store, key="rows"), data.LazyTensorStorage(20)
    for storage in (ours, theirs):
        storage.set(range(10), batch(10))
        rows = storage.get(index).clone()
        rows["x"] += 100
        storage[index] = rows
    assert (ours[:] == theirs[:]).all()


def test_a_buffer_wraps_around_and_samples_what_is_there(store: memstore.Store, writer: Any) -> None:
    rb = buffer(MemstoreStorage(10, store=store, key="rows"), writer(), batch_size=200)
    assert len(rb) == 0
    assert rb.extend(batch(7)).tolist() == list(range(7))
    assert rb.extend(batch(7, 7)).tolist() == [7, 8, 9, 0, 1, 2, 3]
    assert rb.add(batch(1, 14)[0]) == 4
    assert len(rb) == 10 and rb.storage._is_full
    expected = [10, 11, 12, 13, 14, 5, 6, 7, 8, 9]
    assert rb[:]["n", "y"].tolist() == expected
    sample = rb.sample()
    assert sample["n", "y"].tolist() == [expected[slot] for slot in sample["index"]]
    assert set(sample["n", "y"].tolist()) == set(expected)
    rb.empty()
    assert len(rb) == 0 and rb.write_count == 0
    assert rb.extend(batch(2)).tolist() == [0, 1] and len(rb) == 2


def test_a_batch_of_more_rows_than_there_are_slots_leaves_the_last(store: memstore.Store, writer: Any) -> None:
    rb = buffer(MemstoreStorage(4, store=store, key="rows"), writer())
    rb.extend(batch(10))
    assert sorted(rb[:]["n", "y"].tolist()) == [6, 7, 8, 9]


def test_rows_are_tensors_and_tensorclasses_too(store: memstore.Store) -> None:
    rb = data.ReplayBuffer(storage=MemstoreStorage(10, store=store, key="tensor"), batch_size=4)
    rb.extend(torch.arange(6))
    assert rb.sample().shape == (4,) and rb[2] == 2
    rb = data.ReplayBuffer(storage=MemstoreStorage(10, store=store, key="class"), batch_size=4)
    rb.extend(Transition(state=torch.rand(5, 3), done=torch.zeros(5, 1, dtype=torch.bool), batch_size=[5]))
    assert isinstance(rb.sample(), Transition) and isinstance(rb[1], Transition)
    other = MemstoreStorage(10, store=store, key="class")
    assert isinstance(other[torch.tensor([0])], Transition)


def test_elements_may_have_two_dimensions(store: memstore.Store, writer: Any) -> None:
    ours, theirs = MemstoreStorage(24, store=store, key="rows", ndim=2), data.LazyTensorStorage(24, ndim=2)
    value = TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3])
    for storage, one in ((ours, writer()), (theirs, data.TensorDictRoundRobinWriter())):
        rb = buffer(storage, one, batch_size=30, dim_extend=0)
        rb.extend(value)
        rb.extend(value + 100)
        rb.extend(value[:1] + 200)
        sample = rb.sample()
        assert (sample["x"] == storage[:]["x"][sample["index"].unbind(-1)]).all()
    assert (ours[:]["x"] == theirs[:]["x"]).all()
    assert ours.shape == theirs.shape == (8, 3) and len(ours) == len(theirs) and ours.max_size == theirs.max_size
    assert len(ours.flatten()) == 24
    for storage in (ours, theirs):
        storage[torch.tensor([0, 5]), torch.tensor([1, 2])] = TensorDict({"x": torch.tensor([-1, -2])}, [2])
    assert (ours[:]["x"] == theirs[:]["x"]).all()
    theirs_too = []
    for storage in (ours, theirs):
        rb = buffer(storage)  # its first dimension is the second of the storage
        rb[1, 2:4] = TensorDict({"x": torch.tensor([-3, -4])}, [2])
        rb[:, 5] = TensorDict({"x": torch.tensor([-5, -6, -7])}, [3])
        theirs_too.append(rb[:]["x"].clone())
    assert (theirs_too[0] == theirs_too[1]).all() and (theirs_too[0] == -7).any()
    again = MemstoreStorage(24, store=store, key="rows", ndim=2)
    assert again.shape == (8, 3)


def test_a_generation_counts_the_writes_of_all(store: memstore.Store) -> None:
    storage = MemstoreStorage(4, store=store, key="rows")
    rb = buffer(storage, MemstoreWriter(track_generations=True))
    index = rb.extend(batch(4))
    assert rb.writer.generations_of(index).tolist() == [0, 0, 0, 0]
    other = buffer(MemstoreStorage(4, store=store, key="rows"), MemstoreWriter())
    other.extend(batch(2))
    assert rb.writer.generations_of(index).tolist() == [1, 1, 0, 0]
    assert (rb.sample()["index_generation"] >= 0).all()
    assert other.writer.generations_of(index).tolist() == [-1] * 4
    rb.empty()
    assert rb.writer.generations_of(index).tolist() == [2, 2, 1, 1]


def test_generations_of_torchrls_writer_work_as_ever(store: memstore.Store) -> None:
    writer = data.RoundRobinWriter(track_generations=True)
    rb = data.ReplayBuffer(storage=MemstoreStorage(4, store=store, key="rows"), writer=writer, batch_size=2)
    index = rb.extend(batch(4))
    rb.extend(batch(2))
    assert writer.generations_of(index).tolist() == [1, 1, 0, 0]


def test_whoever_opens_the_key_has_the_rows_the_cursor_and_the_revision(store: memstore.Store) -> None:
    early = MemstoreStorage(10, store=store, key="rows")
    assert not early.initialized and len(early) == 0 and early.shape is None
    first = buffer(MemstoreStorage(10, store=store, key="rows"), MemstoreWriter())
    first.extend(batch(7))
    second = buffer(MemstoreStorage(10, store=store, key="rows"), MemstoreWriter())
    assert second.extend(batch(5, 7)).tolist() == [7, 8, 9, 0, 1]
    assert len(early) == 10 and early[:]["n", "y"].tolist() == [10, 11, *range(2, 10)]
    assert early._last_cursor_index == 1
    assert first.writer._cursor == 2 and first.write_count == 12
    before = early._mutation_revision
    first.extend(batch(1))
    assert early._mutation_revision > before


def test_a_storage_is_pickled_as_a_reference(store: memstore.Store) -> None:
    storage = MemstoreStorage(1000, store=store, key="rows")
    empty = pickle.loads(pickle.dumps(storage))
    storage.set(range(100), batch(100))
    text = pickle.dumps(storage)
    assert len(text) < 5000
    other = pickle.loads(text)
    assert (other[:] == storage[:]).all() and len(empty) == 100
    other.set(torch.tensor([3]), batch(1, 500))
    assert storage[3]["n", "y"] == 500
    store.delete("rows")
    with pytest.raises(memstore.VersionGoneError):
        pickle.loads(text)


def test_a_patch_of_some_entries_leaves_the_others(store: memstore.Store) -> None:
    rb = buffer(MemstoreStorage(10, store=store, key="rows"), MemstoreWriter(track_generations=True))
    index = rb.extend(batch(5))
    storage = rb.storage
    patch = storage._validate_conditional_patch(index[1:3], {("n", "y"): torch.tensor([70, 80])})
    storage._apply_conditional_patch(index[1:3], patch)
    assert rb[:]["n", "y"].tolist() == [0, 70, 80, 3, 4] and rb[:]["x"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_rows_that_are_there_are_corrected_by_some_entries(store: memstore.Store) -> None:
    rb = buffer(MemstoreStorage(10, store=store, key="rows"))
    rb.extend(batch(5))
    rb[1] = batch(1, 70)[0]  # without the entry "index", which the writer added
    rb[[3, 2]] = TensorDict({"n": {"y": torch.tensor([93, 92])}}, [2])
    assert rb[:]["n", "y"].tolist() == [0, 70, 92, 93, 4] and rb[:]["x"][:, 0].tolist() == [0, 70, 2, 3, 4]
    assert rb[:]["index"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(memstore.StructureMismatchError, match="missing"):
        rb.storage[7] = TensorDict({"x": torch.zeros(3)}, [])


def test_an_entry_is_got_by_its_name(store: memstore.Store) -> None:
    storage = MemstoreStorage(10, store=store, key="rows")
    storage.set(range(5), batch(5))
    assert storage.get(("n", "y")).tolist() == [0, 1, 2, 3, 4] == storage[:]["n", "y"].tolist()
    assert storage.get("x").shape == (5, 3)


def test_entries_of_all_rows_are_set_in_place(store: memstore.Store) -> None:
    rb = buffer(MemstoreStorage(10, store=store, key="rows"))
    rb.extend(batch(5))
    rb.set_(("n", "y"), torch.full((5,), 9))
    rb.set_at_("x", torch.ones(2, 3), torch.tensor([0, 1]))
    assert MemstoreStorage(10, store=store, key="rows")[:]["n", "y"].tolist() == [9] * 5
    assert rb[:]["x"].sum() == 6 + 3 * (2 + 3 + 4)


def test_stacks_of_rows_are_stored_as_rows(store: memstore.Store, writer: Any) -> None:
    rb = buffer(MemstoreStorage(10, store=store, key="rows"), writer())
    rb.extend(LazyStackedTensorDict.lazy_stack([batch(1, number)[0] for number in range(4)]))
    assert rb[:]["n", "y"].tolist() == [0, 1, 2, 3]
    storage = MemstoreStorage(10, store=store, key="list")
    storage.set(range(3), [batch(1, number)[0].exclude("index") for number in range(3)])
    assert storage[:]["n", "y"].tolist() == [0, 1, 2]


def test_a_compiled_program_calls_the_storage(store: memstore.Store) -> None:
    storage = MemstoreStorage(10, store=store, key="rows")
    storage.set(range(4), batch(4))
    double = torch.compile(lambda index: storage.get(index)["x"] * 2, backend="eager")
    assert double(torch.tensor([1, 3]))[:, 0].tolist() == [2, 6]


def test_modes_of_torch_do_not_reach_the_rows(store: memstore.Store) -> None:
    storage = MemstoreStorage(10, store=store, key="rows")
    with torch.inference_mode():
        storage.set(range(4), batch(4))
        assert storage.get(torch.tensor([2]))["n", "y"].tolist() == [2]
    storage.set(range(1), batch(1, 9).apply(lambda leaf: leaf if leaf.dtype == torch.int64 else leaf.requires_grad_()))
    assert not storage[:]["x"].requires_grad and storage[:]["x"][:, 0].tolist() == [9, 1, 2, 3]
    with pytest.raises(memstore.UnsupportedValueError), FakeTensorMode():
        storage.set(range(4), batch(4))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_another_size_is_told(store: memstore.Store) -> None:
    MemstoreStorage(10, store=store, key="rows").set(range(3), batch(3))
    with pytest.raises(memstore.StructureMismatchError, match="10 slots, and max_size 11 makes 11.*max_size 10"):
        MemstoreStorage(11, store=store, key="rows")


def test_another_structure_is_told_and_nothing_changes(store: memstore.Store) -> None:
    storage = MemstoreStorage(10, store=store, key="rows")
    storage.set(range(3), batch(3))
    with pytest.raises(memstore.StructureMismatchError, match="float64"):
        storage.set(range(3), batch(3).double())
    with pytest.raises(memstore.StructureMismatchError, match="'y'.*missing"):
        storage.set(range(3), batch(3).exclude(("n", "y")))
    storage.set(range(1), batch(1, 7).set("more", torch.zeros(1)))
    assert storage[:]["n", "y"].tolist() == [7, 1, 2]


@pytest.mark.parametrize("value", [(torch.zeros(3),), {"a": torch.zeros(3)}], ids=str)
def test_rows_that_are_no_tensors_are_refused(store: memstore.Store, value: Any) -> None:
    rb = data.ReplayBuffer(storage=MemstoreStorage(10, store=store, key="rows"))
    with pytest.raises(memstore.UnsupportedValueError, match="make a TensorDict"):
        rb.extend(value)


def test_before_the_first_batch_there_is_nothing_to_get(store: memstore.Store) -> None:
    storage = MemstoreStorage(10, store=store, key="rows")
    with pytest.raises(RuntimeError, match="non-initialized"):
        storage.get(0)
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer(storage).sample()
    assert "data=<empty>" in repr(storage)


def test_other_entries_are_refused(store: memstore.Store) -> None:
    store.put("rows", torch.zeros(3))
    with pytest.raises(memstore.MutableEntryError):
        MemstoreStorage(10, store=store, key="rows")


def test_the_writer_wants_a_storage_of_memstore() -> None:
    with pytest.raises(TypeError, match="MemstoreStorage"):
        data.ReplayBuffer(storage=data.LazyTensorStorage(10), writer=MemstoreWriter()).extend(torch.zeros(3))


def lazy(*rows: TensorDict) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*rows, stack_dim=0)


def of_length(count: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(3), "n": {"y": torch.zeros(count)}})


@pytest.mark.parametrize(
    "ragged",
    [
        lambda: lazy(of_length(2), of_length(3)),
        lambda: [of_length(2), of_length(3)],
        lambda: TensorDict({"more": lazy(of_length(2), of_length(3))}, [2]),
    ],
    ids=["lazy stack", "list", "lazy stack inside"],
)
def test_ragged_rows_are_refused_by_name_and_make_no_entry(store: memstore.Store, ragged: Any) -> None:
    storage = MemstoreStorage(10, store=store, key="rows")
    for write in (lambda: storage.set(range(2), ragged()), lambda: storage.append(ragged())):
        with pytest.raises(memstore.StructureMismatchError, match=r"'n', 'y'\) has shape \[2\] in one row and \[3\]"):
            write()
    assert "rows" not in store
    assert storage.append(lazy(of_length(2), of_length(2))).tolist() == [0, 1]
    assert storage.append([of_length(2)] * 3).tolist() == [2, 3, 4]
    with pytest.raises(memstore.StructureMismatchError):
        storage.append(ragged())
    assert len(storage) == 5


def test_a_buffer_of_ragged_rows_stays_as_it_is(store: memstore.Store) -> None:
    rb = buffer(MemstoreStorage(10, store=store, key="rows"), MemstoreWriter())
    rb.extend(batch(3))
    with pytest.raises(memstore.StructureMismatchError):
        rb.extend(lazy(of_length(2), of_length(3)))
    assert rb.extend(batch(2, 3)).tolist() == [3, 4] and len(rb) == 5


def test_ragged_tensors_are_refused(store: memstore.Store) -> None:
    storage = MemstoreStorage(10, store=store, key="rows")
    with pytest.raises(memstore.StructureMismatchError, match="a row has shape"):
        storage.set(range(2), [torch.zeros(2), torch.zeros(3)])
    assert "rows" not in store


@pytest.mark.parametrize(
    "rows",
    [
        [{"x": torch.zeros(3)}] * 2,
        [(torch.zeros(3), torch.zeros(1))] * 2,
        [torch.zeros(3), "text"],
        {"x": torch.zeros(2, 3)},
        (torch.zeros(2, 3), torch.zeros(2)),
    ],
    ids=["dicts", "tuples", "text", "a dict", "a tuple"],
)
def test_rows_that_are_no_tensordicts_are_refused_by_name(store: memstore.Store, rows: Any) -> None:
    storage = MemstoreStorage(10, store=store, key="rows")
    for write in (lambda: storage.set(range(2), rows), lambda: storage.append(rows)):
        with pytest.raises(memstore.UnsupportedValueError, match="'rows': .* make a TensorDict of it"):
            write()
    assert "rows" not in store
