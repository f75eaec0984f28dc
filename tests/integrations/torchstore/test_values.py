"""Values by TorchStore's functions: put, get, batches, slices, keys and state dicts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import memstore
import memstore.integrations.torchstore as ts
from memstore.integrations.torchstore.calls import PICKLE_VARIABLE

pytestmark = pytest.mark.usefixtures("job")

VALUES = {
    "tensor": torch.randn(3, 4),
    "large": torch.randn(300, 400),
    "of no dimension": torch.tensor(5),
    "columns": torch.arange(20.0).reshape(4, 5)[:, :3],
    "object": {"rank": 0, "data": [1, 2, (3, None)], "text": "x"},
    "nested": {"a": [torch.ones(2), {"b": torch.zeros(3)}], "n": 5},
}


class Custom:
    """What only pickle can store."""

    def __init__(self, number: int) -> None:
        self.number = number


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", VALUES)
async def test_values_come_back(name: str) -> None:
    await ts.put(name, VALUES[name])
    assert same(VALUES[name], await ts.get(name))
    assert await ts.exists(name) and not await ts.exists("other")


async def test_a_tensordict_is_put_and_got_as_one() -> None:
    await ts.put("batch", TensorDict({"x": torch.ones(4, 2)}, [4]))
    assert (await ts.get("batch")).batch_size == torch.Size([4])


async def test_what_was_got_stays_when_the_key_is_put_again() -> None:
    await ts.put("key", torch.zeros(1000))
    held = await ts.get("key")
    await ts.put("key", torch.ones(1000))
    assert torch.equal(held, torch.zeros(1000)) and torch.equal(await ts.get("key"), torch.ones(1000))


async def test_a_key_may_change_from_a_tensor_to_an_object() -> None:
    await ts.put("key", torch.zeros(3))
    await ts.put("key", {"a": 1})
    assert await ts.get("key") == {"a": 1}


async def test_a_tensor_is_filled_in_place_and_cast() -> None:
    value = torch.randn(50, 4)
    await ts.put("key", value)
    target = torch.zeros(50, 4)
    assert await ts.get("key", target) is target and torch.equal(target, value)
    half = torch.zeros(50, 4, dtype=torch.bfloat16)
    assert await ts.get("key", inplace_tensor=half) is half and torch.equal(half, value.bfloat16())
    wrong = torch.zeros(4, 50)
    with pytest.raises(memstore.StructureMismatchError):
        await ts.get("key", wrong)
    assert not wrong.any()


async def test_what_is_no_tensor_is_not_filled() -> None:
    await ts.put("key", torch.ones(2))
    target: Any = [0, 0]
    with pytest.raises(TypeError, match="inplace_tensor is a tensor"):
        await ts.get("key", target)
    await ts.put("object", {"a": 1})
    with pytest.raises(memstore.StructureMismatchError):
        await ts.get("object", torch.zeros(2))


def box(offsets: Any, shape: Any, whole: Any = (100, 200)) -> ts.TensorSlice:
    return ts.TensorSlice(offsets=offsets, coordinates=(), global_shape=whole, local_shape=shape, mesh_shape=())


async def test_a_slice_is_read_or_filled() -> None:
    value = torch.randn(100, 200)
    await ts.put("key", value)
    found = await ts.get("key", tensor_slice_spec=box((10, 20), torch.Size([5, 10])))
    assert torch.equal(found, value[10:15, 20:30]) and found.is_contiguous()
    target = torch.empty(30, 40)
    assert await ts.get("key", target, box([70, 160], (30, 40))) is target
    assert torch.equal(target, value[70:, 160:])


@pytest.mark.parametrize("key", ["key", "state/w"])
async def test_a_slice_past_the_end_is_clipped_to_the_tensor(key: str) -> None:
    value = torch.randn(100, 200)
    await ts.put("key", value)
    await ts.put_state_dict({"w": value}, "state")
    found = await ts.get(key, tensor_slice_spec=box((96, 190), (5, 20)))
    assert torch.equal(found, value[96:101, 190:210]) and found.shape == (4, 10)
    assert (await ts.get(key, tensor_slice_spec=box((100, 0), (5, 20)))).shape == (0, 20)
    target = torch.zeros(4, 5)
    assert await ts.get(key, target, box((96, 0), (5, 5))) is target and torch.equal(target, value[96:, :5])
    larger = torch.zeros(5, 5)
    with pytest.raises(memstore.StructureMismatchError, match=r"the slice \[4, 5\], clipped to .* \[100, 200\]"):
        await ts.get(key, larger, box((96, 0), (5, 5)))
    assert not larger.any()


@pytest.mark.parametrize(
    "value",
    [torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Buffer(torch.ones(4, 2)), torch.ones(4, 2, requires_grad=True) * 1],
    ids=["Parameter", "Buffer", "of a graph"],
)
async def test_tensors_come_back_plain_and_without_gradients(value: torch.Tensor) -> None:
    await ts.put("w", value)
    await ts.put_batch({"batched": value})
    await ts.put_state_dict({"w": value}, "state")
    part = ts.TensorSlice((1, 0), None, (4, 2), (2, 2), None)
    found = [
        await ts.get("w"),
        await ts.get("state/w"),
        await ts.get("w", tensor_slice_spec=part),
        await ts.get("state/w", tensor_slice_spec=part),
        *(await ts.get_batch(["w", "batched"])).values(),
        *(await ts.get_batch({"batched": None, "state/w": None})).values(),
    ]
    for tensor in found:
        assert type(tensor) is torch.Tensor and not isinstance(tensor, torch.nn.Buffer)
        assert tensor.is_leaf and not tensor.requires_grad and tensor.all()


async def test_an_object_keeps_its_parameters() -> None:
    await ts.put("object", {"w": torch.nn.Parameter(torch.ones(2))})
    assert isinstance((await ts.get("object"))["w"], torch.nn.Parameter)


@pytest.mark.parametrize(
    ("wanted", "target", "message"),
    [
        (box((0, 0), (5, 5), (100, 100)), None, "of shape .100, 200., and the slice is one of"),
        (box((-1, 0), (5, 5)), None, "is not in"),
        (box((0, 0), (5, 5)), torch.zeros(4, 5), r"inplace_tensor has shape \[4, 5\], and the slice \[5, 5\]$"),
    ],
)
def test_a_slice_that_does_not_fit_is_told(wanted: ts.TensorSlice, target: Any, message: str) -> None:
    async def use() -> None:
        await ts.put("key", torch.zeros(100, 200))
        await ts.get("key", target, wanted)

    with pytest.raises(memstore.StructureMismatchError, match=message):
        asyncio.run(use())


async def test_batches() -> None:
    batch = {"one": torch.ones(3), "two": torch.zeros(1000), "object": {"rank": 1}}
    await ts.put_batch(batch)
    assert same(batch, await ts.get_batch(list(batch)))
    target = torch.ones(1000)
    found = await ts.get_batch({"two": target, "object": None})
    assert found["two"] is target and not target.any() and found["object"] == {"rank": 1}


async def test_a_batch_with_a_missing_key_fills_nothing() -> None:
    await ts.put("one", torch.ones(3))
    target = torch.zeros(3)
    with pytest.raises(KeyError, match="missing"):
        await ts.get_batch({"one": target, "missing": None})
    assert not target.any()
    for wrong in ([], ["one", "one"]):
        with pytest.raises(ValueError, match="at least one key"):
            await ts.get_batch(wrong)
    with pytest.raises(TypeError):
        await ts.get_batch("one")
    with pytest.raises(ValueError, match="entries"):
        await ts.put_batch({})


async def test_keys_are_deleted() -> None:
    await ts.put_batch({name: torch.ones(2) for name in "abcd"})
    await ts.delete("a")
    await ts.delete_batch(["b", "c", "b", "missing"])
    await ts.delete_batch([])
    assert await ts.keys() == ["d"]
    for gone in (ts.get("a"), ts.delete("a")):
        with pytest.raises(KeyError):
            await gone
    with pytest.raises(TypeError):
        await ts.delete_batch("d")


async def test_prefixes_of_keys_are_words() -> None:
    for key in ("", ".x", "v0.x", "v0.y", "v0.x.z", "v01.x", "v1.x"):
        await ts.put(key, torch.ones(1))
    assert sorted(await ts.keys()) == ["", ".x", "v0.x", "v0.x.z", "v0.y", "v01.x", "v1.x"]
    assert sorted(await ts.keys("v0")) == ["v0.x", "v0.x.z", "v0.y"]
    assert sorted(await ts.keys("v0.x")) == ["v0.x", "v0.x.z"]
    assert await ts.keys("") == ["", ".x"]
    assert await ts.keys("v") == []
    await ts.delete("")
    assert await ts.keys("") == [".x"]


async def test_what_only_pickle_can_store_is_refused_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for refused in (ts.put("key", Custom(5)), ts.put_batch({"key": Custom(5)})):
        with pytest.raises(memstore.UnsupportedValueError, match=f"set {PICKLE_VARIABLE}=1"):
            await refused
    monkeypatch.setenv(PICKLE_VARIABLE, "1")
    ts.reset_client()
    await ts.put("key", Custom(5))
    assert (await ts.get("key")).number == 5


async def test_many_calls_at_once() -> None:
    await asyncio.gather(*(ts.put(f"key{number}", torch.full((1000,), number)) for number in range(50)))
    found = await asyncio.gather(*(ts.get(f"key{number}") for number in range(50)))
    assert all(torch.equal(value, torch.full((1000,), number)) for number, value in enumerate(found))


async def test_names_are_stores_of_their_own() -> None:
    await ts.initialize(store_name="../other")
    await ts.put("key", torch.ones(1), store_name="../other")
    assert await ts.exists("key", store_name="../other") and not await ts.exists("key")
    await ts.shutdown(store_name="../other")
    await ts.put("key", torch.zeros(1))


async def test_a_missing_key_is_told_with_what_is_near_and_in_words_of_this_api() -> None:
    for call in (ts.get, ts.delete, lambda key: ts.get_batch([key])):
        with pytest.raises(KeyError, match=r"no key 'nothing': the store has none yet$"):
            await call("nothing")
    await ts.put("policy", torch.ones(3))
    for call in (ts.get, ts.delete, lambda key: ts.get_batch([key])):
        with pytest.raises(KeyError, match="no key 'plicy': did you mean 'policy'"):
            await call("plicy")


# --- arguments that are none ------------------------------------------------------------------------------------------

BOX = ts.TensorSlice((0, 0), None, (4, 2), (2, 2), None)


@pytest.mark.parametrize("spec", [3, slice(0, 2), (slice(0, 2),), {"offsets": (0, 0)}, ts.TensorSlice])
async def test_a_slice_that_is_none_is_told(spec: Any) -> None:
    await ts.put("w", torch.ones(4, 2))
    for key in ("w", "absent"):
        with pytest.raises(TypeError, match=f"'{key}': tensor_slice_spec is a TensorSlice\\(offsets, .*, and not"):
            await ts.get(key, tensor_slice_spec=spec)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"offsets": 3}, TypeError, "offsets is whole numbers, one for each dimension, and not 3"),
        ({"offsets": None}, TypeError, "offsets is whole numbers, one for each dimension, and not None"),
        ({"offsets": (0.5, 0)}, TypeError, r"offsets is whole numbers, one for each dimension, and not \(0.5, 0\)"),
        ({"coordinates": 3}, TypeError, "coordinates is whole numbers"),
        ({"local_shape": "ab"}, TypeError, "local_shape is whole numbers"),
        ({"offsets": (0,)}, ValueError, "have a number for each dimension of the tensor, and not 1, 2 and 2 of them"),
        ({"local_shape": (2,)}, ValueError, "and not 2, 2 and 1 of them"),
        ({"local_shape": (-1, 2)}, ValueError, r"local_shape is sizes, 0 or more, and not \(-1, 2\)"),
    ],
)
def test_numbers_that_are_no_slice_are_told(change: dict[str, Any], error: type[Exception], message: str) -> None:
    fields: dict[str, Any] = {name: getattr(BOX, name) for name in BOX.__dataclass_fields__}
    with pytest.raises(error, match=message):
        ts.TensorSlice(**{**fields, **change})
    assert ts.TensorSlice(**{**fields, "offsets": torch.zeros(2, dtype=torch.int64)}) == BOX


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, 2, device="meta"), "a meta tensor, without memory"),
        (lambda: torch.ones(2, 2).to_sparse(), "a torch.sparse_coo tensor"),
        (lambda: torch.ones(1, 2).expand(2, 2), "an expanded tensor"),
    ],
    ids=["meta", "sparse", "expanded"],
)
async def test_a_target_that_cannot_be_filled_is_told(make: Any, message: str) -> None:
    await ts.put("w", torch.ones(4, 2))
    await ts.put_state_dict({"w": torch.ones(2, 2)}, "state")
    for key, spec in (("w", BOX), ("state/w", None)):
        with pytest.raises(memstore.StructureMismatchError, match=f"'{key}': inplace_tensor is {message}"):
            await ts.get(key, make(), spec)


@pytest.mark.parametrize("key", [None, 3, b"w", ["w"], []], ids=str)
async def test_a_key_that_is_none_is_told(key: Any) -> None:
    """None, [] and b"" were taken for the key ""."""
    await ts.put("", torch.ones(2))
    calls = (
        lambda: ts.put(key, torch.zeros(2)),
        lambda: ts.get(key),
        lambda: ts.get_batch([key]),
        lambda: ts.exists(key),
        lambda: ts.delete(key),
        lambda: ts.delete_batch([key]),
        lambda: ts.put_state_dict({}, key, direct_rdma=True),
        lambda: ts.get_state_dict(key),
    )
    for call in calls:
        with pytest.raises(memstore.InvalidKeyError, match="a key is a str"):
            await call()
    assert (await ts.get("")).tolist() == [1, 1]


@pytest.mark.parametrize("name", [3, None, ["torchstore"]], ids=str)
async def test_a_store_name_that_is_none_is_told(name: Any) -> None:
    env = ts.spmd.SPMDEnv(0, 0, 1, 1, "127.0.0.1", 1)
    calls = (
        lambda: ts.get("w", store_name=name),
        lambda: ts.client(name),
        lambda: ts.initialize(store_name=name),
        lambda: ts.initialize_spmd(ts.HostStrategy(), name, env=env),
        lambda: ts.shutdown(name),
    )
    for call in calls:
        with pytest.raises(TypeError, match="store_name is a str, as 'torchstore', and not"):
            await call()
    with pytest.raises(TypeError, match="store_name is a str"):
        ts.reset_client(name)


async def test_flags_and_ranks_that_are_none_are_told() -> None:
    env: Any = 3
    no: Any = "no"
    seconds: Any = 120
    with pytest.raises(TypeError, match="strict is True or False, and not 'no'"):
        await ts.get_state_dict("state", {}, no)
    with pytest.raises(TypeError, match="direct_rdma is True or False, and not 'no'"):
        await ts.get_state_dict("state", {}, direct_rdma=no)
    with pytest.raises(TypeError, match="direct_rdma is True or False, and not 'no'"):
        await ts.put_state_dict({}, "state", direct_rdma=no)
    with pytest.raises(TypeError, match="env is an SPMDEnv, or None to read torchrun's environment, and not 3"):
        await ts.initialize_spmd(ts.HostStrategy(), env=env)
    with pytest.raises(TypeError, match=r"rendezvous_timeout is a datetime.timedelta, as .*, and not 120"):
        await ts.initialize_spmd(ts.HostStrategy(), rendezvous_timeout=seconds)
    with pytest.raises(TypeError, match="mesh is a ProcMesh of Monarch, or None, and not an int"):
        await ts.spawn_actors(1, object, "name", mesh=3)


# --- state dicts ------------------------------------------------------------------------------------------------------


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
