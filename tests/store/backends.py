"""Where the tests of a Store get their stores from: they are the suite that each backend has to pass.

A test without the mark `embedded` holds for a Store wherever its values lie. It opens stores by `open_store`, or takes
one from a fixture. With the mark, it tests what only the embedded store has: its segments, catalog, locks, leases, and
what they take.

A new backend is one more entry of BACKENDS; each test without the mark then runs once with each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import memstore


class Backend(Protocol):
    def open(self, root: str, mode: Any = "a", **options: Any) -> memstore.Store:
        """As `memstore.open`. The test calls it in other processes, too, with the same path for the same store."""
        ...


class Embedded:
    def open(self, root: str, mode: Any = "a", **options: Any) -> memstore.Store:
        return memstore.open(root, mode, **options)


BACKENDS: dict[str, Backend] = {"embedded": Embedded()}
_current: Backend = BACKENDS["embedded"]  # not handed to the tests: children that they fork open stores, too


def open_store(root: str, mode: Any = "a", **options: Any) -> memstore.Store:
    """Opens a store of the backend that is tested."""
    return _current.open(root, mode, **options)


@contextmanager
def testing(backend: Backend) -> Iterator[None]:
    global _current
    before, _current = _current, backend
    try:
        yield
    finally:
        _current = before
