"""What is no key is refused by every method that takes one, saying what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memstore

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
def test_it_is_refused(store: memstore.Store, kind: str) -> None:
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
