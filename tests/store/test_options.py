"""get's options: out=, like=, device=, dtype=."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

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


def test_out_is_filled_in_place_and_returned(filled: memstore.Store) -> None:
    out = zeros_like(VALUE)
    addresses = [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(out)]
    assert filled.get("key", out=out) is out
    assert_same(VALUE, out)
    assert [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(out)] == addresses


def test_out_takes_a_models_parameters(filled: memstore.Store) -> None:
    model = torch.nn.Linear(50, 40)
    filled.put("model", {name: torch.randn_like(leaf) for name, leaf in model.state_dict().items()})
    state = model.state_dict(keep_vars=True)
    filled.get("model", out=state)
    assert_same(filled.get("model")["weight"], model.weight.detach())
    assert model.weight.requires_grad and isinstance(model.weight, torch.nn.Parameter)
    model(torch.ones(50)).sum().backward()


def test_out_takes_a_tensordict_and_a_view_of_a_tensor(filled: memstore.Store) -> None:
    value = TensorDict({"a": torch.randn(4, 5), "b": {"c": torch.arange(4)}}, [4])
    filled.put("td", value)
    out = torch.zeros_like(value)
    assert filled.get("td", out=out) is out
    assert (out == value).all()
    filled.put("t", torch.arange(12).reshape(3, 4))
    whole = torch.zeros(5, 3, dtype=torch.int64)
    filled.get("t", out=whole[:4].T)
    assert torch.equal(whole[:4].T, torch.arange(12).reshape(3, 4))
    assert not whole[4].any()


def test_every_mismatch_of_out_is_told_and_nothing_is_written(filled: memstore.Store) -> None:
    out = {"w": torch.zeros(4, 3), "n": torch.zeros(1000), "more": torch.zeros(1)}
    with pytest.raises(memstore.StructureMismatchError) as caught:
        filled.get("key", out=out)
    message = str(caught.value)
    for text in ("['w']", "[3, 4]", "[4, 3]", "['n']", "int64", "float32", "['more']", "['deep']"):
        assert text in message, message
    assert isinstance(caught.value, ValueError)
    assert not any(leaf.any() for leaf in out.values())


def test_common_leaves_are_filled_without_strict(filled: memstore.Store) -> None:
    out = {"w": torch.zeros(3, 4), "more": torch.zeros(1)}
    assert filled.get("key", out=out, strict=False) is out
    assert torch.equal(out["w"], VALUE["w"])
    assert not out["more"].any()
    with pytest.raises(memstore.StructureMismatchError):
        filled.get("key", out={"w": torch.zeros(4, 4)}, strict=False)


def test_like_gives_new_memory_of_its_kind(filled: memstore.Store) -> None:
    like = {"w": torch.zeros(4, 3, dtype=torch.float64).T, "n": torch.zeros(1000, dtype=torch.int64), "deep": [torch.zeros(2, dtype=torch.bool)]}  # fmt: skip  # noqa: E501
    got = filled.get("key", like=like)
    assert got["w"].dtype == torch.float64 and got["w"].stride() == (1, 3)
    assert torch.equal(got["w"], VALUE["w"].double())
    assert not like["w"].any()
    assert got["w"].data_ptr() != like["w"].data_ptr()


def test_out_and_like_exclude_each_other(filled: memstore.Store) -> None:
    for key, default in (("key", {}), ("missing", {"default": None})):
        with pytest.raises(TypeError, match="not both"):
            filled.get(key, out=zeros_like(VALUE), like=VALUE, **default)
    for more in ({"device": "cpu"}, {"dtype": torch.float16}):
        with pytest.raises(TypeError, match="leave device= and dtype= out"):
            filled.get("key", out=zeros_like(VALUE), **more)


def test_dtype_is_for_floating_leaves_only(filled: memstore.Store) -> None:
    got = filled.get("key", dtype=torch.float16)
    assert (got["w"].dtype, got["n"].dtype, got["deep"][0].dtype) == (torch.float16, torch.int64, torch.bool)
    assert torch.equal(got["w"], VALUE["w"].half())
    assert torch.equal(got["n"], VALUE["n"])


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


def test_a_get_in_inference_mode_gives_normal_tensors(filled: memstore.Store) -> None:
    with torch.inference_mode():
        got = filled.get("big")["w"]
        copied = filled.get("key", dtype=torch.float64)["w"]
    assert not got.is_inference()
    got.requires_grad_().sum().backward()
    assert not copied.is_inference()


def test_options_that_nobody_knows_are_refused(filled: memstore.Store) -> None:
    with pytest.raises(TypeError):
        filled.get("key", devise="cpu")  # type: ignore[call-arg]
