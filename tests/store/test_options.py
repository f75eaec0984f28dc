"""get's options: out=, like=, device=, dtype=."""

from __future__ import annotations

import pytest
import torch

import memstore
from tests.support.equality import assert_same

VALUE = {"w": torch.arange(12.0).reshape(3, 4), "n": torch.arange(1000), "deep": [torch.ones(2, dtype=torch.bool)]}


@pytest.fixture
def filled(store: memstore.Store) -> memstore.Store:
    store.put("key", VALUE)
    store.put("big", {"w": torch.randn(1000, 1000)})
    return store


def zeros_like(value: object) -> object:
    return torch.utils._pytree.tree_map(torch.zeros_like, value)


def test_out_and_like_exclude_each_other(filled: memstore.Store) -> None:
    for key, default in (("key", {}), ("missing", {"default": None})):
        with pytest.raises(TypeError, match="not both"):
            filled.get(key, out=zeros_like(VALUE), like=VALUE, **default)
    for more in ({"device": "cpu"}, {"dtype": torch.float16}):
        with pytest.raises(TypeError, match="leave device= and dtype= out"):
            filled.get("key", out=zeros_like(VALUE), **more)


def test_device_is_as_in_to(filled: memstore.Store) -> None:
    got = filled.get("key", device="cpu")
    assert_same(VALUE, got)
    meta = filled.get("key", device=torch.device("meta"))
    assert meta["w"].device.type == "meta" and meta["w"].shape == (3, 4)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "hpu"])
def test_a_device_that_is_not_there_is_an_error(filled: memstore.Store, device: str) -> None:
    """torch has a class of errors for each way in which it isn't there."""
    if device != "hpu" and getattr(torch, device).is_available():
        pytest.skip(f"this machine has {device}")
    said = f"device='{device}': this process has no such device .*; without device= the tensors are on the CPU"
    with pytest.raises(RuntimeError, match=said):
        filled.get("key", device=device)
    with pytest.raises(RuntimeError, match=said):
        filled.view("key", device=device)["w"].sum()


@pytest.mark.embedded
def test_a_copy_holds_no_segment(filled: memstore.Store) -> None:
    held = [
        filled.get("big", out={"w": torch.zeros(1000, 1000)}),
        filled.get("big", like={"w": torch.zeros(1000, 1000)}),
        filled.get("big", dtype=torch.float64),
    ]
    filled.put("big", 1)
    filled.gc()
    assert filled.stats().pinned_bytes == filled.stats().reusable_bytes == 0
    assert len(held) == 3
