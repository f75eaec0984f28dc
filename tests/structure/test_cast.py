"""A put with dtype=: floating leaves are stored as another dtype, bit for bit as torch casts them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from memstore.errors import UnsupportedValueError
from memstore.structure import DTYPES, fill, flatten, plan_of, rebuild
from tests.examples import examples
from tests.structure.roundtrip import round_trip, stored
from tests.support import strategies
from tests.support.equality import assert_same
from tests.support.strategies import random_bits

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, on prototype dtypes
slow = settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

FP4 = torch.float4_e2m1fn_x2  # two numbers a byte: torch converts nothing to it, and it to nothing
FLOATING = sorted((dtype for dtype in DTYPES.values() if dtype.is_floating_point and dtype is not FP4), key=str)
BF16 = torch.bfloat16


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes; a NaN as one of its kind: which of them a cast makes, depends on the processor's vectors."""
    tensor = tensor.detach().contiguous()
    if tensor.is_floating_point() and tensor.dtype is not FP4:
        tensor = torch.where(tensor.double().isnan(), torch.full_like(tensor, float("nan")), tensor)
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # a tensor of one element may have any stride
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


def assert_cast(value: torch.Tensor, got: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == value.shape
    assert torch.equal(bits(got), bits(value.detach().to(dtype)))


def leaves_of(value: Any) -> list[torch.Tensor]:
    return flatten(value).tensors


def castable(value: Any) -> bool:
    """Whether torch has a kernel for every leaf: what is made of fp4 can be refused."""
    return all(leaf.dtype is not FP4 for leaf in leaves_of(value))


@slow
@given(strategies.values(), st.sampled_from(FLOATING))
def test_a_cast_on_the_way_in_is_the_one_on_the_way_out(value: Any, dtype: torch.dtype) -> None:
    assume(castable(value))
    got, plain = cast(value, dtype), round_trip(value)
    expected = rebuild(*stored(value), None, dtype=dtype)
    one, other, as_put = flatten(got), flatten(expected), flatten(plain)
    assert one.objects == other.objects
    for leaf, want, was in zip(one.tensors, other.tensors, as_put.tensors, strict=True):
        assert (leaf.dtype, leaf.shape, leaf.stride()) == (want.dtype, want.shape, was.stride())
        assert (type(leaf), leaf.requires_grad) == (type(want), want.requires_grad)
        assert torch.equal(bits(leaf), bits(want))


def cast(value: Any, dtype: torch.dtype, **options: Any) -> Any:
    return rebuild(*stored(value, dtype=dtype, **options), None)


@slow
@given(strategies.tensors(), st.sampled_from(FLOATING), st.sampled_from([0, 1536]))
def test_a_tensor_is_cast_as_to_casts_it(value: torch.Tensor, dtype: torch.dtype, inline_limit: int) -> None:
    assume(value.dtype is not FP4)
    got = cast(value, dtype, inline_limit=inline_limit)
    assert_cast(value, got, dtype if value.is_floating_point() else value.dtype)
    assert (type(got), got.requires_grad) == (type(value), value.requires_grad)


@slow
@given(strategies.tied_tensors(), st.sampled_from(FLOATING))
def test_leaves_of_one_dtype_stay_tied_as_they_were(value: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assume(castable(value) and "bytes" not in value)
    got, plain = cast(value, dtype), round_trip(value)
    for name, leaf in value.items():
        assert_cast(leaf, got[name], dtype if leaf.is_floating_point() else leaf.dtype)
        assert got[name].storage_offset() == plain[name].storage_offset()
        for other in value:
            assert (got[name] is got[other]) == (plain[name] is plain[other])
            assert share(got[name], got[other]) == share(plain[name], plain[other])


def share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("target", FLOATING, ids=str)
@pytest.mark.parametrize("source", FLOATING, ids=str)
def test_every_bit_pattern_of_every_dtype(source: torch.dtype, target: torch.dtype) -> None:
    value = random_bits((4099,), source, seed=1)
    assert_cast(value, cast(value, target), target)


@pytest.mark.parametrize("size", [1, 7, 2048, (1 << 15) - 16, (1 << 15) - 15, 100_003, (1 << 23) + 1])
@pytest.mark.parametrize("turned", [False, True])
def test_leaves_of_every_size_are_cast_whole(size: int, turned: bool) -> None:
    """By one kernel, in pieces that one core does, or on all cores."""
    value = torch.randn(2, size).t() if turned else torch.randn(size, 2)
    got = cast({"a": value, "n": torch.arange(5)}, BF16)
    assert_cast(value, got["a"], BF16)
    assert got["a"].stride() == value.stride() and torch.equal(got["n"], torch.arange(5))


BASE = torch.randn(300, 200)
LAYOUTS = {
    "expanded": BASE[:1].expand(300, 200),
    "expanded and transposed": BASE[0].expand(40, 200).t(),
    "overlapping": BASE.view(-1).as_strided((50, 8), (4, 1)),
    "transposed": BASE.t(),
    "permuted": BASE.view(30, 10, 200).permute(2, 0, 1),
    "columns": BASE[:, :7],
    "every second": BASE[::2, ::3],
    "later in its storage": BASE[17:],
    "no dimension": torch.tensor(1.2345),
    "empty": torch.empty(0, 3),
    "no elements of several": torch.empty(3, 0, 2).transpose(0, 2),
    "negated lazily": torch.randn(9, dtype=torch.complex64).conj().imag,
    "a part of complex numbers": torch.randn(9, dtype=torch.complex64).real,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_those_of_a_put_without_a_cast(name: str) -> None:
    got, plain = cast(LAYOUTS[name], BF16), round_trip(LAYOUTS[name])
    assert_cast(LAYOUTS[name], got, BF16)
    assert got.stride() == plain.stride()
    if got.numel():
        assert got.untyped_storage().nbytes() * 2 == plain.untyped_storage().nbytes(), "an expanded one stays small"


def test_what_is_no_real_floating_leaf_stays_as_it_is() -> None:
    value = {
        "n": torch.arange(3),
        "b": torch.tensor([True]),
        "c": torch.randn(3, dtype=torch.complex64),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "bf16": random_bits((64,), BF16, seed=0),  # its NaNs too
        "array": np.linspace(0, 1, 5),
        "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(torch.randn(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "lr": 0.1,
        "scalar": np.float32(1.5),
    }
    assert_same(value, cast(value, BF16))


def test_nested_and_sparse_tensors_cast_their_values_only() -> None:
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    strided = torch.nested.nested_tensor(rows)
    sparse = torch.randn(4, 4).relu().to_sparse()
    got = cast({"jagged": jagged, "strided": strided, "sparse": sparse, "csr": sparse.to_sparse_csr()}, BF16)
    assert got["jagged"].offsets().dtype == torch.int64
    for name in ("jagged", "strided"):
        assert [torch.equal(row, want.to(BF16)) for row, want in zip(got[name].unbind(), rows, strict=True)]
        assert got[name].dtype == BF16
    assert_same(sparse.to(BF16), got["sparse"])
    assert torch.equal(got["csr"].to_dense(), sparse.to_dense().to(BF16))


def test_containers_keep_their_kind() -> None:
    value = TensorDict({"w": torch.nn.Parameter(torch.randn(2, 3)), "n": {"i": torch.arange(2)}}, [2], names=["x"])
    got = cast(value, torch.float64)
    assert type(got) is TensorDict and got.names == ["x"]
    assert type(got["w"]) is torch.nn.Parameter and got["w"].requires_grad and got["w"].is_leaf
    assert_cast(value["w"], got["w"], torch.float64)


# --- ties ------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_leaf_that_is_cast_are_a_copy() -> None:
    base = torch.randn(8, 8)
    value = {"bytes": base.view(torch.uint8), "whole": base, "again": base.view(-1), "as int": base.view(torch.int32)}
    got = cast(value, BF16)
    for name in ("whole", "again"):
        assert_cast(value[name], got[name], BF16)
    for name in ("bytes", "as int"):
        assert torch.equal(got[name], value[name])
    assert share(got["whole"], got["again"]) and share(got["bytes"], got["as int"])
    assert not share(got["whole"], got["bytes"])


def test_an_array_over_a_tensors_memory_is_a_copy_when_the_tensor_is_cast() -> None:
    array = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    tensor = torch.from_numpy(array)
    got = cast({"array": array, "tensor": tensor}, BF16)
    assert got["array"].dtype == np.float32 and (got["array"] == array).all()
    assert_cast(tensor, got["tensor"], BF16)


def test_two_dtypes_over_the_same_bytes_are_cast_each() -> None:
    base = torch.randn(6, dtype=torch.float64)
    value = {"double": base, "float": base.view(torch.float32)}
    got = cast(value, BF16)
    assert_cast(value["double"], got["double"], BF16)
    assert_cast(value["float"], got["float"], BF16)


def test_one_tensor_in_a_wrapper_and_beside_it_is_two_dtypes() -> None:
    inner = torch.randn(4)
    got = cast({"plain": inner, "wrapped": Doubled(inner)}, BF16)
    assert_cast(inner, got["plain"], BF16)
    assert got["wrapped"].held.dtype == torch.float32 and torch.equal(got["wrapped"].held, inner)


class Doubled(torch.Tensor):
    """A tensor made of another, as torchao's: only its class knows what the inner one's dtype means."""

    held: torch.Tensor
    names: ClassVar[list[str]] = ["held"]

    def __new__(cls, inner: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return self.names, None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Doubled:
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(func)


# --- plans and modes --------------------------------------------------------------------------------------------------


def test_a_cast_has_a_plan_of_its_own_which_is_made_once() -> None:
    values = [{"w": torch.randn(30, 7), "n": torch.arange(4)} for _ in range(2)]
    plans = [[flatten(value, dtype=dtype).plan for dtype in (None, BF16, torch.float16)] for value in values]
    assert all(one is other for one, other in zip(*plans, strict=True))
    assert len(set(map(id, plans[0]))) == 3
    bare = [flatten(torch.randn(9), dtype=dtype) for dtype in (None, BF16, None, BF16)]
    assert [flat.plan.nbytes for flat in bare] == [36, 18, 36, 18]
    assert bare[0].plan is bare[2].plan and bare[1].plan is bare[3].plan


def test_no_leaf_is_made_twice_on_the_way() -> None:
    """One pass: torch is asked for no memory but tensors' heads."""
    value = {"large": torch.randn(1 << 20), "turned": torch.randn(300, 300).t(), "gaps": torch.randn(300, 300)[:, ::2]}
    flat = flatten(value, dtype=BF16)
    memory = np.zeros(flat.plan.nbytes, np.uint8)
    with torch.profiler.profile(profile_memory=True) as profile:
        fill(flat, memory)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages()) < 1024
    got = rebuild(plan_of(flat.plan.description), flat.objects, memory, None)
    assert torch.equal(got["large"], value["large"].to(BF16))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, FakeTensorMode])
def test_modes_of_torch_change_nothing(mode: Any) -> None:
    value = {"p": torch.nn.Parameter(torch.randn(5, 4)), "w": torch.randn(40_000)}
    with mode():
        put = stored(value, dtype=BF16)
    got = rebuild(*put, None)
    assert_cast(value["p"], got["p"], BF16)
    assert_cast(value["w"], got["w"], BF16)
    assert got["p"].requires_grad and not got["p"].is_inference()


def test_a_tensor_with_a_tangent_is_cast_without_it() -> None:
    value = torch.randn(5)
    with forward_ad.dual_level():
        put = stored({"w": forward_ad.make_dual(value, torch.ones(5))}, dtype=BF16)
    assert_cast(value, rebuild(*put, None)["w"], BF16)


def test_a_tensor_made_in_inference_mode_is_cast() -> None:
    with torch.inference_mode():
        value = torch.randn(7)
    assert_cast(value, cast({"a": value}, BF16)["a"], BF16)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int8, r"dtype=torch.int8: a put casts the floating leaves only, and to a real floating dtype"),
        (torch.complex64, r"dtype=torch.complex64: .* real floating dtype, as torch.bfloat16"),
        (torch.bool, r"dtype=torch.bool: "),
        ("bfloat16", r"dtype='bfloat16', a str: a put casts to a torch.dtype, as torch.bfloat16"),
        (float, r"dtype=<class 'float'>, a type"),
        ([], r"dtype=\[\], a list"),
    ],
)
def test_a_dtype_that_no_floating_leaf_can_have_is_refused(dtype: Any, message: str) -> None:
    for value in (torch.randn(3), {"n": torch.arange(3)}, 5):
        with pytest.raises(TypeError, match=message):
            flatten(value, dtype=dtype)


@pytest.mark.parametrize(("source", "target"), [(torch.float32, FP4), (FP4, BF16)], ids=str)
def test_a_leaf_that_torch_can_not_cast_is_named(source: torch.dtype, target: torch.dtype) -> None:
    value = {"n": torch.arange(3), "w": [torch.empty(4, dtype=source)]}
    with pytest.raises(UnsupportedValueError, match=rf"value\['w'\]\[0\]: torch can't convert {source} to {target}"):
        flatten(value, dtype=target)
    plans = [flatten(value["n"], dtype=cast).plan for cast in (target, None)]
    assert plans[0].description == plans[1].description, "nothing is cast there"
