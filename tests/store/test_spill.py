"""Values that nobody has read for longest move to a folder on a disk where there is no room, and are never lost."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

import memstore
from memstore.errors import (
    NotAStoreError,
    QuotaExceededError,
    ReadOnlyError,
    StorageError,
    StoreFullError,
)
from tests.children import Child, Wire
from tests.crash.leftovers import left_after_gc
from tests.inside import root_of
from tests.small_tmpfs import on_small_tmpfs

pytestmark = pytest.mark.embedded

MIB = 1 << 20
ROOM = 8  # values


def value(number: int) -> torch.Tensor:
    return torch.full((MIB // 4,), float(number))


@pytest.fixture
def disk(root: str) -> Iterator[str]:
    """A path for a spill folder."""
    path = tempfile.mkdtemp(dir=os.path.dirname(root), prefix="disk-")
    yield f"{path}/spill"


@pytest.fixture
def full(root: str, disk: str) -> Iterator[memstore.Store]:
    """A store with room for 8 values, and 8 of them, k0 to k7."""
    with memstore.open(root, capacity=ROOM * (MIB + 8192), spill=disk, checksum=True, timeout=20.0) as store:
        for number in range(ROOM):
            store.put(f"k{number}", value(number))
        yield store


def moved(store: memstore.Store) -> list[str]:
    return [key for key in store if store.info(key).spilled]


def check(store: memstore.Store, *numbers: int) -> None:
    for number in numbers:
        assert torch.equal(store.get(f"k{number}"), value(number))


def files_in(disk: str) -> int:
    return sum(name.endswith(".safetensors") for _, _, names in os.walk(disk) for name in names)


def test_those_that_were_not_read_for_longest_move(full: memstore.Store, disk: str) -> None:
    assert moved(full) == []
    full.put("k8", value(8))  # from this look on the kernel tells who was read
    assert moved(full) == ["k0"]
    check(full, 1, 2)
    full.put("k9", value(9))
    full.put("k10", value(10))
    assert moved(full) == ["k0", "k3", "k4"]
    check(full, *range(11))
    (path,) = full.info("k3").files
    assert path.startswith(f"{disk}/") and os.path.exists(path)
    assert "moved to a disk" in str(full.info("k3")) and "moved" not in str(full.info("k10"))
    stats = full.stats()
    assert 3 * MIB < stats.spilled_bytes < 3.1 * MIB and stats.live_bytes < ROOM * (MIB + 8192)
    assert "moved to a disk" in repr(stats)
    report = full.verify()
    assert report.ok and report.checked == 11


def test_a_store_without_a_folder_is_full(root: str) -> None:
    with memstore.open(root, capacity=2 * MIB) as store:
        store.put("k0", value(0))
        with pytest.raises(StoreFullError) as raised:
            store.put("k1", value(1))
        assert "moved" not in str(raised.value)


def test_a_value_larger_than_the_store_moves_nothing(full: memstore.Store) -> None:
    with pytest.raises(StoreFullError):
        full.put("large", torch.zeros(10 * MIB))
    assert moved(full) == []


def test_what_is_replaced_or_deleted_leaves_the_disk(full: memstore.Store, disk: str) -> None:
    for number in range(8, 12):
        full.put(f"k{number}", value(number))
    assert moved(full) == ["k0", "k1", "k2", "k3"] and files_in(disk) == 4
    full.put("k0", value(20))
    full.delete("k1")
    full.put("k2", 1)
    full.gc()
    assert files_in(disk) == len(moved(full)) and "k3" in moved(full) and "k0" not in moved(full)
    assert torch.equal(full.get("k0"), value(20))
    full.clear()
    assert left_after_gc(full) == [] and files_in(disk) == 0


def test_what_somebody_holds_stays_in_memory_and_as_it_is(full: memstore.Store) -> None:
    held = full.get("k0")
    full.put("k8", value(8))
    assert moved(full) == ["k1"]
    assert torch.equal(held, value(0))


def test_held_versions_survive_a_move(full: memstore.Store, disk: str) -> None:
    """Those that were taken before it as references, and those that are taken of a moved value."""
    first = pickle.dumps(full.ref("k0"))
    for number in range(8, 20):
        full.put(f"k{number}", value(number))
    assert {"k0", "k1", "k2", "k3"} < set(moved(full))
    view, ref = full.view("k1"), full.ref("k2")
    tensor = full.get("k3")
    for number in range(4):
        full.put(f"k{number}", value(30 + number))
    full.gc()
    assert torch.equal(pickle.loads(first).get(), value(0))  # by its lease
    assert torch.equal(view[:], value(1)) and torch.equal(ref.get(), value(2)) and torch.equal(tensor, value(3))
    sent = pickle.dumps(ref)
    del ref
    full.gc()
    assert torch.equal(pickle.loads(sent).get(), value(2))


def test_kept_and_pinned_versions_move_and_stay_readable(full: memstore.Store) -> None:
    full.clear()
    versions = [full.put("k", value(number), history=3) for number in range(3)]
    pin = full.pin("k", version=versions[0])
    for number in range(12):
        full.put(f"k{number}", value(number))
    assert full.versions("k") == tuple(versions)  # none was given up for room
    assert full.stats().spilled_bytes > 6 * MIB
    for number, version in enumerate(versions):
        assert torch.equal(full.get("k", version=version), value(number))
    full.put("k", value(3))
    assert full.versions("k") == (*versions, versions[-1] + 13)
    pin.close()
    assert len(full.versions("k")) == 3 and full.verify().ok
    full.clear()
    assert left_after_gc(full) == []


def test_rows_that_are_written_in_place_stay(root: str, disk: str) -> None:
    with memstore.open(root, capacity=8 * MIB, spill=disk) as store:
        data = store.create_dataset("rows", ((MIB // 4,), torch.float32), capacity=3)
        data.extend(torch.stack([value(number) for number in range(3)]))
        del data
        for number in range(8):
            store.put(f"k{number}", value(number))
        assert "rows" not in moved(store) and len(moved(store)) >= 3
        check(store, *range(8))
        assert torch.equal(store.open_dataset("rows")[1], value(1))


def test_parts_of_ranks_move(root: str, disk: str) -> None:
    with memstore.open(root, capacity=6 * MIB, spill=disk, checksum=True) as store:
        whole = torch.arange(2 * MIB // 4, dtype=torch.float32).reshape(2, -1)
        for rank in range(2):
            part = memstore.TensorShard(whole[rank : rank + 1], global_shape=tuple(whole.shape), offsets=(rank, 0))
            store.put_sharded("w", {"w": part}, attempt="1", rank=rank, world_size=2, wait=False)
        for number in range(6):
            store.put(f"k{number}", value(number))
        assert store.info("w").spilled
        assert torch.equal(store.get("w")["w"], whole) and store.verify().ok


# --- several processes ------------------------------------------------------------------------------------------------


def _put_and_check(wire: Wire, root: str, start: int) -> None:
    with memstore.open(root, timeout=60.0) as store:
        for number in range(start, start + 20):
            store.put(f"k{number}", value(number))
            check(store, start, number)


def _read(wire: Wire, root: str) -> int:
    count = 0
    with memstore.open(root, "r", timeout=60.0) as store:
        wire.send()
        while not wire.has_message:
            check(store, *range(4))
            count += 4
    return count


def test_two_processes_fill_it_and_one_reads(full: memstore.Store, disk: str) -> None:
    with Child(_read, full.root) as reader:
        reader.receive()
        with Child(_put_and_check, full.root, 100) as first, Child(_put_and_check, full.root, 200) as second:
            first.receive(), second.receive()
        reader.send()
        assert reader.receive() > 0
    check(full, *range(ROOM), *range(100, 120), *range(200, 220))
    assert full.stats().spilled_bytes > 38 * MIB and full.verify().ok
    assert left_after_gc(full) == []


def _read_by_and_by(wire: Wire, root: str) -> None:
    with memstore.open(root, "r") as store:
        wire.send(torch.equal(store.get("k0"), value(0)))
        wire.receive()
        check(store, *range(4))
        with memstore.open(root) as writing:
            for number in range(4, 8):
                writing.put(f"k{number}", value(number))


def test_a_process_that_had_it_open_before_finds_what_was_moved(root: str, disk: str) -> None:
    with memstore.open(root, capacity=5 * MIB) as store:
        for number in range(4):
            store.put(f"k{number}", value(number))
        with Child(_read_by_and_by, root) as child:
            assert child.receive()
            with memstore.open(root, spill=disk):
                store.put("k4", value(4))
                store.put("k5", value(5))
            assert len(moved(store)) >= 2
            child.send()
            child.receive()
        check(store, *range(8))


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_gone_is_told(full: memstore.Store, root: str, disk: str) -> None:
    full.put("k8", value(8))
    os.rename(disk, f"{disk}.away")
    with pytest.raises(StorageError, match="isn't there") as raised:
        full.get("k0")
    assert raised.value.path is not None and raised.value.path.startswith(disk)
    del raised  # its traceback keeps the store open
    check(full, 1, 8)
    full.close()
    for mode in ("r", "a"):
        with pytest.raises(StorageError, match="isn't there"):
            memstore.open(root, mode)
    with pytest.raises(StorageError, match="isn't there"):
        memstore.repair(root, timeout=5.0)
    with pytest.raises(ValueError, match="doesn't have them"):
        memstore.open(root, spill=f"{disk}.new")
    with memstore.open(root, spill=f"{disk}.away") as store:  # it was moved
        check(store, *range(9))
    with memstore.open(root, "r") as store:
        check(store, 0)


def test_an_empty_folder_that_is_gone_is_made_again(root: str, disk: str) -> None:
    with memstore.open(root, capacity=4 * MIB, spill=disk):
        pass
    shutil.rmtree(disk)
    with memstore.open(root) as store:
        for number in range(5):
            store.put(f"k{number}", value(number))
        assert len(moved(store)) >= 2
    with memstore.open(root, spill=disk) as store:  # the same again
        check(store, *range(5))


def test_what_no_folder_can_be_is_refused(root: str, disk: str) -> None:
    with pytest.raises(ReadOnlyError):
        memstore.open(root, "r", spill=disk)
    with pytest.raises(TypeError, match="spill is the path"):
        memstore.open(root, spill=3)  # type: ignore[arg-type]
    memstore.open(root).close()
    for path, words in ((f"{root}/below", "itself"), (f"{disk}/no/parent", "create it first"), (__file__, "folder")):
        with pytest.raises(NotAStoreError, match=words):
            memstore.open(root, spill=path)
    with memstore.open(root) as store:  # nothing was changed
        store.put("k0", value(0))


def test_a_copied_store_does_not_take_the_files(full: memstore.Store, root: str) -> None:
    full.put("k8", value(8))
    full.close()
    shutil.copytree(root, f"{root}.copy")
    with pytest.raises(NotAStoreError, match="is a copy of the store"):
        memstore.open(f"{root}.copy")
    os.rename(root, f"{root}.moved")
    shutil.rmtree(f"{root}.copy")
    with memstore.open(f"{root}.moved") as store:  # it was moved: all is its own
        check(store, *range(9))


def test_a_store_that_is_removed_takes_them_along(full: memstore.Store, root: str, disk: str) -> None:
    full.put("k8", value(8))
    full.close()
    memstore.open(root, "w").close()
    assert os.listdir(disk) == []
    with memstore.open(root, capacity=2 * MIB, spill=disk) as store:
        store.put("k0", value(0))
        store.put("k1", value(1))
    memstore.destroy(root)
    assert os.listdir(disk) == []


def test_a_store_that_is_served_may_have_one(root: str, disk: str) -> None:
    memstore.open(root, spill=disk).close()
    _need_cluster(root)
    memstore.destroy(root)
    memstore.open(root).close()
    _need_cluster(root)
    with memstore.open(root, capacity=3 * MIB, spill=disk) as store:
        for number in range(4):
            store.put(f"k{number}", value(number))
        assert len(moved(store)) == 2
        check(store, *range(4))


def _need_cluster(root: str) -> None:
    from memstore.engine import deadline_after, need_cluster

    with memstore.open(root) as store:
        need_cluster(root_of(store), deadline_after(10.0))


# --- no room there either ---------------------------------------------------------------------------------------------


def _on_a_small_disk(folder: str, root: str) -> None:
    with memstore.open(root, capacity=3 * MIB, spill=f"{folder}/spill", inline_limit=0) as store:
        with pytest.raises(StoreFullError) as raised:
            for number in range(20):
                store.put(f"k{number}", value(number))
        text = str(raised.value)
        assert root in text and f"{folder}/spill" in text and "free" in text
        count = len(store)
        assert 5 <= count <= 6
        check(store, *range(count))
        store.delete("k0")
        store.put("k0", value(0))
        check(store, *range(count))
        assert store.verify().ok and left_after_gc(store) == []
    memstore.destroy(root)  # its disk goes with this process


def test_a_full_disk_is_told_and_nothing_is_lost(root: str) -> None:
    on_small_tmpfs(4, _on_a_small_disk, root)


def _in_a_small_memory(folder: str, disk: str) -> None:
    with memstore.open(f"{folder}/store", spill=disk) as store:  # the file system is the limit
        for number in range(40):
            store.put(f"k{number}", value(number))
        check(store, *range(40))
        assert len(moved(store)) > 15
        store.put_many({f"m{number}": value(number) for number in range(8)})
        check(store, *range(40))


def test_a_full_memory_moves_values(disk: str) -> None:
    on_small_tmpfs(28, _in_a_small_memory, disk)


# --- a repair ---------------------------------------------------------------------------------------------------------


def test_a_repair_finds_what_was_moved(full: memstore.Store, root: str, disk: str) -> None:
    for number in range(8, 12):
        full.put(f"k{number}", value(number))
    path = full.info("k1").files[0]
    full.close()
    shutil.copy(path, f"{root}/segments/")  # a kill between the commit of a move and its end leaves both
    os.remove(f"{root}/catalog/local/data.mdb")
    report = memstore.repair(root)
    assert report.lost == () and len(report.recovered) == 12
    with memstore.open(root) as store:
        check(store, *range(12))
        assert len(moved(store)) in (3, 4) and store.verify().ok
        store.clear()
        assert left_after_gc(store) == []


def test_a_verify_names_a_damaged_copy(full: memstore.Store) -> None:
    full.put("k8", value(8))
    (path,) = full.info("k0").files
    with open(path, "r+b") as file:
        file.seek(MIB // 2)
        file.write(b"damage")
    (error,) = full.verify().damaged
    assert (error.key, error.path) == ("k0", path)


# --- a quota beside a full store --------------------------------------------------------------------------------------


def test_a_quota_that_is_met_while_room_is_made_takes_nothing_of_others(root: str) -> None:
    """A put that finds the store full, and then its quota taken, drops kept versions of that quota's keys alone."""
    with memstore.open(root, capacity=8 * MIB) as store:
        kept = [store.put("other/k", value(number), history=2) for number in range(2)]
        store.set_quota("a/", 2 * MIB)
        store.put("a/1", value(1))
        store.put("b", torch.zeros(3 * MIB, dtype=torch.uint8))
        store.delete("b")  # its file stays, to be used again
        assert store.stats().reusable_bytes > 3 * MIB
        with pytest.raises(QuotaExceededError):
            store.put("a/2", torch.zeros(5 * MIB // 2, dtype=torch.uint8))
        assert store.stats().reusable_bytes == 0, "the store wasn't full"
        assert store.versions("other/k") == tuple(kept)
