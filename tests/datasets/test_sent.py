"""Datasets in other processes: pickled, copied, in queues, and in the workers of DataLoaders."""

from __future__ import annotations

import copy
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
from torch import multiprocessing
from torch.utils.data import DataLoader

import memstore
from memstore._threads import call_late
from memstore.engine import lies_in_mapping

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
