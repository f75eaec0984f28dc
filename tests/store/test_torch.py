"""Values that were got are ordinary tensors: autograd, compilation, inference mode."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

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


def test_in_place_changes_count_versions(store: memstore.Store) -> None:
    store.put("key", torch.full((1000,), 2.0))
    got = store.get("key").requires_grad_()
    loss = (got * got).sum()
    with torch.no_grad():
        got.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


def test_functional_transforms_take_them(store: memstore.Store) -> None:
    store.put("key", torch.randn(30, 30))
    got = store.get("key")
    assert torch.func.vmap(torch.sum)(got).shape == (30,)
    assert torch.equal(torch.func.grad(lambda x: (x * x).sum())(got), 2 * got)


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
