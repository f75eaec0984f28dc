"""What can't be stored is refused before anything is written, and the message names the leaf."""

from __future__ import annotations

import collections
import io
import pickle
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, MetaData, NonTensorData, TensorDict, tensorclass
from torch._subclasses.fake_tensor import FakeTensorMode

from memstore.errors import StructureMismatchError, UnsupportedValueError
from memstore.sharding import TensorShard
from memstore.structure import flatten, get_into, rebuild, take_shards_apart, walk
from tests.structure.roundtrip import round_trip, stored
from tests.support.equality import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")


class Thing:
    def __eq__(self, other: object) -> bool:
        return type(other) is Thing

    __hash__ = None  # type: ignore[assignment]


class Sub(torch.Tensor):
    pass


class SubList(list):  # type: ignore[type-arg]
    pass


class SubTensorDict(TensorDict):
    pass


def local_tensorclass() -> Any:
    @tensorclass
    class Hidden:
        x: torch.Tensor

    return Hidden(torch.zeros(2), batch_size=[2])


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def fake_sparse() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3).to_sparse()


def local_object() -> Any:
    class Local:
        pass

    return Local()


def persistent() -> Any:
    return TensorDict({"a": torch.zeros(2)}, [2])._get_sub_tensordict(0)


def hooked() -> Any:
    return LazyStackedTensorDict(TensorDict(a=torch.zeros(2)), hook_out=lambda x: x)


LEAVES = {
    "fake tensor: it": fake_sparse,
    "meta tensor": lambda: torch.zeros(3, device="meta"),
    "mkldnn tensor": lambda: torch.zeros(3, 3).to_mkldnn(),
    "fake tensor": fake,
    "not initialized": lambda: torch.nn.UninitializedParameter(),
    "an unknown subclass of torch.Tensor": lambda: torch.zeros(3).as_subclass(Sub),
    "_SubTensorDict": persistent,
    "SubTensorDict": lambda: SubTensorDict({"a": torch.zeros(1)}),
    "LazyStackedTensorDict with hooks": hooked,
    "Hidden": local_tensorclass,
    "MetaData[int | str]": lambda: MetaData[int | str]("x"),
    "test_refusals.Thing": Thing,
    "SubList, a subclass of a builtin container": lambda: SubList([torch.zeros(1)]),
    "factory is no builtin type": lambda: collections.defaultdict(lambda: 1),
    "builtin_function_or_method, which only allow_pickle=True": lambda: len,
    "lone surrogate": lambda: "\ud800",
    "dtype object": lambda: np.array([object()]),
    "a key of type test_refusals.Key": lambda: {Key(): 1},
    "a key with a lone surrogate": lambda: {"\ud800": torch.zeros(1)},
    "torch.nn.modules.linear.Linear: put its state_dict()": lambda: torch.nn.Linear(1, 1),
    "SGD: put its state_dict()": lambda: torch.optim.SGD([torch.zeros(1)]),
    "MultiStepLR: put its state_dict()": lambda: torch.optim.lr_scheduler.MultiStepLR(
        torch.optim.SGD([torch.zeros(1)]), []
    ),
    "GradScaler: put its state_dict()": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "Generator: put its get_state()": torch.Generator,
    "numpy.random._generator.Generator: put its bit_generator.state": np.random.default_rng,
    "generator: what it yields": lambda: (i for i in range(3)),
    "map: what it yields": lambda: map(str, [1]),
    "dict_keys: put list(...)": lambda: {}.keys(),
    "function: it can't be found by its name": lambda: lambda: 1,
    "memoryview: put bytes(...)": lambda: memoryview(b"x"),
    "module: put its name": lambda: collections,
    "TextIOWrapper: it is a part of this process": lambda: io.TextIOWrapper(io.BytesIO()),
    "lock: it is a part of this process": threading.Lock,
    "Local: its class: it can't be found by its name": local_object,
}


class Key:
    pass


@pytest.mark.parametrize("message", LEAVES)
def test_refused_leaves_are_named(message: str) -> None:
    bad = LEAVES[message]()
    with pytest.raises(UnsupportedValueError) as caught:
        flatten(bad)
    expected = message.removeprefix("a key of type test_refusals.") if message.startswith("a key of") else message
    assert expected in str(caught.value)
    for value, name in (
        ({"a": [torch.zeros(1), 2, {"exp_avg": bad}]}, "value['a'][2]['exp_avg']"),
        ((torch.zeros(1), bad, torch.zeros(1)), "value[1]"),
    ):
        with pytest.raises(UnsupportedValueError) as caught:
            flatten(value)
        if "surrogate" not in message or "key" not in message:
            assert str(caught.value).startswith(name)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda entries: collections.defaultdict(int, entries)])
@pytest.mark.parametrize("key", ["\ud800", ("é", "\ud800")])
@pytest.mark.parametrize("entry", [1, torch.zeros(1)], ids=["object", "tensor"])
def test_keys_that_are_no_text_are_named(kind: Any, key: Any, entry: Any) -> None:
    for value, path in ((kind({key: entry}), ""), ({"a": [0, kind({"é": 1, key: entry})]}, "['a'][1]")):
        with pytest.raises(UnsupportedValueError) as caught:
            flatten(value)
        assert str(caught.value).startswith(f"value{path}[{key!r}]: a key with a lone surrogate")


def shrunk(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


SHRUNK = {
    "freed": lambda: shrunk(torch.zeros(4), 0),
    "freed, large": lambda: shrunk(torch.zeros(1 << 20), 0),
    "freed, a view": lambda: shrunk(torch.zeros(100)[50:], 0),
    "freed, a parameter": lambda: shrunk(torch.nn.Parameter(torch.zeros(4)), 0),
    "cut": lambda: shrunk(torch.zeros(100), 396),
    "cut, a view": lambda: shrunk(torch.zeros(100)[50:], 200),
    "cut, strides": lambda: shrunk(torch.zeros(10, 10).t()[2:, 1::2], 396),
}


@pytest.mark.parametrize("case", SHRUNK)
def test_tensors_whose_storage_was_freed(case: str) -> None:
    bad = SHRUNK[case]()
    left = bad.untyped_storage().nbytes()
    for value in ({"a": [torch.zeros(0), torch.zeros(5)[2:], bad]}, {"a": [bad.data, torch.zeros(3), bad, bad]}):
        with pytest.raises(UnsupportedValueError, match=r"value\['a'\]\[[02]\]: a tensor whose storage was freed"):
            flatten(value)
    with pytest.raises(UnsupportedValueError, match=r"^value: a tensor whose storage was freed"):
        flatten(bad)
    assert bad.untyped_storage().nbytes() == left


def test_storages_that_are_just_long_enough() -> None:
    whole = shrunk(torch.zeros(100)[50:75], 300)
    empty = shrunk(torch.zeros(3)[3:], 0)
    assert_same([whole, empty], round_trip([whole, empty]))
    assert_same(empty, round_trip(empty))


@pytest.mark.parametrize(
    "bad",
    [
        torch.empty(0, 2**61, dtype=torch.uint8),
        torch.empty_strided((0, 2), (2**61, 1)),
        torch.empty_strided((1,), (2**61,)),
        torch.zeros(1).expand(2**60),
    ],
    ids=lambda tensor: str(tensor.stride()),
)
def test_shapes_and_strides_beyond_any_memory(bad: torch.Tensor) -> None:
    with pytest.raises(UnsupportedValueError, match=r"^value\['a'\]\[1\]: a leaf .*too large"):
        flatten({"a": [torch.zeros(1), bad]})


def test_leaves_in_tensordicts_are_named() -> None:
    bad = TensorDict({"n": {"s": torch.zeros(3, 3).to_mkldnn(), "t": torch.zeros(3)}}, [])
    with pytest.raises(UnsupportedValueError, match=r"value\['x'\]\['n'\]\['s'\]: a .*mkldnn tensor"):
        flatten({"x": bad})
    with pytest.raises(UnsupportedValueError, match=r"value\['n'\]: .*Thing"):
        flatten(TensorDict({"n": NonTensorData(Thing())}))
    with pytest.raises(UnsupportedValueError, match=r"value\['n'\]\['deep'\]\[1\]: .*Thing"):
        flatten(TensorDict({"n": NonTensorData({"deep": [1, Thing()]})}))


def test_tensors_in_transforms_are_refused() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedValueError, match=r"value\['x'\]: .*transform"):
            flatten({"x": x})
        return x

    torch.vmap(inside)(torch.zeros(3, 2))
    torch.func.grad(lambda x: inside(x).sum())(torch.zeros(2))


@pytest.mark.parametrize("kind", [list, dict, collections.OrderedDict])
def test_cycles(kind: Any) -> None:
    inner: Any = kind()
    value = {"top": [1, inner]}
    if kind is list:
        inner.append(value["top"])
    else:
        inner["up"] = value["top"]
    with pytest.raises(UnsupportedValueError, match=r"contains itself: value\['top'\]$"):
        flatten(value)
    with pytest.raises(UnsupportedValueError, match=r"contains itself: value\['top'\]$"):
        flatten(value, allow_pickle=True)


def test_a_tensordict_that_contains_itself() -> None:
    value = TensorDict({}, [])
    value._tensordict["me"] = value
    with pytest.raises(UnsupportedValueError, match=r"contains itself: value$"):
        flatten(value)


def nested(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize("leaf", [torch.ones(1), 1, None])
def test_levels(leaf: Any) -> None:
    assert_same(nested(200, leaf), round_trip(nested(200, leaf)))
    assert_same({"a": nested(198, (leaf,))}, round_trip({"a": nested(198, (leaf,))}))
    with pytest.raises(UnsupportedValueError, match="more than 200 levels"):
        flatten(nested(201, leaf))
    with pytest.raises(UnsupportedValueError, match="more than 200 levels"):
        flatten(nested(100_000, leaf))


def test_tensordicts_of_many_levels() -> None:
    def deep(levels: int) -> TensorDict:
        made = TensorDict({"x": torch.zeros(1)})
        for _ in range(levels - 1):
            made = TensorDict._new_unsafe({"n": made}, torch.Size([]), nested=False)
        return made

    assert_same(deep(200), round_trip(deep(200)))
    with pytest.raises(UnsupportedValueError, match="more than 200 levels"):
        flatten(deep(201))


def test_pickle_is_refused_in_both_directions() -> None:
    value = {"t": torch.zeros(1), "x": Thing(), "sub": torch.zeros(2).as_subclass(Sub), "d": SubList([1])}
    assert_same(value["x"], round_trip(value, allow_pickle=True)["x"])
    assert type(round_trip(value, allow_pickle=True)["sub"]) is Sub
    flat = flatten(value, allow_pickle=True)
    from memstore.structure import plan_of, rebuild

    plan = plan_of(flat.plan.description)
    memory = np.zeros(plan.nbytes, np.uint8)
    with pytest.raises(UnsupportedValueError, match="allow_pickle=True"):
        rebuild(plan, flat.objects, memory, None)


def test_what_fails_to_pickle_is_named() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            raise pickle.PicklingError("no")

    with pytest.raises(UnsupportedValueError, match=r"value\['a'\]: .*Broken.* no"):
        flatten({"a": Broken()}, allow_pickle=True)


@pytest.mark.parametrize("message", ["generator: what", "function: it can't", "lock: it is", "Local: its class"])
def test_advice_names_pickle_only_where_it_works(message: str) -> None:
    bad = LEAVES[next(name for name in LEAVES if name.startswith(message))]()
    with pytest.raises(UnsupportedValueError) as refused:
        flatten({"a": bad})
    told = str(refused.value)
    assert "allow_pickle" not in told or "define it at the top level of a module and use allow_pickle=True" in told
    with pytest.raises(UnsupportedValueError, match=f"fails to pickle: .*{message.split(': ')[1]}"):
        flatten({"a": bad}, allow_pickle=True)


def bomb(kind: Any, leaf: Any, levels: int = 11) -> Any:
    for _ in range(levels):
        leaf = kind([leaf] * 10)
    return leaf


BOMBS = {
    "lists": lambda: bomb(list, 1),
    "tuples of tensors": lambda: bomb(tuple, torch.zeros(1)),
    "dicts": lambda: bomb(lambda entries: dict(enumerate(entries)), "x"),
    "ordered": lambda: bomb(lambda entries: collections.OrderedDict(enumerate(entries)), None),
    "deques": lambda: bomb(collections.deque, 1),
    "counters": lambda: bomb(lambda entries: collections.Counter(dict(enumerate(entries))), 1),
    "namespaces": lambda: bomb(lambda entries: types.SimpleNamespace(a=entries, b=entries), 1, 7),
    "a large list": lambda: bomb(list, [0] * 50_000, 3),
    "two of each": lambda: nested_pairs(150),
    "tensordicts": lambda: bomb(
        lambda entries: TensorDict._new_unsafe(
            dict(zip("abcdefghij", entries, strict=True)), torch.Size([]), nested=False
        ),
        torch.zeros(1),
    ),
}


def nested_pairs(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_shared_containers_without_an_end_are_refused(allow_pickle: bool) -> None:
    with pytest.raises(UnsupportedValueError, match=r"value\['a'\]\[.*: containers that stand in so many places"):
        flatten({"a": bomb(list, torch.zeros(1))}, allow_pickle=allow_pickle)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of what is allowed, so that it takes a thousandth of the time."""
    monkeypatch.setattr(walk, "_COUNTED_FROM", walk._COUNTED_FROM // 1000)
    monkeypatch.setattr(walk, "_MOST_REPEATED", walk._MOST_REPEATED // 1000)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", BOMBS)
def test_shared_containers_of_any_kind_are_refused(name: str) -> None:
    value = BOMBS[name]()
    with pytest.raises(UnsupportedValueError, match=r"value\[.*: containers that stand in so many places"):
        flatten({"a": value})
    with pytest.raises(StructureMismatchError, match="containers that stand in so many places"):
        get_into(*stored({"a": 1}), {"a": value})


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    "value",
    [
        [[1, {"x": "y"}]] * 3000,
        [{"meta": shared, "n": n} for shared in [dict.fromkeys("abcdef", 1)] for n in range(2000)],
        [[torch.zeros(1)] * 3] * 2000,
        [[n, [n]] for n in range(3000)],
    ],
    ids=["one list", "with their own", "tensors", "none shared"],
)
def test_shared_containers_are_ordinary(value: Any) -> None:
    plan, objects, memory = stored({"v": value})
    assert_same(value, rebuild(plan, objects, memory, None)["v"])


def test_keys_that_share_are_refused() -> None:
    key: Any = (1, 2)
    for _ in range(14):
        key = (key, key)
    with pytest.raises(UnsupportedValueError, match="a key of more than 4,096 parts"):
        flatten({"a": {key: torch.zeros(1)}})


def test_slices_that_share_are_refused() -> None:
    value: Any = (1, 2, 3)
    for _ in range(40):
        value = slice(value, value, value)
    with pytest.raises(UnsupportedValueError, match="in a set or slice"):
        flatten([value])


@pytest.mark.parametrize(
    ("local", "what"),
    [
        (lambda: torch.ones(2, 4, device="meta"), "a shard that is a meta tensor"),
        (lambda: torch.nn.Parameter(torch.ones(2, 4, device="meta")), "a shard that is a meta tensor"),
        (lambda: torch.eye(4)[:2].to_sparse(), "a shard that is a torch.sparse_coo tensor"),
        (lambda: torch.eye(4)[:2].to_sparse_csr(), "a shard that is a torch.sparse_csr tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.qint8), "a shard of a quantized tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(0, 4), 0.1, 0, torch.qint8), "a shard of a quantized tensor"),
    ],
)
def test_shards_without_plain_memory_are_refused_by_name(local: Callable[[], torch.Tensor], what: str) -> None:
    value = {"a": torch.ones(2), "layers": [{"w": TensorShard(local(), (4, 4), (0, 0))}]}
    where = re.escape(f"value['layers'][0]['w']: {what}")
    with pytest.raises(UnsupportedValueError, match=f"^{where}"):
        take_shards_apart(value)
    plan, objects, memory = stored({"a": torch.ones(2), "layers": [{"w": torch.ones(4, 4)}]})
    with pytest.raises(StructureMismatchError, match=f"^out: {where}"):
        get_into(plan, objects, memory, value)


def test_a_value_is_left_as_it_was() -> None:
    value = TensorDict({"a": torch.zeros(2, requires_grad=True), "n": {"s": "x"}}, [2]).lock_()
    before = {key: id(entry) for key, entry in value._tensordict.items()}
    flatten([value, {"s": {Thing: 1} and "x"}])
    with pytest.raises(UnsupportedValueError):
        flatten([value, Thing()])
    assert value.is_locked and {key: id(entry) for key, entry in value._tensordict.items()} == before
    assert value["a"].requires_grad and value["a"].is_leaf
