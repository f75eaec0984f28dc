"""A full file system: an error, never a crash; nothing changed; gets and deletes go on, and puts after a delete."""

from __future__ import annotations

import errno
import os
import pickle

import pytest

import memstore
from tests.children import Child, Wire, children
from tests.examples import one_in
from tests.inside import root_of
from tests.segments import of_size
from tests.small_tmpfs import fill, free_bytes, on_small_tmpfs
from tests.support.equality import assert_same

MIB = 1 << 20


def state(store: memstore.Store) -> object:
    """All that a failed put must leave as it was, but for files that were kept for reuse."""
    store.gc()
    files = {name: os.path.getsize(f"{store.root}/segments/{name}") for name in os.listdir(f"{store.root}/segments")}
    stats = store.stats()
    return [(key, store.version(key)) for key in store], files, stats.live_bytes, stats.filling_bytes, stats.puts


def put_fails(store: memstore.Store, key: str, value: object) -> memstore.StoreFullError:
    before, free = state(store), free_bytes(os.path.dirname(store.root))
    with pytest.raises(memstore.StoreFullError) as caught:
        store.put(key, value)
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.ENOSPC
    assert state(store) == before
    assert free_bytes(os.path.dirname(store.root)) == free
    return caught.value


# --- large values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100 * MIB, 14 * MIB])
def test_a_large_value_that_doesnt_fit(size: int) -> None:
    on_small_tmpfs(20, _large_value, size)


def _large_value(folder: str, size: int) -> None:
    with memstore.open(f"{folder}/store") as store:
        store.put("key", of_size(3 * MIB))
        held = store.get("key")
        for key in ("key", "other"):
            error = put_fails(store, key, of_size(size))
            assert error.key == key and repr(key) in str(error) and "delete" in str(error)
        assert_same(of_size(3 * MIB), store.get("key"))
        assert (held == 7).all()
        del held
        store.delete("key")
        store.put("key", of_size(7 * MIB, 9))
        assert_same(of_size(7 * MIB, 9), store.get("key"))


def test_large_values_until_it_is_full() -> None:
    on_small_tmpfs(40, _fill_and_drain, 3 * MIB + 4097)


def test_small_files_until_it_is_full() -> None:
    on_small_tmpfs(14, _fill_and_drain, 50_000)


def _fill_and_drain(folder: str, size: int) -> None:
    with memstore.open(f"{folder}/store") as store:
        count = 0
        try:
            for count in range(10_000):
                store.put(f"{count}", of_size(size, count))
        except memstore.StoreFullError:
            pass
        assert count > 3
        assert list(store) == sorted(f"{number}" for number in range(count))
        for number in range(count):
            assert (store.get(f"{number}") == number % 251).all()
        put_fails(store, "0", of_size(size, 99))  # an overwrite needs room for both
        put_fails(store, "new", of_size(size, 99))
        with pytest.raises(memstore.StoreFullError):
            store.put_many({"a": 1, "b": of_size(size), "0": of_size(size)})
        assert "a" not in store and (store.get("0") == 0).all()
        for _ in range(3):
            store.delete("0")
            store.put("0", of_size(size, 5))
        assert store.delete_many(f"{number}" for number in range(count)) == count
        assert list(store) == []
        for number in range(count):
            store.put(f"{number}", of_size(size, number))


def test_a_batch_that_fits_but_for_the_last() -> None:
    on_small_tmpfs(24, _batch)


def _batch(folder: str) -> None:
    with memstore.open(f"{folder}/store") as store:
        before, free = state(store), free_bytes(folder)
        said = r"has no room for '\d+' \(.*; it takes 3.\d MiB, all 20 values of the call take 6\d.\d MiB\): "
        with pytest.raises(memstore.StoreFullError, match=said):
            store.put_many({f"{number}": of_size(3 * MIB) for number in range(20)})
        assert state(store) == before
        assert free_bytes(folder) == free
        store.put_many({f"{number}": of_size(3 * MIB) for number in range(4)})


# --- inline values: the catalog is full -------------------------------------------------------------------------------


def test_inline_values_until_the_catalog_is_full() -> None:
    on_small_tmpfs(20, _inline)


def _inline(folder: str) -> None:
    value = b"v" * 1400
    with memstore.open(f"{folder}/store") as store:
        count = _fill_with_inline_values(store, value)
        names = [f"{number:06}" for number in range(count)]
        assert count > 3000
        assert list(store) == names
        error = put_fails(store, "new", value)
        assert "catalog" in str(error) or "room" in str(error)
        with pytest.raises(memstore.StoreFullError):
            store.put("large", of_size(100_000))  # its row in the catalog has no room
        for name in names[::50]:
            assert store.get(name) == value
            pickle.dumps(store.get(name))
        for name in names[: count // 2]:
            assert store.delete(name)
        assert len(store) == count - count // 2
        for name in names[: count // 4]:
            store.put(name, value)
        assert store.get(names[0]) == store.get(names[-1]) == value
    with memstore.open(f"{folder}/store") as store:
        assert len(store) == count - count // 2 + count // 4


def _fill_with_inline_values(store: memstore.Store, value: bytes) -> int:
    for number in range(100_000):
        try:
            store.put(f"{number:06}", value)
        except memstore.StoreFullError:
            return number
    raise AssertionError("it never got full")


@pytest.mark.parametrize("order", one_in(2, ["scattered", "backwards", "all at once", "forwards"]))
def test_every_key_of_a_full_catalog_can_be_deleted(order: str) -> None:
    on_small_tmpfs(20, _delete_all, order)


def _delete_all(folder: str, order: str) -> None:
    with memstore.open(f"{folder}/store") as store:
        names = [f"{number:06}" for number in range(_fill_with_inline_values(store, b"v" * 1400))]
        fill(folder)
        if order == "backwards":
            names.reverse()
        if order == "scattered":
            names = [name for start in range(97) for name in names[start::97]]
        if order == "all at once":
            assert store.delete_many(names) == len(names)
        else:
            for name in names:
                store.delete(name)
        assert list(store) == []
        store.put("again", b"v" * 1400)


def test_puts_that_are_tried_again_leave_the_room_for_deletes() -> None:
    """Each of them looks how full the catalog is, also if the one before was refused; so does each process's first."""
    on_small_tmpfs(20, _try_again)


def _try_again(folder: str) -> None:
    root = f"{folder}/store"
    with memstore.open(root) as store:
        count = _fill_with_inline_values(store, b"v" * 1400)
        for number in range(300):
            with pytest.raises(memstore.StoreFullError):
                store.put(f"again {number}", b"v" * 1400)
    with children(20, _put_once, root) as attempts:
        assert not any(attempt.receive() for attempt in attempts)
    with memstore.open(root) as store:
        assert len(store) == count


def _put_once(_: Wire, number: int, root: str) -> bool:
    with memstore.open(root) as store:
        try:
            store.put(f"other {number}", b"v" * 1400)
        except memstore.StoreFullError:
            return False
    return True


def test_overwrites_of_inline_values_go_on_when_it_is_full() -> None:
    on_small_tmpfs(20, _overwrite_inline)


def _overwrite_inline(folder: str) -> None:
    with memstore.open(f"{folder}/store") as store:
        store.put_many({f"{number}": b"v" * 1400 for number in range(500)})
        fill(folder)
        for turn in range(5):
            for number in range(500):
                store.put(f"{number}", bytes([turn]) * 1400)
        assert {store.get(f"{number}") for number in range(500)} == {bytes([4]) * 1400}


# --- everything else --------------------------------------------------------------------------------------------------


def test_all_but_puts_goes_on_when_not_a_byte_is_left() -> None:
    on_small_tmpfs(20, _not_a_byte)


def _not_a_byte(folder: str) -> None:
    root = f"{folder}/store"
    with memstore.open(root) as store:
        store.put_many({"small": 1, "file": of_size(50_000), "large": of_size(3 * MIB), "gone": of_size(50_000)})
    ballast = fill(folder)
    assert free_bytes(folder) == 0
    for mode in ("r", "r+", "a"):
        memstore.open(root, mode).close()
    with memstore.open(root) as store, Child(_wait_for_small, root) as waiting:
        waiting.receive()
        assert_same(of_size(50_000), store.get("file"))
        got = store.get("large")
        got.fill_(1)  # copy-on-write takes the process's memory
        assert (store.get("large") == 7).all()
        put_fails(store, "file", of_size(50_000))
        put_fails(store, "large", of_size(3 * MIB))
        assert list(store) == ["file", "gone", "large", "small"]
        sent = pickle.dumps(store.ref("gone"))  # a lease
        assert store.delete("gone")
        assert (pickle.loads(sent).get() == 7).all()
        assert store.info("file").nbytes == 50_000 and store.stats().keys == 3
        version = store.put("small", 2)  # inline: the catalog has room
        assert waiting.receive(20) == version
        store.delete("file")
        del got
        store.put("file", of_size(40_000))
        store.gc()
        os.unlink(ballast)
        store.put("large", of_size(4 * MIB))


def _wait_for_small(wire: Wire, root: str) -> int:
    with memstore.open(root, "r") as store:
        version = store.version("small")
        wire.send()
        return store.wait("small", newer_than=version, timeout=30)


@pytest.mark.full
def test_seventy_readers_find_room_for_themselves() -> None:
    """LMDB's table of readers is sparse if left alone: beyond its first page a reader was a SIGBUS."""
    on_small_tmpfs(12, _seventy_readers)


def _seventy_readers(folder: str) -> None:
    root = f"{folder}/store"
    with memstore.open(root) as store:
        store.put("key", 1)
        store.put("file", of_size(50_000))
    fill(folder)
    with children(70, _read_and_stay, root) as readers:
        for reader in readers:
            assert reader.receive() == (1, 350_000)
        for reader in readers:
            reader.send()
        for reader in readers:
            assert reader.receive() == (1, 350_000)


def _read_and_stay(wire: Wire, _: int, root: str) -> object:
    with memstore.open(root, "r") as store:
        root_ = root_of(store)
        found = store.get("key"), int(store.get("file").sum())

        def stay(transaction: object) -> None:  # all of them in a transaction at once
            wire.send(found)
            wire.receive()

        with root_.guard:
            root_.catalog.view(stay)
        return store.get("key"), int(store.get("file").sum())


def test_a_store_that_cant_be_created_for_want_of_room() -> None:
    on_small_tmpfs(24, _create)


def _create(folder: str) -> None:
    refused = 0
    for number, room in enumerate([0, 4096, 8192, 12288, 20_480, 40_960, 100_000, 300_000, MIB, 8 * MIB, 9 * MIB]):
        root = f"{folder}/store{number}"
        ballast = fill(folder, leave=room)
        try:
            memstore.open(root).close()
        except memstore.StoreFullError as error:
            refused += 1
            assert error.errno == errno.ENOSPC and root in str(error)
        os.unlink(ballast)
        with memstore.open(root) as store:  # the same process, the same folder, with room
            store.put("key", of_size(50_000))
            assert_same(of_size(50_000), store.get("key"))
        import shutil

        shutil.rmtree(root)
    assert refused == 10


@pytest.mark.parametrize("room", [0, 1, 2, 5, 10])
def test_a_put_that_fails_half_way(room: int) -> None:
    """With room for so many pages of a small file; the catalog has room."""
    on_small_tmpfs(12, _half_way, room)


def _half_way(folder: str, room: int) -> None:
    with memstore.open(f"{folder}/store") as store:
        store.put("key", of_size(5000))
        fill(folder, leave=room * 4096)
        put_fails(store, "key", of_size(60_000))
        assert_same(of_size(5000), store.get("key"))


def test_writers_of_two_processes_meet_the_end_together() -> None:
    on_small_tmpfs(24, _two_writers)


def _two_writers(folder: str) -> None:
    root = f"{folder}/store"
    with memstore.open(root) as store:
        with children(2, _put_until_full, root) as writers:
            for writer in writers:
                writer.receive()
            for writer in writers:
                writer.send()
            counts = [writer.receive() for writer in writers]
        assert min(counts) > 0
        assert len(store) == sum(counts)
        for key, value in store.items():
            assert (value == int(key.split("/")[1]) % 251).all()
        store.gc()
        stats = store.stats()
        assert stats.filling_bytes == stats.reusable_bytes == 0
        assert stats.live_bytes == sum(counts) * (4096 + 73_728)  # data in its size class


def _put_until_full(wire: Wire, number: int, root: str) -> int:
    with memstore.open(root) as store:
        wire.send()
        wire.receive()
        for count in range(10_000):
            try:
                store.put(f"{number}/{count}", of_size(70_000, count))
            except memstore.StoreFullError:
                return count
    raise AssertionError
