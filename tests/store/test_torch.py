"""Values that were got are ordinary tensors: autograd, compilation, inference mode."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict, TensorDictParams

import memstore


def test_autograd_flows_through_them(store: memstore.Store) -> None:
    store.put("key", {"w": torch.full((30, 30), 2.0), "b": torch.nn.Parameter(torch.ones(30))})
    got = store.get("key")
    assert not got["w"].requires_grad and got["w"].is_leaf
    assert isinstance(got["b"], torch.nn.Parameter) and got["b"].requires_grad and got["b"].is_leaf
    weight = got["w"].requires_grad_()
    (torch.ones(30) @ weight + got["b"]).pow(2).sum().backward()
    assert weight.grad.shape == (30, 30) and got["b"].grad.shape == (30,)
    assert (got["b"].grad == 2 * 61).all()
    assert not store.get("key")["w"].requires_grad


def test_they_are_trained_in_place_and_only_here(store: memstore.Store) -> None:
    model = torch.nn.Linear(40, 40)
    store.put("model", model.state_dict())
    trained = torch.nn.Linear(40, 40)
    trained.load_state_dict(store.get("model"), assign=True)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained(torch.ones(40)).sum().backward()
    optimizer.step()
    assert not torch.equal(trained.weight, model.weight)
    assert torch.equal(store.get("model")["weight"], model.weight)


def test_in_place_changes_count_versions(store: memstore.Store) -> None:
    store.put("key", torch.full((1000,), 2.0))
    got = store.get("key").requires_grad_()
    loss = (got * got).sum()
    with torch.no_grad():
        got.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_they_are_normal_tensors_also_in_inference_mode(store: memstore.Store) -> None:
    with torch.inference_mode():
        store.put("key", {"a": torch.ones(1000), "b": torch.ones(3)})
        got = store.get("key")
        assert not got["a"].is_inference() and not got["b"].is_inference()
        assert (got["a"] + 1).is_inference()
    got["a"].requires_grad_()
    (got["a"] * 2).sum().backward()
    assert (got["a"].grad == 2).all()


def test_a_put_records_no_gradient(store: memstore.Store) -> None:
    leaf = torch.ones(1000, requires_grad=True)
    store.put("key", {"x": leaf * 2, "leaf": leaf})
    got = store.get("key")
    assert got["x"].grad_fn is None and got["x"].is_leaf and got["leaf"].requires_grad
    assert leaf.grad is None


def test_compiled_functions_take_them(store: memstore.Store) -> None:
    store.put("key", {"w": torch.randn(20, 20), "b": torch.randn(20)})
    got = store.get("key")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def apply(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w + b)

    x = torch.randn(7, 20)
    assert torch.allclose(apply(x, got["w"], got["b"]), torch.relu(x @ got["w"] + got["b"]))
    store.put("key", {"w": torch.randn(20, 20), "b": torch.randn(20)})
    newer = store.get("key")
    torch.compiler.set_stance("fail_on_recompile")
    try:  # the next version is no other kind of tensor
        assert torch.allclose(apply(x, newer["w"], newer["b"]), torch.relu(x @ newer["w"] + newer["b"]))
    finally:
        torch.compiler.set_stance("default")


def test_a_get_inside_a_compiled_function_breaks_the_graph_and_works(store: memstore.Store) -> None:
    store.put("key", torch.randn(1000))

    @torch.compile(backend="eager")
    def double() -> torch.Tensor:
        return store.get("key") * 2

    assert torch.equal(double(), store.get("key") * 2)


def test_functional_transforms_take_them(store: memstore.Store) -> None:
    store.put("key", torch.randn(30, 30))
    got = store.get("key")
    assert torch.func.vmap(torch.sum)(got).shape == (30,)
    assert torch.equal(torch.func.grad(lambda x: (x * x).sum())(got), 2 * got)


def test_modules_take_tensordict_params(store: memstore.Store) -> None:
    module = torch.nn.Linear(40, 40)
    store.put("key", TensorDict.from_module(module, as_module=True))
    got = store.get("key")
    assert isinstance(got, TensorDictParams)
    other = torch.nn.Linear(40, 40)
    with got.to_module(other):
        assert torch.equal(other(torch.ones(40)), module(torch.ones(40)))


def test_vectorised_and_out_variants_write_to_the_copy_only(store: memstore.Store) -> None:
    store.put("key", torch.ones(5000))
    got = store.get("key")
    torch.add(got, 1, out=got)
    got[::2].mul_(2)
    got.index_add_(0, torch.tensor([0]), torch.tensor([5.0]))
    assert (got[0], got[1], got[2]) == (9, 2, 4)
    assert (store.get("key") == 1).all()


@pytest.mark.parametrize("size", [8, 5000])
def test_what_is_sent_can_t_be_changed_by_its_receiver(store: memstore.Store, size: int) -> None:
    """torch would move the sender's storage to memory that the receiver may write; also for values without a file."""
    store.put("key", torch.ones(size))
    held = store.get("key")
    alias = held.numpy()
    sent = pickle.loads(bytes(ForkingPickler.dumps(held)))
    sent.fill_(9)
    assert (held == 1).all() and (alias == 1).all()
    assert not held.is_shared()
