"""Stores for the tests of `tests/store`, which are run here on an AsyncStore: see `test_contract.py`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import memstore.aio
from tests.store.backends import testing

T = TypeVar("T")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "embedded: of a Store in a folder of this host, and of no other backend")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of `tests/store` that look into a store find another object here."""
    items[:] = [item for item in items if item.path != CONTRACT or item.get_closest_marker("embedded") is None]


@pytest.fixture
def store(root: str) -> memstore.aio.AsyncStore:
    """A store for a test that is a coroutine, in whose loop it is opened and closed."""
    return memstore.aio.open(root, timeout=20.0)


CONTRACT = Path(__file__).parent / "test_contract.py"


class Loops:
    """A loop in a thread, for blocking calls of what is awaited. One a process: a forked child has another."""

    def __init__(self) -> None:
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        loop = self._loops.get(os.getpid())
        if loop is None:
            loop = self._loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="loop of tests", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(250)

    def iterate(self, found: Any) -> Iterator[Any]:
        async def collected() -> list[Any]:
            return [one async for one in found]

        return iter(self.run(collected()))


LOOPS = Loops()


class Blocking:
    """An AsyncStore, called as a Store."""

    def __init__(self, store: memstore.aio.AsyncStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if inspect.iscoroutinefunction(found):
            return lambda *arguments, **options: LOOPS.run(found(*arguments, **options))
        if name in ("keys", "items", "values"):
            return lambda *arguments: LOOPS.iterate(found(*arguments))
        return found

    def __iter__(self) -> Iterator[str]:
        return LOOPS.iterate(self._store.keys())

    def __contains__(self, key: str) -> bool:
        return LOOPS.run(self._store.contains(key))

    def __len__(self) -> int:
        return LOOPS.run(self._store.count())

    def __getitem__(self, key: str) -> Any:
        return LOOPS.run(self._store.get(key))

    def __setitem__(self, key: str, value: Any) -> None:
        LOOPS.run(self._store.put(key, value))

    def __delitem__(self, key: str) -> None:
        LOOPS.run(self._store.delete(key))

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *_: object) -> None:
        LOOPS.run(self._store.close())


class Awaited:
    """A backend of `tests/store`."""

    def open(self, root: str, mode: Any = "a", **options: Any) -> Any:
        async def opened() -> memstore.aio.AsyncStore:
            return await memstore.aio.open(root, mode, **options)

        return Blocking(LOOPS.run(opened()))


@pytest.fixture
def awaited_backend() -> Iterator[None]:
    with testing(Awaited()):
        yield


open_awaited = functools.partial(Awaited().open)
