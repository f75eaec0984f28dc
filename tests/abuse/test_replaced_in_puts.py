"""A store is removed, moved or made anew during puts: what is acknowledged is in the store that the path names."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import memstore
from tests.abuse.replacing import INLINE, SEGMENT, make, make_anew, move_and_make_anew, move_away
from tests.children import Child, Wire, in_child
from tests.crash.blockers import waiting_for_mutexes
from tests.inside import root_of
from tests.support import faults


class Change(NamedTuple):
    make: Callable[[memstore.Store], object]
    commits: int  # that of a claim, and its own
    keys: tuple[str, ...]


CHANGES = {
    "inline": Change(lambda store: store.put("key", INLINE + 1), 1, ("key",)),
    "segment": Change(lambda store: store.put("segment", SEGMENT + 1), 2, ("segment",)),
    "batch": Change(lambda store: store.put_many({"key": INLINE + 1, "segment": SEGMENT + 1}), 2, ("key", "segment")),
    "delete": Change(lambda store: store.delete_many(["key", "segment"]), 1, ("key", "segment")),
}


def steps_until_its_commit(change: Change, root: str) -> int:
    make(root)
    with memstore.open(root) as store:
        change.make(store)
        make(root)
        steps = faults.record(lambda: change.make(store))
    return [number for number, name in enumerate(steps, 1) if name == faults.COMMIT][change.commits - 1]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_not_acknowledged_if_the_store_moved_before_its_commit(scratch: str, name: str) -> None:
    """Nor right after it. When the store comes back, the change is there, or not, as a whole."""
    change = CHANGES[name]
    steps, seen = steps_until_its_commit(change, scratch), set[int | None]()
    with memstore.open(scratch) as store:
        for number, after in itertools.product(range(1, steps + 1), (False, True)):
            make(scratch)
            with (
                faults.at_step(number, lambda: move_away(store), after=after),
                pytest.raises(memstore.NotAStoreError, match="removed or moved"),
            ):
                change.make(store)
            os.rename(f"{scratch}.aside", scratch)
            found = {
                None if value is None else int(value[0]) for value in (store.get(key, None) for key in change.keys)
            }
            assert len(found) == 1, f"moved at step {number}"
            seen |= found
        store.gc()
        assert store.verify().ok and store.stats().filling_bytes == 0
    assert 0 in seen


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_not_acknowledged_if_the_store_was_made_anew_before_its_commit(scratch: str, name: str) -> None:
    """No error but ours, and nothing of it in the new store."""
    change = CHANGES[name]
    for number in range(1, steps_until_its_commit(change, scratch) + 1):
        make(scratch)
        with (
            memstore.open(scratch) as store,
            faults.at_step(number, lambda: make_anew(scratch), after=True),
            pytest.raises(memstore.NotAStoreError, match="replaced meanwhile"),
        ):
            change.make(store)
        with memstore.open(scratch, "r") as store:
            assert sorted(store) == ["key", "segment"] and sorted(os.listdir(store.root + "/segments")) == [
                SEGMENT_FILE
            ]
            assert torch.equal(store.get("key"), INLINE) and torch.equal(store.get("segment"), SEGMENT)
        shutil.rmtree(scratch)


SEGMENT_FILE = f"{1:016x}.safetensors"


def test_a_put_that_waits_for_the_mutex_meanwhile(scratch: str) -> None:
    make(scratch)
    ended: list[object] = []

    def put(store: memstore.Store, value: torch.Tensor) -> None:
        try:
            ended.append(store.put("key", value))
        except BaseException as error:
            ended.append(type(error))

    with memstore.open(scratch) as store:
        threads = [threading.Thread(target=put, args=(store, value)) for value in (INLINE + 1, SEGMENT + 1)]

        def hold() -> None:
            for thread in threads:
                thread.start()
            while waiting_for_mutexes() < len(threads):
                time.sleep(0.001)
            in_child(move_and_make_anew, scratch)

        root_of(store).mutex.run(hold, time.monotonic() + 20)
        for thread in threads:
            thread.join(100)
    assert ended == [memstore.NotAStoreError] * 2
    with memstore.open(scratch) as new, memstore.open(f"{scratch}.aside") as moved:
        assert torch.equal(new.get("key"), INLINE) and torch.equal(moved.get("key"), INLINE)


Journal = list[tuple[str, int, float, float]]  # key, stamp, when the put began, and when it was acknowledged


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.full)])
def test_a_writer_loses_nothing_while_its_store_is_swapped_again_and_again(scratch: str, count: int) -> None:
    """What is acknowledged between two swaps is in the store that was there between them."""
    make(scratch)
    since = [time.monotonic()]  # each store's first moment, and last
    until: list[float] = []
    with Child(_put_and_journal, scratch) as writer:
        assert writer.receive() == "opened"
        for number in range(count):
            make(f"{scratch}.new")
            until.append(time.monotonic())
            os.rename(scratch, f"{scratch}.{number}")
            os.rename(f"{scratch}.new", scratch)
            since.append(time.monotonic())
            assert writer.receive() == "opened"
        writer.send()
        journal: Journal = writer.receive()
    os.rename(scratch, f"{scratch}.{count}")
    until.append(time.monotonic())
    for number in range(count + 1):
        mine = [entry for entry in journal if since[number] <= entry[2] and entry[3] <= until[number]]
        with memstore.open(f"{scratch}.{number}", "r") as store:
            for key in ("key", "segment"):
                last = max((stamp for name, stamp, *_ in mine if name == key), default=0)
                assert int(store.get(key)[0]) >= last, f"store {number} has lost the put of {last}"
    assert len(journal) > count


def _put_and_journal(wire: Wire, root: str) -> Journal:
    journal: Journal = []
    stamps = itertools.count(1)
    while True:
        try:
            store = memstore.open(root, "r+")
        except memstore.NotAStoreError:  # between two renames
            continue
        with store:
            wire.send("opened")
            for stamp in stamps:
                if wire.has_message:
                    return journal
                key, value = ("key", INLINE) if stamp % 2 else ("segment", SEGMENT)
                began = time.monotonic()
                try:
                    store.put(key, value + stamp)
                except memstore.NotAStoreError:
                    break
                journal.append((key, stamp, began, time.monotonic()))
