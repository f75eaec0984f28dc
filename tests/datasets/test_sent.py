"""Datasets in other processes, in queues and DataLoaders; and what tensors over their rows may be used for."""

from __future__ import annotations

import copy
import io
import os
import pickle
import pickletools
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import multiprocessing
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader

import memstore
from memstore._threads import call_late
from memstore.engine import lies_in_mapping
from tests.children import in_child

ROOT = Path(__file__).parent.parent.parent
SPEC = {"x": ((3,), torch.float32), "inner": {"y": ((), torch.bfloat16)}}


def rows(count: int, start: int = 0) -> dict[str, Any]:
    number = torch.arange(start, start + count)
    return {"x": number[:, None].float().expand(-1, 3), "inner": {"y": number.bfloat16()}}


def filled(store: memstore.Store, count: int = 20) -> memstore.Dataset:
    data = store.create_dataset("data", SPEC, capacity=100)
    data.extend(rows(count))
    return data


def test_a_copy_is_the_same_dataset(store: memstore.Store) -> None:
    data = filled(store)
    for other in (copy.copy(data), copy.deepcopy({"data": data})["data"]):
        other.extend(rows(1))
    assert len(data) == 22
    data.seal()
    assert len(copy.deepcopy(data)) == 22


def test_a_pickle_keeps_its_mode_and_means_this_one(store: memstore.Store) -> None:
    data = filled(store)
    reader = pickle.loads(pickle.dumps(store.open_dataset("data", "r")))
    with pytest.raises(memstore.ReadOnlyError):
        reader.extend(rows(1))
    packed = pickle.dumps(data)
    store.delete("data")
    filled(store)
    with pytest.raises(memstore.VersionGoneError, match="created anew"):
        pickle.loads(packed)


def test_pickles_name_no_module_that_is_imported_late(store: memstore.Store) -> None:
    data = filled(store)
    buffer = memstore.ReplayBuffer(store, "replay", spec={"x": ((), torch.float32)}, capacity=4)
    for found in (data, buffer):
        called, arguments = found.__reduce__()
        assert called is call_late
        names = {op.name for op, _, _ in pickletools.genops(pickle.dumps(arguments))}
        assert not names & {"GLOBAL", "STACK_GLOBAL"}, "what has to be imported is imported between forks"


# --- queues -----------------------------------------------------------------------------------------------------------


def _fill(queue: Any, answers: Any) -> None:
    data, number = queue.get()
    data[number : number + 1] = rows(1, 100)
    answers.put((data.extend(rows(2, 200)), data[number : number + 1]))
    answers.put(os.getpid())
    queue.get()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_dataset_goes_through_a_queue_and_rows_come_back_as_copies(store: memstore.Store, method: str) -> None:
    data = filled(store)
    context: Any = multiprocessing.get_context(method)
    queue, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_fill, args=(queue, answers))
    process.start()
    queue.put((data, 7))
    added, sent = answers.get()
    assert answers.get() == process.pid != os.getpid()
    assert added == range(20, 22) and data[7]["x"].tolist() == [100] * 3 and data[21]["inner", "y"] == 201
    sent["x"].zero_()
    assert data[7]["x"].tolist() == [100] * 3
    queue.put(None)
    process.join(60)
    assert process.exitcode == 0


# --- loaders ----------------------------------------------------------------------------------------------------------


def _seen(batches: Any) -> list[int]:
    found: list[int] = []
    for batch in batches:
        assert torch.equal(batch["x"], batch["inner", "y"][:, None].float().expand(-1, 3))
        found += [int(row) for row in batch["x"][:, 0]]
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_data_loader_reads_each_row_once(store: memstore.Store, method: str, workers: int) -> None:
    if not workers and method != "fork":
        pytest.skip("no process is started")
    data: Any = filled(store)
    options: Any = {"num_workers": workers, "multiprocessing_context": method if workers else None}
    batches = list(DataLoader(data, batch_size=6, shuffle=True, **options))
    assert [len(batch["x"]) for batch in batches] == [6, 6, 6, 2]
    assert sorted(_seen(batches)) == list(range(20))
    shared = [batch["x"].is_shared() or lies_in_mapping(batch["x"].data_ptr()) for batch in batches]
    assert all(shared) is bool(workers), "it was read into shared memory"


def test_batches_are_copies(store: memstore.Store) -> None:
    data: Any = filled(store, 4)
    (batch,) = DataLoader(data, batch_size=4)
    data[0:4] = rows(4, 50)
    assert _seen([batch]) == [0, 1, 2, 3]


def test_a_collate_function_gets_the_rows(store: memstore.Store) -> None:
    data: Any = filled(store, 4)

    def numbers(given: Any) -> list[int]:
        return [int(row["x"][0]) for row in given]

    assert list(DataLoader(data, batch_size=2, collate_fn=numbers)) == [[0, 1], [2, 3]]


def test_an_epoch_has_the_rows_that_were_there_when_it_began(store: memstore.Store) -> None:
    data: Any = filled(store, 4)
    found: list[int] = []
    for batch in DataLoader(data, batch_size=2):
        found += _seen([batch])
        data.extend(rows(1, 50))
    assert found == [0, 1, 2, 3] and len(data) == 6


def test_a_store_dataset_takes_the_key_of_a_dataset_too(store: memstore.Store) -> None:
    data = filled(store)
    fixed = memstore.StoreDataset(store, "data")
    data.extend(rows(1, 20))
    assert _seen(DataLoader(fixed, batch_size=7)) == list(range(20))
    assert len(pickle.loads(pickle.dumps(fixed))) == 20


# --- actors -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_actor_of_monarch_writes_what_it_was_given(root: str) -> None:
    if find_spec("monarch") is None:  # not imported here: what is forked from this process later could not use it
        pytest.skip("Monarch isn't installed")
    command = [sys.executable, "-m", "tests.datasets.monarch_actor", root]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and done.stdout.endswith("as it should be\n"), done.stdout + done.stderr


# --- what the tensors over a dataset's rows may be used for, and in which of torch's modes ----------------------------


WIDE = {"x": ((1000,), torch.float32)}


def wide_rows(*numbers: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 1000)}


def new(store: memstore.Store) -> memstore.Dataset:
    data = store.create_dataset("data", WIDE, capacity=100)
    data.extend(wide_rows(0, 1, 2, 3))
    return data


def first(value: Any) -> list[float]:
    return value["x"][:, 0].tolist()


def test_what_moves_memory_away_moves_a_slice_alone(store: memstore.Store) -> None:
    data = new(store)
    part, alias = data[1:3], data[1:3]["x"].numpy()
    part.share_memory_()
    part["x"].zero_()
    data[1]["x"].share_memory_().fill_(7)
    data.extend(wide_rows(4))
    assert first(store.open_dataset("data")[:]) == first(data[:]) == [0, 1, 2, 3, 4]
    alias[0] = 9
    assert first(data[:]) == [0, 9, 2, 3, 4]


def test_a_slice_is_saved_and_sent_in_its_own_bytes(store: memstore.Store) -> None:
    data = new(store)
    file = io.BytesIO()
    torch.save(data[1:3], file)
    assert len(file.getvalue()) < 3 * 4000
    file.seek(0)
    assert first(torch.load(file, weights_only=False)) == [1, 2]
    part = copy.deepcopy(data[1:3])
    data[1:2] = wide_rows(9)
    assert first(part) == [1, 2] and part["x"].untyped_storage().nbytes() == 2 * 4000


def test_rows_can_be_put_into_the_same_store(store: memstore.Store) -> None:
    data = new(store)
    store.put("copy", data[::2])
    data[0:1] = wide_rows(9)
    assert first(store.get("copy")) == [0, 2] and store.info("copy").nbytes == 8000


@pytest.mark.parametrize("end", ["close", "seal", "delete"])
def test_rows_stay_when_all_else_goes(root: str, end: str) -> None:
    store = memstore.open(root)
    data = new(store)
    held, array, lazy = data[1:3], data[1:3]["x"].numpy(), store.view("data")
    if end != "close":
        data.seal() if end == "seal" else store.delete("data")
        store.gc()
        store.put("other", torch.ones(100, 1000))  # of the size of its file
    store.close()
    assert first(held) == array[:, 0].tolist() == [1, 2] and lazy["x"][:, 0].tolist() == [0, 1, 2, 3]
    if end == "close":
        assert data.extend(wide_rows(4)) == range(4, 5)
    del data
    held["x"].fill_(7)
    assert array[0, 0] == 7


def test_training_notes_nothing_on_the_rows(store: memstore.Store) -> None:
    data, weight = new(store), torch.nn.Parameter(torch.full((1000,), 2.0))
    loss = (data[1:3]["x"] * weight).sum()
    loss.backward()
    assert weight.grad is not None and weight.grad[0] == 3
    part = data[1:3]["x"]
    part.mul_(weight)
    assert part.requires_grad and not data[1:3]["x"].requires_grad
    assert first(data[1:3].detach()) == [2, 4]
    data.extend({"x": part})
    assert not data[4]["x"].requires_grad


def _read_and_write(data: memstore.Dataset, batch: dict[str, torch.Tensor]) -> tuple[Any, Any, Any]:
    data[1:2] = batch
    data.extend(batch)
    return data[1:2], data[1], data[[1, 0]]


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, torch.no_grad, FakeTensorMode, lambda: torch.device("meta")],
    ids=["inference", "no_grad", "fake", "meta"],
)
def test_modes_change_neither_reads_nor_writes(store: memstore.Store, mode: Any) -> None:
    data, batch = new(store), wide_rows(9)
    with mode():
        found = _read_and_write(data, batch)
        made = store.create_dataset_from("other", batch)
        shared = [part["x"] for part in (*found[:2], made[:], store.open_dataset("data")[:])]
        made.seal()
    assert not any(tensor.is_inference() for tensor in shared)
    for tensor in (*shared, found[2]["x"]):  # a copy is as any tensor that is made in inference mode
        assert type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    assert first(data[:]) == [0, 9, 2, 3, 9] and first(store.get("other")) == [9]


def test_inside_a_transform_rows_are_plain_and_its_own_tensors_are_refused(store: memstore.Store) -> None:
    data = new(store)
    mapped = torch.func.vmap(lambda x: x + data[1]["x"])(torch.zeros(2, 1000))
    assert mapped[:, 0].tolist() == [1, 1]
    with pytest.raises(memstore.UnsupportedValueError, match="no memory of its own"):
        torch.func.vmap(lambda x: data.__setitem__(0, {"x": x}) or x)(torch.zeros(2, 1000))
    gradient = torch.func.grad(lambda x: (x * data[2]["x"]).sum())(torch.ones(1000))
    assert gradient[0] == 2 and first(data[:]) == [0, 1, 2, 3]


def test_a_compiled_function_reads_and_writes(store: memstore.Store) -> None:
    data = new(store)

    def step(x: torch.Tensor) -> torch.Tensor:
        read = data[1]["x"] + x
        data.extend({"x": read[None]})
        return read

    compiled = torch.compile(step, backend="eager")  # what it breaks off, and runs as it is
    assert compiled(torch.ones(1000))[0] == 2
    data[1:2] = wide_rows(5)
    assert compiled(torch.ones(1000))[0] == 6
    assert first(data[:]) == [0, 5, 2, 3, 2, 6]


def test_containers_of_rows_are_the_users_own(store: memstore.Store) -> None:
    data = new(store)
    part = data[0:2]
    part["y"] = torch.zeros(2)
    part.batch_size = []
    assert isinstance(data[0:2], TensorDict) and list(data[0:2].keys()) == ["x"]
    assert in_child(lambda: first(data[0:2])) == [0, 1]
