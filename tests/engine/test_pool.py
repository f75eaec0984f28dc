"""Retired files: used again where they can be, given back where they can't."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

import memstore
from memstore.engine.catalog.tables import Counters
from tests.crash.leftovers import leftovers
from tests.crash.operations import OPERATIONS
from tests.crash.values import LARGE, SMALL, stamp_of, stamped
from tests.inside import counters_of, root_of
from tests.segments import files
from tests.small_tmpfs import fill, free_bytes, on_small_tmpfs
from tests.support import faults


def counters(store: memstore.Store) -> Counters:
    return counters_of(root_of(store))


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_a_file_that_is_held_is_passed_over_until_it_is_let_go(nbytes: int, store: memstore.Store) -> None:
    store.put("k", stamped(0, nbytes))
    (held_file,) = files(store.root)
    held = store.get("k")
    for stamp in range(1, 6):
        store.put("k", stamped(stamp, nbytes))
    assert len(files(store.root)) == 3 and counters(store).held > nbytes
    assert stamp_of(held) == 0
    del held
    stamp, deadline = 6, time.monotonic() + 30.0
    while held_file not in {os.path.basename(path) for key in store for path in store.info(key).files}:
        assert time.monotonic() < deadline, "it is not used again"
        stamp += 1
        store.put_many({key: stamped(stamp, nbytes) for key in "kl"})  # held files are looked at again every 20 ms
    assert counters(store).held == 0
    assert leftovers(store, spares=True) == []


def test_the_oldest_is_used_first(store: memstore.Store) -> None:
    """So that readers of the last versions have time to go."""
    names = ["a", "b", "c"]
    store.put_many({name: stamped(0, SMALL) for name in names})
    paths = {name: store.info(name).files for name in names}
    for name in ("b", "c", "a"):
        store.delete(name)
    for number, name in enumerate(("b", "c", "a")):
        store.put(f"{number}", stamped(1, SMALL))
        assert store.info(f"{number}").files == paths[name]


def test_a_claim_asks_for_four_files_and_sets_them_aside(store: memstore.Store) -> None:
    names = [f"{number}" for number in range(50)]
    store.put_many({name: stamped(0, SMALL) for name in names})
    held = store.get_many(names)
    store.delete_many(names)
    size, before = os.path.getsize(f"{root_of(store).segments}/{files(store.root)[0]}"), counters(store)
    claim = _holds(lambda: store.put("k", stamped(1, SMALL)))[0]
    assert claim.count("lock_exclusive") == 4 + 1, "four are held, and a new one is locked"
    assert counters(store).held - before.held == before.retired - counters(store).retired == 4 * size
    assert len(held) == 50


def test_a_sweep_of_many_files_is_many_short_holds(store: memstore.Store) -> None:
    names = [f"{number}" for number in range(500)]
    store.put_many({name: stamped(0, SMALL) for name in names})
    store.delete_many(names)
    assert len(files(store.root)) == 500
    holds = _holds(store.gc)
    assert files(store.root) == []
    unlinked = [hold.count("unlink") for hold in holds]
    assert sum(unlinked) == 500 and max(unlinked) <= 16
    assert not any("free_blocks" in hold for hold in holds), "that takes long"


def _holds(operation: Callable[[], object]) -> list[list[str]]:
    """The steps within each hold of the mutex."""
    holds: list[list[str]] = []
    inside = False
    for name in faults.record(operation):
        if name == "mutex_lock":
            holds.append([])
        inside = name == "mutex_lock" or (inside and name != "mutex_unlock")
        if inside:
            holds[-1].append(name)
    return holds


def test_the_pool_takes_a_tenth_of_the_free_space_at_most() -> None:
    on_small_tmpfs(40, _a_tenth)


def _a_tenth(folder: str) -> None:
    size = 200 << 10
    with memstore.open(f"{folder}/store") as store:
        for number in range(80):
            store.put(f"{number}", stamped(number, size))
        most = 0
        for number in range(40):
            store.delete(f"{number}")
            retired = counters(store).retired
            assert retired <= free_bytes(folder) / 10
            most = max(most, retired)
        assert counters(store).live > 2 * most > 8 * size, "what is live would allow for more"


def test_one_file_of_the_latest_size_stays_where_little_is_free() -> None:
    on_small_tmpfs(40, _one_stays)


def _one_stays(folder: str) -> None:
    size = 6 << 20
    with memstore.open(f"{folder}/store") as store:
        store.put("older", stamped(0, 1 << 20))
        store.delete("older")
        store.put("k", stamped(0, size))
        ballast = fill(folder, leave=size + (1 << 20))
        store.put("k", stamped(1, size))
        two = files(store.root)
        assert len(two) == 2, "the older one is gone"
        for stamp in range(2, 5):
            store.put("k", stamped(stamp, size))
            assert files(store.root) == two
        assert counters(store).retired > free_bytes(folder) / 10
        os.unlink(ballast)


@pytest.mark.parametrize("name", ["abandon-small", "abandon-large"])
def test_a_lost_race_gives_its_file_back_for_reuse(name: str, store: memstore.Store) -> None:
    operation = OPERATIONS[name]
    operation.reset(store)
    operation.run(store, None)
    kept = files(store.root)
    assert counters(store).filling == 0
    assert leftovers(store, spares=True) == []
    for _ in range(3):
        operation.run(store, None)
        assert files(store.root) == kept


@pytest.mark.parametrize("spoil", ["unlink", "cut", "link"])
def test_a_retired_file_that_can_not_be_used_is_given_back_by_puts(spoil: str, store: memstore.Store) -> None:
    """A sweep that died before its commit leaves rows without files, which nobody may count for ever."""
    store.put("k", stamped(0, SMALL))
    store.delete("k")
    (name,) = files(store.root)
    path = f"{root_of(store).segments}/{name}"
    if spoil == "cut":
        os.truncate(path, 4096)
    else:
        os.unlink(path)
    if spoil == "link":
        os.symlink("/etc/hostname", path)
    for stamp in range(4):
        store.put("k", stamped(stamp, SMALL))
    assert counters(store).held == 0
    assert name not in files(store.root)
    assert leftovers(store, spares=True) == []
