"""Stored rows through torch's own DataLoader, with workers of each kind; batches in memory that is used again."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import BatchSampler, DataLoader, StackDataset, Subset, _utils, default_collate

import memstore
from memstore import BlockShuffle, StoreDataset
from memstore.dataloader import MOST_BLOCKS, MOST_TICKETS, begin_batch
from memstore.engine import lies_in_mapping
from tests.children import Child, Wire, in_child
from tests.dataloader.loaders import fails, fails_for_some, named, rows_in, value, where_it_was_read, with_address

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


# --- batches in shared memory that is used again: nobody's batch ever changes, and nothing is left --------------------


ROWS = 100


def read(fill: float, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What a worker reads."""
    allocate = begin_batch()
    return [allocate(shape, dtype).fill_(fill) for shape in shapes]


def begin(*shapes: tuple[int, ...]) -> None:
    """Says how large batches are: the first has no block."""
    assert not any(lies_in_mapping(tensor.data_ptr()) for tensor in read(0, *shapes))


def send(tensor: torch.Tensor) -> bytes:
    return bytes(ForkingPickler.dumps(tensor))


def receive(message: bytes) -> torch.Tensor:
    return pickle.loads(message)


def blocks_mapped() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("memstore: batches" in line for line in maps)


# -- one process, as worker and as its receiver ------------------------------------------------------------------------


def test_memory_is_used_again_when_both_have_dropped_it() -> None:
    def act() -> None:
        begin((1000,))
        places: set[int] = set()
        for i in range(10):
            (tensor,) = read(i, (1000,))
            places.add(tensor.data_ptr())
            received = receive(send(tensor))
            del tensor
            assert torch.equal(received, torch.full((1000,), float(i)))
            del received
        assert len(places) == 1

    in_child(act)


@pytest.mark.parametrize("keeper", ["worker", "receiver", "numpy", "message"])
def test_memory_that_somebody_has_stays_as_it_is(keeper: str) -> None:
    def act() -> None:
        begin((1000,))
        kept: list[Any] = []
        for i in range(2 * MOST_BLOCKS):
            (tensor,) = read(i, (1000,))
            message = send(tensor)
            received = None if keeper == "message" else receive(message)
            kept.append({"worker": tensor, "receiver": received, "message": message}.get(keeper))
            if keeper == "numpy":
                assert received is not None
                kept[-1] = received.numpy()
        assert blocks_mapped() <= 2 * MOST_BLOCKS  # each by worker and receiver
        for i, found in enumerate(kept):
            found = receive(found) if keeper == "message" else torch.as_tensor(found)
            assert torch.equal(found, torch.full((1000,), float(i)))

    in_child(act)


def test_the_alias_of_a_received_tensor_lives_on_when_that_is_shared_anew() -> None:
    def act() -> None:
        begin((1000,))
        received = receive(send(*read(7, (1000,))))
        alias = received.numpy()
        received.share_memory_()
        del received
        for i in range(3):
            read(i, (1000,))
        assert (alias == 7).all()

    in_child(act)


def test_tensors_arrive_as_they_are() -> None:
    @given(st.sampled_from([torch.uint8, torch.bfloat16, torch.complex64, torch.bool]), st.integers(1, 4))
    def act(dtype: torch.dtype, rows: int) -> None:
        for _ in range(2):  # the first perhaps without a block
            allocate = begin_batch()
            sent = [allocate((rows, 4), dtype).copy_(torch.arange(4 * rows).view(rows, 4))]
            sent += [sent[0].t(), sent[0][rows // 2 :, ::2], sent[0][0, 2], allocate((0, 3), torch.int64)]
            if dtype.is_complex:
                sent.append(sent[0].conj())
            for tensor in sent:
                found = receive(send(tensor))
                assert torch.equal(found, tensor)
                assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())

    in_child(act)


def test_one_tensor_may_be_sent_often() -> None:
    def act() -> None:
        begin((1000,))
        (tensor,) = read(3, (1000,))
        for _ in range(MOST_TICKETS + 2):
            assert receive(send(tensor))[-1] == 3
        first, second = receive(send(tensor)), receive(send(tensor))
        del first, tensor
        for i in range(3):
            read(i, (1000,))
        assert torch.equal(second, torch.full((1000,), 3.0))

    in_child(act)


def test_a_message_is_received_once() -> None:
    def act() -> None:
        begin((1000,))
        message = send(*read(1, (1000,)))
        received = receive(message)
        with pytest.raises(memstore.VersionGoneError, match="once"):
            receive(message)
        del received
        with pytest.raises(memstore.VersionGoneError, match="once"):
            receive(message)
        read(2, (1000,))
        with pytest.raises(memstore.VersionGoneError, match="once"):
            receive(message)

    in_child(act)


def test_larger_batches_get_larger_memory_and_the_old_is_given_back() -> None:
    def act() -> None:
        for size in (1000, 100_000, 500_000):
            begin((size,))
            for _ in range(3):
                assert lies_in_mapping(read(1, (size,))[0].data_ptr())
        assert blocks_mapped() == 1

    in_child(act)


def test_a_child_of_the_receiver_keeps_what_it_inherits() -> None:
    def act() -> None:
        begin((1000,))
        others = blocks_mapped()  # of the process that has forked this one
        held = [receive(send(*read(5, (1000,)))), *read(6, (1000,))]

        def look(wire: Wire) -> None:
            wire.receive()
            assert [torch.equal(held[i], torch.full((1000,), 5.0 + i)) for i in range(2)] == [True, True]

        with Child(look) as child:
            held.clear()
            for i in range(5):
                assert receive(send(*read(i, (1000,))))[0] == i
            child.send()
            child.receive()
        assert blocks_mapped() <= others + 2

    in_child(act)


def test_who_has_read_a_batch_and_ended_is_named() -> None:
    def act(wire: Wire) -> None:
        begin((1000,))
        wire.send(send(*read(1, (1000,))))

    with Child(act) as child:
        message = child.receive()
        child.receive()
    with pytest.raises(memstore.VersionGoneError, match=f"process {child.pid}, which has read this batch, has ended"):
        receive(message)


# -- loaders -----------------------------------------------------------------------------------------------------------


def loader(store: memstore.Store, workers: int = 1, transform: Any = with_address, **options: Any) -> Any:
    store.put("train", value(ROWS))
    data = StoreDataset(store, "train", transform=transform)
    options = {"batch_size": 4, "multiprocessing_context": "fork", "persistent_workers": True, **options}
    return DataLoader(data, num_workers=workers, **options)


def end(batches: Any) -> None:
    """Its workers end, whose mappings the store would still count."""
    with contextlib.suppress(RuntimeError):  # while one ends, torch may tell again of another that was killed
        batches._iterator._shutdown_workers()
    for worker in batches._iterator._workers:
        worker.join()
    batches._iterator = None
    gc.collect()


def places(batches: Iterator[Any]) -> list[int]:
    return [int(batch["address"]) for batch in batches]


def test_workers_read_into_few_places(store: memstore.Store) -> None:
    batches = loader(store)
    assert len(set(places(batches))) <= 6
    assert len(set(places(batches))) <= 5
    end(batches)
    assert blocks_mapped() == 0


def test_a_loop_that_keeps_its_batches_has_them_all(store: memstore.Store) -> None:
    batches = loader(store, batch_size=1)  # more than there are blocks
    kept: list[Any] = []
    for _ in range(2):
        kept = list(batches)
        assert [row for batch in kept for row in rows_in(batch)] == list(range(ROWS))
        assert blocks_mapped() == MOST_BLOCKS
    end(batches)
    assert [row for batch in kept for row in rows_in(batch)] == list(range(ROWS))
    del kept
    assert blocks_mapped() == 0


def test_an_epoch_that_is_left_costs_the_next_nothing(store: memstore.Store) -> None:
    batches = loader(store, workers=2, prefetch_factor=4)
    for _ in range(5):
        some = iter(batches)
        assert rows_in(next(some)) == list(range(4))
    assert len(set(places(batches))) <= 2 * 8
    end(batches)


def test_batches_that_fail_cost_the_others_nothing(store: memstore.Store) -> None:
    batches = loader(store, transform=fails_for_some)
    found: list[int] = []
    some, errors = iter(batches), 0
    while True:
        try:
            found += rows_in(next(some))
        except RuntimeError:
            errors += 1
        except StopIteration:
            break
    assert errors == 5
    assert found == [row for row in range(ROWS) if row % 20 >= 4]
    del some
    end(batches)


def test_batches_out_of_order_are_whole(store: memstore.Store) -> None:
    batches = loader(store, workers=2, in_order=False)
    for _ in range(3):
        assert sorted(row for batch in batches for row in rows_in(batch)) == list(range(ROWS))
    end(batches)


def test_what_a_killed_worker_has_sent_stays(store: memstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = loader(store, workers=2)
    some = iter(batches)
    kept = [next(some) for _ in range(6)]
    words = "exited unexpectedly|killed by signal|has ended|Connection re(set|fused)|^$"  # the last ones: torch's queue
    # torch's handler of SIGCHLD raises wherever it interrupts, also in pytest's own code, for each child that ends.
    # Without it torch looks at the workers now and then.
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    torchs = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with pytest.raises((RuntimeError, memstore.VersionGoneError, ConnectionError, EOFError), match=words):
            os.kill(some._workers[0].pid, signal.SIGKILL)
            while True:
                kept.append(next(some))
        assert [row for batch in kept for row in rows_in(batch)] == list(range(4 * len(kept)))
        del some
        end(batches)
        del kept
        gc.collect()
    finally:
        signal.signal(signal.SIGCHLD, torchs)
    assert blocks_mapped() == 0
