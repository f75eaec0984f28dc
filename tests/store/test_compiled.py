"""torch.compile of code that calls memstore: each call breaks the graph, and runs as it is."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import memstore
from memstore.convert import convert
from memstore.deferred_init import deferred_init, is_deferred, materialize_module
from memstore.integrations import dcp
from tests.examples import one_in

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


def _weights(store: memstore.Store, folder: Path, turn: int) -> Any:
    tied = torch.full((5,), 0.5)
    alike = [torch.full((2000,), float(turn + i)) for i in range(3)]
    others = [torch.full((turn, 2), 3.0), torch.ones(turn), torch.ones(2, 2, 2)]
    store.put("policy", {"alike": alike, "others": others, "one": tied, "other": tied})
    found = {name: weight * 2 for name, weight in memstore.iter_weights(store, "policy")}
    return found, list(dict(memstore.iter_weights(store, "policy", prefix="alike.")).values())


def _loaded(store: memstore.Store, folder: Path, turn: int) -> Any:
    store.put("samples", {"x": torch.arange(60.0).reshape(30, 2) * turn, "y": torch.arange(30)})
    samples, order = memstore.StoreDataset(store, "samples"), memstore.BlockShuffle(30, block=2, seed=turn)
    loaded = list[dict[str, torch.Tensor]]()
    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(samples, batch_size=4, sampler=order, num_workers=workers)
        loaded += [{name: entry + 1 for name, entry in batch.items()} for batch in loader]
    return loaded


def _deferred(store: memstore.Store, folder: Path, turn: int) -> Any:
    store.put("layer", {"weight": torch.full((turn, 2), 3.0), "bias": torch.ones(turn)})
    module = deferred_init(torch.nn.Linear, 2, turn)
    was_deferred = is_deferred(module)
    materialize_module(module, source=store.view("layer"))
    return was_deferred, is_deferred(module), module(torch.ones(2)).detach()


def _files(store: memstore.Store, folder: Path, turn: int) -> Any:
    store.put("policy", {"w": torch.full((turn,), 2.0), "b": torch.ones(turn)})
    store.export("policy", folder / f"{turn}.safetensors")
    convert(folder / f"{turn}.safetensors", folder / f"{turn}.pt")
    state = {"w": torch.full((turn,), 5.0), "epoch": turn}
    dcp.save(state, checkpoint_id=folder / f"step-{turn}")
    dcp.load(into := {"w": torch.zeros(turn), "epoch": 0}, checkpoint_id=folder / f"step-{turn}")
    return torch.load(folder / f"{turn}.pt"), into


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
    "weights": _weights,
    "loaded rows": _loaded,
    "deferred": _deferred,
    "files": _files,
}


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
@pytest.mark.filterwarnings("error:Dynamo does not know how to trace")
@pytest.mark.parametrize("name", one_in(2, CALLS))
def test_a_call_gives_what_it_gives_uncompiled(name: str, root: str, tmp_path: Path) -> None:
    call = CALLS[name]
    compiled: Call = torch.compile(call, backend="eager")
    with memstore.open(root, timeout=10.0) as store, memstore.open(f"{root}-plain", timeout=10.0) as plain:
        (tmp_path / "plain").mkdir()
        for turn in (3, 2, 4):  # other sizes are compiled anew
            found, expected = compiled(store, tmp_path, turn), call(plain, tmp_path / "plain", turn)
            torch.testing.assert_close(found, expected)


# Of hosts, which load no torch; values alone, whose code may be traced; and a context that is there to be traced in.
TRACED = {
    *("Cluster", "destroy", "join", "repair", "serve", "stores", "RateLimiter", "StateDict", "Stateful", "TensorShard"),
    "fake_mode",
}


def _functions(found: Any) -> Iterator[FunctionType]:
    for one in vars(found).values() if inspect.isclass(found) else [found]:
        function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        if isinstance(function, FunctionType) and function.__module__.startswith("memstore."):
            yield function


@pytest.mark.parametrize("room", [memstore, memstore.convert, memstore.deferred_init, memstore.fake, dcp])
def test_each_public_call_is_left_alone(room: Any) -> None:
    called = {name: getattr(room, name) for name in room.__all__ if name not in TRACED}
    own = {name: found for name, found in called.items() if not _is_of_values(found)}
    assert not [
        f"{name}: {function.__qualname__}"
        for name, found in own.items()
        for function in _functions(found)
        if not getattr(function, "_torchdynamo_disable", False)
    ]
    assert any(True for found in own.values() for _ in _functions(found))


def _is_of_values(found: Any) -> bool:
    return inspect.isclass(found) and (issubclass(found, (BaseException, tuple)) or dataclasses.is_dataclass(found))
