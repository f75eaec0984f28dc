"""A store that is used again by the very thread that is in the middle of using it.

Signal handlers and finalizers run anywhere: between two lines of a put, on its thread. A trainer that stores a last
checkpoint when it gets SIGTERM does just that.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

import memstore
from memstore.engine.catalog.catalog import Catalog
from tests.children import in_child
from tests.inside import root_of


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
