"""What is no key or can't be stored is refused before anything is written, and key or leaf is named."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

import memstore


class Thing:
    """An object that only pickle could store."""

    def __reduce__(self) -> Any:
        raise AssertionError("it was pickled")


def cyclic_list() -> list:
    value: list = [torch.ones(1)]
    value.append(value)
    return value


def cyclic_dict() -> dict:
    value: dict = {"x": torch.ones(1)}
    value["self"] = {"again": value}
    return value


def deep(levels: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(levels):
        value = [value]
    return value


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


BAD_VALUES = {
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), "mkldnn"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "fake": (fake, "[Ff]ake"),
    "an object": (Thing, "Thing.*allow_pickle"),
    "a function": (lambda: test_it_is_refused, "allow_pickle"),
    "a lambda": (lambda: lambda: 1, "found by its name"),
    "a lock": (threading.Lock, "lock: it is a part of this process"),
    "a module": (lambda: torch.nn.Linear(2, 2), r"Linear: put its state_dict\(\)"),
    "a type": (lambda: int, "allow_pickle"),
    "a generator": (lambda: (i for i in range(3)), "generator"),
    "a cyclic list": (cyclic_list, "contains itself"),
    "a cyclic dict": (cyclic_dict, "contains itself"),
    "too deep": (lambda: deep(500), "200 levels"),
    "an object array": (lambda: __import__("numpy").array([Thing()], dtype=object), "allow_pickle"),
    "a surrogate": (lambda: "a\ud800", "surrogate"),
}
PLACES = {
    "alone": (lambda value: value, "value"),
    "in a dict": (lambda value: {"ok": torch.ones(900), "deep": {3: value}}, r"value\['deep'\]\[3\]"),
    "in a list": (lambda value: [torch.ones(900), (1, value)], r"value\[1\]\[1\]"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", BAD_VALUES)
def test_it_is_refused(store: memstore.Store, kind: str, place: str) -> None:
    make, text = BAD_VALUES[kind]
    wrap, name = PLACES[place]
    store.put("key", torch.ones(1000))
    before = contents(store)
    for call in (
        lambda: store.put("key", wrap(make())),
        lambda: store.put("new", wrap(make())),
        lambda: store.put_many({"a": torch.zeros(1000), "key": wrap(make()), "b": 1}),
    ):
        with pytest.raises(memstore.UnsupportedValueError, match=f"{name}.*{text}") as caught:
            call()
        assert isinstance(caught.value, TypeError)
    assert contents(store) == before and store.stats().puts == 1


def contents(store: memstore.Store) -> object:
    return [(key, store.version(key)) for key in store], sorted(os.listdir(f"{store.root}/segments"))


def test_the_deepest_allowed_value_is_stored(store: memstore.Store) -> None:
    store.put("key", deep(200))
    value = store.get("key")
    for _ in range(200):
        (value,) = value
    assert value == 1
    with pytest.raises(memstore.UnsupportedValueError, match="200 levels"):
        store.put("key", deep(201))


def test_a_bad_leaf_of_a_tensordict_is_named(store: memstore.Store) -> None:
    value = TensorDict({"a": torch.ones(3), "b": {"c": torch.eye(3).to_mkldnn()}}, [])
    with pytest.raises(memstore.UnsupportedValueError, match=r"value\['b'\]\['c'\]"):
        store.put("key", value)


def test_the_key_is_in_the_error(store: memstore.Store) -> None:
    with pytest.raises(memstore.UnsupportedValueError) as caught:
        store.put_many({"good": 1, "bad": Thing()})
    assert caught.value.key == "bad"


def test_pickles_are_written_only_where_they_are_allowed(root: str) -> None:
    value = {"x": torch.ones(3), "c": complex, "d": frozenset([("a", 1)])}
    with memstore.open(root) as store, pytest.raises(memstore.UnsupportedValueError, match=r"value\['c'\]"):
        store.put("key", value)
    with memstore.open(root, allow_pickle=True) as store:
        store.put("key", value)
        assert store.get("key")["c"] is complex
    with memstore.open(root) as store:
        with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
            store.get("key")
        with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
            store.get("key", out={"x": torch.zeros(3), "c": None, "d": None})
        assert store.info("key").leaves[0].shape == (3,)


def test_an_object_whose_pickling_fails_is_refused(root: str) -> None:
    with memstore.open(root, allow_pickle=True) as store:
        with pytest.raises(memstore.UnsupportedValueError, match=r"value\['t'\].*Thing.*was pickled"):
            store.put("key", {"t": Thing()})
        with pytest.raises(memstore.UnsupportedValueError, match="lock"):
            store.put("key", threading.Lock())
        assert list(store) == []


def test_a_value_too_large_for_any_machine_is_an_error_not_a_crash(store: memstore.Store) -> None:
    before = contents(store)
    with pytest.raises((memstore.StoreFullError, memstore.ResourceLimitError, memstore.UnsupportedValueError)):
        store.put("key", {"a": torch.zeros(1), "b": torch.empty_strided((1 << 45,), (1,), device="meta")})
    assert contents(store) == before


@pytest.mark.parametrize("value", [
    {"a": torch.empty(0)}, {}, [], (), "", None, {"": torch.ones(1)}, {"": {"": {}}}, TensorDict({}, []),
    {"a" * 100_000: torch.ones(1)}, [[]] * 1000, torch.empty(0, 5, 0), {None: 1, True: 2, 1.5: 3, b"x": 4},
], ids=lambda value: str(type(value).__name__))  # fmt: skip
def test_odd_values_are_values(store: memstore.Store, value: object) -> None:
    from tests.support.equality import assert_same

    store.put("key", value)
    assert_same(value, store.get("key"))


# --- out= -------------------------------------------------------------------------------------------------------------

STORED = {"w": torch.ones(3, 4), "n": torch.ones(1000, dtype=torch.int64), "deep": {"x": torch.ones(2)}, "lr": 0.5}


def zeros() -> dict[str, Any]:
    return {"w": torch.zeros(3, 4), "n": torch.zeros(1000, dtype=torch.int64), "deep": {"x": torch.zeros(2)}, "lr": 0.0}


def changed(**changes: Any) -> dict[str, Any]:
    out = {**zeros(), **changes}
    return {name: value for name, value in out.items() if value is not Thing}


BAD_OUTS = {
    "another shape": (lambda: changed(w=torch.zeros(4, 3)), [r"value\['w'\].*\[3, 4\].*\[4, 3\]"]),
    "another dtype": (lambda: changed(n=torch.zeros(1000)), [r"value\['n'\].*int64.*float32"]),
    "a leaf too many": (lambda: changed(more=torch.zeros(1)), [r"value\['more'\]"]),
    "a leaf too few": (lambda: changed(w=Thing), [r"value\['w'\]"]),
    "another structure": (lambda: changed(deep=torch.zeros(2)), [r"value\['deep'\]"]),
    "a list": (lambda: [torch.zeros(3, 4)], ["value"]),
    "a tensor": (lambda: torch.zeros(3, 4), ["value"]),
    "no tensor": (lambda: changed(w=1.0), [r"value\['w'\]"]),
    "a meta tensor": (lambda: changed(w=torch.zeros(3, 4, device="meta")), ["meta"]),
    "an expanded tensor": (lambda: changed(w=torch.zeros(1, 4).expand(3, 4)), [r"value\['w'\]"]),
    "all at once": (
        lambda: changed(w=torch.zeros(4, 3), n=torch.zeros(1000), deep=Thing, more=torch.zeros(1)),
        [r"\['w'\]", r"\['n'\]", r"\['deep'\]\['x'\]", r"\['more'\]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_OUTS)
def test_an_out_of_another_kind_is_left_alone(store: memstore.Store, kind: str) -> None:
    import re

    make, texts = BAD_OUTS[kind]
    store.put("key", STORED)
    out = make()
    with pytest.raises(memstore.StructureMismatchError) as caught:
        store.get("key", out=out)
    for text in texts:
        assert re.search(text, str(caught.value)), str(caught.value)
    for leaf in torch.utils._pytree.tree_leaves(out):
        assert not isinstance(leaf, torch.Tensor) or leaf.is_meta or not leaf.any()


def test_a_mismatch_of_thousands_of_leaves_is_told_in_short(store: memstore.Store) -> None:
    store.put("key", {f"{number}": torch.zeros(1) for number in range(5000)})
    with pytest.raises(memstore.StructureMismatchError) as caught:
        store.get("key", out={f"{number}": torch.zeros(2) for number in range(5000)})
    assert len(str(caught.value)) < 5000 and "5" in str(caught.value)


def test_an_out_with_gradients_or_in_inference_mode(store: memstore.Store) -> None:
    store.put("key", {"w": torch.ones(1000)})
    parameter = torch.nn.Parameter(torch.zeros(1000))
    store.get("key", out={"w": parameter})
    assert parameter.sum() == 1000 and parameter.requires_grad and parameter.grad_fn is None
    with torch.inference_mode():
        out = torch.zeros(1000)
        store.get("key", out={"w": out})
    assert out.sum() == 1000


# --- keys -------------------------------------------------------------------------------------------------------------


BAD_KEYS = {
    "empty": ("", "at least one character"),
    "too long": ("x" * 501, "at most 500 bytes.*has 501"),
    "too long in bytes": ("é" * 251, "at most 500 bytes.*has 502"),
    "a NUL": ("a\0b", "no NUL"),
    "only a NUL": ("\0", "no NUL"),
    "a lone surrogate": ("a\ud800", "lone surrogate at 1"),
    "None": (None, "a key is a str.*NoneType"),
    "bytes": (b"key", "a key is a str.*bytes"),
    "a number": (3, "a key is a str.*int"),
    "a tuple": (("a", "b"), "a key is a str.*tuple"),
    "a list": (["a"], "a key is a str.*list"),
    "a tensor": (torch.zeros(1), "a key is a str.*Tensor"),
}
CALLS: dict[str, Callable[[memstore.Store, object], object]] = {
    "put": lambda store, key: store.put(key, 1),
    "put_many": lambda store, key: store.put_many({key: 1}),
    "get": lambda store, key: store.get(key),
    "get with a default": lambda store, key: store.get(key, None),
    "get_many": lambda store, key: store.get_many([key]),
    "delete": lambda store, key: store.delete(key, missing_ok=True),
    "delete_many": lambda store, key: store.delete_many([key], missing_ok=True),
    "version": lambda store, key: store.version(key),
    "info": lambda store, key: store.info(key),
    "wait": lambda store, key: store.wait(key, timeout=0),
    "ref": lambda store, key: store.ref(key),
    "in": lambda store, key: key in store,
    "[]": lambda store, key: store[key],
    "[]=": lambda store, key: store.__setitem__(key, 1),
    "del": lambda store, key: store.__delitem__(key),
    "iter_weights": lambda store, key: list(memstore.iter_weights(store, key)),
}


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_what_is_no_key_is_refused(store: memstore.Store, kind: str) -> None:
    key, text = BAD_KEYS[kind]
    for name, call in CALLS.items():
        if name == "put_many" and not isinstance(key, (str, bytes, int, tuple, type(None))):
            continue  # a dict takes no list, and compares no tensor
        with pytest.raises(memstore.InvalidKeyError, match=text) as caught:
            call(store, key)
        assert isinstance(caught.value, ValueError), name
    assert list(store) == []


def test_a_huge_key_is_not_repeated_in_full(store: memstore.Store) -> None:
    with pytest.raises(memstore.InvalidKeyError) as caught:
        store.put("x" * 10_000_000, 1)
    assert len(str(caught.value)) < 300


def test_a_kind_of_str_is_a_key(store: memstore.Store) -> None:
    class Name(str):
        __slots__ = ()

    store.put(Name("key"), 1)
    assert store.get("key") == store.get(Name("key")) == 1
    assert type(next(iter(store))) is str


def test_bad_keys_among_good_ones_change_nothing(store: memstore.Store) -> None:
    store.put("good", 1)
    for keys in (["good", ""], ["", "good"]):
        with pytest.raises(memstore.InvalidKeyError):
            store.delete_many(keys)
        with pytest.raises(memstore.InvalidKeyError):
            store.get_many(keys)
    assert list(store) == ["good"]


@pytest.mark.parametrize("version", ["3", 1.5, [1]])
def test_a_version_is_a_number(store: memstore.Store, version: object) -> None:
    store.put("key", 1)
    for call in (
        lambda: store.put("key", 2, expect_version=version),
        lambda: store.put_many({"key": 2}, expect_versions={"key": version}),
        lambda: store.delete("key", expect_version=version),
    ):
        with pytest.raises((TypeError, ValueError, memstore.VersionConflictError)):
            call()
    assert store.get("key") == 1


@pytest.mark.parametrize("timeout", ["soon", [], float("nan")])
def test_a_timeout_is_a_number(store: memstore.Store, timeout: object) -> None:
    for call in (
        lambda: store.put("key", 2, timeout=timeout),
        lambda: store.wait("key", timeout=timeout),
        lambda: store.get("key", timeout=timeout),
        lambda: store.get_many(["key"], timeout=timeout),
        lambda: store.delete("key", timeout=timeout),
        lambda: store.gc(timeout=timeout),
    ):
        with pytest.raises(ValueError if isinstance(timeout, float) else TypeError, match="number of seconds"):
            call()
    assert list(store) == []
