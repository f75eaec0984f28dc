"""What a got leaf is: memory of the mapping, alone in its storage, alive as long as anything refers to it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import msgpack
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictParams
from torch.multiprocessing import reductions

from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure import fill, flatten, iter_tensors, leaf_table, plan_of, rebuild, structure_text
from tests.structure.roundtrip import Mapping, round_trip, stored
from tests.structure.test_matrix import Pair, jagged
from tests.support.equality import assert_same


def got_with_mapping(value: Any, **options: Any) -> tuple[Any, Any, Mapping]:
    plan, objects, memory = stored(value, inline_limit=0)
    mapping = Mapping()
    return rebuild(plan, objects, memory, mapping, **options), memory, mapping


LEAVES = [
    torch.randn(64),
    torch.randn(8, 8).t(),
    torch.randn(64).bfloat16(),
    torch.nn.Parameter(torch.randn(64)),
    torch.nn.Buffer(torch.randn(64)),
    torch.tensor(1.5),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=range(len(LEAVES)))
def test_leaves_are_the_memory_and_alone_in_their_storage(leaf: torch.Tensor) -> None:
    value = {"before": torch.randn(5000), "leaf": leaf, "after": torch.randn(5000)}
    got, memory, mapping = got_with_mapping(value)
    tensor = got["leaf"]
    start = memory.ctypes.data
    assert start <= tensor.data_ptr() < start + memory.nbytes
    assert tensor.untyped_storage().nbytes() == leaf.numel() * leaf.itemsize
    assert tensor.untyped_storage()._memstore_mapping is mapping
    for data in (pickle.dumps(tensor), saved(tensor)):
        assert len(data) < 2500 + leaf.numel() * leaf.itemsize
    loaded = torch.load(io.BytesIO(saved(tensor)), weights_only=True)
    for double in (loaded, pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), copy.copy(tensor)):
        assert type(double) is type(tensor) and torch.equal(double, leaf) and double.requires_grad == leaf.requires_grad
    assert not start <= copy.deepcopy(tensor).data_ptr() < start + memory.nbytes


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_whole_values_can_be_saved_and_copied() -> None:
    value = {"t": TensorDict({"a": torch.randn(4), "s": "x"}), "p": torch.nn.Parameter(torch.randn(3)), "o": [1, "a"]}
    got, _, _ = got_with_mapping(value)
    loaded = torch.load(io.BytesIO(saved(got)), weights_only=True)
    for double in (copy.deepcopy(got), pickle.loads(pickle.dumps(got)), loaded):
        assert_same(value, double)


def moved_to_shared_memory(got: Any) -> Any:
    alias = got["a"].numpy()
    got["a"].share_memory_()
    return alias


def sent_by_torch(got: Any) -> Any:
    alias = got["a"].numpy()
    reductions.reduce_storage(got["a"].untyped_storage())
    return alias


HOLDERS: dict[str, Any] = {
    "tensor": lambda got: got["a"],
    "numpy": lambda got: got["a"].numpy(),
    "view": lambda got: got["a"][3:],
    "parameter": lambda got: got["p"],
    "numpy of parameter": lambda got: got["p"].detach().numpy(),
    "history": lambda got: (got["p"] * got["a"]).sum(),
    "shared": moved_to_shared_memory,
    "sent": sent_by_torch,
}
SWAPS = ("shared", "sent")  # the storage has other data now; the alias points to the old


@pytest.mark.parametrize("hold", HOLDERS)
def test_the_mapping_lives_as_long_as_anything_of_it(hold: str) -> None:
    got, memory, mapping = got_with_mapping({"a": torch.randn(64), "p": torch.nn.Parameter(torch.randn(64))})
    alive = weakref.ref(mapping), weakref.ref(memory)
    held: Any = HOLDERS[hold](got)
    del got, memory, mapping
    assert alive[0]() is not None
    if hold not in SWAPS:
        assert alive[1]() is not None
    del held
    assert alive[0]() is None and alive[1]() is None  # at once: no collection is waited for


def test_writing_to_a_leaf_writes_the_memory() -> None:
    plan, objects, memory = stored(torch.zeros(3))
    rebuild(plan, objects, memory, None).fill_(1)
    assert rebuild(plan, objects, memory, None).sum() == 3


BASE = torch.arange(64.0)
INLINE: dict[str, Any] = {
    "alone": torch.randn(64),
    "run": {"before": torch.randn(64), "a": torch.randn(64)},
    "no dtype of numpy": {"a": torch.randn(64).bfloat16()},
    "transposed": {"a": torch.randn(8, 8).t()},
    "tied": {"before": BASE[:40], "a": BASE[20:]},
    "number": torch.tensor(1.5),
    "jagged": jagged(),
    "class": Pair(torch.randn(64), torch.randn(64), batch_size=[64]),
}
ALIASES: dict[str, Any] = {
    "numpy": lambda tensor: (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy(),
    "dlpack": torch.from_dlpack,
    "capsule": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("name", INLINE)
@pytest.mark.parametrize("swap", SWAPS)
def test_the_bytes_of_an_inline_value_live_as_long_as_an_alias(name: str, alias: str, swap: str) -> None:
    plan, objects, memory = stored(INLINE[name])
    got = rebuild(plan, objects, memory, None)
    tensor = [leaf.values() if leaf.is_nested else leaf for _, leaf in iter_tensors(got)][-1]
    held = ALIASES[alias](tensor)
    alive = weakref.ref(memory)
    if swap == "shared":
        tensor.share_memory_()
    else:
        reductions.reduce_storage(tensor.untyped_storage())
    del got, tensor, memory
    assert alive() is not None
    del held
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("mapping", [None, Mapping()], ids=["inline", "mapped"])
def test_an_alias_of_a_leaf_that_had_to_be_copied_keeps_the_copy(mapping: Any) -> None:
    plan = plan_of(msgpack.encode([["dict", ["u", "a"], [0, 0]], [["uint8", [1], 0], ["float32", [300], 1]], False]))
    _, no_objects, _ = stored(torch.zeros(1))
    got = rebuild(plan, no_objects, np.arange(1201, dtype=np.uint8), mapping)
    copied = weakref.ref(got["a"].untyped_storage()._memstore_mapping)
    alias = got["a"].numpy()
    assert np.shares_memory(copied(), alias)
    got["a"].share_memory_()
    del got
    assert copied() is not None
    del alias
    assert copied() is None


def test_conversions() -> None:
    value = {
        "f": torch.randn(3),
        "i": torch.arange(3),
        "c": torch.ones(2, dtype=torch.complex64),
        "p": torch.nn.Parameter(torch.ones(2)),
    }
    got, memory, _ = got_with_mapping(value, dtype=torch.bfloat16)
    assert [got[key].dtype for key in "ficp"] == [torch.bfloat16, torch.int64, torch.complex64, torch.bfloat16]
    assert type(got["p"]) is torch.nn.Parameter and got["p"].is_leaf and got["p"].requires_grad
    got, memory, _ = got_with_mapping(value, device="cpu")
    assert memory.ctypes.data <= got["f"].data_ptr() < memory.ctypes.data + memory.nbytes
    got, _, _ = got_with_mapping({"t": TensorDict(a=torch.ones(2)), "j": jagged()}, device="meta")
    assert got["t"].device == torch.device("meta") == got["t"]["a"].device


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.int32, "floating or complex"),
        (torch.bool, "floating or complex"),
        ("float16", "to a torch.dtype, as torch"),
    ],
)
@pytest.mark.parametrize("leaf", [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.arange(2)], ids=str)
def test_conversions_are_to_floating_dtypes(leaf: torch.Tensor, dtype: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        round_trip({"a": leaf}, dtype=dtype)


def test_a_missing_device_says_what_to_do() -> None:
    plan, objects, memory = stored(torch.zeros(3))
    tree, leaves, inline = msgpack.decode(plan.description)
    elsewhere = plan_of(msgpack.encode([tree, [[*leaves[0], None, 0, "cuda:99"]], inline]))
    with pytest.raises(UnsupportedValueError, match=r"cuda:99.*device='cpu'"):
        rebuild(elsewhere, objects, memory, None)
    assert rebuild(elsewhere, objects, memory, None, device="cpu").device.type == "cpu"


def test_too_little_memory() -> None:
    plan, objects, memory = stored(torch.zeros(30))
    with pytest.raises(CorruptionError):
        rebuild(plan, objects, memory[:-1], None)
    with pytest.raises(ValueError, match="don't fit"):
        fill(flatten(torch.zeros(30)), memory[:-1])


def test_names_and_descriptions() -> None:
    plan, _, _ = stored({"s": {3: {"exp_avg": torch.zeros(2, dtype=torch.bfloat16)}}, "lr": 1})
    assert leaf_table(plan) == [(("s", 3, "exp_avg"), torch.bfloat16, (2,), 4)]
    for value, text in (
        (torch.zeros(1), "Tensor"),
        ({str(i): torch.zeros(1) for i in range(300)}, "dict of 300 leaves"),
        (TensorDict(a=torch.zeros(3), batch_size=[3]), "TensorDict[3] of 1 leaf"),
        ([torch.zeros(1), 2, "x"], "list of 1 leaf and 2 objects"),
        (Pair(torch.zeros(3), None, "x", batch_size=[3]), "Pair of 1 leaf and 1 object"),
        ({}, "empty dict"),
        (3, "object"),
    ):
        assert structure_text(stored(value)[0]) == text


def test_iter_tensors() -> None:
    t = torch.zeros(2)
    value = {
        "a": t,
        "l": [t, 3, {"b": t}],
        "td": TensorDict({"x": {"y": t}, "s": "no"}),
        "pair": Pair(t, t, batch_size=[2]),
    }
    value["lazy"] = LazyStackedTensorDict(TensorDict(q=t), TensorDict(q=t))
    value["params"] = TensorDictParams(TensorDict(w=t))
    assert [name for name, _ in iter_tensors(value)] == [
        *(("a",), ("l", 0), ("l", 2, "b"), ("td", "x", "y"), ("pair", "left"), ("pair", "right")),
        *(("lazy", 0, "q"), ("lazy", 1, "q"), ("params", "w")),
    ]
    assert list(iter_tensors(t)) == [((), t)]
