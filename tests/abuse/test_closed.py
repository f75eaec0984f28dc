"""A closed store says so, whatever is asked of it; what was got from it stays."""

from __future__ import annotations

import pickle

import pytest
import torch

import memstore
from tests.support.equality import assert_same

CALLS = {
    "put": lambda store: store.put("key", 1),
    "put_many": lambda store: store.put_many({"key": 1}),
    "put_many of nothing": lambda store: store.put_many({}),
    "get": lambda store: store.get("key"),
    "get with a default": lambda store: store.get("missing", None),
    "get_many": lambda store: store.get_many(["key"]),
    "get_many of nothing": lambda store: store.get_many([]),
    "keys": lambda store: store.keys(),
    "delete": lambda store: store.delete("key", missing_ok=True),
    "delete_many": lambda store: store.delete_many(["key"]),
    "delete_many of nothing": lambda store: store.delete_many([]),
    "version": lambda store: store.version("key"),
    "info": lambda store: store.info("key"),
    "wait": lambda store: store.wait("key"),
    "ref": lambda store: store.ref("key"),
    "stats": lambda store: store.stats(),
    "gc": lambda store: store.gc(),
    "len": len,
    "in": lambda store: "key" in store,
    "iter": iter,
    "items": lambda store: list(store.items()),
    "values": lambda store: list(store.values()),
    "update": lambda store: store.update({"key": 1}),
    "pop": lambda store: store.pop("key"),
    "setdefault": lambda store: store.setdefault("key", 1),
    "tree": lambda store: store.tree(),
    "[]": lambda store: store["key"],
    "[]=": lambda store: store.__setitem__("key", 1),
    "del": lambda store: store.__delitem__("key"),
    "with": lambda store: store.__enter__(),
    "pickle": pickle.dumps,
    "iter_weights": lambda store: next(memstore.iter_weights(store, "key")),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_says_so(root: str, name: str) -> None:
    for mode in ("a", "r"):
        store = memstore.open(root, mode)
        if mode == "a":
            store.put("key", 1)
        store.close()
        with pytest.raises((memstore.StoreClosedError, memstore.ReadOnlyError), match=root) as caught:
            CALLS[name](store)
        assert isinstance(caught.value, memstore.StoreClosedError) or mode == "r"
        assert "open it again" in str(caught.value) or mode == "r"


def test_it_may_be_closed_again_and_told(root: str) -> None:
    store = memstore.open(root)
    store.close()
    store.close()
    assert "closed" in repr(store) and store.root == root
    assert store == store and hash(store) == hash(store)


def test_another_store_of_the_folder_goes_on(root: str) -> None:
    one, other = memstore.open(root), memstore.open(root)
    one.close()
    other.put("key", 1)
    assert other.get("key") == 1
    other.close()


def test_an_iteration_that_it_cuts_off_says_so(root: str) -> None:
    with memstore.open(root) as store:
        store.put_many({f"{number:05}": number for number in range(1500)})
        keys, items = store.keys(), store.items()
        next(keys), next(items)
    with pytest.raises(memstore.StoreClosedError):
        list(keys)
    with pytest.raises(memstore.StoreClosedError):
        next(items)


def test_what_was_got_stays(root: str) -> None:
    with memstore.open(root) as store:
        store.put_many({"key": torch.arange(5000), "small": torch.arange(3)})
        got, ref = store.get_many(["key", "small"]), store.ref("key")
        weights = memstore.iter_weights(store, "key")
        next(weights)
    assert_same({"key": torch.arange(5000), "small": torch.arange(3)}, got)
    assert_same(torch.arange(5000), ref.get())
    assert list(weights) == []


def test_a_store_that_was_dropped_is_closed(root: str) -> None:
    from tests.leaks import open_files

    for _ in range(50):
        memstore.open(root).put("key", 1)
    memstore.open(root).close()
    assert open_files(root) == []
