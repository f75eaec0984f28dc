"""A closed store says so, whatever is asked of it; and a store that is used again in the middle of using it."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

import memstore
from memstore.engine.catalog.catalog import Catalog
from tests.children import in_child
from tests.inside import root_of
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


# --- a store that is used again by the very thread that is in the middle of using it ----------------------------------
# Signal handlers and finalizers run anywhere: between two lines of a put, on its thread. A trainer that stores a last
# checkpoint when it gets SIGTERM does just that.


def once(patched: Any, name: str, before: Callable[[], None]) -> None:
    """The next call of `patched.name` does `before` first."""
    original = getattr(patched, name)

    def call(*arguments: Any, **options: Any) -> Any:
        setattr(patched, name, original)
        before()
        return original(*arguments, **options)

    setattr(patched, name, call)


def signal_in(patched: Any, name: str, handler: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: handler())
    once(patched, name, lambda: os.kill(os.getpid(), signal.SIGTERM))


def test_a_signal_handler_puts_in_the_middle_of_a_get(root: str) -> None:
    memstore.open(root).close()
    assert in_child(_handler_in_a_get, root, timeout=100) in (["key"], ["key", "last words"])


def _handler_in_a_get(root: str) -> list[str]:
    with memstore.open(root) as store:
        store.put("key", torch.ones(1000))

        def handler() -> None:
            with contextlib.suppress(memstore.MemstoreError):  # an error is fine, a deadlock is not
                store.put("last words", 1)

        signal_in(Catalog, "read", handler)
        assert store.get("key").sum() == 1000
        return list(store)


def test_a_signal_handler_puts_in_the_middle_of_a_commit(root: str) -> None:
    memstore.open(root).close()
    assert in_child(_handler_in_a_commit, root, timeout=100)


def _handler_in_a_commit(root: str) -> bool:
    """Whether the outer put still has the mutex when its handler has come back."""
    with memstore.open(root) as store:
        lock = root_of(store).mutex

        def handler() -> None:
            with contextlib.suppress(memstore.MemstoreError):
                store.put("last words", 1)

        kept: list[bool] = []

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGTERM)  # the handler runs before the next line
            kept.append(lock.owner() != 0)

        signal.signal(signal.SIGTERM, lambda *_: handler())
        once(import_module("memstore.engine.protocols.put"), "_commit_locked", interrupt)
        store.put("key", torch.ones(1000))
        assert store.get("key").sum() == 1000
        return kept == [True]


def test_a_finalizer_deletes_in_the_middle_of_a_get(root: str) -> None:
    memstore.open(root).close()
    assert in_child(_finalizer_in_a_get, root, timeout=100) in (["key"], ["key", "temporary"])


class Temporary:
    """An object of the user's that takes its key with it; in a cycle, so that only a collection ends it."""

    def __init__(self, store: memstore.Store) -> None:
        self.store, self.me = store, self
        store.put("temporary", 1)

    def __del__(self) -> None:
        with contextlib.suppress(memstore.MemstoreError):
            self.store.delete("temporary")


def _finalizer_in_a_get(root: str) -> list[str]:
    with memstore.open(root) as store:
        store.put("key", torch.ones(1000))
        Temporary(store)
        once(Catalog, "read", lambda: gc.collect() and None)
        assert store.get("key").sum() == 1000
        return list(store)


def test_a_finalizer_of_memstores_own_takes_no_lock(root: str) -> None:
    memstore.open(root).close()
    assert in_child(_drop_in_a_get, root, timeout=100) == ["key"]


def _drop_in_a_get(root: str) -> list[str]:
    with memstore.open(root) as store:
        store.put("key", torch.ones(1000))
        cycle: list[Any] = [memstore.open(root), store.ref("key"), store.get("key")]
        cycle.append(cycle)
        del cycle
        once(Catalog, "read", lambda: gc.collect() and None)
        assert store.get("key").sum() == 1000
        return list(store)
