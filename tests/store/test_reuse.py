"""Files that are used again, and mappings that are kept for it: the same values, no more memory, no faults."""

from __future__ import annotations

import os

import pytest

import memstore
from memstore.engine import syscalls
from memstore.engine.sync.primitives import Doorbell
from tests.children import Child, Wire, in_child
from tests.huge_pages import require_huge_pages
from tests.segments import files, of_size
from tests.small_tmpfs import free_bytes, on_small_tmpfs

pytestmark = pytest.mark.embedded

MIB = 1 << 20


def shared_mappings(root: str) -> int:
    with open("/proc/self/maps") as file:
        return sum(f"{root}/segments/" in line and line.split()[1].startswith("rw-s") for line in file)


@pytest.mark.parametrize("size", [5000, 300_000, 3 * MIB])
def test_overwrites_take_two_files(store: memstore.Store, size: int) -> None:
    for number in range(20):
        store.put("key", of_size(size, number))
        assert (store.get("key") == number).all()
    assert len(files(store.root)) == 2


def test_values_of_nearly_one_size_share_files(store: memstore.Store) -> None:
    for number in range(40):
        size = 3 * MIB - 1000 * (number % 8)
        store.put("key", {"a": of_size(size, number), "b": "x" * (number * 40)})
        value = store.get("key")
        assert (value["a"] == number).all() and value["a"].numel() == size
        del value
    assert len(files(store.root)) <= 4


def test_a_much_smaller_value_takes_no_large_file(store: memstore.Store) -> None:
    store.put("key", of_size(8 * MIB))
    store.delete("key")
    store.put("key", of_size(6 * MIB))
    assert store.stats().live_bytes < 7 * MIB


def test_two_writers_take_turns_with_the_same_files(root: str) -> None:
    """Each keeps mappings of files that the other fills in between."""
    with memstore.open(root) as store, Child(_overwrite, root) as other:
        other.receive()
        for number in range(0, 60, 2):
            store.put("key", of_size(3 * MIB, number))
            other.send(number + 1)
            other.receive()
            assert (store.get("key") == number + 1).all()
            store.put("mine", of_size(3 * MIB, number))
            assert (store.get("mine") == number).all() and (store.get("key") == number + 1).all()
        other.send(None)
        assert len(files(store.root)) <= 5


def _overwrite(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        wire.send()
        while (number := wire.receive()) is not None:
            store.put("key", of_size(3 * MIB, number))
            assert (store.get("key") == number).all()
            wire.send()


def put_theirs(root: str) -> None:
    with memstore.open(root) as store:
        store.put("theirs", of_size(3 * MIB))


def test_a_writer_takes_the_file_that_it_has_mapped_before_an_older_one_of_others(root: str) -> None:
    with memstore.open(root) as store:
        store.put("live", of_size(16 * MIB))  # a sweep leaves less than that of what may be used again
        in_child(put_theirs, root)  # before our own: a fork gives up what is mapped
        store.put("ours", of_size(3 * MIB))
        ours, theirs = store.info("ours").files, store.info("theirs").files
        store.delete("theirs")
        store.delete("ours")
        store.put("ours", of_size(3 * MIB))
        assert store.info("ours").files == ours
        store.put("more", of_size(3 * MIB))
        assert store.info("more").files == theirs


def test_a_writer_keeps_few_mappings_and_none_when_it_closes(root: str) -> None:
    store = memstore.open(root)
    for number in range(10):
        store.put(f"{number}", of_size(3 * MIB))
        assert shared_mappings(store.root) <= 3
    assert shared_mappings(store.root) > 0
    assert in_child(shared_mappings, store.root) == 0
    assert in_child(_put_and_count, store) <= 3
    store.close()
    assert shared_mappings(root) == 0


def _put_and_count(store: memstore.Store) -> int:
    for number in range(5):
        store.put(f"{number}", of_size(3 * MIB, 9))
        assert (store.get(f"{number}") == 9).all()
    return shared_mappings(store.root)


def test_memory_comes_back_from_files_that_a_writer_keeps_mapped() -> None:
    on_small_tmpfs(40, _comes_back)


def _comes_back(folder: str) -> None:
    root = f"{folder}/store"
    with memstore.open(root) as store:
        store.put("inline", 1)
        before = free_bytes(folder)
        for number in range(4):
            store.put("key", of_size(6 * MIB, number))
        store.delete("key")
        assert shared_mappings(root) > 0
        assert in_child(_collect, root) > 6 * MIB
        assert files(store.root) == []
        assert abs(free_bytes(folder) - before) < MIB  # unlinked by another, mapped by this one
        for number in range(4):
            store.put("key", of_size(6 * MIB, number))
            assert (store.get("key") == number).all()


def _collect(root: str) -> int:
    with memstore.open(root) as store:
        return store.gc()


@pytest.mark.parametrize("refused", ["collapse", "populate", "both"])
def test_where_the_kernel_refuses_huge_pages(
    store: memstore.Store, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    for name in ("collapse", "populate"):
        if refused in (name, "both"):
            monkeypatch.setattr(syscalls, name, lambda address, size: False)
    for number in range(6):
        store.put("key", {"a": of_size(5 * MIB, number), "b": of_size(3 * MIB + 77, number)})
        value = store.get("key")
        assert (value["a"] == number).all() and (value["b"] == number).all()
        blocks = [os.stat(f"{store.root}/segments/{name}").st_blocks * 512 for name in files(store.root)]
        sizes = [os.path.getsize(f"{store.root}/segments/{name}") for name in files(store.root)]
        assert blocks >= sizes, "what is not allocated is a SIGBUS when the disk is full"
    if refused in ("collapse", "both"):
        assert store.stats().huge_page_bytes == 0


def test_files_keep_their_huge_pages_when_they_are_used_again(store: memstore.Store) -> None:
    require_huge_pages(store.root)
    size = 8 * MIB
    for number in range(4):
        store.put("key", of_size(size, number))
    assert len(files(store.root)) == 2
    before = store.stats().huge_page_bytes
    value = store.get("key")
    assert (value == 3).all()
    assert store.stats().huge_page_bytes - before == size


def test_a_put_that_was_published_returns_though_another_thread_closes_the_store(
    store: memstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        store.put(f"key {number}", of_size(300_000, number))
    for number in range(3):
        store.delete(f"key {number}")
    wake = Doorbell.wake

    def wake_and_close(bell: Doorbell, key: int) -> None:
        wake(bell, key)
        store.close()

    monkeypatch.setattr(Doorbell, "wake", wake_and_close)
    version = store.put("key 3", of_size(100_000))
    monkeypatch.undo()
    with memstore.open(store.root) as again:
        assert again.version("key 3") == version
