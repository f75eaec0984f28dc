"""Section by section, what a value may be made of; each comes back as it was put."""

from __future__ import annotations

import collections
import math
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)
from torch.autograd import forward_ad

from memstore.structure import fill, flatten, rebuild
from memstore.structure.traits import DTYPES, QUANTIZED
from tests.structure import classes
from tests.structure.roundtrip import round_trip, stored
from tests.support.equality import assert_same, is_same
from tests.support.strategies import random_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*(prototype|deprecated).*")

Point = collections.namedtuple("Point", "x y")


def check(value: Any) -> Any:
    got = round_trip(value)
    assert_same(value, got)
    return got


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(name for name, dtype in DTYPES.items() if dtype not in QUANTIZED))
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)])
def test_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, torch.uint8, 1)
    dtype = DTYPES[name]
    if dtype is torch.bool:
        tensor = tensor % 2 == 0
    else:
        tensor = random_bits((*shape, dtype.itemsize), torch.uint8, 1)
        storage = tensor.untyped_storage()
        plain = torch.empty(shape, dtype=torch.uint8)
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, shape, plain.stride())
    check(tensor)
    check({"a": tensor, "b": [tensor[1:] if shape else tensor, tensor.t()[::2] if len(shape) == 2 else tensor]})


MANY = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*MANY, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (16,), (3, 8, 8)])
def test_many_leaves_of_one_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = [random_bits(shape, dtype, i) for i in range(100)]
    turned = [random_bits((4, 8), dtype, i).t() for i in range(100)]
    check([*rows, torch.ones(3), *turned, *rows[:2], [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(70)]])


def test_many_leaves_with_tangents() -> None:
    rows = [torch.randn(8, 8) for _ in range(100)]
    with forward_ad.dual_level():
        got = round_trip([forward_ad.make_dual(row, torch.ones(8, 8)) for row in rows])
    assert_same(rows, got)


def test_a_bare_tensor_is_described_in_a_few_bytes() -> None:
    assert len(flatten(torch.zeros(3, 4)).plan.description) < 60
    assert len(flatten(torch.zeros(3, 4, 5)[::2].requires_grad_()).plan.description) < 60


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[1:3],
        lambda t: t[:, 1:3],
        lambda t: t[::2, ::3],
        lambda t: t[:1],
        lambda t: t[::3],
        lambda t: t[0, 0],
        lambda t: t[2:2],
        lambda t: t.unsqueeze(1).expand(4, 7, 6),
        lambda t: t[0, :1].expand(5),
        lambda t: t.as_strided((3, 2), (1, 1)),
        lambda t: t.flip(0),
        lambda t: t.diagonal(),
        lambda t: t.view(2, 2, 6).permute(2, 0, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_strides(view: Any, dtype: torch.dtype) -> None:
    tensor = view(torch.arange(24).reshape(4, 6).to(dtype))
    check(tensor)
    check([torch.zeros(3), {"t": tensor}])


def test_a_slice_is_stored_without_its_gaps() -> None:
    plan, _, _ = stored(torch.zeros(1000, 1000)[:, :10])
    assert plan.nbytes == 1000 * 10 * 4


EXPANDED_WITH_GAPS: list[tuple[Any, int, tuple[int, ...]]] = [
    (lambda t: t[:, :2].expand(3, 4, 2), 8, (0, 2, 1)),
    (lambda t: t[:, :2].unsqueeze(1).expand(4, 500_000, 2), 8, (2, 0, 1)),
    (lambda t: t[:, 1:2].expand(4, 6), 4, (1, 0)),
    (lambda t: t[::2, ::3].t().expand(7, 2, 2), 4, (0, 1, 2)),
    (lambda t: t[:, 0].unfold(0, 3, 1), 4, (1, 1)),  # sliding windows over a column
    (lambda t: t[:, :4].unfold(1, 3, 1), 16, (4, 1, 1)),  # over rows that were cut
    (lambda t: t.as_strided((4, 2), (0, 7)), 2, (0, 1)),
    (lambda t: t.as_strided((2, 2, 2), (4, 1, 6)), 8, (4, 2, 1)),  # windows that are no windows over whole runs
    (lambda t: t[:1, :1].expand(4, 6), 1, (0, 0)),
]


@pytest.mark.parametrize(("view", "elements", "strides"), EXPANDED_WITH_GAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float8_e4m3fn])
def test_what_lies_between_expanded_elements_is_not_stored(
    view: Any, elements: int, strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    base = torch.arange(1, 25).reshape(4, 6).to(dtype)
    value = view(base)
    plan, _, memory = stored(value)
    assert plan.nbytes == elements * dtype.itemsize
    own = value.clone(memory_format=torch.contiguous_format)
    assert set(memory.tolist()) <= set(own.view(torch.uint8).flatten().tolist())
    assert check(value).stride() == strides
    got = check({"one": value, "other": view(base), "apart": torch.zeros(3)})  # the very same elements: tied
    assert got["one"].data_ptr() == got["other"].data_ptr()
    got = check({"covered": value, "base": base})
    assert got["covered"].stride() == value.stride()
    if dtype is torch.float32:
        cast = rebuild(*stored({"x": value, "y": view(base.clone())}, dtype=torch.bfloat16), None)
        assert all(torch.equal(leaf, value.bfloat16()) and leaf.stride() == strides for leaf in cast.values())
    if dtype.is_complex:
        assert torch.equal(round_trip(value.conj()), value.conj())


def test_conjugated_and_negated_views_are_resolved() -> None:
    base = torch.randn(4, dtype=torch.complex64)
    for value in (base.conj(), base.conj().imag, torch._neg_view(torch.arange(3.0)), base.conj().reshape(2, 2).t()):
        got = round_trip({"v": value, "base": base})
        assert_same({"v": value, "base": base}, got)
        assert torch.equal(got["v"], value.resolve_conj().resolve_neg())


def test_gradients_kinds_and_history() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    value = {
        "parameter": weight,
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "integers": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "grad": torch.randn(3, requires_grad=True),
        "buffer": torch.nn.Buffer(torch.randn(3)),
        "unsaved": torch.nn.Buffer(torch.arange(3), persistent=False),
    }
    check(value)
    got = round_trip({"sum": weight * 2})["sum"]
    assert got.requires_grad and got.is_leaf and torch.equal(got, (weight * 2).detach())
    assert weight.grad is None and weight.requires_grad


def test_inference_tensors_come_back_as_normal_ones() -> None:
    with torch.inference_mode():
        value = {"a": torch.randn(3), "s": torch.randn(4, 4)[:, :2]}
        inside = round_trip({**value, "p": torch.nn.Parameter(torch.randn(3))})
    outside = round_trip(value)
    for tensor in [*inside.values(), *outside.values()]:
        assert not tensor.is_inference()
        tensor.detach().add_(1)
        (tensor.detach().requires_grad_() * 2).sum().backward()


def test_a_default_device_changes_nothing() -> None:
    value = {"a": torch.randn(3), "s": torch.randn(4, 4)[:, :2], "e": torch.zeros(0), "b": torch.zeros(3).bfloat16()}
    with torch.device("meta"):
        got = round_trip(value)
    assert_same(value, got)


# -- ties ------------------------------------------------------------------------------------------------------------


def test_tied_leaves_share_one_storage_and_are_stored_once() -> None:
    table = torch.nn.Parameter(torch.randn(1000, 8))
    value = {"embed": table, "head": table, "data": table.data, "rows": table.detach()[10:20]}
    plan, _, _ = stored(value)
    assert plan.nbytes == 1000 * 8 * 4
    got = check(value)
    got["data"][10] = 7
    assert (got["rows"][0] == 7).all() and (got["embed"][10] == 7).all() and got["head"] is got["embed"]


def test_leaves_of_one_storage_that_do_not_overlap_are_apart() -> None:
    base = torch.arange(8.0)
    got = check({"a": base[:4], "b": base[4:]})
    assert got["a"].untyped_storage().nbytes() == 16


@pytest.mark.parametrize("inline_limit", [0, 1 << 20])
def test_ties_across_dtypes_and_odd_offsets(inline_limit: int) -> None:
    base = torch.arange(64, dtype=torch.uint8)
    value = [torch.zeros(1, dtype=torch.bool), base[3:30], base.view(torch.float64)[1:3], base[8:20].view(torch.int32)]
    plan, objects, memory = stored(value, inline_limit=inline_limit)
    assert_same(value, rebuild(plan, objects, memory, None))


def test_tied_slices_with_gaps() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    check([base[:, :2], base[:, 2:4]])  # bytes overlap, elements don't
    check([base[:, :2], base[:, :2]])
    got = check([base[:, :2], base[:, :2].view(4, 2)])
    assert got[0].untyped_storage().nbytes() == 4 * 2 * 4  # the same elements: without the gaps
    same = base[:, :2]
    got = check([same, same])
    assert got[0] is got[1]


def test_ties_store_nothing_that_was_not_put() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for views in (
        {"a": base[:, :1], "b": base[:, :2]},
        {"a": base[:, :1], "b": base[:, :2], "c": base[:, :1]},
        {"a": base[:, :5], "b": base[:, :4], "rows": base[2:]},
        {"row": base[1], "turned": base[:, 1:3].t()},
    ):
        flat = flatten(views)
        elements = {name: set(view.reshape(-1).tolist()) for name, view in views.items()}
        memory = np.zeros(flat.plan.nbytes, np.uint8)
        fill(flat, memory)
        assert set(memory.view(np.float32).tolist()) <= set.union(*elements.values(), {0.0})
        assert flat.plan.nbytes <= sum(view.nbytes for view in views.values())
        assert [leaf.nbytes for leaf in flat.plan.leaves] == [view.nbytes for view in views.values()]
        check(views)


def test_slices_with_gaps_stay_tied_to_what_covers_them() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    got = check({"columns": base[:, :2], "top": base[:2], "rest": base[2:], "whole": base, "apart": torch.zeros(3)})
    got["whole"].fill_(7)
    assert (got["columns"] == 7).all() and (got["rest"] == 7).all() and got["columns"].stride() == (6, 1)
    got = check({"halves": [base[:3], base[2:]], "column": base[:, 1]})  # two that overlap cover it together
    got["halves"][1].fill_(7)
    assert got["column"].tolist() == [1, 7, 7, 7]
    got = check({"rows": base[1:], "columns": base[:, :2], "again": base[:, :2].view(4, 2)})
    assert got["columns"].data_ptr() == got["again"].data_ptr() and got["columns"].is_contiguous()


def test_ties_by_address_across_storages() -> None:
    array = np.arange(6.0)
    got = round_trip([torch.from_numpy(array), torch.from_numpy(array), array])
    got[0][0] = 9
    assert got[1][0] == 9 and got[2][0] == 9


def test_memory_that_is_not_aligned() -> None:
    data = bytearray(range(64))
    one = torch.frombuffer(data, dtype=torch.float32, count=3, offset=1)
    two = torch.frombuffer(data, dtype=torch.float32, count=3, offset=5)
    assert_same([one, two], round_trip([one, two]), ties=False)  # no storage has both at whole elements


# -- containers ------------------------------------------------------------------------------------------------------


def test_builtin_containers() -> None:
    t = torch.arange(3)
    value = {
        "list": [t, 1, [t, (t,)]],
        "tuple": (t, "x", ()),
        "ordered": OrderedDict(b=t, a=1),
        "default": defaultdict(list, {"x": [t]}),
        "point": Point(t, 2),
        "empty": [{}, [], (), OrderedDict(), defaultdict(int)],
        "size": torch.Size([1, 2]),
        "none": None,
    }
    check(value)
    for entry in value.values():
        check(entry)


def test_keys_that_python_holds_equal_stay_apart() -> None:
    for keys in ([1], [True], [1.0], ["1"], [0.0], [-0.0], [False], [None], [(1, "a")], [b"a"], [1 << 70], [-1]):
        value = {key: torch.zeros(1) for key in keys}
        check(value)
        check({"outer": dict.fromkeys(keys, 1)})
    check({0: {"exp_avg": torch.ones(2)}, 1: {"exp_avg": torch.zeros(2)}})


@pytest.mark.parametrize("key", ["a/b", "..", "meta", "🔑", "", "a.b", "__metadata__", "__pad__", "\0", "é"])
def test_odd_keys(key: str) -> None:
    check({key: torch.ones(2), "a": {"b": torch.zeros(1)}, "x": {key: 3}})
    check(TensorDict({key: torch.ones(2), "n": {key: torch.ones(3)}}))


def test_module_and_optimizer_states() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    got = check(state)
    assert got["model"]._metadata == model.state_dict()._metadata
    model.load_state_dict(got["model"])
    optimizer.load_state_dict(got["optimizer"])


def test_objects_that_change_keep_the_plan() -> None:
    def state(n: int, lr: Any) -> Any:
        groups = [{"lr": lr, "betas": (0.9, lr), "params": [0, 1], "names": ["x"] * 3}]
        losses = collections.deque(range(n), maxlen=100)
        others = {"losses": losses, "config": classes.Config(n), "seen": collections.Counter(range(n))}
        return {"state": {0: {"step": [n], "avg": torch.zeros(3)}}, "param_groups": groups, "others": others}

    assert flatten(state(3, 0.1)).plan is flatten(state(8, "auto")).plan is flatten(state(1, None)).plan


OTHERS = {
    "dtype": lambda: torch.randn(4, 4).double(),
    "shape": lambda: torch.randn(4, 5),
    "strides": lambda: torch.randn(4, 4).t(),
    "expanded": lambda: torch.randn(4, 1).expand(4, 4),
    "a gradient": lambda: torch.randn(4, 4, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(4, 4)),
    "a buffer": lambda: torch.nn.Buffer(torch.randn(4, 4)),
    "negated lazily": lambda: torch._neg_view(torch.randn(4, 4)),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "nested, turned": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]).transpose(1, 2),
    "nested, jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    "sparse": lambda: torch.randn(4, 4).to_sparse(),
    "sparse rows": lambda: torch.randn(4, 4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8),
    "a wrapper": lambda: classes.Int8Weight.of(torch.randn(4, 4)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_value_that_differs_from_many_of_its_tree(name: str) -> None:
    """What is known of the last values of a tree isn't taken for what a value of it is that differs."""
    for _ in range(8):
        value = check({name: torch.randn(4, 4), "b": torch.zeros(3)})
    check({name: OTHERS[name](), "b": torch.zeros(3)})
    same = torch.randn(4, 4)
    for _ in range(8):
        check({name: torch.randn(4, 4), "b": torch.randn(4, 4)})
    check({name: same, "b": same})
    value[name].requires_grad_()
    value["b"].resize_(2)
    check(value)
    value[name].data = torch.randn(2, 2).double()
    check(value)


# -- objects ---------------------------------------------------------------------------------------------------------

OBJECTS = [
    *(None, True, False, 0, 1, -1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.0, -0.0, math.inf, -math.inf, math.nan),
    *(
        "",
        "é",
        "🔑" * 100,
        "\0",
        b"",
        b"\xff\0",
        bytearray(b"x"),
        1j,
        complex(-0.0, math.nan),
        ...,
        range(3),
        slice(1, None),
    ),
    *(torch.float8_e5m2, torch.strided, torch.channels_last, torch.device("cuda:1"), torch.Size([]), torch.Size([3])),
    *(np.float16(1), np.float32(math.nan), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j)),
    *(np.str_("x"), np.str_(""), np.bytes_(b"x"), np.datetime64("2020-01-01T00:00"), np.timedelta64(3, "s")),
    *(frozenset({1, "a"}), {1.5, None}, set(), frozenset(), {(1, "x"), b"y"}, np.longdouble(1) / 3),
    *([1, (2, [3, {"x": (4,)}])], {"a": OrderedDict(b=1)}, ({1: 2, True + 1: 3},), [[], {}, ()]),
]


@pytest.mark.parametrize("value", OBJECTS, ids=[f"{i} {type(value).__name__}" for i, value in enumerate(OBJECTS)])
def test_objects(value: Any) -> None:
    check(value)
    check({"a": value, "t": torch.zeros(1)})
    check([[value]])
    check(TensorDict({"t": torch.zeros(2), "n": NonTensorData(value)}))


ARRAYS = [
    *(np.arange(6).astype(kind).reshape(2, 3) for kind in ("f2", "f4", "f8", "i1", "u2", "u4", "u8", "c8", "c16", "?")),
    *(np.arange(6).astype(kind).reshape(2, 3) for kind in (">f4", ">i8", "g", "M8[s]", "m8[ns]")),
    *(np.array("x"), np.array(["ab", "c"]), np.array([b"x"]), np.array(3.0), np.zeros((0, 3)), np.zeros((2, 0), "U3")),
    *(np.arange(12.0).reshape(3, 4).T, np.arange(12.0).reshape(3, 4)[:, ::-1], np.arange(12)[::3]),
    np.broadcast_to(np.arange(3.0), (2, 3)),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype.str} {value.shape}")
@pytest.mark.filterwarnings("error")
def test_numpy_arrays(value: Any) -> None:
    check(value)
    got = check({"a": value, "n": [value]})
    assert got["a"].flags.writeable


def test_arrays_that_can_not_be_written_come_back_writable() -> None:
    value = np.arange(3.0)
    value.flags.writeable = False
    assert check([value])[0].flags.writeable
    frozen = round_trip([value])
    frozen[0].flags.writeable = False
    assert not is_same([value], frozen)


def test_arrays_are_not_converted_by_a_get() -> None:
    got = round_trip({"a": np.arange(3.0), "t": torch.arange(3.0)}, dtype=torch.float16)
    assert got["a"].dtype == np.float64 and got["t"].dtype == torch.float16


def test_pickled_objects() -> None:
    value = {"f": math.sin, "t": torch.zeros(1), "s": {torch.float32}, "sub": collections.Counter("aab")}
    assert_same(value, round_trip(value, allow_pickle=True))


# -- tensordict ------------------------------------------------------------------------------------------------------


def nested_tensordict() -> TensorDict:
    return TensorDict(
        {
            "a": torch.randn(3, 4, 2),
            "deep": TensorDict(
                {"x": torch.randn(3, 4, 5), "empty": TensorDict({}, [3, 4])}, [3, 4], names=["batch", "q"]
            ),
            "flat": TensorDict({"y": torch.arange(3)}, [3], device="cpu"),
            "text": "hello",
            "unbatched": UnbatchedTensor(torch.randn(7)),
        },
        batch_size=[3],
        names=["batch"],
    )


def test_tensordicts() -> None:
    check(nested_tensordict())
    check(TensorDict({}, [2, 0], device="cpu"))
    check([nested_tensordict(), {"x": TensorDict(a=1)}])


def test_locks() -> None:
    value = nested_tensordict().lock_()
    got = check(value)
    with pytest.raises(RuntimeError):
        got["deep"]["new"] = torch.zeros(3, 4)
    got.unlock_()
    got["deep", "new"] = torch.zeros(3, 4)
    part = nested_tensordict()
    part["deep"].lock_()
    check(part)
    assert value.is_locked


def test_names_and_values_of_the_original_are_not_shared() -> None:
    value = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["x", "y"])
    got = round_trip(value)
    got.names = ["u", "v"]
    got["a"] += 1
    assert round_trip(value).names == ["x", "y"] and value["a"].sum() == 0


def test_non_tensor_data() -> None:
    for data in (
        "text",
        None,
        3,
        2.5,
        (1, 2),
        {"a": [1, {"b": None}]},
        np.float32(2),
        np.arange(3),
        [1, "x"],
        torch.ones(2),
    ):
        check(NonTensorData(data))
        check(MetaData(data, batch_size=[2], device="cpu"))
        check(TensorDict({"n": NonTensorData(data, batch_size=[2]), "t": torch.zeros(2)}, [2], names=["b"]))
        got = round_trip(TensorDict({"n": NonTensorData(data)}))
        assert type(got["n"]) is type(TensorDict({"n": NonTensorData(data)})["n"])


def test_non_tensor_stacks() -> None:
    got = check(TensorDict({"s": NonTensorStack("a", "b"), "l": ["x", 1], "t": torch.zeros(2)}, [2]))
    assert got["s"] == ["a", "b"] and got["l"] == ["x", 1]
    check(NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")))
    check(
        NonTensorStack(
            NonTensorData("a", batch_size=[2], device="cpu"), NonTensorData("b", batch_size=[2], device="cpu")
        )
    )
    check(NonTensorStack(*["x"] * 3).lock_())
    check(NonTensorStack(NonTensorData(torch.ones(2)), NonTensorData(torch.zeros(3))))
    many = NonTensorStack(*map(str, range(1000)))
    assert len(flatten(many).plan.description) < 40


def test_lazy_stacks() -> None:
    one, two = TensorDict(a=torch.zeros(3, 2), b=1), TensorDict(a=torch.zeros(4, 2))
    check(lazy_stack([one, two]))
    check(lazy_stack([one, one.clone()]).lock_())
    check(lazy_stack([TensorDict(a=torch.zeros(3, 2), batch_size=[3], names=["x"])] * 2, 1, stack_dim_name="s"))
    check(LazyStackedTensorDict(stack_dim=0))
    check(TensorDict({"l": lazy_stack([TensorDict(q=torch.ones(1)), TensorDict(q=torch.ones(2))])}, [2]))


@tensorclass
class Pair:
    left: torch.Tensor
    right: Any
    note: str = "none"

    def __post_init__(self) -> None:
        Pair.built += 1


Pair.built = 0


@tensorclass
class Holder:
    pair: Pair
    table: torch.Tensor | None = None


def test_tensorclasses() -> None:
    pair = Pair(torch.randn(3, 2), TensorDict(x=torch.zeros(3), batch_size=[3]), "hi", batch_size=[3])
    built = Pair.built
    got = check(pair)
    assert got.note == "hi" and Pair.built == built
    check(Holder(pair, batch_size=[3]))
    check(TensorDict({"p": pair, "h": {"h": Holder(pair, torch.ones(3), batch_size=[3])}}, [3]).lock_())
    check({"list": [pair, pair]})
    check(torch.stack([pair, pair]))
    check(LazyStackedTensorDict.lazy_stack([pair, Pair(torch.randn(3, 2), None, "ho", batch_size=[3])]))


def test_tensordict_params() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    value = TensorDict.from_module(module, as_module=True)
    got = check(value)
    assert [name for name, _ in got.named_parameters()] == [name for name, _ in value.named_parameters()]
    assert [name for name, _ in got.named_buffers()] == [name for name, _ in value.named_buffers()]
    check(TensorDictParams(TensorDict(w=torch.ones(2), n={"i": torch.arange(2)}), no_convert=True))
    check(TensorDictParams(TensorDict(w=torch.ones(2)), lock=True))
    check({"p": TensorDictParams(TensorDict(w=torch.ones(2)))})


def test_memory_maps_come_back_as_tensors(tmp_path: Any) -> None:
    value = TensorDict({"a": torch.randn(3, 2), "n": {"b": torch.arange(3)}}, [3]).memmap(str(tmp_path))
    got = check(value)
    assert type(got["a"]) is torch.Tensor
    check(MemoryMappedTensor.from_tensor(torch.arange(4)))


# -- nested and quantized --------------------------------------------------------------------------------------------


def jagged(**options: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged, **options)


def test_jagged_tensors() -> None:
    check(jagged())
    check({"grad": jagged(requires_grad=True), "double": jagged().double()})
    check(jagged().transpose(1, 2))
    lengths = torch.nested.nested_tensor_from_jagged(
        torch.randn(10, 3), torch.tensor([0, 4, 8]), torch.tensor([2, 3]), min_seqlen=2, max_seqlen=3
    )
    check([lengths, 1])
    check(TensorDict({"j": jagged()}, [2]))


def test_jagged_tensors_that_share_offsets_still_do() -> None:
    one = jagged()
    got = check({"one": one, "two": one * 2, "three": {"x": one.double()}})
    assert got["one"].shape == got["two"].shape
    assert torch.equal((got["one"] + got["two"]).values(), (one * 3).values())
    assert got["one"].offsets() is got["three"]["x"].offsets()


def test_strided_nested_tensors() -> None:
    value = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    check(value)
    check(torch.nested.nested_tensor([torch.zeros(0, 5), torch.zeros(2, 0)]))
    check([value.transpose(1, 2), torch.nested.nested_tensor([torch.randn(2)], requires_grad=True)])


def test_quantized_tensors() -> None:
    x = torch.randn(4, 3)
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        check(torch.quantize_per_tensor(x, 0.1, 3, dtype))
    scales, zeros = torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.int64)
    check({"q": torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8), "x": x})


# -- the comparison itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), torch.nn.Parameter(torch.zeros(2))),
        (torch.zeros(2), torch.nn.Buffer(torch.zeros(2))),
        (torch.nn.Buffer(torch.zeros(2)), torch.nn.Buffer(torch.zeros(2), persistent=False)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.zeros(2, 2), torch.zeros(2, 2).t()),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        ([torch.zeros(2)] * 2, [torch.zeros(2), torch.zeros(2)]),
        ([torch.zeros(2), torch.zeros(2)], [torch.zeros(2)] * 2),
        ({1: 0}, {True: 0}),
        ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
        ((1,), [1]),
        (1, 1.0),
        (0.0, -0.0),
        (np.float32(1), np.float64(1)),
        (np.zeros(2, "i4"), np.zeros(2, "i8")),
        (np.zeros((2, 3)), np.zeros((2, 3), order="F")),
        (TensorDict({}, [2]), TensorDict({}, [2, 1])),
        (TensorDict({}, [2]), TensorDict({}, [2]).lock_()),
        (TensorDict({}, [2]), TensorDict({}, [2], device="cpu")),
        (TensorDict({}, [2]), TensorDict({}, [2], names=["a"])),
        (TensorDict(a=1), {"a": torch.tensor(1)}),
        (NonTensorData("a"), NonTensorData("b")),
        (NonTensorData("a"), MetaData("a")),
        (lazy_stack([TensorDict(a=1)] * 2), torch.stack([TensorDict(a=1)] * 2)),
    ],
)
def test_assert_same_sees_differences(one: Any, other: Any) -> None:
    assert is_same(one, one) and is_same(other, other)
    assert not is_same(one, other)
