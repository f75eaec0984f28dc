"""A client under load: it puts, gets, deletes and waits at random, and records what came of it."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection

import torch

import memstore
from tests.support.history import Recorder

KEYS = [f"g{number}/k" for number in range(6)]  # of several owners
SIZES = (1, 1, 8, 1 << 9, 1 << 15)  # elements of 8 bytes: in records, and in files
TIMEOUT = 2.0  # seconds of each call


class TornError(Exception):
    pass


def size_of(value: int) -> int:
    """Returns the elements of a value: so its size is known to who reads the history."""
    return SIZES[value % len(SIZES)]


def one_value(value: torch.Tensor) -> int:
    """What a tensor has that was filled with one number."""
    first = int(value[0])
    if not bool((value == first).all()):
        raise TornError(f"{first} and others")
    return first


class Client:
    """One process, and what it does."""

    def __init__(self, store: memstore.Store, recorder: Recorder, number: int, seed: int) -> None:
        self._store, self._recorder = store, recorder
        self._chance = random.Random(seed)
        self._values = iter(range(number << 32, (number + 1) << 32))

    def step(self) -> None:
        key = self._chance.choice(KEYS)
        action = self._chance.choices(
            (self.put, self.put_expecting, self.get, self.delete, self.wait), (30, 10, 45, 3, 12)
        )[0]
        try:
            action(key)
        except (memstore.KeyNotFoundError, memstore.VersionConflictError):
            pass
        except (memstore.StoreTimeoutError, memstore.HomeUnavailableError, memstore.UnknownOutcomeError):
            time.sleep(0.02)
        except memstore.StaleMembershipError:  # its host was drained
            time.sleep(0.2)

    def put(self, key: str, expect_version: int | None = None) -> None:
        value = next(self._values)
        tensor = torch.full((size_of(value),), value, dtype=torch.int64)
        with self._recorder.put(key, value, expect_version=expect_version) as outcome:
            outcome.version = self._store.put(key, tensor, expect_version=expect_version, timeout=TIMEOUT)

    def put_expecting(self, key: str) -> None:
        with self._recorder.get(key) as outcome:
            version = outcome.version = self._store.version(key)
        self.put(key, version)

    def get(self, key: str) -> None:
        with self._recorder.get(key) as outcome:
            outcome.value = one_value(self._store.get(key, timeout=TIMEOUT))

    def delete(self, key: str) -> None:
        with self._recorder.delete(key):
            self._store.delete(key, timeout=TIMEOUT)

    def wait(self, key: str) -> None:
        with self._recorder.get(key) as found:
            newer_than = found.version = self._store.version(key)
        with self._recorder.wait(key, newer_than=newer_than) as outcome:
            outcome.version = self._store.wait(key, newer_than=newer_than, timeout=0.5)


def run(channel: Connection, root: str, folder: str, name: str, seed: int) -> None:
    """The whole life of a client: it goes on until it is killed.

    Args:
        folder: for what it records, in a file of its name.
        seed: of its chance; no two clients have the same.
    """
    store = memstore.open(root, "r+")
    with Recorder(f"{folder}/{name}.jsonl") as recorder:
        client = Client(store, recorder, seed + 1, seed)
        channel.send("ready")
        while True:
            client.step()
