"""put and get: what was put comes back, under any key, in any process, at any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import memstore
from tests.children import in_child
from tests.examples import examples
from tests.store.backends import open_store
from tests.support.equality import assert_same
from tests.support.strategies import values

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)
SIZES = [0, 1, 1536, 1537, 4096, 65_536, (2 << 20) - 4096, 2 << 20, (8 << 20) + 1]  # bytes: inline, small, large


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_of_any_size_comes_back(store: memstore.Store, size: int) -> None:
    value = torch.randint(0, 256, (size,), dtype=torch.uint8)
    store.put("key", value)
    assert_same(value, store.get("key"))


@pytest.mark.embedded
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_of_any_size_comes_back_from_a_disk(disk_store: memstore.Store, size: int) -> None:
    value = torch.randint(0, 256, (size,), dtype=torch.uint8)
    disk_store.put("key", value)
    assert_same(value, disk_store.get("key"))


@given(value=values())
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_value_comes_back(store: memstore.Store, value: object) -> None:
    store.put("key", value)
    assert_same(value, store.get("key"))


def test_another_process_gets_it(store: memstore.Store) -> None:
    value = {"w": torch.randn(100, 100), "step": 3, "names": ["a", None]}
    store.put("key", value)
    assert_same(value, in_child(_open_and_get, store.root, "key"))


def test_this_process_gets_what_another_put(store: memstore.Store) -> None:
    in_child(_open_and_put, store.root, "key", 100_000)
    assert_same(torch.arange(100_000), store.get("key"))


def _open_and_get(root: str, key: str) -> object:
    with open_store(root, "r") as store:
        return _copied(store.get(key))


def _copied(value: object) -> object:
    return {name: part.clone() if isinstance(part, torch.Tensor) else part for name, part in value.items()}  # type: ignore[attr-defined]


def _open_and_put(root: str, key: str, count: int) -> int:
    with open_store(root, "r+") as store:
        return store.put(key, torch.arange(count))


def test_it_is_there_after_a_reopening(root: str) -> None:
    value = TensorDict({"a": torch.randn(3, 1000), "b": {"c": torch.arange(3)}}, [3])
    with open_store(root) as store:
        version = store.put("key", value)
    with open_store(root) as store:
        assert_same(value, store.get("key"))
        assert store.version("key") == version


def test_an_overwrite_may_change_everything(store: memstore.Store) -> None:
    for value in (
        torch.randn(5000),
        {"a": [1, 2]},
        torch.arange(3),
        TensorDict({"x": torch.zeros(2, 3000)}, [2]),
        None,
        "text",
        [torch.ones(1), (torch.zeros(2),)],
        torch.randn(3 << 20),
        5,
    ):
        store.put("key", value)
        assert_same(value, store.get("key"))
    assert list(store) == ["key"]


def test_puts_dont_touch_their_value(store: memstore.Store) -> None:
    weight = torch.nn.Parameter(torch.randn(100, 100))
    value = TensorDict({"w": weight, "s": torch.tensor(1.0)}, []).lock_()
    before = {name: (leaf.clone(), leaf.data_ptr()) for name, leaf in value.items()}
    store.put("key", value)
    assert value.is_locked
    assert value["w"] is weight and weight.requires_grad
    for name, (copy, address) in before.items():
        assert torch.equal(copy, value[name]) and value[name].data_ptr() == address


def test_a_value_may_change_after_its_put(store: memstore.Store) -> None:
    small, large = torch.ones(10), torch.ones(100_000)
    store.put("key", {"small": small, "large": large})
    small.zero_()
    large.zero_()
    assert store.get("key")["small"].sum() == 10
    assert store.get("key")["large"].sum() == 100_000


def test_what_was_got_may_be_put_under_its_own_key(store: memstore.Store) -> None:
    store.put("key", {"a": torch.arange(10_000), "b": torch.ones(3)})
    for _ in range(3):
        value = store.get("key")
        value["a"] += 1
        store.put("key", value)
    assert torch.equal(store.get("key")["a"], torch.arange(10_000) + 3)
    del value


def test_a_missing_key_is_an_error_that_names_it(store: memstore.Store) -> None:
    store.put("other", 1)
    for call in (store.get, store.version, store.info, store.delete, store.ref, store.__getitem__, store.__delitem__):
        with pytest.raises(memstore.KeyNotFoundError, match="no key 'missing'") as caught:
            call("missing")
        assert caught.value.key == "missing"
        assert isinstance(caught.value, KeyError)
    for many in (store.get_many, store.delete_many):
        with pytest.raises(memstore.KeyNotFoundError, match="missing") as caught:
            many(["other", "missing"])
        assert caught.value.key == "missing"
    assert list(store) == ["other"]


def test_a_default_is_returned_as_it_is(store: memstore.Store) -> None:
    default, out = object(), torch.zeros(3)
    assert store.get("missing", default) is default
    assert store.get("missing", None) is None
    assert store.get("missing", default=default, out=out) is default
    assert store.get("missing", default, like=out) is default
    assert not out.any()
    store.put("key", None)
    assert store.get("key", default) is None


def test_an_ellipsis_is_a_value_like_others(store: memstore.Store) -> None:
    store.put("key", ...)
    assert store.get("key") is ...


KEYS = [
    "a",
    "..",
    "../../etc/passwd",
    "/",
    "a/b",
    "//",
    ".",
    "a\nb",
    "🐍",
    " ",
    "meta",
    "x" * 500,
    "é" * 250,
    "\x01",
    "~",
]


@pytest.mark.embedded
@pytest.mark.parametrize("key", KEYS)
def test_any_text_is_a_key_and_never_a_path(store: memstore.Store, key: str) -> None:
    value = torch.randn(1000)
    version = store.put(key, value)
    assert_same(value, store.get(key))
    assert list(store) == [key] and key in store
    assert store.version(key) == store.info(key).version == version
    assert store.info(key).key == key
    assert store.info(key).files[0].startswith(f"{store.root}/segments/")
    assert store.delete(key)
    assert key not in store


@given(st.dictionaries(names, st.integers(), max_size=20))
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_dont_meet(store: memstore.Store, items: dict[str, int]) -> None:
    store.delete_many(list(store))
    store.put_many(items)
    assert dict(store.items()) == items
    assert list(store) == sorted(items, key=str.encode)


@pytest.mark.embedded
@pytest.mark.parametrize("limit", [0, 100, 1536, 65536])
def test_inline_is_what_the_limit_says(root: str, limit: int) -> None:
    with open_store(root, inline_limit=limit) as store:
        for size in (1, limit, limit + 1):
            value = torch.full((size,), 7, dtype=torch.uint8)
            store.put("key", value)
            assert_same(value, store.get("key"))
            assert store.info("key").kind == ("inline" if 0 < limit >= size else "segment")


def test_many_keys_and_values_at_once(store: memstore.Store) -> None:
    value = {f"layer.{i}": torch.full((i % 7 + 1, 5), float(i)) for i in range(3000)}
    store.put("key", value)
    assert_same(value, store.get("key"))
