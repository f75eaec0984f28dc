"""Puts in a row: the file that one replaces is kept for the next, which then needs no claim. Nobody else feels it."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from functools import partial

import pytest

import memstore
from memstore.engine import syscalls
from memstore.engine.files.segments import MAPPED_AGAIN
from memstore.engine.format.records import FILLING, RETIRED
from memstore.engine.protocols.sweep import CLEANUP_TIMEOUT
from memstore.engine.root.roots import NextFile
from memstore.engine.sync.primitives import deadline_after
from tests.children import Child, Wire, in_child
from tests.crash.leftovers import leftovers
from tests.inside import root_of
from tests.leaks import open_files
from tests.patience import least_seconds
from tests.segments import files, of_size
from tests.support import faults

pytestmark = pytest.mark.embedded

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB


def kept(store: memstore.Store) -> NextFile:
    ahead = root_of(store).next_put.file
    assert ahead is not None, "nothing is kept"
    return ahead


def put_in_a_row(store: memstore.Store, key: str = "key", size: int = SIZE, puts: int = 4) -> None:
    for number in range(puts):
        store.put(key, of_size(size, number))
        assert (store.get(key) == number).all()


def states(store: memstore.Store) -> list[int]:
    root = root_of(store)
    with root.guard:
        return sorted(row.state for _, row in root.catalog.view(lambda transaction: list(transaction.segments())))


def holds(store: memstore.Store, key: str, size: int = SIZE) -> int:
    return faults.record(lambda: store.put(key, of_size(size))).count("mutex_lock")


@pytest.mark.parametrize("size", [16 * KIB, SIZE, 2 * MIB - 256 * KIB])
def test_a_put_in_a_row_needs_one_hold_and_one_transaction(store: memstore.Store, size: int) -> None:
    put_in_a_row(store, size=size)
    for _ in range(3):
        names = faults.record(lambda: store.put("key", of_size(size)))
        assert (names.count("mutex_lock"), names.count(faults.COMMIT)) == (1, 1), names
    assert len(files(store.root)) == 2


def mappings_of_puts(store: memstore.Store, keys: str, size: int) -> list[int]:
    """How many files each of these puts maps to fill them."""
    puts = [partial(store.put, key, of_size(size - number, number)) for number, key in enumerate(keys)]
    return [faults.record(put).count("map_shared") for put in puts]


@pytest.mark.parametrize("size", [MAPPED_AGAIN, MIB, 2 * MIB - 256 * KIB])
def test_files_that_take_turns_are_mapped_once(store: memstore.Store, size: int) -> None:
    """The files of two keys, and the one that is kept: each is mapped where it has been used twice of late."""
    assert mappings_of_puts(store, "aaaaaaaaaa", size) == [0] * 6 + [1, 1, 0, 0]
    assert (store.get("a") == 9).all() and store.get("a").numel() == size - 9
    assert sum(mappings_of_puts(store, "bababababababa", size)) <= 2
    assert mappings_of_puts(store, "babababa", size) == [0] * 8
    held = store.get("a")
    put_in_a_row(store, "b", size, puts=9)
    assert (held == 7).all() and (store.get("a") == 7).all()


def test_small_files_and_those_of_many_keys_are_not_mapped(store: memstore.Store) -> None:
    assert mappings_of_puts(store, "aaaaaaaaaa", MAPPED_AGAIN - 16 * KIB) == [0] * 10
    assert mappings_of_puts(store, "abcdef" * 4, MIB) == [0] * 24


def test_a_file_with_holes_is_allocated_before_it_is_mapped(store: memstore.Store) -> None:
    """A folder may have been copied so. A hole that is written to where the disk is full would be a SIGBUS."""
    put_in_a_row(store, size=MIB, puts=6)
    file = kept(store)
    syscalls.free_blocks(file.file.lock_file.fd, file.size)
    assert mappings_of_puts(store, "a", MIB) == [1]
    assert os.stat(file.file.path).st_blocks * 512 >= file.size


@pytest.mark.parametrize("call", ["reserve", "map_shared"])
def test_a_file_that_cannot_be_mapped_is_written(store: memstore.Store, call: str) -> None:
    """As by a process that has as many mappings as the kernel allows."""
    put_in_a_row(store, size=MIB, puts=6)
    full = faults.raising(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    with faults.at_step(1, full, names=frozenset({call})):
        store.put("key", of_size(MIB, 6))
    assert (store.get("key") == 6).all()
    assert mappings_of_puts(store, "aaaaaa", MIB).count(1) >= 1, "the next ones are mapped again"


def test_a_mapping_keeps_no_memory_of_a_file_that_gc_unlinks(store: memstore.Store) -> None:
    put_in_a_row(store, size=MIB, puts=8)
    fd = os.open(kept(store).file.path, os.O_RDONLY)
    try:
        assert store.gc() > MIB
        assert (os.fstat(fd).st_nlink, os.fstat(fd).st_blocks) == (0, 0)
    finally:
        os.close(fd)


def test_keys_of_one_size_share_what_is_kept(store: memstore.Store) -> None:
    for turn in range(4):
        for key in "abcde":
            store.put(key, of_size(SIZE - turn, turn))
    assert [int(store.get(key)[0]) for key in "abcde"] == [3] * 5
    assert len(files(store.root)) == 6
    assert holds(store, "c") == 1


def test_who_puts_once_keeps_nothing(root: str) -> None:
    for number in range(4):
        with memstore.open(root) as store:
            store.put("key", of_size(SIZE, number))
            assert root_of(store).next_put.file is None


def test_sizes_in_turn_keep_nothing(store: memstore.Store) -> None:
    for number in range(6):
        store.put("small", of_size(SIZE, number))
        store.put("other", of_size(3 * SIZE, number))
        store.put_many({"a": of_size(SIZE, number), "b": of_size(SIZE, number)})
    assert root_of(store).next_put.file is None
    assert len(files(store.root)) <= 7


def test_another_size_takes_its_place(store: memstore.Store) -> None:
    put_in_a_row(store, "a", SIZE)
    first = kept(store).segment
    put_in_a_row(store, "b", 3 * SIZE)
    assert kept(store).segment != first and kept(store).size > 3 * SIZE
    assert leftovers(store, spares=True) == []
    store.put("a", of_size(SIZE, 9))
    assert kept(store).size > 3 * SIZE and (store.get("a") == 9).all()
    assert len(files(store.root)) == 4


def test_large_files_and_inline_values_are_not_kept(store: memstore.Store) -> None:
    for size in (100, 3 * MIB):
        put_in_a_row(store, size=size)
        assert root_of(store).next_put.file is None


def test_a_batch_may_use_it(store: memstore.Store) -> None:
    put_in_a_row(store)
    segment = kept(store).segment
    store.put_many({"a": of_size(SIZE, 1), "b": of_size(SIZE, 2)})
    assert root_of(store).next_put.file is None
    assert segment in {row.segment for row in map(root_of(store).catalog.read, (b"a", b"b")) if row is not None}
    assert (store.get("a") == 1).all() and (store.get("b") == 2).all()


# --- readers ----------------------------------------------------------------------------------------------------------


def test_what_is_held_is_not_kept(store: memstore.Store) -> None:
    held = []
    for number in range(40):
        store.put("key", of_size(SIZE, number))
        held.append(store.get("key"))
        assert root_of(store).next_put.file is None
    for number, value in enumerate(held):
        assert (value == number).all()
    assert FILLING not in states(store)


def test_after_a_refusal_it_is_not_tried_at_each_put(store: memstore.Store) -> None:
    put_in_a_row(store)
    held = store.get("key")
    for left in range(16, 0, -1):
        store.put("key", of_size(SIZE))
        assert (root_of(store).next_put.keeps_none_for, root_of(store).next_put.file) == (left, None)
    assert (held == 3).all()
    del held
    put_in_a_row(store)
    assert min(holds(store, "key") for _ in range(5)) == 1  # now and then a put sweeps, in a second hold


def test_a_version_that_is_held_can_still_be_sent(store: memstore.Store) -> None:
    put_in_a_row(store)
    ref = store.ref("key")
    put_in_a_row(store)
    sent = pickle.dumps(ref)
    del ref
    put_in_a_row(store)
    assert (pickle.loads(sent).get() == 3).all()


def test_a_version_that_is_leased_is_not_kept(store: memstore.Store) -> None:
    put_in_a_row(store)
    sent = pickle.dumps(store.ref("key", lease=60.0))
    put_in_a_row(store, puts=30)
    assert (pickle.loads(sent).get() == 3).all()


def test_what_a_writer_booked_that_was_killed_can_still_be_sent(root: str) -> None:
    """Right after its commit, before it came to see that a reader holds the version."""
    with memstore.open(root) as store:
        store.put("key", of_size(SIZE, 3))
        ref = store.ref("key")
        with Child(_die_after_the_commit, root) as writer:
            writer.process.join(100)
            assert writer.process.exitcode == -signal.SIGKILL
        store.put("inline", 1)
        assert FILLING not in states(store)
        sent = pickle.dumps(ref)
        del ref
        put_in_a_row(store)
        assert (pickle.loads(sent).get() == 3).all()


def _die_after_the_commit(wire: Wire, root: str) -> None:
    store = memstore.open(root)
    store.put("other", of_size(SIZE))
    with faults.at_step(2, faults.die, after=True, names=frozenset({faults.COMMIT})):  # the first one claims
        store.put("key", of_size(SIZE, 4))


# --- gc, room, closing, figures ---------------------------------------------------------------------------------------


def test_stats_count_it_as_reusable(store: memstore.Store) -> None:
    put_in_a_row(store)
    stats = store.stats()
    assert (stats.filling_bytes, stats.pinned_bytes) == (0, 0)
    assert stats.reusable_bytes == kept(store).size


def test_gc_gives_it_back(store: memstore.Store) -> None:
    put_in_a_row(store)
    size = kept(store).size
    assert store.gc() == size
    assert leftovers(store) == [] and not any("/segments/" in path for path in open_files(store.root))
    put_in_a_row(store)
    assert holds(store, "key") == 1


def test_a_put_without_room_gets_it(root: str) -> None:
    with memstore.open(root, capacity=3 * MIB) as store:
        put_in_a_row(store, size=MIB)
        assert kept(store).size > MIB
        store.put("other", of_size(MIB + MIB // 2, 5))
        assert root_of(store).next_put.file is None
        assert (store.get("other") == 5).all() and (store.get("key") == 3).all()
        with pytest.raises(memstore.StoreFullError, match=" 0 B being written"):
            store.put("third", of_size(MIB))


def test_closing_gives_it_back(root: str) -> None:
    in_child(_put_and_close, root)
    with memstore.open(root) as other:
        assert states(other).count(RETIRED) == 1
        assert leftovers(other, spares=True) == []


def _put_and_close(root: str) -> None:
    with memstore.open(root) as store:
        put_in_a_row(store)
        assert FILLING in states(store)


def test_closing_waits_for_nobody(root: str) -> None:
    store = memstore.open(root)
    put_in_a_row(store)
    with Child(_hold_mutex, root) as holder:
        holder.receive()
        store.close()
        assert open_files(root) == []
        holder.send()
        holder.receive()
    with memstore.open(root) as store:
        store.gc()
        assert leftovers(store) == []


def test_a_put_that_gets_no_mutex_ends_in_time_and_keeps_it(root: str) -> None:
    with memstore.open(root) as store:
        put_in_a_row(store)
        before = kept(store)
        with Child(_hold_mutex, root) as holder:
            holder.receive()

            def refused() -> None:
                with pytest.raises(memstore.StoreTimeoutError, match=f"pid {holder.pid}"):
                    store.put("key", of_size(SIZE, 9), timeout=0.05)

            assert least_seconds(refused, CLEANUP_TIMEOUT) < CLEANUP_TIMEOUT
            assert kept(store) == before
            holder.send()
            holder.receive()
        assert holds(store, "key") == 1
        assert leftovers(store, spares=True) == []


def _hold_mutex(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:

        def hold() -> None:
            wire.send()
            wire.receive()

        root_of(store).mutex.run(hold, deadline_after(30.0))


def test_another_process_gets_it_when_this_one_is_dead(root: str) -> None:
    with memstore.open(root) as store, Child(_put_and_wait, root) as writer:
        writer.receive()
        store.gc()
        assert states(store).count(FILLING) == 1 and len(files(store.root)) == 2  # "not promised" in docs/promises.md
        os.kill(writer.pid, signal.SIGKILL)
        writer.process.join()
        store.gc()
        assert leftovers(store) == [] and len(files(store.root)) == 1


def _put_and_wait(wire: Wire, root: str) -> None:
    store = memstore.open(root)
    put_in_a_row(store)
    wire.send()
    wire.receive()


# --- what may happen to it --------------------------------------------------------------------------------------------


def _cut(path: str) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize("spoil", [os.unlink, _cut], ids=["unlinked", "cut"])
def test_a_file_that_somebody_spoiled_is_not_used(store: memstore.Store, spoil: Callable[[str], None]) -> None:
    put_in_a_row(store)
    segment = kept(store).segment
    spoil(f"{store.root}/segments/{segment:016x}.safetensors")
    put_in_a_row(store)
    assert root_of(store).next_put.file is None or kept(store).segment != segment
    store.gc()
    assert leftovers(store) == []


def test_a_store_that_was_removed_says_so(store: memstore.Store) -> None:
    put_in_a_row(store)
    shutil.rmtree(store.root)
    with pytest.raises(memstore.NotAStoreError):
        store.put("key", of_size(SIZE))


def test_a_conflict_keeps_the_file_for_others(store: memstore.Store) -> None:
    put_in_a_row(store)
    version, count = store.version("key"), len(files(store.root))

    def overtake(number: int, name: str) -> None:
        if name == "mutex_lock" and number < 10:
            in_child(_put_one, store.root)

    with faults.watching(overtake, lambda *_: None), pytest.raises(memstore.VersionConflictError):
        store.put("key", of_size(SIZE), expect_version=version)
    assert leftovers(store, spares=True) == [] and len(files(store.root)) <= count + 1


def _put_one(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", of_size(SIZE, 9))


def test_a_forked_child_has_none(store: memstore.Store) -> None:
    put_in_a_row(store)
    assert in_child(_fork_and_put, store) == (None, [], 1)
    assert holds(store, "mine") == 1
    assert (store.get("theirs") == 7).all() and (store.get("mine") == 7).all()
    assert leftovers(store, spares=True) == []


def _fork_and_put(store: memstore.Store) -> tuple[NextFile | None, list[str], int]:
    root = root_of(store)
    found, there = root.next_put.file, open_files(store.root)
    put_in_a_row(store, "theirs", puts=20)
    first = holds(store, "theirs")
    store.close()
    return found, there, first


def test_a_child_doesnt_keep_it_from_a_sweep(root: str) -> None:
    """The child lives on when the writer is dead."""
    with memstore.open(root) as store, Child(_put_and_fork, root) as writer:
        child = writer.receive()
        try:
            os.kill(writer.pid, signal.SIGKILL)
            writer.process.join()
            store.gc()
            assert leftovers(store) == []
        finally:
            os.kill(child, signal.SIGKILL)


def _put_and_fork(wire: Wire, root: str) -> None:
    store = memstore.open(root)
    put_in_a_row(store)
    child = os.fork()
    if not child:
        signal.pause()
    wire.send(child)
    wire.receive()
