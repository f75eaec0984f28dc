"""A store with a capacity: what does not fit is refused, for all processes together, and nothing changes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import memstore
from memstore._wording import size
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.protocols.change import Change, Content
from memstore.engine.protocols.put import commit
from memstore.engine.sync.primitives import deadline_after
from tests.children import Child, Wire, children, hold_key, in_child
from tests.crash.leftovers import end_leases
from tests.inside import root_of
from tests.segments import of_size

pytestmark = pytest.mark.embedded

MIB = 1 << 20


def used(store: memstore.Store) -> int:
    return sum(os.stat(entry.path).st_blocks * 512 for entry in os.scandir(f"{store.root}/segments"))


def fill(store: memstore.Store, size: int) -> int:
    for number in range(10_000):
        try:
            store.put(f"{number}", of_size(size, number))
        except memstore.StoreFullError:
            return number
    raise AssertionError("it never got full")


@pytest.mark.parametrize("size", [2000, 50_000, 3 * MIB])
def test_puts_stop_at_it_and_go_on_after_a_delete(root: str, size: int) -> None:
    with memstore.open(root, capacity=16 * MIB) as store:
        assert store.stats().capacity == 16 * MIB
        count = fill(store, size)
        assert 0.7 * 16 * MIB < used(store) <= 16 * MIB
        with pytest.raises(memstore.StoreFullError, match="16.0 MiB") as caught:
            store.put("new", of_size(size))
        assert caught.value.key == "new" and "new" not in store
        assert [int(store.get(f"{number}")[0]) for number in range(count)] == [n % 251 for n in range(count)]
        for number in range(3):
            store.delete(f"{number}")
            store.put(f"{number}", of_size(size, 9))
        assert used(store) <= 16 * MIB


def test_files_kept_for_reuse_make_room_for_others(root: str) -> None:
    with memstore.open(root, capacity=16 * MIB) as store:
        for _ in range(3):
            store.put("large", of_size(5 * MIB))
        store.delete("large")
        assert store.stats().reusable_bytes > 5 * MIB
        store.put("larger", of_size(14 * MIB))
        assert used(store) <= 16 * MIB


def test_values_that_are_too_large_together_are_told_with_their_size(root: str) -> None:
    """And never with what the put itself took before it failed, which is nobody's by then."""
    with memstore.open(root, capacity=16 * MIB) as store:
        items = {"a": of_size(9 * MIB), "b": of_size(9 * MIB), "small": 1}
        with pytest.raises(memstore.StoreFullError, match=r"for 'b': it takes 9.0 MiB, all 3 .* 18.0 MiB,") as caught:
            store.put_many(items)
        assert caught.value.key == "b" and "the whole store is 16.0 MiB: open" in str(caught.value)
        store.put("live", of_size(6 * MIB))
        items = {"a": of_size(5 * MIB), "b": of_size(7 * MIB)}
        with pytest.raises(memstore.StoreFullError, match=r"for 'b' \(it takes 7.0 MiB, all 2 .* 12.0 MiB\)") as caught:
            store.put_many(items)
        assert "capacity 16.0 MiB, 6.0 MiB live, 0 B replaced but held, 0 B being written" in str(caught.value)
        assert caught.value.key == "b" and list(store) == ["live"]
        assert store.put_many({**items, "b": of_size(3 * MIB)}) and len(store) == 3


def test_the_error_names_who_holds_what_was_replaced(root: str) -> None:
    with memstore.open(root, capacity=16 * MIB) as store:
        store.put("key", of_size(6 * MIB))
        with Child(hold_key, root) as holder:
            holder.receive()
            store.put("key", of_size(6 * MIB))
            with pytest.raises(memstore.StoreFullError, match=f"held by pid {holder.pid}") as caught:
                store.put("key", of_size(6 * MIB))
            assert "live" in str(caught.value) and "16.0 MiB" in str(caught.value)
        store.put("key", of_size(6 * MIB, 8))
        assert (store.get("key") == 8).all()


# What writes to a store beside put and put_many; all of them may find it full.
WRITERS = {
    "attach": lambda store, file: store.attach("key", file),
    "delete": lambda store, file: store.delete("live"),
    "delete_many": lambda store, file: store.delete_many(["live", "inline"]),
    "ref": lambda store, file: pickle.dumps(store.ref("live")),
    "view": lambda store, file: pickle.dumps(store.view("live")),
    "gc": lambda store, file: store.gc(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_call_says_in_full_what_takes_the_room(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    np.save(tmp_path / "file.npy", np.arange(5000))
    with memstore.open(root, capacity=16 * MIB) as store:
        store.put_many({"inline": 1, "live": of_size(3 * MIB), "replaced": of_size(5000)})
        held = store.get("replaced")
        store.delete("replaced")

        def refuse(*_: object, **__: object) -> None:
            raise memstore.StoreFullError("the catalog can't be grown")

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "update", refuse)
            with pytest.raises(memstore.StoreFullError, match="the catalog can't be grown.*16.0 MiB") as caught:
                WRITERS[name](store, tmp_path / "file.npy")
        assert f"{size(store.stats().live_bytes)} live" in str(caught.value)
        assert f"{size(store.stats().pinned_bytes)} replaced but held by pid {os.getpid()}" in str(caught.value)
        assert caught.value.key == {"attach": "key", "gc": None, "delete_many": None}.get(name, "live")
        assert "key" not in store and (store.get("live") == 7).all() and (held == 7).all()


@pytest.mark.parametrize("name", ["attach", "ref", "view"])
def test_files_kept_for_reuse_make_room_for_the_catalog_too(root: str, tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "file.npy", np.arange(5000))
    with memstore.open(root, capacity=20 * MIB) as store:
        store.put("live", of_size(5000))
        for _ in range(2):
            store.put("large", of_size(7 * MIB))
        store.delete("large")
        opened, count = root_of(store), 0
        with pytest.raises(memstore.StoreFullError):  # as a put, but it doesn't try again
            while count < 10_000:
                content = Content(b"bytes", b"", 1400, inline=b"v" * 1400)
                commit(opened, [Change(b"%d" % count, content)], deadline_after(10))
                count += 1
        assert store.stats().reusable_bytes > 14 * MIB
        assert WRITERS[name](store, tmp_path / "file.npy")
        assert store.stats().reusable_bytes == 0
        end_leases(store)


def test_it_counts_for_all_processes_together(root: str) -> None:
    with memstore.open(root, capacity=32 * MIB) as store:
        with children(3, _fill, root) as writers:
            counts = [writer.receive(60) for writer in writers]
        assert min(counts) >= 0 and len(store) == sum(counts)
        assert 0.7 * 32 * MIB < used(store) <= 32 * MIB
        store.gc()
        assert store.stats().filling_bytes == 0


def _fill(_: Wire, number: int, root: str) -> int:
    with memstore.open(root) as store:
        for count in range(10_000):
            try:
                store.put(f"{number}/{count}", of_size(2 * MIB + 1))
            except memstore.StoreFullError:
                return count
    raise AssertionError


def test_what_another_process_is_writing_counts(root: str) -> None:
    with memstore.open(root, capacity=16 * MIB) as store, Child(_stop_while_filling, root) as writer:
        assert writer.receive() == "filling"
        assert store.stats().filling_bytes > 10 * MIB
        with pytest.raises(memstore.StoreFullError, match=f"{size(store.stats().filling_bytes)} being written"):
            store.put("key", of_size(7 * MIB))
        writer.send()
        writer.receive()
        assert (store.get("other") == 7).all() and list(store) == ["other"]


def _stop_while_filling(wire: Wire, root: str) -> None:
    from tests.support import faults

    def stop() -> None:
        wire.send("filling")
        wire.receive()

    with memstore.open(root) as store, faults.at_step(2, stop, names=frozenset({"write_at"})):
        store.put("other", of_size(10 * MIB))


def test_a_dead_writers_reservation_comes_back(root: str) -> None:
    with memstore.open(root, capacity=16 * MIB) as store:
        with pytest.raises(RuntimeError, match="exit code -9"):
            in_child(_die_while_filling, root)
        store.put("key", of_size(12 * MIB))
        assert (store.get("key") == 7).all()


def _die_while_filling(root: str) -> None:
    from tests.support import faults

    with memstore.open(root) as store, faults.at_step(2, faults.die, names=frozenset({"write_at"})):
        store.put("dead", of_size(12 * MIB))


def test_inline_values_count_by_what_the_catalog_grows(root: str) -> None:
    with memstore.open(root, capacity=10 * MIB) as store:
        with pytest.raises(memstore.StoreFullError, match="capacity"):
            for number in range(100_000):
                store.put(f"{number}", b"v" * 1400)
        count = len(store)
        assert store.get(f"{count - 1}") == b"v" * 1400
        assert store.stats().catalog_bytes < 18 * MIB
        for number in range(count // 2):
            store.delete(f"{number}")
        store.put("again", b"v" * 1400)


def test_another_one_changes_it_for_all(root: str) -> None:
    with memstore.open(root, capacity="20MiB") as store, memstore.open(root) as same:
        assert same.stats().capacity == 20 * MIB
        with memstore.open(root, "r+", capacity=5_000_000):
            assert store.stats().capacity == 5_000_000
        with pytest.raises(memstore.StoreFullError):
            store.put("key", of_size(6 * MIB))
        in_child(memstore.open, root)
    with memstore.open(root, "r") as store:
        assert store.stats().capacity == 5_000_000
    with pytest.raises(memstore.ReadOnlyError):
        memstore.open(root, "r", capacity=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("2G", 2 << 30), ("77", 77), (123, 123)],
)
def test_sizes(text: int | str, expected: int) -> None:
    from memstore._wording import parse_size

    assert parse_size(text) == expected


@pytest.mark.parametrize("wrong", ["", "GiB", "-1", "1e9", "8 gigs", 0, -5, True, 1.5, None, b"8GiB", 1 << 63, "8EiB"])
def test_what_is_no_size(root: str, wrong: object) -> None:
    from memstore._wording import parse_size

    with pytest.raises(ValueError, match="8GiB"):
        parse_size(wrong)  # type: ignore[arg-type]
    if wrong is not None:
        with pytest.raises(ValueError, match="8GiB"):
            memstore.open(root, capacity=wrong)  # type: ignore[arg-type]
