"""Two openings of one store, one of them in another process: each does what it is told, and holds what it was told to.

Values are named by a kind and a number, and made where they are needed: what is stored is nobody else's memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

import memstore
from memstore.testing import faults
from memstore.testing.equality import assert_same
from tests.children import Child, Wire, in_child

Named = tuple[str, int]


def make(named: Named) -> Any:
    kind, number = named
    return {
        "object": lambda: number,
        "inline": lambda: torch.tensor([number]),
        "segment": lambda: {"x": torch.full((700,), number), "y": [number, torch.tensor(number)]},
        "like it": lambda: torch.full((700 + number % 300,), number),  # some fit into one another's files
        "medium": lambda: torch.full((9000,), number),
        "large": lambda: torch.full(((1 << 18) + (number % 5 << 15),), number),  # from 2 MiB on it is mapped
    }[kind]()


class Side:
    """One opening of the store. Its methods raise where a value is not what it should be."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self._path, self._options = path, options
        self.store = memstore.open(path, **options)
        self.held: dict[int, tuple[Any, Named]] = {}

    def put(self, key: str, named: Named, expected: int | None = None) -> int:
        return self.store.put(key, make(named), expect_version=expected)

    def put_many(self, items: dict[str, Named]) -> dict[str, int]:
        return self.store.put_many({key: make(named) for key, named in items.items()})

    def put_in_a_fork(self, key: str, named: Named) -> int:
        return in_child(self.put, key, named)

    def delete(self, key: str) -> bool:
        return self.store.delete(key, missing_ok=True)

    def delete_many(self, keys: list[str]) -> int:
        return self.store.delete_many(keys)

    def dying(self, step: int, after: bool, name: str, arguments: Sequence[Any]) -> Any:
        """Does it, and dies at a step, if it comes to that."""
        with faults.at_step(step, faults.die, after=after):
            return getattr(self, name)(*arguments)

    def hold(self, number: int, key: str, named: Named, by_ref: bool) -> None:
        if by_ref:
            ref = pickle.loads(pickle.dumps(self.store.ref(key)))
            self.held[number] = ref, named
        else:
            self.held[number] = self.store.get(key), named

    def let_go(self, number: int) -> None:
        self.held.pop(number, None)

    def check(self, model: dict[str, tuple[Named, int]]) -> None:
        """It is as the model says, and so is what is held."""
        store = self.store
        assert list(store) == sorted(model, key=str.encode)
        assert len(store) == len(model)
        for key, value in store.get_many(list(model)).items():
            named, version = model[key]
            assert_same(make(named), value)
            assert store.version(key) == store.wait(key, timeout=0) == version
        for value, named in self.held.values():
            assert_same(make(named), value.get() if isinstance(value, memstore.Ref) else value)

    def wait(self, key: str, newer_than: int) -> int:
        return self.store.wait(key, newer_than=newer_than, timeout=10.0)

    def collect(self) -> None:
        self.store.gc()

    def verify(self) -> None:
        if hasattr(self.store, "verify"):
            assert self.store.verify().ok

    def limit(self, spare: int | None) -> None:
        """Sets the capacity to what is taken, and so much more. None: no limit that matters."""
        stats = self.store.stats()
        taken = stats.live_bytes + stats.reusable_bytes + stats.pinned_bytes + stats.filling_bytes
        memstore.open(self._path, capacity=1 << 50 if spare is None else taken + spare + 1).close()

    def reopen(self, mode: str) -> None:
        self.store.close()
        self.store = memstore.open(self._path, mode, **self._options)  # type: ignore[arg-type]

    def end(self) -> None:
        self.held.clear()
        self.store.close()


class OtherSide:
    """A `Side` in another process."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self._child = Child(_serve, path, options)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._child.send((name, arguments))
            raised, result = self._child.receive()
            if raised is not None:
                raise raised
            return result

        return call

    def close(self) -> None:
        self._child.__exit__()


def _serve(wire: Wire, path: str, options: dict[str, Any]) -> None:
    side = Side(path, options)
    while True:
        name, arguments = wire.receive(3600)
        try:
            answer = None, getattr(side, name)(*arguments)
        except Exception as error:
            answer = error.with_traceback(None), None
        wire.send(answer)
