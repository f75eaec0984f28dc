"""Versions: they grow, and a put or delete may insist on one."""

from __future__ import annotations

import threading

import pytest
import torch

import memstore
from tests.children import Wire, children
from tests.store.backends import open_store


def test_they_grow_over_puts_deletes_and_openings(root: str) -> None:
    seen: list[int] = []
    for _ in range(3):
        with open_store(root) as store:
            seen.append(store.put("key", 1))
            seen.append(store.put("key", torch.randn(1000)))
            store.put("other", 2)
            seen.append(store.put_many({"x": 1, "key": 2})["key"])
            store.delete("key")
            store.gc()
    assert seen == sorted(set(seen))
    assert seen[0] > 0


@pytest.mark.parametrize("value", [1, torch.zeros(5000)], ids=["inline", "segment"])
def test_an_expected_version_must_be_there(store: memstore.Store, value: object) -> None:
    with pytest.raises(memstore.VersionConflictError, match="'key' doesn't exist.*version 3 was expected") as caught:
        store.put("key", value, expect_version=3)
    assert (caught.value.key, caught.value.expected, caught.value.found) == ("key", 3, 0)
    first = store.put("key", value, expect_version=0)
    with pytest.raises(memstore.VersionConflictError) as caught:
        store.put("key", value, expect_version=0)
    assert (caught.value.expected, caught.value.found) == (0, first)
    second = store.put("key", value, expect_version=first)
    assert second > first
    with pytest.raises(memstore.VersionConflictError, match=f"at version {second}, and version {first}"):
        store.put("key", value, expect_version=first)
    assert store.version("key") == second
    with pytest.raises(memstore.VersionConflictError):
        store.delete("key", expect_version=first)
    assert store.delete("key", expect_version=second)
    assert "key" not in store
    assert store.put("key", value, expect_version=0) > second


def test_a_conflict_is_seen_before_anything_is_copied(store: memstore.Store) -> None:
    store.put("key", 1)
    with pytest.raises(memstore.VersionConflictError):
        store.put("key", torch.zeros(1).expand(1 << 44), expect_version=99)  # 64 TiB would not fit


def test_a_delete_may_expect_nothing(store: memstore.Store) -> None:
    assert store.delete("key", expect_version=0, missing_ok=True) is False
    with pytest.raises(memstore.VersionConflictError):
        store.delete("key", expect_version=4, missing_ok=True)
    with pytest.raises(memstore.KeyNotFoundError):
        store.delete("key", expect_version=0)


@pytest.mark.parametrize("large", [False, True])
def test_of_racing_threads_exactly_one_wins(store: memstore.Store, large: bool) -> None:
    version = store.put("key", 0)
    for _ in range(10):
        start = threading.Barrier(8)
        won: list[tuple[int, int]] = []
        lost: list[int] = []

        def race(number: int, version: int, start: threading.Barrier = start, won=won, lost=lost) -> None:
            value = torch.full((5000 if large else 5,), number)
            start.wait()
            try:
                won.append((store.put("key", value, expect_version=version), number))
            except memstore.VersionConflictError as error:
                assert error.found > version
                lost.append(number)

        threads = [threading.Thread(target=race, args=(number, version)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 7)
        version, winner = won[0]
        assert store.version("key") == version
        assert (store.get("key") == winner).all()


def test_processes_count_without_losing_one(store: memstore.Store) -> None:
    """Compare and swap: three processes add to a counter; each sum of wins is in the count."""
    store.put("counter", torch.zeros(500, dtype=torch.int64))
    with children(3, _add, store.root) as adders:
        for child in adders:
            child.receive()  # it has read the first version
        for child in adders:
            child.send()
        conflicts = [child.receive() for child in adders]
    assert (store.get("counter") == 3 * 60).all()
    assert sum(conflicts) >= 2  # of the first three


def _add(wire: Wire, number: int, root: str) -> int:
    conflicts = added = 0
    with open_store(root, "r+") as store:
        while added < 60:
            version = store.version("counter")
            value = store.get("counter") + 1
            if not added and not conflicts:
                wire.send()
                wire.receive()
            try:
                store.put("counter", value, expect_version=version)
                added += 1
            except memstore.VersionConflictError:
                conflicts += 1
    return conflicts
