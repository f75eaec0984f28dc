"""wait: the basics. (What death does to it: tests/crash.)"""

from __future__ import annotations

import threading
import time

import pytest
import torch

import memstore
from memstore.engine import index as entries
from tests.children import Child, Wire
from tests.inside import root_of
from tests.store.backends import open_store


def test_what_is_there_is_returned_at_once(store: memstore.Store) -> None:
    version = store.put("key", 1)
    assert store.wait("key", timeout=0) == version
    assert store.wait("key", newer_than=version - 1, timeout=0) == version


@pytest.mark.parametrize("timeout", [0, 0.05, -1])
def test_what_doesnt_come_is_a_timeout(store: memstore.Store, timeout: float) -> None:
    version = store.put("key", 1)
    started = time.monotonic()
    with pytest.raises(memstore.StoreTimeoutError, match=f"version {version}: no.* newer than {version} ") as caught:
        store.wait("key", newer_than=version, timeout=timeout)
    assert timeout <= time.monotonic() - started < 20
    assert isinstance(caught.value, TimeoutError) and caught.value.key == "key"
    with pytest.raises(memstore.StoreTimeoutError, match="'missing' doesn't exist"):
        store.wait("missing", timeout=timeout)


def test_none_is_the_stores_own_timeout(root: str) -> None:
    store = open_store(root, timeout=0.05)
    with pytest.raises(memstore.StoreTimeoutError):
        store.wait("key")


def test_a_put_wakes_threads_and_processes(store: memstore.Store) -> None:
    version = store.put("key", 1)
    found: list[int] = []
    with Child(_follow, store.root, "key", version) as child:
        thread = threading.Thread(target=lambda: found.append(store.wait("key", newer_than=version, timeout=30)))
        thread.start()
        child.receive()
        latest = store.put("key", torch.zeros(1000))
        thread.join(60)
        assert found == [latest]
        assert child.receive() == latest


def _follow(wire: Wire, root: str, key: str, version: int) -> int:
    with open_store(root, "r") as store:
        wire.send()
        return store.wait(key, newer_than=version, timeout=float("inf"))


@pytest.mark.embedded
def test_a_sleeper_is_woken_and_doesnt_just_look_again(store: memstore.Store) -> None:
    version = store.put("key", 0)
    with Child(_follow_ten, store.root, version) as child:
        child.receive()
        for turn in range(10):
            child.wait_until_it_sleeps_on_a_futex()
            version = store.put("key", turn)
            assert child.receive() == version


def _follow_ten(wire: Wire, root: str, version: int) -> None:
    entries.LOOK_EVERY = 3600.0  # seconds, instead of one, after which it would look by itself
    with open_store(root, "r") as store:
        wire.send()
        for _ in range(10):
            version = store.wait("key", newer_than=version, timeout=float("inf"))
            wire.send(version)


def test_put_many_wakes_each_of_its_keys(store: memstore.Store) -> None:
    with Child(_follow, store.root, "a", 0) as one, Child(_follow, store.root, "b", 0) as other:
        one.receive()
        other.receive()
        versions = store.put_many({"a": 1, "b": torch.zeros(1000)})
        assert (one.receive(), other.receive()) == (versions["a"], versions["b"])


def test_a_delete_doesnt_count(store: memstore.Store) -> None:
    version = store.put("key", 1)
    store.delete("key")
    with pytest.raises(memstore.StoreTimeoutError):
        store.wait("key", newer_than=0, timeout=0.05)
    again = store.put("key", 2)
    assert store.wait("key", newer_than=version) == again


@pytest.mark.embedded
def test_many_keys_share_a_word_and_dont_mix(store: memstore.Store) -> None:
    bell = root_of(store).doorbell.bell
    names = [f"{number}" for number in range(4000)]
    twin = next(name for name in names[1:] if bell(name.encode()) == bell(names[0].encode()))
    with Child(_follow, store.root, names[0], 0) as child:
        child.receive()
        for _ in range(100):
            store.put(twin, 1)
        version = store.put(names[0], 1)
        assert child.receive() == version


def test_a_follower_ends_at_the_last_version(store: memstore.Store) -> None:
    seen: list[int] = []

    def follow() -> None:
        while not seen or "end" not in store or seen[-1] < store.version("key"):
            seen.append(store.wait("key", newer_than=seen[-1] if seen else 0, timeout=30))

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(300):
        store.put("key", number)
    version = store.put_many({"key": 300, "end": 1})["key"]
    thread.join(100)
    assert seen == sorted(set(seen)) and seen[-1] == version
