"""torch.compile of code that calls memstore: each call breaks the graph, and runs as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore

pytestmark = pytest.mark.embedded

SPEC = {"x": torch.zeros(3), "y": torch.zeros(())}
Call = Callable[[memstore.Store, Path, int], Any]


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    torch._dynamo.reset()


def _get_and_put(store: memstore.Store, folder: Path, turn: int) -> torch.Tensor:
    put = torch.full((4,), float(turn))
    store.put_many({"one": {"w": put}, "other": torch.ones(3000)})
    with memstore.open(store.root, "r") as reader:
        both, ref = reader.get_many(["one", "other"]), reader.ref("one")
        found = both["one"]["w"] + ref.get()["w"] + reader.view("one")["w"] + reader["one"]["w"]
        return found + both["other"].sum() + len(reader) + sum(weight.sum() for _, weight in reader.view("one").items())


def _sample(sampler: Any) -> Call:
    def call(store: memstore.Store, folder: Path, turn: int) -> Any:
        buffer = memstore.ReplayBuffer(store, f"replay {turn}", SPEC, capacity=8, sampler=sampler)
        added = buffer.extend({"x": torch.ones(turn, 3), "y": torch.ones(turn)})
        buffer.extend({"x": torch.ones(2, 3), "y": torch.ones(2)})
        batch = buffer.sample(2)
        if sampler == "prioritized":
            buffer.update_priority(batch["index"], torch.ones(2))
        return batch["x"].sum(0), added, len(buffer)

    return call


def _rows(store: memstore.Store, folder: Path, turn: int) -> Any:
    dataset = store.create_dataset(f"rows {turn}", SPEC, capacity=8)
    dataset.extend({"x": torch.ones(turn, 3), "y": torch.arange(float(turn))})
    return dataset[0:turn]["y"] + dataset.read_rows(list(range(turn)))["y"], len(dataset)


def _snapshot(store: memstore.Store, folder: Path, turn: int) -> torch.Tensor:
    state = {"state": memstore.StateDict(w=torch.full((3,), float(turn)))}
    memstore.Snapshot.take(str(folder / f"{turn}"), state)
    state["state"]["w"] = torch.zeros(3)
    memstore.Snapshot(str(folder / f"{turn}")).restore(state)
    return state["state"]["w"] + 1


CALLS: dict[str, Call] = {
    "get and put": _get_and_put,
    "sample": _sample("uniform"),
    "sample by priority": _sample("prioritized"),
    "sample once": _sample("fifo"),
    "rows": _rows,
    "snapshot": _snapshot,
}


@pytest.mark.filterwarnings("error:Dynamo does not know how to trace")
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_call_gives_what_it_gives_uncompiled(call: Call, root: str, tmp_path: Path) -> None:
    compiled: Call = torch.compile(call, backend="eager")
    with memstore.open(root, timeout=10.0) as store, memstore.open(f"{root}-plain", timeout=10.0) as plain:
        for turn in (3, 2, 4):  # other sizes are compiled anew
            found, expected = compiled(store, tmp_path, turn), call(plain, tmp_path / "plain", turn)
            torch.testing.assert_close(found, expected)
