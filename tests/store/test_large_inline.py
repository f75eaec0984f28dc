"""Values of up to 64 KiB in the catalog: where they lie, and what the catalog may grow to for their sake."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memstore
from tests.children import Child, Wire
from tests.inside import lmdb_of, root_of
from tests.small_tmpfs import fill, on_small_tmpfs
from tests.small_values import USERS_LIMIT

pytestmark = pytest.mark.embedded

KIB, MIB = 1 << 10, 1 << 20
STEP = 8 * MIB
MOST = 64 * MIB  # of the catalog, for the sake of such values


@pytest.fixture
def store(root: str) -> Iterator[memstore.Store]:
    with memstore.open(root, inline_limit=USERS_LIMIT, timeout=30.0) as opened:
        yield opened


def value(number: int, nbytes: int = 60 * KIB) -> torch.Tensor:
    """Of few elements: torch compares more than 32,768 by several threads, for which a busy machine has no cores."""
    return torch.full((nbytes // 8,), number)


def catalog_size(root: str) -> int:
    return Path(root, "catalog", "local", "data.mdb").stat().st_size


def test_users_get_this_limit_where_there_is_room_for_it(root: str) -> None:
    assert USERS_LIMIT == 65_536
    with memstore.open(root, inline_limit=None, capacity=MIB) as small:
        small.put("key", value(1))
        assert small.info("key").kind == "segment"


def test_what_is_held_stays_when_it_is_replaced(store: memstore.Store) -> None:
    store.put("key", {"a": value(1, 20 * KIB), "b": value(2, 30 * KIB)})
    held, view = store.get("key"), store.view("key")
    for number in range(20):
        store.put("key", {"a": value(number, 20 * KIB), "b": value(number, 30 * KIB)})
    assert torch.equal(held["a"], value(1, 20 * KIB)) and torch.equal(view["b"][:], value(2, 30 * KIB))


def test_the_catalog_grows_no_further_for_their_sake(store: memstore.Store, root: str) -> None:
    """90 MiB of them: the catalog takes what it may, and the others have files."""
    count = 1500
    for number in range(count):
        store.put(f"key/{number}", value(number))
    kinds = [store.info(f"key/{number}").kind for number in range(count)]
    assert 40 * MIB < kinds.count("inline") * 60 * KIB <= MOST
    assert catalog_size(root) <= MOST
    for number in range(count):
        assert torch.equal(store.get(f"key/{number}"), value(number))
    for number in range(count):  # there is room again
        store.delete(f"key/{number}")
    for number in range(70):
        store.put("again", value(number))
    assert store.info("again").kind == "inline"


@pytest.mark.parametrize("others", [0, 3])
def test_a_batch_that_finds_no_room_is_put_whole(store: memstore.Store, root: str, others: int) -> None:
    """Also one whose segments were live by then: their headers are put back, and all of it is put once more."""
    items = {f"segment/{number}": value(number, 200 * KIB) for number in range(others)}
    items |= {f"key/{number}": value(number) for number in range(1500)}
    versions = store.put_many(items)
    assert catalog_size(root) <= MOST
    assert all(torch.equal(store.get(key), put) for key, put in items.items())
    assert sorted(versions.values()) == list(range(min(versions.values()), min(versions.values()) + len(items)))
    assert store.verify().damaged == ()


def hold_a_moment(wire: Wire, root: str) -> None:
    """Keeps a read transaction open, as a process that is stopped in the middle of a get does."""
    with memstore.open(root) as store, lmdb_of(root_of(store)).begin():
        wire.send("open")
        wire.receive()


def test_a_stopped_reader_lets_the_catalog_grow_no_further(store: memstore.Store, root: str) -> None:
    """What it may still read is not used again: 120 MiB of overwrites would make the catalog as large."""
    store.put("key", value(0))
    with Child(hold_a_moment, root) as child:
        assert child.receive() == "open"
        for number in range(2000):
            store.put("key", value(number))
        assert catalog_size(root) < 2 * MOST  # segments' rows take 50 KB a put then; all in the catalog made 176 MiB
        assert torch.equal(store.get("key"), value(1999))
        child.send()


def put_on_a_full_disk(folder: str) -> tuple[set[str], int]:
    with memstore.open(f"{folder}/store", inline_limit=USERS_LIMIT) as store:
        fill(folder, leave=4 * MIB)  # the catalog can't grow by a step any more
        for number in range(150):
            store.put(f"key/{number}", value(number))
        right = sum(torch.equal(store.get(f"key/{number}"), value(number)) for number in range(150))
        return {store.info(f"key/{number}").kind for number in range(150)}, right


def test_on_a_full_disk_they_go_where_there_is_room() -> None:
    assert on_small_tmpfs(24, put_on_a_full_disk) == ({"inline", "segment"}, 150)


def test_values_that_come_and_go_don_t_wear_the_catalog_out(store: memstore.Store, root: str) -> None:
    """Sizes at random leave holes of all sizes: the catalog stays within twice what lies in it."""
    sizes = random.Random(7)
    put: dict[str, torch.Tensor] = {}
    for number in range(6000):
        key = f"key/{sizes.randrange(300)}"
        if sizes.random() < 0.25:
            store.delete(key, missing_ok=True)
            put.pop(key, None)
        else:
            put[key] = value(number, sizes.randrange(KIB, 60 * KIB))
            store.put(key, put[key])
    assert catalog_size(root) <= 2 * 300 * 30 * KIB + STEP
    assert all(torch.equal(store.get(key), one) for key, one in put.items())
