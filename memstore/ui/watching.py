"""The content of the live page, once a second: numbers for all who listen, a page of keys for each, and rates.

What needs the maps of all processes of the host, or other hosts, is looked at every five seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from memstore._threads import between_forks
from memstore.engine import index, numbers_of_store
from memstore.errors import MemstoreError
from memstore.listing import Keyspace, open_keyspace, opened
from memstore.metrics.calls import calls
from memstore.metrics.looking import KeyFigures, StoreLook, key_page, look_at

T = TypeVar("T")

EVERY = 1.0  # seconds
_LOOK_EVERY = 5.0  # seconds
_WINDOW = 10.0  # seconds over which rates are taken
_ROWS_EVERY = 10.0  # seconds between two searches for datasets and replay buffers, among
_SEARCHED = 200_000  # keys; they take about a second
_LEAVES = 500  # of one entry
_SHARDS = 2000
_TIMEOUT = 5.0  # seconds


class KeyRates:
    """Growth a second of numbers, over the last ten seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, float]]] = deque()

    def note(self, numbers: Mapping[str, float], now: float) -> dict[str, float]:
        """Takes the numbers of this moment. Returns the rates of those that were there before."""
        while len(self._seen) > 1 and self._seen[0][0] < now - _WINDOW:
            self._seen.popleft()
        self._seen.append((now, dict(numbers)))
        found: dict[str, float] = {}
        for name, value in numbers.items():
            first = next(((at, one[name]) for at, one in self._seen if name in one), None)
            if first is not None and now > first[0]:
                found[name] = max(value - first[1], 0.0) / (now - first[0])
        return found


class Watcher:
    """Looks at one store, at most once a second however many ask.

    Args:
        root: the store's folder.
        checkpoints: folders of a CheckpointManager, or URLs.
    """

    def __init__(self, root: str, checkpoints: Sequence[str] = ()) -> None:
        self.root, self.checkpoints = root, tuple(checkpoints)
        self._lock = threading.Lock()
        self._store: Keyspace | None = None
        self._look: StoreLook | None = None
        self._looked_at = self._told_at = float("-inf")
        self._found: dict[str, Any] = {}
        self._rates = KeyRates()
        self._row_keys: tuple[str, ...] = ()
        self._searched_at = float("-inf")

    def use(self, action: Callable[[Keyspace], T]) -> T:
        """Calls `action` with the opened store, which is opened anew after an error. Raises what `action` raises."""
        with self._lock:
            if self._store is None:
                self._store = open_keyspace(self.root, "r", timeout=_TIMEOUT)
            try:
                return action(self._store)
            except MemstoreError:
                store, self._store = self._store, None
                with contextlib.suppress(MemstoreError, OSError):
                    store.close()
                raise

    def close(self) -> None:
        with self._lock:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def summary(self) -> dict[str, Any]:
        """Returns what isn't about single keys, of the last second. Without a store it says "gone": why."""
        try:
            return self.use(self._summary)
        except (MemstoreError, OSError) as error:
            self._rates, self._row_keys, self._searched_at = KeyRates(), (), float("-inf")
            self._look, self._told_at = None, float("-inf")
            return {"at": time.time(), "root": self.root, "gone": str(error)}

    def _summary(self, store: Keyspace) -> dict[str, Any]:
        now, root = time.monotonic(), opened(store)
        root.check_in_place()
        if now - self._told_at < EVERY * 0.9:
            return self._found
        look = self._look
        if look is None or now - self._looked_at >= _LOOK_EVERY:
            look = self._look = look_at(store, checkpoints=self.checkpoints)
            self._looked_at = now
        fresh = numbers_of_store(root)
        buffers = self._rows(store, fresh.keys, now)
        numbers: dict[str, float] = {"versions": fresh.versions}
        for one in buffers:
            numbers[f"added {one['key']}"] = one["added"] or one["rows"] or 0
            if one["sampled"] is not None:
                numbers[f"sampled {one['key']}"] = one["sampled"]
        hosts = [] if look.cluster is None else [asdict(host) for host in look.cluster.hosts]
        for host in hosts:
            numbers |= {f"sent {host['address']}": host["sent"], f"received {host['address']}": host["received"]}
        counted = calls()  # of this process, if it counts them: a get leaves no trace in the store
        if counted:
            numbers["gets"] = counted["get"].count if "get" in counted else 0
        rates = self._rates.note(numbers, now)
        for one in buffers:
            one["added_rate"] = rates.get(f"added {one['key']}")
            one["sampled_rate"] = rates.get(f"sampled {one['key']}")
        for host in hosts:
            host["sent_rate"] = rates.get(f"sent {host['address']}")
            host["received_rate"] = rates.get(f"received {host['address']}")
        self._told_at = now
        self._found = {
            "at": time.time(),
            "root": look.root,
            "stats": {**asdict(look.stats), "keys": fresh.keys, "live_bytes": fresh.live_bytes},
            "versions": fresh.versions,
            "puts_rate": rates.get("versions"),
            "gets_rate": rates.get("gets", 0.0) if counted else None,
            "holders": [asdict(one) for one in look.holders],
            "pending": [asdict(one) for one in look.pending],
            "quotas": [asdict(one) for one in look.quotas],
            "hosts": hosts,
            "lost": {} if look.cluster is None else look.cluster.lost,
            "steps": [asdict(one) for one in look.steps],
            "rows": buffers,
            "troubles": look.troubles,
        }
        return self._found

    def _rows(self, store: Keyspace, keys: int, now: float) -> list[dict[str, Any]]:
        """Returns the datasets and replay buffers. They are looked for now and then, since that reads all keys."""
        if now - self._searched_at >= _ROWS_EVERY * max(1.0, keys / 10_000):
            self._searched_at = now
            found: list[str] = []
            for number, (key, record) in enumerate(index.records_from(lambda: opened(store), b"", _TIMEOUT)):
                if number >= _SEARCHED:
                    break
                if record.is_mutable:
                    found.append(key.decode())
            self._row_keys = tuple(found)
        pages = (key_page(store, key, limit=1) for key in self._row_keys)
        wanted = set(self._row_keys)
        return [asdict(one) for page in pages for one in page if one.key in wanted and one.capacity is not None]


class PageListener:
    """One who watches a page of keys.

    Args:
        prefix: of the keys.
        after: the key before the first one; "" begins with the first.
        limit: how many.
    """

    def __init__(self, watcher: Watcher, prefix: str, after: str, limit: int) -> None:
        self._watcher, self._prefix, self._after, self._limit = watcher, prefix, after, limit
        self._rates = KeyRates()
        self._versions: dict[str, int] = {}
        self._changes: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        """Returns the summary, and the page of keys with the changes a second that were seen of each."""
        found = dict(self._watcher.summary())
        if "gone" in found:
            return found
        try:
            page = self._watcher.use(
                lambda store: key_page(store, self._prefix, self._after or None, limit=self._limit + 1)
            )
        except (MemstoreError, OSError) as error:
            return {**found, "keys": [], "more": False, "troubles": [*found["troubles"], str(error)]}
        keys = page[: self._limit]
        rates = self._changes_of(keys)
        told = [{**asdict(one), "rate": rates.get(one.key)} for one in keys]
        return {**found, "keys": told, "more": len(page) > self._limit}

    def _changes_of(self, keys: Sequence[KeyFigures]) -> dict[str, float]:
        for one in keys:
            before = self._versions.get(one.key)
            if before is not None and before != one.version:
                self._changes[one.key] = self._changes.get(one.key, 0.0) + 1
            self._versions[one.key] = one.version
        return self._rates.note({one.key: self._changes.get(one.key, 0.0) for one in keys}, time.monotonic())


def entry(root: str, key: str) -> dict[str, Any]:
    """Describes one key: its leaves, and the shards of each. Raises what `Store.info` raises.

    It loads torch, which takes seconds the first time.
    """
    with between_forks():
        from memstore.store.opening import open as open_store
    with open_store(root, "r", timeout=_TIMEOUT) as store:
        info = store.info(key)
    shards = 0
    leaves: list[dict[str, Any]] = []
    for leaf in info.leaves[:_LEAVES]:
        parts = leaf.shards[: max(_SHARDS - shards, 0)]
        shards += len(parts)
        leaves.append(
            {
                "name": ".".join(map(str, leaf.name)),
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "shape": leaf.shape,
                "nbytes": leaf.nbytes,
                "shards": [{"offsets": one.offsets, "shape": one.shape, "rank": one.rank} for one in parts],
            }
        )
    return {
        "key": info.key,
        "version": info.version,
        "kind": info.kind,
        "nbytes": info.nbytes,
        "created": info.created,
        "structure": info.structure,
        "owner": info.owner,
        "leaves": leaves,
        "more": max(len(info.leaves) - _LEAVES, 0),
    }
