"""Where the tests of a Store get their stores from: they are the suite that each backend has to pass.

A test without the mark `embedded` holds for a Store wherever its values lie. It opens stores by `open_store`, or takes
one from a fixture. With the mark, it tests what only the embedded store has: its segments, catalog, locks, leases, and
what they take.

A new backend is one more entry of BACKENDS; each test without the mark then runs once with each of them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

import memstore
from tests.distributed.home_server import HomeServer, ask


class Backend(Protocol):
    def open(self, root: str, mode: Any = "a", **options: Any) -> memstore.Store:
        """As `memstore.open`. The test calls it in other processes, too, with the same path for the same store."""
        ...


class Embedded:
    def open(self, root: str, mode: Any = "a", **options: Any) -> memstore.Store:
        return memstore.open(root, mode, **options)


class Served:
    """Stores of a host of a cluster. Another process answers for it."""

    def __init__(self, home: str) -> None:
        """`home` is added to a store's path: that is the root which is the home of all keys."""
        self._home = home
        self._server: HomeServer | None = None

    def start(self) -> None:
        self._server = self._server or HomeServer()

    def end_test(self) -> None:
        self.ask("stop")

    def open(self, root: str, mode: Any = "a", **options: Any) -> memstore.Store:
        store = memstore.open(root, mode, **options)
        self.ask("serve", store.root, *([store.root + self._home] if self._home else []))
        return store

    def ask(self, what: str, *paths: str) -> None:
        assert self._server is not None
        ask(self._server.address, what, *paths)


SERVED = {"one host": Served(""), "two hosts": Served("-home")}
BACKENDS: dict[str, Backend] = {"embedded": Embedded(), **SERVED}
_current: Backend = BACKENDS["embedded"]  # not handed to the tests: children that they fork open stores, too


def open_store(root: str, mode: Any = "a", **options: Any) -> memstore.Store:
    """Opens a store of the backend that is tested."""
    return _current.open(root, mode, **options)


@contextmanager
def testing(backend: Backend) -> Generator[None]:
    global _current
    before, _current = _current, backend
    try:
        yield
    finally:
        _current = before


def overwrite_and_delete(store: memstore.Store) -> None:
    """Whatever could take the first version away."""
    store.put("key", torch.zeros(5000))
    store.delete("key")
    store.put("key", torch.zeros(3))
    store.gc()
