"""put_many, get_many, delete_many: one moment each."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

import memstore
from tests.children import Child, Wire, children
from tests.store.backends import open_store
from tests.support import faults
from tests.support.equality import assert_same


def test_versions_and_values_come_back_in_order(store: memstore.Store) -> None:
    items = {"b": torch.randn(1000), "a": 1, "c": {"x": torch.arange(3)}}
    versions = store.put_many(items)
    assert list(versions) == list(items)
    assert versions == {key: store.version(key) for key in items}
    assert list(store.get_many(["c", "a", "b"])) == ["c", "a", "b"]
    assert_same(items, {key: store.get_many(["a", "b", "c"])[key] for key in items})
    assert len(set(versions.values())) == 3


def test_nothing_is_nothing(store: memstore.Store) -> None:
    assert store.put_many({}) == {}
    assert store.get_many([]) == {}
    assert store.delete_many([]) == 0


def test_any_iterable_of_keys_will_do(store: memstore.Store) -> None:
    store.put_many({"a": 1, "b": 2})
    assert store.get_many(key for key in "ab") == {"a": 1, "b": 2}
    assert store.get_many(["a", "a"]) == {"a": 1}
    assert store.delete_many({"a", "b"}) == 2


def test_one_bad_value_stops_all(store: memstore.Store) -> None:
    store.put("a", 1)
    with pytest.raises(memstore.UnsupportedValueError):
        store.put_many({"a": torch.randn(1000), "b": torch.zeros(1000), "c": torch.zeros(3, device="meta")})
    assert dict(store.items()) == {"a": 1}


def test_one_bad_key_stops_all(store: memstore.Store) -> None:
    with pytest.raises(memstore.InvalidKeyError):
        store.put_many({"a": torch.randn(1000), "": 2})
    assert list(store) == []


def test_one_conflict_stops_all(store: memstore.Store) -> None:
    version = store.put("a", 1)
    with pytest.raises(memstore.VersionConflictError) as caught:
        store.put_many({"a": 2, "b": torch.randn(1000)}, expect_versions={"a": version, "b": 7})
    assert (caught.value.key, caught.value.expected, caught.value.found) == ("b", 7, 0)
    assert dict(store.items()) == {"a": 1}
    assert store.version("a") == version
    store.put_many({"a": 2, "b": 3}, expect_versions={"a": version, "b": 0})
    assert dict(store.items()) == {"a": 2, "b": 3}


def test_expectations_are_of_items(store: memstore.Store) -> None:
    with pytest.raises(ValueError, match="'b'"):
        store.put_many({"a": 1}, expect_versions={"b": 0})
    assert list(store) == []


def test_one_missing_key_stops_a_delete(store: memstore.Store) -> None:
    store.put_many({"a": 1, "b": torch.randn(1000)})
    with pytest.raises(memstore.KeyNotFoundError, match="'c'"):
        store.delete_many(["a", "b", "c"])
    assert list(store) == ["a", "b"]
    assert store.delete_many(["a", "b", "c", "b"], missing_ok=True) == 2
    assert list(store) == []


def test_a_string_is_not_taken_for_keys(store: memstore.Store) -> None:
    """delete_many("ab") would delete "a" and "b"."""
    store.put_many({"a": 1, "b": 2, "ab": 3})
    for call in (store.get_many, store.delete_many):
        with pytest.raises(TypeError, match="'ab' is one str"):
            call("ab")
    assert len(store) == 3


def test_a_reader_never_sees_half_a_batch(store: memstore.Store) -> None:
    """A process puts pairs (one inline, one in a segment) as fast as it can; what is got at one moment is a pair."""
    store.put_many(_pair(0))
    with Child(_put_pairs, store.root) as writer:
        writer.receive()
        seen = set[int]()
        while len(seen) < 40:
            pair = store.get_many(["large", "small"])
            numbers = {int(pair["small"]), *pair["large"].unique().tolist()}
            assert len(numbers) == 1, numbers
            seen |= numbers
        writer.send()
        assert writer.receive() > max(seen) - 1


def _pair(number: int) -> dict[str, torch.Tensor]:
    return {"small": torch.tensor(number), "large": torch.full((3000,), number)}


def _put_pairs(wire: Wire, root: str) -> int:
    number = 0
    with open_store(root, "r+") as store:
        wire.send("started")
        while not wire.has_message:
            number += 1
            store.put_many(_pair(number))
    return number


def test_a_reader_never_sees_half_a_delete(store: memstore.Store) -> None:
    with Child(_put_and_delete_pairs, store.root) as writer:
        writer.receive()
        seen = {0: 0, 2: 0}
        while min(seen.values()) < 20:
            try:
                store.get_many(["a", "b"])
                count = 2
            except memstore.KeyNotFoundError:
                count = len(list(store))  # one page of keys is one moment too
            assert count in seen
            seen[count] += 1
        writer.send()
        writer.receive()


def _put_and_delete_pairs(wire: Wire, root: str) -> None:
    with open_store(root, "r+") as store:
        wire.send("started")
        while not wire.has_message:
            store.put_many({"a": torch.zeros(1000), "b": 1})
            store.delete_many(["a", "b"])


def test_get_many_is_never_starved(root: str) -> None:
    """With all of its keys overwritten at full speed, each call ends: after two misfits it takes the mutex."""
    with open_store(root, timeout=30.0) as store:
        _overwrite_all(store, 0)
        with children(2, _overwrite_until_told, root) as writers:
            for writer in writers:
                writer.receive()
            seconds: list[float] = []
            for _ in range(60):
                start = time.monotonic()
                values = store.get_many(NAMES)
                seconds.append(time.monotonic() - start)
                assert len({int(value[0]) for value in values.values()}) == 1, "not of one moment"
                del values
            for writer in writers:
                writer.send()
                assert writer.receive(60) > 0
        assert statistics.median(seconds) < 2.0  # and none is beyond the timeout


@pytest.mark.embedded
def test_the_third_try_holds_the_mutex(root: str) -> None:
    """The keys are replaced in the middle of the first try and of the second; no one can in the middle of the third."""
    taken = list[str]()

    with open_store(root) as store, Child(_replace_when_told, root) as writer:
        _overwrite_all(store, 0)

        def replace(number: int, name: str) -> None:
            taken.append(name)
            if "mutex_lock" not in taken:
                writer.send(number)
                writer.receive()

        with faults.watching(replace, lambda *_: None, names=frozenset({"open_into", "mutex_lock"})):
            values = store.get_many(NAMES)
        writer.send(0)
    assert taken == ["open_into", "open_into", "mutex_lock", *["open_into"] * len(NAMES)]
    assert {int(value[0]) for value in values.values()} == {2}


def _replace_when_told(wire: Wire, root: str) -> None:
    with open_store(root) as store:
        while number := wire.receive():
            _overwrite_all(store, number)
            store.gc()  # of what it was told to replace, the file is gone
            wire.send()


NAMES = [f"{number}" for number in range(20)]


def _overwrite_all(store: memstore.Store, number: int) -> None:
    store.put_many({name: torch.full((3000,), number) for name in NAMES})


def _overwrite_until_told(wire: Wire, number: int, root: str) -> int:
    with open_store(root) as store:
        wire.send()
        count = 0
        while not wire.has_message:
            count += 1
            _overwrite_all(store, 2 * count + number)
    return count
