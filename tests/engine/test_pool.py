"""Retired files: used again where they can be, given back where they can't."""

from __future__ import annotations

import os
import time

import pytest

import memstore
from memstore.engine.tables import Counters
from tests.crash.leftovers import leftovers, opened
from tests.crash.operations import OPERATIONS
from tests.crash.values import LARGE, SMALL, stamp_at, stamp_of, stamped


def counters(store: memstore.Store) -> Counters:
    root = opened(store)
    with root.guard:
        return root.catalog.view(lambda transaction: transaction.counters())


def files(store: memstore.Store) -> list[str]:
    return sorted(os.listdir(opened(store).segments))


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_a_retired_file_is_used_again(nbytes: int, store: memstore.Store) -> None:
    store.put("k", stamped(0, nbytes))
    store.put("k", stamped(1, nbytes))
    two = files(store)
    assert len(two) == 2
    for stamp in range(2, 10):
        store.put("k", stamped(stamp, nbytes))
        assert files(store) == two
        assert stamp_at(store, "k") == stamp


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_a_file_that_is_held_is_passed_over_until_it_is_let_go(nbytes: int, store: memstore.Store) -> None:
    store.put("k", stamped(0, nbytes))
    (held_file,) = files(store)
    held = store.get("k")
    for stamp in range(1, 6):
        store.put("k", stamped(stamp, nbytes))
    assert len(files(store)) == 3 and counters(store).held > nbytes
    assert stamp_of(held) == 0
    del held
    stamp, deadline = 6, time.monotonic() + 5.0
    while [os.path.basename(path) for path in store.info("k").files] != [held_file]:
        assert time.monotonic() < deadline, "it is not used again"
        stamp += 1
        store.put("k", stamped(stamp, nbytes))  # held files are looked at again every 20 ms
    assert counters(store).held == 0
    assert leftovers(store, spares=True) == []


@pytest.mark.parametrize("name", ["abandon-small", "abandon-large"])
def test_a_lost_race_gives_its_file_back_for_reuse(name: str, store: memstore.Store) -> None:
    operation = OPERATIONS[name]
    operation.reset(store)
    operation.run(store, None)
    kept = files(store)
    assert counters(store).filling == 0
    assert leftovers(store, spares=True) == []
    for _ in range(3):
        operation.run(store, None)
        assert files(store) == kept


@pytest.mark.parametrize("spoil", ["unlink", "cut", "link"])
def test_a_retired_file_that_can_not_be_used_is_given_back_by_puts(spoil: str, store: memstore.Store) -> None:
    """A sweep that died before its commit leaves rows without files, which nobody may count for ever."""
    store.put("k", stamped(0, SMALL))
    store.delete("k")
    (name,) = files(store)
    path = f"{opened(store).segments}/{name}"
    if spoil == "cut":
        os.truncate(path, 4096)
    else:
        os.unlink(path)
    if spoil == "link":
        os.symlink("/etc/hostname", path)
    for stamp in range(4):
        store.put("k", stamped(stamp, SMALL))
    assert counters(store).held == 0
    assert name not in files(store)
    assert leftovers(store, spares=True) == []
