"""What the tensors over a dataset's rows may be used for, and in which of torch's modes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses import FakeTensorMode

import memstore
from tests.children import in_child

SPEC = {"x": ((1000,), torch.float32)}


def rows(*numbers: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, 1000)}


def new(store: memstore.Store) -> memstore.Dataset:
    data = store.create_dataset("data", SPEC, capacity=100)
    data.extend(rows(0, 1, 2, 3))
    return data


def first(value: Any) -> list[float]:
    return value["x"][:, 0].tolist()


def test_what_moves_memory_away_moves_a_slice_alone(store: memstore.Store) -> None:
    data = new(store)
    part, alias = data[1:3], data[1:3]["x"].numpy()
    part.share_memory_()
    part["x"].zero_()
    data[1]["x"].share_memory_().fill_(7)
    data.extend(rows(4))
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
    data[1:2] = rows(9)
    assert first(part) == [1, 2] and part["x"].untyped_storage().nbytes() == 2 * 4000


def test_rows_can_be_put_into_the_same_store(store: memstore.Store) -> None:
    data = new(store)
    store.put("copy", data[::2])
    data[0:1] = rows(9)
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
        assert data.extend(rows(4)) == range(4, 5)
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
    data, batch = new(store), rows(9)
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
    data[1:2] = rows(5)
    assert compiled(torch.ones(1000))[0] == 6
    assert first(data[:]) == [0, 5, 2, 3, 2, 6]


def test_containers_of_rows_are_the_users_own(store: memstore.Store) -> None:
    data = new(store)
    part = data[0:2]
    part["y"] = torch.zeros(2)
    part.batch_size = []
    assert isinstance(data[0:2], TensorDict) and list(data[0:2].keys()) == ["x"]
    assert in_child(lambda: first(data[0:2])) == [0, 1]
