"""Writers and readers to be killed, and journals of what they attempted and what was acknowledged.

A writer has keys that nobody else writes, so that after its death its journal says what they must be: as after the last
operation that returned, or as after the one that was under way. It notes each before it begins and after it returned,
in a file, which outlives a process as the page cache does. Beside them there are two keys for all: "shared", which is
put, and "counter", which is counted up by compare-and-swaps.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

import memstore
from memstore.engine.protocols import reuse
from tests.crash.leftovers import open_fds
from tests.crash.values import INLINE, LARGE, SMALL, stamp_of, stamped
from tests.inside import root_of
from tests.leaks import mapped_files

SLOTS = 16  # writers at most; a stamp tells its writer by its remainder
SIZES = [INLINE, SMALL, SMALL + 4096, 3 * SMALL, 9 * SMALL, LARGE]
SINGLES, BATCH = ["0", "1"], ["2", "3", "4"]
LEASE = 600.0  # seconds; ended by the test when all rest


# --- the workers ------------------------------------------------------------------------------------------------------


class Writer:
    """One writer: `number` counts its operations, and goes on where that of its slot died."""

    def __init__(self, store: memstore.Store, slot: int, number: int, journal: str, seed: int) -> None:
        self.store, self.slot, self.number, self.chance = store, slot, number, random.Random(seed)
        self.held: deque[tuple[torch.Tensor, int]] = deque(maxlen=8)
        self.sent: deque[tuple[bytes, int]] = deque(maxlen=3)
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def step(self) -> None:
        action = self.chance.choice(
            [self._put, self._put, self._put_many, self._put_shared, self._count, self._delete, self._delete_many]
            + [self._hold, self._hold, self._send]
        )
        action()
        for value, stamp in self.held:
            assert stamp_of(value, every=509) == stamp, "a value that was held has changed"

    def _note(self, *words: object) -> None:
        os.write(self._journal, (json.dumps(words) + "\n").encode())

    def _begin(self, kind: str, keys: list[str]) -> int:
        self.number += 1
        self._note("begin", self.number, kind, keys)
        return self.number * SLOTS + self.slot

    def _done(self, result: int) -> None:
        self._note("done", self.number, result)

    def _value(self, stamp: int) -> torch.Tensor:
        weights = [4, 8, 8, 4, 2, 1]
        return stamped(stamp, self.chance.choices(SIZES, weights)[0])

    def _own(self, names: list[str]) -> list[str]:
        return [f"{self.slot}/{name}" for name in names]

    def _put(self) -> None:
        key = self._own([self.chance.choice(SINGLES)])
        stamp = self._begin("put", key)
        self._done(self.store.put(key[0], self._value(stamp)))

    def _put_many(self) -> None:
        keys = self._own(BATCH)
        stamp = self._begin("put", keys)
        self._done(max(self.store.put_many({key: self._value(stamp) for key in keys}).values()))

    def _delete(self) -> None:
        key = self._own([self.chance.choice(SINGLES)])
        self._begin("delete", key)
        self._done(self.store.delete(key[0], missing_ok=True))

    def _delete_many(self) -> None:
        self._begin("delete", self._own(BATCH))
        self._done(self.store.delete_many(self._own(BATCH), missing_ok=True))

    def _put_shared(self) -> None:
        stamp = self._begin("shared", [])
        self._done(self.store.put("shared", self._value(stamp)))

    def _count(self) -> None:
        ref = self.store.ref("counter")
        count = stamp_of(ref.get())
        self._begin("count", [])
        try:
            self.store.put("counter", stamped(count + 1, SMALL), expect_version=ref.version)
        except memstore.VersionConflictError:
            self._done(0)
        else:
            self._done(1)

    def _hold(self) -> None:
        value = self.store.get("shared")
        self.held.append((value, stamp_of(value)))

    def _send(self) -> None:
        """What a lease keeps: from one of these to another some steps later nobody holds the version."""
        ref = self.store.ref("shared", lease=LEASE)
        self.sent.append((pickle.dumps(ref), stamp_of(ref.get())))
        del ref
        if len(self.sent) == self.sent.maxlen:
            sent, stamp = self.sent.popleft()
            assert stamp_of(pickle.loads(sent).get()) == stamp

    def let_go(self) -> None:
        self.held.clear()
        self.sent.clear()


def write(channel: Connection, path: str, slot: int, number: int, journal: str, seed: int) -> None:
    store = memstore.open(path, timeout=20.0)
    writer = Writer(store, slot, number, journal, seed)
    while True:
        writer.step()
        if channel.poll():
            writer.let_go()
            _rest(channel, store)


def read(channel: Connection, path: str, keys: list[str], seed: int) -> None:
    """Gets values and holds some, which must not change."""
    store, chance = memstore.open(path, timeout=20.0), random.Random(seed)
    held: deque[tuple[dict[str, torch.Tensor], dict[str, int]]] = deque(maxlen=16)
    while True:
        names = chance.sample(keys, 3)
        values = store.get_many([name for name in names if name in ("shared", "counter")])
        values |= {name: value for name in names if (value := store.get(name, None)) is not None}
        held.append((values, {name: stamp_of(value) for name, value in values.items()}))
        del values
        for values, stamps in held:
            for name, value in values.items():
                assert stamp_of(value, every=509) == stamps[name], "a value that was held has changed"
        if chance.random() < 0.02:
            store.gc()
        if channel.poll():
            held.clear()
            del values, value
            _rest(channel, store)


def _rest(channel: Connection, store: memstore.Store) -> None:
    """Lets go of everything, sends what is open and mapped still, and waits."""
    channel.recv()
    gc.collect()
    root_of(store).storage.mappings.clear()
    reuse.close_next_file(root_of(store))
    channel.send((len(open_fds()), [name for name in mapped_files(store.root) if "/segments/" in name]))
    channel.recv()


# --- the journals -----------------------------------------------------------------------------------------------------


@dataclass
class Journal:
    """One writer's, as far as it was read."""

    path: str
    slot: int
    stamps: dict[str, int | None] = field(default_factory=dict)  # of its keys, by what was acknowledged
    pending: tuple[int, str, list[str]] | None = None
    number: int = 0
    shared: int = 0  # the last version of "shared" that was acknowledged
    counted: int = 0
    maybe_counted: int = 0
    _offset: int = 0

    def __post_init__(self) -> None:
        self.stamps = {f"{self.slot}/{name}": None for name in [*SINGLES, *BATCH]}

    def read(self) -> None:
        for words in self._lines():
            if words[0] == "begin":
                _, self.number, kind, keys = words
                self.pending = self.number, kind, keys
                continue
            assert self.pending is not None and words[1] == self.pending[0]
            _, kind, keys = self.pending
            self.stamps = self._after(kind, keys)
            self.shared = words[2] if kind == "shared" else self.shared
            self.counted += words[2] if kind == "count" else 0
            self.pending = None

    def _lines(self) -> Iterator[list]:
        if not os.path.exists(self.path):
            return
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written: what comes next would be the rest of it
                    return
                self._offset += len(line)
                yield json.loads(line)

    def _after(self, kind: str, keys: list[str]) -> dict[str, int | None]:
        stamp = self.number * SLOTS + self.slot if kind == "put" else None
        return {**self.stamps, **dict.fromkeys(keys, stamp)}

    def close(self, found: dict[str, int | None]) -> bool:
        """Its writer is dead, and left its keys as `found`. Returns whether it died in an operation."""
        self.read()
        possible = [self.stamps, self._after(*self.pending[1:])] if self.pending else [self.stamps]
        assert found in possible, f"{found} after {self.pending}, and before it {self.stamps}"
        died_in_one, self.stamps = self.pending is not None, found
        self.maybe_counted += bool(self.pending and self.pending[1] == "count")
        self.pending = None
        return died_in_one
