"""Snapshots as other readers see them: mapped, attached to a store, opened by safetensors and by transformers."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader

import memstore
from memstore import Snapshot, StateDict, StoredTensor, TensorShard
from memstore.listing import entries
from tests.children import in_child
from tests.snapshot.ranks import all_right, on_ranks
from tests.support.equality import assert_same


def app_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    tied = torch.arange(4.0)
    half = torch.ones(3, dtype=torch.complex64)
    return {"model": model, "state": StateDict(a=tied, b=[tied, "text", 3], c={"d": half, "e": torch.tensor(7)})}


def dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() for key, value in state.items()}


def plain(view: Any) -> Any:
    """The same containers, with copies of what lazy leaves show."""
    if isinstance(view, (dict, list)):
        for key, value in list(view.items() if isinstance(view, dict) else enumerate(view)):
            view[key] = plain(value)
    return view.clone() if isinstance(view, StoredTensor) else view


def test_a_view_has_lazy_leaves_that_stay_when_the_snapshot_goes(tmp_path: Path) -> None:
    path, state = f"{tmp_path}/s", app_state()
    view = Snapshot.take(path, state).view()
    assert type(view["model"]["0.weight"]) is StoredTensor
    assert view["state"]["a"] is view["state"]["b"][0], "tied as it was"
    before = memstore.bytes_read()
    row = view["model"]["0.weight"][1]
    assert memstore.bytes_read() == before and f"snapshot='{path}'" in repr(row)
    with pytest.raises(memstore.ReadOnlyError, match="lazy leaf of '/"):
        view["state"]["a"][0] = 9.0
    for name in os.listdir(path):
        os.remove(f"{path}/{name}")
    assert_same(dicts(state), plain(view), ties=False)
    assert torch.equal(row, state["model"][0].weight[1]) and memstore.bytes_read() > before


def test_a_leaf_is_sent_as_a_reference_to_the_files_that_it_comes_from(tmp_path: Path) -> None:
    path, state = f"{tmp_path}/s", app_state()
    view = Snapshot.take(path, state).view()
    sent = pickle.dumps((view["model"]["0.weight"][1:], view["state"]["a"]))
    assert in_child(_sum_of_sent, sent) == state["model"][0].weight[1:].sum().item() + 6
    shutil.move(path, f"{path}-old")
    with pytest.raises(memstore.VersionGoneError, match=re.escape(path)):
        pickle.loads(sent)
    Snapshot.take(path, state)
    with pytest.raises(memstore.VersionGoneError, match="another one"):
        pickle.loads(sent)


def _sum_of_sent(sent: bytes) -> float:
    return sum(leaf.sum().item() for leaf in pickle.loads(sent))


def test_a_view_goes_where_tensors_go(tmp_path: Path, root: str) -> None:
    """Into a module, a store, another snapshot, a file, an index, a DataLoader's workers, a forked child."""
    path, state = f"{tmp_path}/s", app_state()
    Snapshot.take(path, {**state, "table": StateDict(x=torch.arange(60.0).reshape(20, 3))})
    view = Snapshot(path).view()
    table = view["table"]["x"]
    model = app_state()["model"]
    with torch.no_grad():
        model[0].weight.zero_()
    model.load_state_dict(view["model"])
    assert torch.equal(model[0].weight, state["model"][0].weight)
    with memstore.open(root) as store:
        store.put("key", view["table"])
        assert torch.equal(store.get("key")["x"], table)
    Snapshot.async_take(f"{path}-2", {"table": StateDict(view["table"])}).wait()
    target = StateDict(view["table"])
    Snapshot(f"{path}-2").restore({"table": target})
    assert type(target["x"]) is torch.Tensor and torch.equal(target["x"], table)
    torch.save(view["table"], f"{tmp_path}/file")
    assert type(torch.load(f"{tmp_path}/file")["x"]) is torch.Tensor
    assert table[[3, 5]].tolist() == [[9, 10, 11], [15, 16, 17]] and (table[table > 58] == 59).all()
    assert sum(batch.sum().item() for batch in DataLoader(table, batch_size=5, num_workers=1)) == 59 * 30
    assert in_child(lambda: table[1].tolist()) == [3, 4, 5]


def test_what_containers_look_into_is_as_it_was_in_a_view(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    value = {
        "jagged": jagged,
        "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
        "array": np.arange(3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "wide": torch.ones(3, dtype=torch.complex128),
        "byte": torch.ones(3).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(True),
    }
    Snapshot.take(f"{tmp_path}/s", {"state": StateDict(value)})
    for mode in (contextlib.nullcontext, torch.inference_mode, FakeTensorMode):
        with mode():
            view = Snapshot(f"{tmp_path}/s").view()["state"]
        assert isinstance(view["parameter"], torch.nn.Parameter) and view["parameter"].requires_grad
        assert view["wide"].stored.base is None, "nothing was copied"
        view["parameter"] = torch.nn.Parameter(view["parameter"].detach().clone())
        assert_same(value, plain(view), ties=False)


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


def test_a_view_is_opened_with_few_calls_a_leaf(tmp_path: Path) -> None:
    """Of Python's functions; times would tell the machine."""
    path, count = f"{tmp_path}/s", 300
    Snapshot.take(path, {"state": StateDict({f"{i}": torch.ones(2, 2) for i in range(count)})}, durability="process")
    calls = 0

    def on_event(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    Snapshot(path).view()
    sys.setprofile(on_event)
    try:
        Snapshot(path).view()
    finally:
        sys.setprofile(None)
    assert calls < 10 * count


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


def test_a_leaf_in_several_files_is_sliced_lazily_as_one_tensor(tmp_path: Path, root: str) -> None:
    path = f"{tmp_path}/s"
    all_right(on_ranks(2, _take_rows, path))
    want = {"state": {"x": torch.tensor([0.0, 0, 1, 1])[:, None].repeat(1, 3)}}
    view = Snapshot(path).view()
    before = memstore.bytes_read()
    part = view["state"]["x"].t()[1:, 1:3]
    assert memstore.bytes_read() == before
    assert part.tolist() == [[0, 1], [0, 1]]
    assert memstore.bytes_read() - before == 16
    assert_same(want, plain(view))
    assert pickle.loads(pickle.dumps(view["state"]["x"]))[1:3, 0].tolist() == [0, 1]
    with memstore.open(root) as store:
        store.attach("in place", path)
        store.attach("copied", path, copy=True)
        for key in ("in place", "copied"):
            assert_same(want, store.get(key))
            assert store.view(key)["state"]["x"][1:3, 0].tolist() == [0, 1]
        (leaf,) = store.info("in place").leaves
        assert [(shard.rank, shard.offsets) for shard in leaf.shards] == [(0, (0, 0)), (1, (2, 0))]
        assert [one.nbytes for one in entries(store)] == [48, 48], "and not the mapped range"
        target = torch.zeros(2, 3)
        store.get("in place", out={"state": {"x": TensorShard(target, (4, 3), (1, 0))}})
        assert target.tolist() == [[0, 0, 0], [1, 1, 1]] and store.verify().ok
    with memstore.open(root, "r") as store:
        assert_same(want, store.get("in place"))
    settings = json.loads(Path(root, "memstore.json").read_text())
    assert settings["features"] == ["sharded"], "memstore before that refuses the store"


def _take_many(rank: int, path: str) -> None:
    tied = TensorShard(torch.full((1, 5), rank + 1.0, dtype=torch.complex128), (2, 5), (rank, 0))
    columns = TensorShard(torch.full((3, 2), rank, dtype=torch.bfloat16), (3, 4), (0, 2 * rank))
    state = StateDict(tied=tied, again=tied, columns=columns, plain=torch.ones(3), text="x", none=torch.zeros(0, 2))
    Snapshot.take(path, {"a": state, "b": StateDict(columns=columns)})


def test_an_attached_snapshot_of_ranks_is_what_was_saved(tmp_path: Path, root: str) -> None:
    path = f"{tmp_path}/s"
    all_right(on_ranks(2, _take_many, path))
    snapshot = Snapshot(path)
    want = {key: snapshot.get_state_dict_for_key(key) for key in ("a", "b")}
    assert want["a"]["tied"].real.tolist() == [[1] * 5, [2] * 5]
    with memstore.open(root, verify=True) as store:
        store.attach("key", path)
        assert_same(want, store.get("key"), ties=False)
        assert_same(want, plain(store.view("key")), ties=False)
        sent = pickle.dumps(store.view("key")["a"]["tied"][1])
        assert pickle.loads(sent).real.tolist() == [2] * 5
    assert_same(want, plain(snapshot.view()), ties=False)
    assert pickle.loads(pickle.dumps(snapshot.view()["a"]["tied"][:, 1])).real.tolist() == [1, 2]


def _distribute(rank: int, path: str) -> list[Any]:
    _take_rows(rank, path)
    mesh = init_device_mesh("cpu", (2,))
    leaf = Snapshot(path).view()["state"]["x"]
    before = memstore.bytes_read()
    return [leaf.distribute(mesh, [Shard(1)]).to_local().tolist(), memstore.bytes_read() - before]


def test_a_rank_reads_its_part_of_a_lazy_leaf(tmp_path: Path) -> None:
    found = all_right(on_ranks(2, _distribute, f"{tmp_path}/s"))
    assert found == [[[[0, 0], [0, 0], [1, 1], [1, 1]], 32], [[[0], [0], [1], [1]], 16]]


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
