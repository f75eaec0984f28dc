"""Snapshots as other readers see them: mapped, attached to a store, opened by safetensors and by transformers."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import memstore
from memstore import Snapshot, StateDict, TensorShard
from memstore.testing.equality import assert_same
from tests.children import in_child
from tests.snapshot.ranks import all_right, on_ranks


def app_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    tied = torch.arange(4.0)
    half = torch.ones(3, dtype=torch.complex64)
    return {"model": model, "state": StateDict(a=tied, b=[tied, "text", 3], c={"d": half, "e": torch.tensor(7)})}


def dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() for key, value in state.items()}


def test_a_view_shows_what_was_saved_and_reads_it_when_it_is_used(tmp_path: Path) -> None:
    path, state = f"{tmp_path}/s", app_state()
    view = Snapshot.take(path, state).view()
    assert_same(dicts(state), view)
    view["state"]["a"][0] = 9.0  # nobody else sees it
    assert_same(dicts(state), Snapshot(path).view())
    for name in os.listdir(path):
        os.remove(f"{path}/{name}")
    assert view["state"]["c"]["e"].item() == 7
    assert torch.equal(pickle.loads(pickle.dumps(view["model"]["0.weight"])), state["model"][0].weight)


def test_a_large_view_takes_no_memory(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    Snapshot.take(path, {"state": StateDict(x=torch.ones(64 << 20, dtype=torch.uint8))}, durability="process")
    assert in_child(_memory_of_a_view, path) < 32 << 20


def _memory_of_a_view(path: str) -> int:
    """Bytes by which the process grows when it looks at an element."""
    before = _resident()
    assert Snapshot(path).view()["state"]["x"][12345].item() == 1
    return _resident() - before


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_folder_is_attached_to_a_store_with_lazy_leaves(tmp_path: Path, root: str) -> None:
    path, state = f"{tmp_path}/s", app_state()
    Snapshot.take(path, state)
    with memstore.open(root) as store:
        store.attach("in place", path)
        store.attach("copied", path, copy=True)
        for key in ("in place", "copied"):
            assert_same(dicts(state), store.get(key))
        assert store.info("in place").kind == "adopted"
        assert torch.equal(store.view("in place")["model"]["0.weight"][1:2].clone(), state["model"][0].weight[1:2])
        with open(f"{path}/state.safetensors", "ab") as file:
            file.write(b"x")
        with pytest.raises(memstore.CorruptionError):
            store.attach("other", path)


def _take_rows(rank: int, path: str) -> None:
    Snapshot.take(path, {"state": StateDict(x=TensorShard(torch.ones(2, 3) * rank, (4, 3), (2 * rank, 0)))})


def test_tensors_in_several_files_are_put_together(tmp_path: Path, root: str) -> None:
    path = f"{tmp_path}/s"
    all_right(on_ranks(2, _take_rows, path))
    want = {"state": {"x": torch.tensor([0.0, 0, 1, 1])[:, None].repeat(1, 3)}}
    assert_same(want, Snapshot(path).view())
    with memstore.open(root) as store:
        with pytest.raises(memstore.UnsupportedValueError, match="state/x.*copy=True"):
            store.attach("key", path)
        store.attach("key", path, copy=True)
        assert_same(want, store.get("key"))


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    path, state = f"{tmp_path}/s", app_state()
    Snapshot.take(path, state)
    model = load_file(f"{path}/model.safetensors")
    assert_same(dict(state["model"].state_dict()), {name: model[name] for name in state["model"].state_dict()})
    assert set(load_file(f"{path}/state.safetensors")) == {"state/a", "state/c/d", "state/c/e"}


def _bert() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20
    )
    return transformers.BertModel(config)


def _take_bert(rank: int, path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(_bert())
    Snapshot.take(path, {"model": model, "step": StateDict(step=3)})
    return {name: value.tolist() for name, value in model.module.state_dict().items()}


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_transformers_reads_a_model(tmp_path: Path, world_size: int) -> None:
    path = f"{tmp_path}/s"
    _bert().config.save_pretrained(path)
    want = all_right(on_ranks(world_size, _take_bert, path))[0]
    model = type(_bert()).from_pretrained(path)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == want
    assert os.path.exists(f"{path}/model.safetensors.index.json") == (world_size == 2)
    if world_size == 2:
        with open(f"{path}/model.safetensors.index.json") as file:
            assert len(set(json.load(file)["weight_map"].values())) == 2
