"""Views are the stored containers: TensorDicts work as TensorDicts, models load them, other types keep their type."""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictParams, tensorclass

import memstore
from memstore import StoredTensor
from tests.structure.test_matrix import jagged
from tests.support.equality import assert_same


@tensorclass
class Sample:
    x: torch.Tensor
    label: str


def nested() -> TensorDict:
    inner = TensorDict({"b": torch.arange(6).reshape(6, 1)}, [6], names=["time"])
    return TensorDict({"a": torch.rand(6, 4), "n": inner, "text": NonTensorData("hello", [6])}, [6], names=["time"])


def leaves(value: Any) -> list[torch.Tensor]:
    return list(value.values(True, True)) if hasattr(value, "batch_size") else [value]


def test_a_view_of_a_tensordict_is_one(store: memstore.Store, reads: Any) -> None:
    store.put("key", nested())
    with reads() as count:
        view = store.view("key")
        assert type(view) is TensorDict
        assert type(view["a"]) is type(view["n", "b"]) is StoredTensor
        assert (view.batch_size, view.names, view["text"]) == (torch.Size([6]), ["time"], "hello")
        assert set(view.keys(True, True)) == set(store.get("key").keys(True, True))
        repr(view), str(view["n"])
        view.select("a"), view.exclude("a"), view.flatten_keys(), view.is_empty()
        assert count() == 0
    assert_same(store.get("key"), view.clone())


LAZY = {
    "slice": lambda td: td[1:3],
    "step": lambda td: td[::2],
    "int": lambda td: td[-1],
    "none": lambda td: td[None],
    "ellipsis": lambda td: td[..., 1:],
    "narrow": lambda td: td.narrow(0, 2, 2),
    "split": lambda td: td.split(4)[1],
    "chunk": lambda td: td.chunk(2)[0],
    "unbind": lambda td: td.unbind(0)[5],
    "iteration": lambda td: list(td)[2],
    "unsqueeze": lambda td: td.unsqueeze(0),
    "view": lambda td: td.view(2, 3),
    "reshape": lambda td: td.reshape(3, 2),
    "permute": lambda td: td.view(2, 3).permute(1, 0),
    "transpose": lambda td: td.view(2, 3).transpose(0, 1),
    "expand": lambda td: td.expand(2, 6),
    "select": lambda td: td.select(("n", "b")),
    "copy": lambda td: td.copy(),
    "to": lambda td: td.to("cpu"),
}
READS = {
    "clone": lambda td: td.clone(),
    "list": lambda td: td[[4, 0, 4]],
    "mask": lambda td: td[torch.tensor([1, 0, 0, 1, 0, 1]).bool()],
    "tensor": lambda td: td[torch.tensor([[5, 1]])],
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td[:2]]),
    "apply": lambda td: td.apply(lambda x: x + 1),
    "named_apply": lambda td: td.named_apply(lambda name, x: x * 2 if "b" in name else x + 0, nested_keys=True),
    "double": lambda td: td.select("a").double(),
    "gather": lambda td: td.gather(0, torch.tensor([3, 3])),
    "to dtype": lambda td: td.select("a").to(torch.float16),
    "arithmetic": lambda td: td.select("a") * 2 + 1,
    "contiguous": lambda td: td[::2].contiguous(),
}


@pytest.mark.parametrize("name", LAZY)
def test_what_selects_stays_lazy(name: str, store: memstore.Store, reads: Any) -> None:
    store.put("key", nested())
    view = store.view("key")
    with reads() as count:
        found = LAZY[name](view)
        assert count() == 0
    assert {type(leaf) for leaf in leaves(found)} <= {StoredTensor, NonTensorData}
    with reads() as count:
        assert_same(LAZY[name](store.get("key")).clone(), found.clone())
        assert count() <= sum(leaf.numel() * leaf.dtype.itemsize for leaf in found.values(True, True) if leaf.numel())


@pytest.mark.parametrize("name", READS)
def test_all_else_loads(name: str, store: memstore.Store) -> None:
    store.put("key", nested())
    view = store.view("key")
    assert_same(READS[name](store.get("key")), READS[name](view))
    assert type(view["a"]) is StoredTensor


def test_writes_are_refused_but_the_container_is_the_holders(store: memstore.Store) -> None:
    store.put("key", nested().select("a", "n"))
    view = store.view("key")
    for write in (
        lambda: view.zero_(),
        lambda: view.update_(nested().select("a", "n")),
        lambda: view.__setitem__(slice(0, 2), nested()[:2].select("a", "n")),
        lambda: view.apply_(lambda x: x.zero_()),
    ):
        with pytest.raises(memstore.ReadOnlyError, match="clone"):
            write()
    with pytest.raises(RuntimeError, match="Failed to update 'a'") as caught:  # tensordict's own
        view.set_("a", torch.zeros(6, 4))
    assert isinstance(caught.value.__cause__, memstore.ReadOnlyError)
    del caught
    view["a"] = torch.zeros(6, 4)
    assert type(view["a"]) is torch.Tensor
    assert type(store.view("key")["a"]) is StoredTensor


def test_models_take_views(store: memstore.Store, reads: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).eval()
    store.put_many({"td": TensorDict.from_module(model), "state": model.state_dict()})
    x = torch.rand(5, 4)
    expected = model(x)
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).eval()
    other.load_state_dict(store.view("state"))
    assert torch.equal(other(x), expected)
    torch.nn.init.zeros_(other[0].weight)
    with reads() as count:
        view = store.view("td")
        with view.to_module(other):
            assert count() == 0
            assert torch.equal(other(x), expected)
    assert not torch.equal(other(x), expected)
    with reads() as count:
        state = view.state_dict()
        assert count() == 0
    assert torch.equal(state["0.weight"] + 0, model[0].weight)


def test_parameters_are_parameters(store: memstore.Store) -> None:
    value = {
        "p": torch.nn.Parameter(torch.rand(3)),
        "frozen": torch.nn.Parameter(torch.rand(3), requires_grad=False),
        "b": torch.nn.Buffer(torch.rand(3), persistent=False),
        "g": torch.rand(3).requires_grad_(),
    }
    store.put("key", value)
    view = store.view("key")
    assert [isinstance(view[name], torch.nn.Parameter) for name in value] == [True, True, False, False]
    assert [view[name].requires_grad for name in value] == [True, False, False, True]
    assert isinstance(view["b"], torch.nn.Buffer)
    assert view["b"].persistent is False
    assert not view["p"][1:].is_leaf
    assert isinstance(torch.nn.Parameter(view["g"]), torch.nn.Parameter)
    store.put("again", view)
    assert_same(value, store.get("again"))


def test_tensordict_params(store: memstore.Store) -> None:
    store.put("key", TensorDictParams(TensorDict({"w": torch.nn.Parameter(torch.rand(3, 2))})))
    view = store.view("key")
    assert type(view) is TensorDictParams
    (view["w"] * 2).sum().backward()
    assert torch.equal(view["w"].grad, torch.full((3, 2), 2.0))


def test_dicts_and_lists_keep_their_types(store: memstore.Store) -> None:
    state = {0: {"step": torch.tensor(3.0), "lr": 1e-3}}
    value = {"state": state, "groups": [OrderedDict(a=torch.ones(2)), None, (1,)]}
    store.put("key", value)
    view = store.view("key")
    assert type(view["state"][0]["step"]) is StoredTensor
    assert type(view["groups"][0]) is OrderedDict
    assert view["groups"][1:] == [None, (1,)]
    assert view["state"][0]["lr"] == 1e-3
    store.put("again", view)
    assert_same(value, store.get("again"))
    store.put("bare", torch.ones(3))
    assert type(store.view("bare")) is StoredTensor


def test_tensorclasses_and_lazy_stacks(store: memstore.Store, reads: Any) -> None:
    stack = LazyStackedTensorDict(TensorDict({"x": torch.rand(3)}), TensorDict({"x": torch.rand(4)}), stack_dim=0)
    store.put_many({"class": Sample(x=torch.rand(5, 2), label="one", batch_size=[5]), "stack": stack})
    with reads() as count:
        sample = store.view("class")
        assert type(sample) is Sample
        assert type(sample[2:].x) is StoredTensor
        assert sample.label == "one"
        assert type(store.view("stack")[1]["x"]) is StoredTensor
        assert count() == 0
    assert_same(store.get("class"), sample.clone())
    assert_same(store.get("stack"), store.view("stack").clone())


def test_ties_are_one_leaf(store: memstore.Store) -> None:
    tied = torch.rand(3)
    store.put("key", {"a": tied, "b": tied, "part": tied[1:]})
    view = store.view("key")
    assert view["a"] is view["b"]
    assert torch.equal(view["part"] + 0, tied[1:])


def test_jagged_quantized_and_arrays_come_loaded(store: memstore.Store, reads: Any) -> None:
    value = {
        "jagged": jagged(),
        "nested": torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]),
        "quantized": torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
        "array": np.arange(3.0),
        "plain": torch.rand(3),
    }
    store.put("key", value)
    with reads() as count:
        view = store.view("key")
        assert count() >= sum(leaf.nbytes for leaf in store.info("key").leaves if leaf.name != ("plain",)) > 0
    assert [type(view[name]) is StoredTensor for name in value] == [False, False, False, False, True]
    view["plain"] = view["plain"].clone()
    assert_same(store.get("key"), view)


def test_a_view_keeps_its_version(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.arange(5000))
        view, ref = store.view("key")[10:20], store.ref("key")
        store.put("key", torch.zeros(5000))
        store.delete("key")
        store.put("other", torch.zeros(5000))
        store.gc()
        again = ref.view()
    assert view.tolist() == again[10:20].tolist() == list(range(10, 20))
    del view, again, ref
    gc.collect()
    with memstore.open(root) as store:
        store.gc()
        assert store.stats().pinned_bytes == 0


def test_a_missing_key_is_an_error(store: memstore.Store) -> None:
    with pytest.raises(memstore.KeyNotFoundError):
        store.view("nothing")
    store.close()
    with pytest.raises(memstore.StoreClosedError):
        store.view("nothing")


def test_another_device_is_reached_when_a_part_is_used(store: memstore.Store, reads: Any) -> None:
    """On meta, which is everywhere and shows where what was read has gone."""
    store.put("key", nested().select("a", "n"))
    with reads() as count:
        view = store.view("key", device="meta")
        assert view.device == view["a"].device == view["a"][1:, 0].device == torch.device("meta")
        assert count() == 0
        assert (view["a"][1:3] * 2).device.type == "meta"
        assert view["a"][[0, 5]].device.type == "meta"
        assert view[torch.tensor([1])]["n", "b"].device.type == "meta"
        assert count() == 2 * 16 + 2 * 16 + 16 + 8


def test_verified_leaves_are_verified_when_first_used(root: str) -> None:
    with memstore.open(root, checksum=True, inline_limit=0) as store:
        store.put("key", {"good": torch.arange(3000), "bad": torch.arange(5000)})
        file = store.info("key").files[0]
    with memstore.open(root, verify=True) as store:
        with open(file, "r+b") as handle:
            handle.seek(50_000)
            handle.write(b"?")
        view = store.view("key")
        assert view["good"][5] == 5
        parts = [view["bad"][:2], view["bad"].sum]
        with pytest.raises(memstore.CorruptionError, match="checksum") as caught:
            parts[0] + 1
        assert (caught.value.key, caught.value.path) == ("key", file)
        with pytest.raises(memstore.CorruptionError):
            parts[1]()
        with pytest.raises(memstore.CorruptionError):
            memstore.read_rows(view["bad"], [1])
        del view, parts, caught
