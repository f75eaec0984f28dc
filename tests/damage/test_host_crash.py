"""What a crash of the host leaves of a batch that was being published: a repair takes all of it, or nothing.

The lock page, which notes the batch, is never synced: after such a crash it says what it said long before.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

import memstore
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.root import folder
from tests.children import in_child
from tests.damage.stores import CATALOG, content_of, overwrite
from tests.examples import one_in
from tests.inside import put_raw_row
from tests.support import faults

INLINE = ("inline/0", "inline/1")
FILES = ("a", "b", "c")


def batch(number: int, *keys: str) -> dict[str, Any]:
    return {key: torch.full((2 if key in INLINE else 1000,), number) for key in keys}


def make(root: str) -> None:
    with memstore.open(root, durability="disk") as store:
        store.put_many(batch(0, *FILES, *INLINE))


def spoil(root: str, table: str) -> None:
    """Writes a row that nobody can have written; the store is not opened, which would sweep."""
    catalog = Catalog(f"{root}/{folder.CATALOG}", durable=True, writable=True)
    catalog.update(lambda t: put_raw_row(t, table, b"counters", b"bad"))
    catalog.close()


def crash_in_put_many(root: str, keys: tuple[str, ...], synced: int) -> None:
    """The host goes down when so many of the batch's headers have been synced as live."""
    page = content_of(f"{root}/{folder.LOCK}")
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_child(put_and_die, root, keys, synced)
    overwrite(f"{root}/{folder.LOCK}", 0, page)


def put_and_die(root: str, keys: tuple[str, ...], synced: int) -> None:
    with memstore.open(root) as store, faults.at_step(synced, faults.die, after=True, names=frozenset({"sync_data"})):
        store.put_many(batch(1, *keys))


def numbers(root: str) -> dict[str, int]:
    with memstore.open(root, verify=True) as store:
        assert store.verify().ok
        return {key: int(value[0]) for key, value in store.items()}


OLD = dict.fromkeys((*FILES, *INLINE), 0)
BATCHES = {
    "one of two": (("a", "b"), 1),
    "two of three": (FILES, 2),
    "all but a value without a file before it": (("inline/0", "a"), 1),
    "all but a value without a file behind it": (("a", "inline/0"), 1),
    "all but values without files": (("a", "inline/0", "b", "inline/1"), 2),
}

DAMAGED = ("nothing", "leases", "counters")  # tables of the catalog
CASES = [
    *((name, "nothing") for name in BATCHES),
    ("one of two", "leases"),
    ("all but a value without a file before it", "leases"),
    ("one of two", "counters"),  # without them nothing tells that values without files were put
]


@pytest.mark.parametrize(("name", "damaged"), one_in(3, CASES))
def test_half_a_batch_doesnt_appear(disk_root: str, name: str, damaged: str) -> None:
    keys, synced = BATCHES[name]
    make(disk_root)
    crash_in_put_many(disk_root, keys, synced)
    if damaged != "nothing":
        spoil(disk_root, damaged)
    report = memstore.repair(disk_root)
    assert (report.recovered, report.lost) == (tuple(sorted(OLD)), ())
    assert numbers(disk_root) == OLD


def test_a_batch_in_a_new_store(disk_root: str) -> None:
    """Before its first version there is none."""
    memstore.open(disk_root, durability="disk").close()
    crash_in_put_many(disk_root, ("a", "inline/0"), 1)
    assert memstore.repair(disk_root).recovered == ()


@pytest.mark.parametrize(("count", "damaged"), [(1, "nothing"), *((3, table) for table in DAMAGED)])
def test_what_was_published_comes_back_to_a_catalog_from_right_before(disk_root: str, count: int, damaged: str) -> None:
    """LMDB takes the state before its last transaction, if the page that starts it is damaged."""
    keys = FILES[:count]
    make(disk_root)

    def keep_catalog() -> None:
        shutil.copy(f"{disk_root}/{CATALOG}", f"{disk_root}.old")

    with memstore.open(disk_root) as store:
        commits = frozenset({faults.COMMIT})
        with faults.at_step(count + 1, keep_catalog, names=commits):  # one each to claim files
            store.put_many(batch(1, *keys))
    shutil.move(f"{disk_root}.old", f"{disk_root}/{CATALOG}")
    if damaged != "nothing":
        spoil(disk_root, damaged)
    memstore.repair(disk_root)
    assert numbers(disk_root) == OLD | dict.fromkeys(keys, 1)


def test_what_is_left_of_a_batch_comes_back_without_a_catalog(disk_root: str) -> None:
    """Others of it were replaced since, and their files used again."""
    make(disk_root)
    with memstore.open(disk_root) as store:
        for number in range(1, 4):
            store.put_many(batch(number, "a", "b"))
    os.truncate(f"{disk_root}/{CATALOG}", 0)
    memstore.repair(disk_root)
    assert numbers(disk_root) == {"a": 3, "b": 3, "c": 0}
