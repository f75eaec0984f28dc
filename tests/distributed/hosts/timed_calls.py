"""Calls of a store, each with its time and its error, for hosts that are cut off.

`far` is a group of keys that the host owns which is cut off; the host that calls owns `near`, and the bytes of its
values lie on the other.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

import memstore

ROWS, SIDE = 4096, 160  # of 8 floats; of a square weight: files of their own, in both cases
SPEC = {"x": ((8,), torch.float32)}
TIMEOUT, DEFAULT = 0.2, 0.6  # seconds: of calls that take a timeout, and of the store
LATE_BY = 0.75  # seconds, at most
TRIES = 3
DATA = "data"

Call = Callable[[memstore.Store, str], object]

# What reads a value by its key; each has a key of its own, since what was fetched once is here from then on.
READS: dict[str, tuple[float, Call]] = {
    "get": (TIMEOUT, lambda store, key: store.get(key, timeout=TIMEOUT)),
    "get with a default": (TIMEOUT, lambda store, key: store.get(key, None, timeout=TIMEOUT)),
    "get into out": (TIMEOUT, lambda store, key: store.get(key, out={"x": torch.empty(ROWS, 8)}, timeout=TIMEOUT)),
    "get_many": (TIMEOUT, lambda store, key: store.get_many([key], timeout=TIMEOUT)),
    "load_model": (TIMEOUT, lambda store, key: store.load_model(key, model(), timeout=TIMEOUT)),
    "[]": (DEFAULT, lambda store, key: store[key]),
    "ref": (DEFAULT, lambda store, key: store.ref(key)),
    "export": (DEFAULT, lambda store, key: store.export(key, f"{tempfile.mkdtemp()}/x.safetensors")),
    "setdefault": (DEFAULT, lambda store, key: store.setdefault(key, 1)),
    "pop": (DEFAULT, lambda store, key: store.pop(key)),
    "iter_weights": (2 * DEFAULT, lambda store, key: list(memstore.iter_weights(store, key))),  # looks up, then reads
    "view and read": (2 * DEFAULT, lambda store, key: store.view(key)["x"][:5].sum()),
    "view and read_rows": (2 * DEFAULT, lambda store, key: memstore.read_rows(store.view(key)["x"], [5, 900])),
}
# What asks the key's owner, and needs no bytes.
LOOKS: dict[str, tuple[float, Call]] = {
    "info": (DEFAULT, lambda store, key: store.info(key)),
    "version": (DEFAULT, lambda store, key: store.version(key)),
    "in": (DEFAULT, lambda store, key: key in store),
    "open_dataset": (DEFAULT, lambda store, key: store.open_dataset(key)),
    "wait": (TIMEOUT, lambda store, key: store.wait(key, newer_than=1 << 60, timeout=TIMEOUT)),
    "wait_any": (TIMEOUT, lambda store, key: store.wait_any([key], newer_than=1 << 60, timeout=TIMEOUT)),
    "pending of a key": (TIMEOUT, lambda store, key: store.pending(key, timeout=TIMEOUT)),
}
WRITES: dict[str, tuple[float, Call]] = {
    "put": (TIMEOUT, lambda store, key: store.put(key, torch.ones(3), timeout=TIMEOUT)),
    "put_many": (TIMEOUT, lambda store, key: store.put_many({key: torch.ones(3)}, timeout=TIMEOUT)),
    "save_model": (TIMEOUT, lambda store, key: store.save_model(key, model(), timeout=TIMEOUT)),
    "create_dataset": (TIMEOUT, lambda store, key: store.create_dataset(key, SPEC, capacity=9, timeout=TIMEOUT)),
    "create_dataset_from": (
        TIMEOUT,
        lambda store, key: store.create_dataset_from(key, {"x": torch.ones(4, 8)}, timeout=TIMEOUT),
    ),
    "delete": (TIMEOUT, lambda store, key: store.delete(key, timeout=TIMEOUT)),
    "delete_many": (TIMEOUT, lambda store, key: store.delete_many([key], timeout=TIMEOUT)),
    "delete_many of many homes": (TIMEOUT, lambda store, key: store.delete_many([key], atomic=False, timeout=TIMEOUT)),
    "put_sharded": (TIMEOUT, lambda store, key: put_part(store, key, 1)),
    "put_sharded of two": (TIMEOUT, lambda store, key: put_part(store, key, 2)),
    "put_sharded unwaited": (TIMEOUT, lambda store, key: put_part(store, key, 2, wait=False)),
    "abort": (TIMEOUT, lambda store, key: store.abort(key, "an attempt", timeout=TIMEOUT)),
    "[]=": (DEFAULT, lambda store, key: store.__setitem__(key, torch.ones(3))),
    "update": (DEFAULT, lambda store, key: store.update({key: torch.ones(3)})),
}
# What asks all homes, or those of a prefix: its errors name no key.
LISTINGS: dict[str, tuple[float, Callable[[memstore.Store], object]]] = {
    "len": (DEFAULT, len),
    "keys": (DEFAULT, lambda store: list(store.keys())),
    "items": (DEFAULT, lambda store: list(store.items())),
    "tree": (DEFAULT, lambda store: store.tree()),
    "wait_any of a prefix": (TIMEOUT, lambda store: store.wait_any(prefix="g", newer_than=1 << 60, timeout=TIMEOUT)),
    "pending": (TIMEOUT, lambda store: store.pending(timeout=TIMEOUT)),
    "clear": (TIMEOUT, lambda store: store.clear(timeout=TIMEOUT)),
}
# What asks no other host: it goes on.
LOCAL: dict[str, tuple[float, Callable[[memstore.Store], object]]] = {
    "stats": (DEFAULT, lambda store: store.stats()),
    "gc": (TIMEOUT, lambda store: store.gc(timeout=TIMEOUT)),
    "a table in a notebook": (DEFAULT, lambda store: store._repr_html_()),  # which says what it lacks
}


def put_part(store: memstore.Store, key: str, world: int, *, wait: bool = True) -> object:
    value = {"x": memstore.TensorShard(torch.zeros(3), (3 * world,), (0,))}
    return store.put_sharded(key, value, attempt="one", rank=0, world_size=world, wait=wait, timeout=TIMEOUT)


def model() -> torch.nn.Module:
    return torch.nn.Linear(SIDE, SIDE)


def prepare(store: memstore.Store, far: str, near: str) -> None:
    """On the host that will be cut off."""
    for group in (far, near):
        for name in READS:
            if name in ("load_model", "iter_weights"):
                store.save_model(f"{group}/{name}", model())
            else:
                store.put(f"{group}/{name}", {"x": torch.arange(ROWS * 8.0).view(ROWS, 8)})
        store.create_dataset(f"{group}/{DATA}", SPEC, capacity=100)


def time_calls(channel: Connection, root: str, far: str, near: str) -> None:
    """Says that it is ready, is told to begin, and sends each call: its name, its key, its limit, and what it took."""
    with memstore.open(root, "r+", timeout=DEFAULT) as store:
        rows = store.create_dataset(f"{far}/own", SPEC, capacity=9)
        channel.send("ready")
        channel.recv()
        for name, (limit, call) in {**READS, **LOOKS, **WRITES}.items():
            key = f"{far}/{DATA if name == 'open_dataset' else name}"
            channel.send(("far", name, key, limit, *took(limit, lambda call=call, key=key: call(store, key))))
        channel.send(("far", "seal", f"{far}/own", TIMEOUT, *took(TIMEOUT, lambda: rows.seal(timeout=TIMEOUT))))
        for name, (limit, call) in READS.items():
            key = f"{near}/{name}"
            channel.send(("near", name, key, limit, *took(limit, lambda call=call, key=key: call(store, key))))
        for kind, calls in (("listing", LISTINGS), ("local", LOCAL)):
            for name, (limit, call) in calls.items():
                channel.send((kind, name, "", limit, *took(limit, lambda call=call: call(store))))
        channel.send(None)


def took(limit: float, call: Callable[[], object]) -> tuple[float, str, str, Any]:
    """Seconds, and the error: its class, its text, its key. Of the first try that isn't late.

    A busy machine may stop this process for a moment, but not in each try.
    """
    for _ in range(TRIES):
        found = _took(call)
        if found[0] <= limit + LATE_BY:
            break
    return found


def _took(call: Callable[[], object]) -> tuple[float, str, str, Any]:
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return time.monotonic() - started, type(error).__name__, str(error), getattr(error, "key", None)
    return time.monotonic() - started, "", "", None
