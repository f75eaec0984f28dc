"""put and put_many with dtype=: what is stored, and what a reader sees. Bit for bit: tests/structure/test_cast.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

import memstore
from tests.examples import examples
from tests.store.backends import open_store
from tests.support.equality import assert_same

BF16 = torch.bfloat16


def converted(value: Any, dtype: torch.dtype) -> Any:
    def convert(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad) if floating else leaf

    return tree_map(convert, value)


_leaves = st.builds(
    lambda dtype, shape: torch.randn(shape).to(dtype),
    st.sampled_from([torch.float32, torch.float64, torch.float16, BF16, torch.int32, torch.bool, torch.complex64]),
    st.lists(st.integers(0, 30), max_size=3).map(tuple),
)
_values = st.recursive(
    st.one_of(_leaves, _leaves, st.integers(), st.floats(allow_nan=False), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abcdé"), inner, max_size=4),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(_values, st.sampled_from([BF16, torch.float16, torch.float32, torch.float64]))
def test_a_put_with_a_dtype_stores_the_converted_value(store: memstore.Store, value: Any, dtype: torch.dtype) -> None:
    store.put("key", value, dtype=dtype)
    assert_same(converted(value, dtype), store.get("key"))


@pytest.mark.parametrize("size", [3, 500, 100_000, 1 << 21])
def test_inline_values_and_segments_of_each_size(store: memstore.Store, size: int) -> None:
    value = {"w": torch.randn(size), "n": torch.arange(3)}
    store.put("key", value, dtype=BF16)
    assert_same(converted(value, BF16), store.get("key"))
    info = store.info("key")
    assert [leaf.dtype for leaf in info.leaves] == [BF16, torch.int64]
    assert info.leaves[0].nbytes == 2 * size


def test_all_values_of_put_many_are_cast(store: memstore.Store) -> None:
    items = {"a": torch.randn(500), "b": {"w": torch.randn(3), "n": torch.arange(2)}, "c": 5}
    versions = store.put_many(items, dtype=torch.float16)
    for key, value in items.items():
        assert_same(converted(value, torch.float16), store.get(key))
    with pytest.raises(memstore.VersionConflictError):
        store.put_many(items, dtype=BF16, expect_versions={"a": versions["a"] + 1000})
    assert store.get("a").dtype == torch.float16
    store.put("a", items["a"], dtype=BF16, expect_version=versions["a"])
    assert store.get("a").dtype == BF16


def test_a_view_and_a_value_of_the_store_are_cast(store: memstore.Store) -> None:
    value = {"w": torch.randn(300, 40), "p": torch.nn.Parameter(torch.randn(3)), "n": torch.arange(3)}
    store.put("key", value)
    store.put("of a view", store.view("key"), dtype=BF16)
    store.put("of a slice", store.view("key")["w"][5:7].t(), dtype=BF16)
    store.put("key", store.get("key"), dtype=BF16)
    for key in ("key", "of a view"):
        assert_same(converted({**value, "p": 0}, BF16), {**store.get(key), "p": 0})
        assert isinstance(store.get(key)["p"], torch.nn.Parameter)
    assert torch.equal(store.get("of a slice"), value["w"][5:7].t().to(BF16))


@pytest.mark.embedded
def test_checksums_are_those_of_the_stored_bytes(root: str) -> None:
    value = {"w": torch.randn(5000), "t": torch.randn(60, 70).t(), "small": torch.randn(2)}
    with open_store(root, checksum=True, verify=True) as store:
        store.put_many({"key": value, "inline": value["small"]}, dtype=BF16)
        assert store.verify().ok and store.verify().checked == 2
        assert_same(converted(value, BF16), store.get("key"))


@pytest.mark.embedded
def test_a_segment_is_a_file_of_the_dtype(store: memstore.Store) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    value = {"w": torch.randn(500, 4), "b": torch.randn(700)}
    store.put("key", value, dtype=BF16)
    read = load_file(store.info("key").files[0])
    assert_same(converted(value, BF16), {name: read[name] for name in value})


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bfloat16", [torch.float16]])
def test_a_wrong_dtype_is_told_and_nothing_changes(store: memstore.Store, dtype: Any) -> None:
    version = store.put("key", torch.ones(3))
    for put in (
        lambda: store.put("key", torch.zeros(3), dtype=dtype),
        lambda: store.put("new", {"n": 5}, dtype=dtype),
        lambda: store.put_many({"key": torch.zeros(3), "new": torch.zeros(1)}, dtype=dtype),
    ):
        with pytest.raises(TypeError, match="dtype="):
            put()
    assert store.version("key") == version and list(store.keys()) == ["key"]
