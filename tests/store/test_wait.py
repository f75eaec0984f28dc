"""wait: the basics. (What death does to it: tests/crash.)"""

from __future__ import annotations

import threading
import time
from typing import Any

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


@pytest.mark.parametrize("timeout", [0, 0.05])
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


# --- any of several keys ----------------------------------------------------------------------------------------------


def test_all_that_are_newer_are_returned(store: memstore.Store) -> None:
    versions = store.put_many({"batch/1": 1, "batch/0": 0, "other": 2})
    both = {key: versions[key] for key in ("batch/0", "batch/1")}
    assert list(store.wait_any(prefix="batch/").items()) == list(both.items())
    assert store.wait_any(["batch/1", "missing", "batch/1"]) == {"batch/1": versions["batch/1"]}
    assert store.wait_any(prefix="batch/", newer_than={"batch/0": versions["batch/0"]}) == {
        "batch/1": versions["batch/1"]
    }
    assert store.wait_any(iter(["other", "batch/0"]), newer_than=versions["other"] - 1, timeout=5).keys() >= {"other"}
    later = store.put("batch/0", 3)
    assert store.wait_any(prefix="", newer_than=versions) == {"batch/0": later}


def test_none_that_is_newer_is_a_timeout(store: memstore.Store) -> None:
    seen = {"batch/0": store.put("batch/0", 1)}
    for timeout in (0, 0.05):
        with pytest.raises(memstore.StoreTimeoutError, match="no key that starts with 'batch/' got a newer"):
            store.wait_any(prefix="batch/", newer_than=seen, timeout=timeout)
    with pytest.raises(memstore.StoreTimeoutError, match=r"none of 2 keys \('batch/0', 'missing'\) got a newer"):
        store.wait_any(["batch/0", "missing"], newer_than=seen, timeout=0)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((), {}, TypeError),
        ((["a"],), {"prefix": "a"}, TypeError),
        (("a",), {}, TypeError),
        (([],), {}, ValueError),
        ((["a"],), {"newer_than": {"a": "1"}}, TypeError),
        ((["a"],), {"newer_than": None}, TypeError),
        (([""],), {}, memstore.errors.InvalidKeyError),
        ((), {"prefix": 0}, memstore.errors.InvalidKeyError),
    ],
    ids=str,
)
def test_keys_that_nobody_can_wait_for(store: memstore.Store, arguments: Any, options: Any, error: Any) -> None:
    with pytest.raises(error):
        store.wait_any(*arguments, **options, timeout=0)


def test_a_dataset_has_no_versions_to_wait_for(store: memstore.Store) -> None:
    store.create_dataset_from("batch/rows", torch.zeros(3))
    with pytest.raises(memstore.MutableEntryError, match="batch/rows"):
        store.wait_any(["batch/rows"], timeout=0)
    version = store.put("batch/0", 1)
    assert store.wait_any(prefix="batch/") == {"batch/0": version}


@pytest.mark.embedded
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_put_of_a_new_key_wakes_who_waits_for_a_prefix(store: memstore.Store, mode: str) -> None:
    """And the waiter doesn't just look again."""
    store.put("other", 0)
    with Child(_consume, store.root, mode) as child:
        child.receive()
        for number in range(5):
            if mode == "r+":
                child.wait_until_it_sleeps_on_a_futex()
            store.put("other", number)
            version = store.put(f"batch/{number}", torch.zeros(1000))
            assert child.receive() == {f"batch/{number}": version}


def _consume(wire: Wire, root: str, mode: Any) -> None:
    entries.LOOK_EVERY = 3600.0  # seconds
    seen: dict[str, int] = {}
    with open_store(root, mode) as store:
        wire.send()
        for _ in range(5):
            new = store.wait_any(prefix="batch/", newer_than=seen, timeout=60)
            seen |= new
            wire.send(new)
