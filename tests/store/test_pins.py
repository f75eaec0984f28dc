"""A pinned version stays readable for everybody, whatever happens to its key, until its pin or its process ends."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
from typing import Any

import pytest
import torch

import memstore
import memstore.aio
from memstore.engine.catalog import tables
from tests.children import Child, Wire, in_child
from tests.inside import root_of

pytestmark = pytest.mark.embedded

KINDS = {"inline": 10, "segment": 20_000}


@pytest.fixture(params=KINDS)
def size(request: pytest.FixtureRequest) -> int:
    return KINDS[request.param]


def put(store: memstore.Store, size: int, number: int, **options: Any) -> int:
    return store.put("k", torch.full((size,), number), **options)


def number_at(store: memstore.Store, version: int) -> int | None:
    found = store.get("k", None, version=version)
    return None if found is None else int(found.unique())


def is_empty(store: memstore.Store) -> bool:
    """No file is left, no row of a replaced version, and none of a pin."""
    store.gc()
    root = root_of(store)
    with root.guard:
        rows = root.catalog.view(
            lambda transaction: [transaction.count(name) for name in (tables.HISTORY, tables.PINS)]
        )
    return rows == [0, 0] and store.stats().live_bytes == 0 and os.listdir(f"{store.root}/segments") == []


def test_it_stays_while_its_key_is_put(store: memstore.Store, size: int) -> None:
    first = put(store, size, 0)
    with store.pin("k") as pin:
        assert (pin.key, pin.version, pin.root) == ("k", first, store.root)
        assert store.versions("k") == (first,)
        last = [put(store, size, number) for number in range(1, 5)][-1]
        assert store.versions("k") == (first, last)
        assert number_at(store, first) == 0
        assert in_child(number_at, store, first) == 0
        assert store.verify().ok
    assert store.versions("k") == (last,) and number_at(store, first) is None
    assert put(store, size, 6) > last and len(store.versions("k")) == 1
    store.delete("k")
    assert is_empty(store)


def test_it_stays_when_its_key_is_deleted(store: memstore.Store, size: int) -> None:
    first = put(store, size, 0)
    pin = store.pin("k")
    store.delete("k")
    assert "k" not in store and list(store) == []
    assert store.versions("k") == (first,) and number_at(store, first) == 0
    with pytest.raises(memstore.KeyNotFoundError):
        store.get("k")
    second = put(store, size, 1)
    assert put(store, size, 2) > second
    assert number_at(store, first) == 0 and number_at(store, second) is None
    assert store.clear() == 1
    assert number_at(store, first) == 0
    pin.close()
    pin.close()
    assert repr(pin).endswith("(closed)>")
    assert is_empty(store)


def test_an_earlier_version_is_pinned_beyond_its_history(store: memstore.Store, size: int) -> None:
    versions = [put(store, size, number, history=3) for number in range(3)]
    with store.pin("k", version=versions[0]), store.pin("k", version=versions[0]):
        versions += [put(store, size, number) for number in range(3, 8)]
        assert store.versions("k") == (versions[0], *versions[-3:])
    assert store.versions("k") == tuple(versions[-3:])
    with pytest.raises(memstore.VersionGoneError):
        store.pin("k", version=versions[0])
    with store.pin("k", version=versions[-2]) as pin:
        assert pin.version == versions[-2]
    assert store.versions("k") == tuple(versions[-3:]), "its history keeps it still"


def test_one_pin_of_two_is_enough(store: memstore.Store, size: int) -> None:
    first = put(store, size, 0)
    one, other = store.pin("k"), store.pin("k")
    put(store, size, 1)
    one.close()
    assert number_at(store, first) == 0
    other.close()
    assert number_at(store, first) is None


def test_a_full_store_keeps_it(root: str) -> None:
    with memstore.open(root, capacity="1MiB", inline_limit=0) as store:
        pinned = put(store, 12_000, 0, history=20)
        with store.pin("k"):
            for number in range(1, 20):
                put(store, 12_000, number)
            assert store.versions("k")[0] == pinned and 4 < len(store.versions("k")) < 12
            store.put("large", torch.zeros(95_000))
            assert pinned in store.versions("k")
            with pytest.raises(memstore.StoreFullError):
                store.put("other", torch.zeros(150_000))
            assert pinned in store.versions("k")


# --- across processes ------------------------------------------------------------------------------------------------


def hold_pin(wire: Wire, path: str, version: int | None) -> None:
    with memstore.open(path) as store:
        pin = store.pin("k", version=version)
        wire.send(pin.version)
        wire.receive()
        pin.close()
        wire.send()
        wire.receive()


def test_a_pin_of_another_process(store: memstore.Store, size: int) -> None:
    first = put(store, size, 0)
    with Child(hold_pin, store.root, None) as child:
        assert child.receive() == first
        for number in range(1, 4):
            put(store, size, number)
        assert number_at(store, first) == 0
        child.send()
        child.receive()
        assert number_at(store, first) is None
        child.send()
    store.delete("k")
    assert is_empty(store)


@pytest.mark.parametrize("how", ["put", "delete", "gc", "no room"])
def test_the_pin_of_a_killed_process_ends(root: str, size: int, how: str) -> None:
    with memstore.open(root, timeout=10.0) as store:
        first = put(store, size, 0)
        with Child(hold_pin, store.root, None) as child:
            child.receive()
            second = put(store, size, 1)
            assert number_at(store, first) == 0
            os.kill(child.pid, signal.SIGSTOP)
            store.gc()
            put(store, size, 2)
            assert number_at(store, first) == 0, "a stopped process has it still"
            os.kill(child.pid, signal.SIGKILL)
            child.process.join()
        assert number_at(store, second) is None
        if how == "put":
            put(store, size, 3)
        elif how == "gc":
            store.gc()
        elif how == "delete":
            store.delete("k")
        else:
            memstore.open(root, capacity=store.stats().live_bytes + (1 << 20)).close()
            with pytest.raises(memstore.StoreFullError):
                store.put("large", torch.zeros(1 << 20))
        assert number_at(store, first) is None
        store.delete("k", missing_ok=True)
        assert is_empty(store)


def test_a_forked_child_doesnt_have_it(store: memstore.Store, size: int) -> None:
    """Its copy ends nothing, and keeps nothing when the parent has ended it."""
    first = put(store, size, 0)
    pin = store.pin("k")
    put(store, size, 1)

    def end(copy: memstore.Pin) -> None:
        copy.close()

    in_child(end, pin)
    put(store, size, 2)
    assert number_at(store, first) == 0
    with Child(_wait, pin) as child:
        child.receive()
        pin.close()
        assert number_at(store, first) is None
        child.send()


def _wait(wire: Wire, pin: memstore.Pin) -> None:
    wire.send(pin.version)
    wire.receive()


def test_a_pin_that_nobody_refers_to_ends(store: memstore.Store, size: int) -> None:
    first = put(store, size, 0)
    pin = store.pin("k")
    put(store, size, 1)
    assert number_at(store, first) == 0
    del pin
    gc.collect()
    put(store, size, 2)
    assert number_at(store, first) is None


def test_it_outlives_its_store_object(root: str, size: int) -> None:
    with memstore.open(root) as store:
        first = put(store, size, 0)
        pin = store.pin("k")
    with memstore.open(root) as store:
        put(store, size, 1)
        assert number_at(store, first) == 0
        pin.close()
        assert number_at(store, first) is None


def test_a_repair_ends_all(scratch: str, size: int) -> None:
    with memstore.open(scratch) as store:
        first = put(store, size, 0)
        pin = store.pin("k")
        store.delete("k")
        last = [put(store, size, number) for number in (1, 2)][-1]
        assert store.versions("k") == (first, last)
    del pin
    gc.collect()
    assert memstore.repair(scratch).lost == ()
    with memstore.open(scratch) as store:
        assert store.versions("k") == (last,)
        store.delete("k")
        assert is_empty(store)


def test_what_cant_be_pinned(store: memstore.Store, size: int) -> None:
    with pytest.raises(memstore.KeyNotFoundError):
        store.pin("k")
    version = put(store, size, 0)
    for wrong in (version + 1, 1 << 40):
        with pytest.raises(memstore.VersionGoneError):
            store.pin("k", version=wrong)
    store.create_dataset("rows", ((2,), torch.float32), capacity=10)
    with pytest.raises(memstore.MutableEntryError):
        store.pin("rows")
    with memstore.open(store.root, "r") as reader, pytest.raises(memstore.ReadOnlyError):
        reader.pin("k")
    with store.pin("k") as pin, pytest.raises(TypeError, match="a pin is its process's own"):
        pickle.dumps(pin)


def test_a_task_pins(root: str, size: int) -> None:
    async def main() -> None:
        async with memstore.aio.open(root) as store:
            first = await store.put("k", torch.full((size,), 0))
            async with await store.pin("k") as pin:
                assert pin.version == first and "version" in repr(pin)
                last = await store.put("k", torch.full((size,), 1))
                assert await store.versions("k") == (first, last)
                assert (await store.get("k", version=first) == 0).all()
            assert await store.versions("k") == (last,)

    asyncio.run(main())
