"""Two openings of one store, one of them in another process: each does what it is told, and holds what it was told to.

Values are named by a kind and a number, and made where they are needed: what is stored is nobody else's memory.
"""

from __future__ import annotations

import errno
import os
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import lmdb
import torch

import memstore
from memstore.engine import index as entries
from tests.children import Child, Wire, in_child
from tests.crash.blockers import sleepers
from tests.inside import root_of
from tests.support import faults
from tests.support.equality import assert_same

Named = tuple[str, int]
TAKE_ROOM = frozenset({faults.COMMIT, "open_into", "truncate", "allocate", "collapse", "write_at"})
LEASE = 3600.0  # seconds: longer than any example


def make(named: Named) -> Any:
    kind, number = named
    return {
        "object": lambda: number,
        "inline": lambda: torch.tensor([number]),
        "segment": lambda: {"x": torch.full((700,), number), "y": [number, torch.tensor(number)]},
        "like it": lambda: torch.full((700 + number % 300,), number),  # some fit into one another's files
        "medium": lambda: torch.full((9000,), number),
        "sharded": lambda: {
            "rows": torch.full((2, 700), number),
            "of 0": torch.tensor([number]),
            "of 1": torch.tensor([number]),
        },
        "large": lambda: torch.full(((1 << 18) + (number % 5 << 15),), number),  # from 2 MiB on it is mapped
    }[kind]()


class Side:
    """One opening of the store. Its methods raise where a value is not what it should be."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self._path, self._options = path, options
        self.store = memstore.open(path, **options)
        self.held: dict[int, tuple[Any, Named]] = {}
        self._fork: Child | None = None
        self._waiting: tuple[ExitStack, Future[int]] | None = None

    def put(self, key: str, named: Named, expected: int | None = None) -> int:
        return self.store.put(key, make(named), expect_version=expected)

    def put_with_history(self, key: str, named: Named, history: int | None) -> int:
        return self.store.put(key, make(named), history=history)

    def versions(self, key: str) -> tuple[int, ...]:
        return self.store.versions(key)

    def check_versions(self, replaced: dict[str, list[tuple[Named, int]]]) -> None:
        """The versions that were replaced and are kept are as they were put."""
        for key, found in replaced.items():
            for named, version in found:
                assert_same(make(named), self.store.get(key, version=version))

    def hold_version(self, number: int, key: str, named: Named, version: int) -> None:
        self.held[number] = self.store.get(key, version=version), named

    def put_many(self, items: dict[str, Named]) -> dict[str, int]:
        return self.store.put_many({key: make(named) for key, named in items.items()})

    def put_shard(self, key: str, number: int, attempt: int, rank: int) -> int | None:
        """One of two ranks' part of a value of the kind "sharded". Returns the version, if that makes it one."""
        row = memstore.TensorShard(torch.full((1, 700), number), global_shape=(2, 700), offsets=(rank, 0))
        value = {"rows": row, f"of {rank}": torch.tensor([number])}
        put = self.store.put_sharded(key, value, attempt=str(attempt), rank=rank, world_size=2, wait=False)
        assert isinstance(put, memstore.PendingPut)
        return put.wait(0) if put.done() else None

    def abort(self, key: str, attempt: int) -> bool:
        return self.store.abort(key, str(attempt))

    def put_in_a_fork(self, key: str, named: Named) -> int:
        return in_child(self.put, key, named)

    def delete(self, key: str) -> bool:
        return self.store.delete(key, missing_ok=True)

    def delete_many(self, keys: list[str]) -> int:
        return self.store.delete_many(keys)

    def dying(self, step: int, after: bool, name: str, arguments: Sequence[Any]) -> Any:
        """Does it, and dies at a step, if it comes to that."""
        self.end_fork()  # nobody would end it then
        with faults.at_step(step, faults.die, after=after):
            return getattr(self, name)(*arguments)

    def on_a_full_disk(self, step: int, lasts: bool, name: str, arguments: Sequence[Any]) -> Any:
        """Does it while no room is left: from a step on of those that take room, or at that one only."""

        def fail(number: int, what: str) -> None:
            if number == step or (lasts and number > step):
                if what == faults.COMMIT:
                    raise lmdb.DiskError("injected")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with faults.watching(fail, lambda *_: None, names=TAKE_ROOM):
            return getattr(self, name)(*arguments)

    def get(self, key: str) -> None:
        self.store.get(key)

    def send(self, key: str) -> bytes:
        """A ref, pickled: nothing but its lease keeps the version from now on."""
        return pickle.dumps(self.store.ref(key, lease=LEASE))

    def load(self, pickled: bytes, named: Named) -> None:
        assert_same(make(named), pickle.loads(pickled).get())

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
        self.check_held()

    def check_held(self) -> None:
        for value, named in self.held.values():
            assert_same(make(named), value.get() if isinstance(value, memstore.Ref) else value)

    def wait(self, key: str, newer_than: int) -> int:
        return self.store.wait(key, newer_than=newer_than, timeout=10.0)

    def start_waiting(self, key: str, newer_than: int) -> None:
        """In a thread, which sleeps when this returns, and which nothing but a wake ends in time."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(entries, "LOOK_EVERY", 3600.0))
            pool = stack.enter_context(ThreadPoolExecutor(1))
            waited = pool.submit(self.store.wait, key, newer_than=newer_than, timeout=60.0)
            deadline = time.monotonic() + 30
            while not sleepers(self.store):
                assert time.monotonic() < deadline and not waited.done()
                time.sleep(0.0001)
            self._waiting = stack.pop_all(), waited

    def end_waiting(self) -> int:
        assert self._waiting is not None
        (stack, waited), self._waiting = self._waiting, None
        with stack:
            return waited.result(20)

    def fork(self) -> None:
        """A child that holds what this process holds now, until it is asked to read it."""
        self.end_fork()
        self._fork = Child(_keep, self)

    def read_in_the_fork(self) -> None:
        if self._fork is not None:
            self._fork.send()
            self._fork.receive()
            self.end_fork()

    def end_fork(self) -> None:
        if self._fork is not None:
            self._fork.kill()  # before it is told that nobody listens any more
            self._fork.__exit__()
            self._fork = None

    def collect(self) -> None:
        self.store.gc()

    def verify(self) -> None:
        report = self.store.verify()
        assert report.ok, report

    def limit(self, spare: int | None) -> None:
        """Sets the capacity to what is taken, and so much more. None: no limit that matters."""
        root = root_of(self.store)
        with root.guard:  # `stats` would tell who holds what, too, from the maps of all processes
            counters = root.catalog.view(lambda transaction: transaction.counters())
        taken = counters.live + counters.retired + counters.held + counters.filling
        memstore.open(self._path, capacity=1 << 50 if spare is None else taken + spare + 1).close()

    def reopen(self, mode: str = "r+") -> None:
        self.store.close()
        self.store = memstore.open(self._path, mode, **self._options)  # type: ignore[arg-type]

    def end(self) -> None:
        self.held.clear()
        self.store.close()


def _keep(wire: Wire, side: Side) -> None:
    wire.receive(3600)
    side.check_held()


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
