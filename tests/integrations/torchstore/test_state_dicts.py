"""State dicts by TorchStore's functions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import pytest
import torch

import memstore
import memstore.integrations.torchstore as ts
from tests.integrations.torchstore.test_values import same

pytestmark = pytest.mark.usefixtures("job")


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}


async def test_a_state_dict_comes_back() -> None:
    value = trained()
    await ts.put_state_dict(value, "v0")
    found = await ts.get_state_dict("v0")
    assert same(value, found) and isinstance(found["model"], OrderedDict)


async def test_a_state_dict_is_filled_in_place() -> None:
    value, target = trained(), trained()
    target["step"] = 0
    tensors = dict(target["model"])
    await ts.put_state_dict(value, key="v0")
    found = await ts.get_state_dict(key="v0", user_state_dict=target)
    assert same(value, found) and same(value, target)
    assert all(found["model"][name] is tensor for name, tensor in tensors.items())


async def test_a_module_follows_what_was_put() -> None:
    learner, generator = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    await ts.put_state_dict(learner.state_dict(), key="app")
    await ts.get_state_dict(key="app", user_state_dict=generator.state_dict())
    assert torch.equal(learner.weight, generator.weight)


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
async def test_weights_are_cast_for_the_transfer_and_into_targets(target: torch.dtype) -> None:
    value = {"w": torch.randn(40, 50), "n": {"b": torch.randn(7), "ids": torch.arange(4)}, "step": 3}
    await ts.put_state_dict(value, "v0", transfer_dtype=torch.bfloat16)
    stored = await ts.get_state_dict("v0")
    assert stored["w"].dtype == torch.bfloat16 and stored["n"]["ids"].dtype == torch.int64
    into = {"w": torch.zeros(40, 50, dtype=target), "n": {"b": torch.zeros(7), "ids": torch.zeros(4).long()}}
    into["step"] = 0
    found = await ts.get_state_dict("v0", into)
    assert found is into and into["step"] == 3
    assert torch.equal(into["w"], value["w"].bfloat16().to(target)) and torch.equal(into["n"]["ids"], torch.arange(4))
    assert torch.equal(into["n"]["b"], value["n"]["b"].bfloat16().float())


async def test_names_that_differ_are_told_and_nothing_is_written() -> None:
    await ts.put_state_dict({"a": torch.ones(3), "b": torch.ones(4)}, "v0")
    for target in ({"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(1)}):
        with pytest.raises(memstore.StructureMismatchError):
            await ts.get_state_dict("v0", target)
        assert not target["a"].any()


async def test_without_strict_the_common_names_are_filled_and_the_stored_ones_returned() -> None:
    value = {"a": torch.ones(3), "b": {"c": torch.ones(4), "d": [torch.ones(2), 5]}, "n": 1}
    await ts.put_state_dict(value, "v0")
    target = {"a": torch.zeros(3, dtype=torch.float64), "b": {"d": [torch.zeros(2), 0]}, "x": torch.zeros(1)}
    found = await ts.get_state_dict("v0", target, strict=False)
    assert found["a"] is target["a"] and target["a"].all() and found["b"]["d"][0] is target["b"]["d"][0]
    assert torch.equal(found["b"]["c"], torch.ones(4)) and found["n"] == 1 and "x" not in found


@pytest.mark.parametrize("target", [None, {"other": torch.zeros(3)}], ids=["got", "filled"])
async def test_the_tensors_of_a_state_dict_are_plain_and_tied_ones_stay_one(target: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    value = {"w": weight, "list": [weight, {"b": torch.nn.Parameter(torch.ones(2))}], "pair": (weight, 1)}
    await ts.put_state_dict({**value, "other": torch.ones(3, requires_grad=True)}, "v0")
    found = await ts.get_state_dict("v0", target, strict=False)
    assert found["w"] is found["list"][0] is found["pair"][0] and found["pair"][1] == 1
    for tensor in (found["w"], found["list"][1]["b"], found["other"]):
        assert type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.all()


async def test_a_parameter_that_is_filled_is_returned_as_it_is() -> None:
    await ts.put_state_dict({"w": torch.nn.Parameter(torch.ones(3))}, "v0")
    for strict in (True, False):
        target = {"w": torch.nn.Parameter(torch.zeros(3))}
        assert (await ts.get_state_dict("v0", target, strict))["w"] is target["w"] and target["w"].all()


def test_a_state_dict_that_is_not_there_is_a_runtime_error_and_a_key_error() -> None:
    for error in (RuntimeError, KeyError, ts.StateDictNotFoundError):
        with pytest.raises(error, match="no state dict 'v9'"):
            asyncio.run(ts.get_state_dict("v9"))


async def test_direct_rdma_puts_what_it_was_given_again() -> None:
    source, target = {"w": torch.zeros(100)}, {"w": torch.ones(100)}
    with pytest.raises(ValueError, match="there was none"):
        await ts.put_state_dict(None, "policy", direct_rdma=True)
    await ts.put_state_dict(source, "policy", direct_rdma=True)
    source["w"] += 2
    await ts.put_state_dict(None, "policy", direct_rdma=True)
    assert await ts.get_state_dict("policy", target, direct_rdma=True) is target
    assert torch.equal(target["w"], source["w"])
    for wrong in (ts.get_state_dict("policy", direct_rdma=True), ts.put_state_dict(None, "policy")):
        with pytest.raises(ValueError, match="policy"):
            await wrong


async def test_a_leaf_has_torchstores_name_too() -> None:
    await ts.put_state_dict({"model": {"l1.weight": torch.randn(3, 2)}, "steps": [1, 7]}, "run/v0")
    whole = (await ts.get_state_dict("run/v0"))["model"]["l1.weight"]
    name = "run/v0/model.l1.weight"
    assert torch.equal(await ts.get(name), whole) and await ts.get("run/v0/steps.1") == 7
    target = torch.zeros(3, 2)
    assert await ts.get(name, target) is target and torch.equal(target, whole)
    wanted = ts.TensorSlice((1, 0), None, (3, 2), (2, 1), None)
    assert torch.equal(await ts.get(name, tensor_slice_spec=wanted), whole[1:, :1])
    assert await ts.exists(name) and await ts.exists("run/v0/MAPPING") and await ts.keys() == ["run/v0"]
    for missing in ("run/v0/model.l2", "run/v1/MAPPING"):
        assert not await ts.exists(missing)
    with pytest.raises(memstore.StructureMismatchError, match="inplace_tensor has shape"):
        await ts.get(name, torch.zeros(2))
    with pytest.raises(KeyError):
        await ts.get("run/v0/other")
