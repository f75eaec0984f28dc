"""The contract of storage drivers: one class of tests, which each of the three passes on stores of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from memstore.engine import opening
from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.mapping import OwnedFile
from memstore.engine.files.segments import SealedSegment, SegmentWriter, erase_put_id
from memstore.engine.format.headers import Header, HeaderSlots, Span, header_size, lay_out
from memstore.engine.format.records import LIVE, RETIRED, Record, SegmentExtent
from memstore.engine.protocols.get import hold
from memstore.engine.protocols.reuse import is_leased
from memstore.engine.protocols.sweep import sweep_all
from memstore.engine.root import shared
from memstore.engine.root.roots import Root
from memstore.engine.root.shared import STATE_VARIABLE, SharedStorage
from memstore.engine.root.storage import LocalFiles, Overlay, StorageDriver
from memstore.engine.sync.primitives import boot_clock, deadline_after
from memstore.errors import ContentionError, CorruptionError, StoreClosedError, UnsupportedFilesystemError
from tests.children import in_child
from tests.engine.bytes_store import delete, get, opened, put, put_many
from tests.leaks import open_files

DATA = bytes(range(256)) * 32
FIRST = 1 << 40  # numbers of segments that the catalog doesn't give meanwhile


def record_of(one: SegmentExtent) -> Record:
    return Record(1, one.put_id, one.segment, one.size, one.start, len(DATA), 0.0, b"", b"")


class StorageContract:
    """What every driver does."""

    kind: type[StorageDriver]
    options: dict[str, object] = {}

    @pytest.fixture
    def root(self, scratch: str) -> Iterator[Root]:
        with opened(scratch, **self.options) as root:
            yield root

    def fill(self, root: Root, segment: int = FIRST, *, put_id: int = 7) -> tuple[SegmentWriter, SealedSegment]:
        """Creates a file and fills it, as steps 2 and 3 of a put."""
        header = Header("key", root.settings.store, b"bytes", b"", _layout().header)
        size = header.nbytes + root.storage.room_for(len(DATA))
        with root.guard:
            file = root.storage.create(segment)
            writer = root.storage.writer(file, segment, put_id, size, is_new=True)
        writer.allocate(header, len(DATA), root.guard, on_tmpfs=False)
        np.asarray(writer)[:] = np.frombuffer(DATA, np.uint8)
        return writer, writer.seal(None, durable=root.storage.durable)

    def put(self, root: Root, segment: int = FIRST, *, put_id: int = 7) -> SegmentExtent:
        writer, sealed = self.fill(root, segment, put_id=put_id)
        sealed.file.go_live(HeaderSlots(put_id, LIVE, 1, put_id, 1), durable=root.storage.durable)
        writer.close()
        return SegmentExtent(segment, put_id, sealed.size, sealed.start)

    def map(self, root: Root, extent: SegmentExtent, *, live: bool = True) -> bytes | None:
        with root.reading():
            mapping = root.storage.map(record_of(extent), live=live)
        return None if mapping is None else bytes(mapping.view()[extent.start : extent.start + len(DATA)])

    def is_free(self, root: Root, segment: int = FIRST) -> bool:
        with root.guard:
            file = root.storage.claim(segment)
        if file is not None:
            file.close()
        return file is not None

    # --- which --------------------------------------------------------------------------------------------------------

    def test_it_is_chosen_when_the_folder_is_opened(self, root: Root) -> None:
        assert type(root.storage) is self.kind
        assert root.storage.path == root.segments and os.path.samestat(
            os.fstat(root.storage.fd), os.stat(root.segments)
        )

    def test_a_closed_one_says_so(self, scratch: str) -> None:
        with opened(scratch, **self.options) as root:
            extent = self.put(root)
        for call in (
            lambda: root.storage.create(FIRST + 1),
            lambda: root.storage.claim(FIRST),
            lambda: root.storage.map(record_of(extent)),
            lambda: root.storage.map_segment(extent),
            lambda: root.storage.map_beside([extent], extent.size),
        ):
            with pytest.raises(StoreClosedError):
                call()

    # --- create and claim ---------------------------------------------------------------------------------------------

    def test_a_file_is_created_once(self, root: Root) -> None:
        file = root.storage.create(FIRST)
        with pytest.raises(FileExistsError):
            root.storage.create(FIRST)
        assert os.path.exists(file.path) and os.path.dirname(file.path) == root.segments
        file.close()

    def test_a_claimed_file_is_nobody_elses(self, root: Root) -> None:
        file = root.storage.create(FIRST)
        assert not self.is_free(root) and not in_child(self.is_free, root)
        file.close()
        assert self.is_free(root) and in_child(self.is_free, root)

    def test_a_claim_ends_with_its_process(self, root: Root) -> None:
        root.storage.create(FIRST).close()
        in_child(_claim_and_die, root)
        assert self.is_free(root)

    def test_a_forked_child_has_no_claim_of_its_parents(self, root: Root) -> None:
        file = root.storage.create(FIRST)
        in_child(_nothing)
        assert not self.is_free(root), "the child's end has given it up"
        file.close()

    @pytest.mark.parametrize("planted", ["nothing", "link", "folder"])
    def test_what_is_no_file_of_memstores_is_not_claimed(self, root: Root, planted: str) -> None:
        path = f"{root.segments}/{FIRST:016x}.safetensors"
        if planted == "link":
            os.symlink(__file__, path)
        elif planted == "folder":
            os.mkdir(path)
        with pytest.raises(FileNotFoundError):
            root.storage.claim(FIRST)

    # --- publish ------------------------------------------------------------------------------------------------------

    def test_what_is_published_is_mapped_and_free_to_be_claimed(self, root: Root) -> None:
        writer, sealed = self.fill(root)
        extent = SegmentExtent(FIRST, 7, sealed.size, sealed.start)
        assert self.map(root, extent) is None, "it isn't live"
        assert not self.is_free(root)
        sealed.file.go_live(HeaderSlots(7, LIVE, 1, 7, 1), durable=root.storage.durable)
        assert self.map(root, extent) == DATA
        assert self.is_free(root), "a commit gives up the lock, whatever is still open"
        writer.close()

    def test_a_parked_file_stays_claimed_until_it_is_published(self, root: Root) -> None:
        writer, sealed = self.fill(root)
        writer.unmap()
        writer.file.park(root.guard)
        assert not in_child(self.is_free, root)
        sealed.file.go_live(HeaderSlots(7, LIVE, 1, 7, 1), durable=root.storage.durable)
        assert in_child(self.is_free, root)
        assert self.map(root, SegmentExtent(FIRST, 7, sealed.size, sealed.start)) == DATA
        writer.close()

    # --- map ----------------------------------------------------------------------------------------------------------

    def test_another_puts_file_is_not_mapped(self, root: Root) -> None:
        extent = self.put(root)
        other = SegmentExtent(FIRST, 8, extent.size, extent.start)
        missing = SegmentExtent(FIRST + 1, 7, extent.size, extent.start)
        for one in (other, missing):
            assert self.map(root, one, live=False) is None
            assert root.storage.map_segment(one) is None
            assert root.storage.map_beside([one], one.size) is None

    def test_only_a_reference_maps_what_was_replaced(self, root: Root) -> None:
        extent = self.put(root)
        file = root.storage.claim(FIRST)
        assert file is not None
        file.go_live(HeaderSlots(7, RETIRED, 1, 7, 1), durable=False)
        file.close()
        assert self.map(root, extent) is None
        assert self.map(root, extent, live=False) == DATA

    def test_segments_are_mapped_beside_zeros(self, root: Root) -> None:
        extent = self.put(root)
        base = 1 << 20
        placed = SegmentExtent(FIRST, 7, extent.size, extent.start, base)
        mapping = root.storage.map_beside([placed], 3 << 20)
        assert mapping is not None and mapping.size == 3 << 20
        view = mapping.view()
        assert view[base + extent.start : base + extent.start + len(DATA)] == DATA
        assert not any(view[:base]) and not any(view[base + (1 << 20) :])

    def test_a_cut_file_is_never_mapped(self, root: Root) -> None:
        """Who reads beyond its end would die of SIGBUS."""
        extent = self.put(root)
        os.truncate(f"{root.segments}/{FIRST:016x}.safetensors", extent.size - 1)
        try:
            assert self.map(root, extent) is None
        except CorruptionError:
            assert self.kind is not SharedStorage, "there it may not have come yet"

    def test_places_are_paths(self, root: Root) -> None:
        extent = self.put(root)
        (place,) = root.storage.placed(record_of(extent))
        assert (place.member, place.extent) == (root.settings.store, extent)
        with open(place.path, "rb") as file:
            head = file.read(4096)
        assert header_size(head, extent.size) == extent.start
        assert root.storage.leased(record_of(extent)) == (extent,)

    # --- retire and remove --------------------------------------------------------------------------------------------

    def test_what_a_reader_has_is_not_removed_before_it_lets_go(self, root: Root) -> None:
        """It holds a lock; or the file has a lease, for as long as a read may take."""
        extent = self.put(root)
        with root.reading():
            held = root.storage.map(record_of(extent))
        root.mutex.run(root.catalog.update, deadline_after(10), lambda one: root.storage.retire(one, [FIRST]))
        is_kept = root.catalog.view(is_leased, FIRST, boot_clock())
        assert is_kept or not self.is_free(root)
        assert held is not None and held.view()[extent.start : extent.start + len(DATA)] == DATA

    def test_a_removed_file_is_gone_and_those_who_have_it_keep_it(self, root: Root) -> None:
        extent = self.put(root)
        with root.reading():
            held = root.storage.map(record_of(extent))
        with root.guard:
            removed = root.storage.unlink(FIRST, None)
        assert removed is None and not os.listdir(root.segments)
        assert held is not None and held.view()[extent.start : extent.start + len(DATA)] == DATA

    def test_the_blocks_of_a_removed_file_are_freed_only_where_nobody_reads_them(self, root: Root) -> None:
        self.put(root)
        with root.guard:
            file = root.storage.claim(FIRST)
            assert file is not None
            removed = root.storage.unlink(FIRST, file)
        assert (removed is None) == root.storage.sees_all_hosts
        assert os.listdir(root.segments) == []
        if removed is not None:
            removed.close()

    # --- through the protocols ----------------------------------------------------------------------------------------

    def test_values_that_are_held_never_change(self, root: Root) -> None:
        held: list[tuple[object, bytes]] = []
        for number in range(12):
            data = bytes([number]) * (5000 + 3000 * (number % 3))
            put(root, b"key", data)
            (entry,) = hold(root, [b"key"], deadline_after(10), may_lock=True)
            assert entry is not None and entry.mapping is not None
            start, mapping = entry.record.start, entry.mapping
            held.append((mapping, data))
            assert mapping.view()[start : start + len(data)] == data
            for (old, expected), at in [(pair, start) for pair in held[-4:]]:
                assert old.view()[at : at + len(expected)] == expected  # type: ignore[attr-defined]
        put_many(root, {b"%d" % number: bytes([number]) * 5000 for number in range(40)})  # some are parked
        for number in range(40):
            assert get(root, b"%d" % number) == bytes([number]) * 5000
        delete(root, b"key")
        assert get(root, b"key") is None

    def test_a_sweep_takes_what_nobody_holds(self, root: Root) -> None:
        for number in range(3):
            put(root, b"key", bytes([number]) * 5000)
        delete(root, b"key")
        root.mutex.run(root.catalog.update, deadline_after(10), _end_leases)
        sweep_all(root, deadline_after(10))
        assert os.listdir(root.segments) == []
        counters = root.catalog.view(Transaction.counters)
        assert (counters.live, counters.retired, counters.held, counters.filling) == (0, 0, 0, 0)

    def test_a_get_that_meets_another_version_each_time_ends_by_its_timeout(
        self, root: Root, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is contention, and no damage."""
        put(root, b"key", bytes(5000))

        def replaced(record: Record, *, live: bool = False) -> None:
            put(root, b"key", bytes(5000))

        monkeypatch.setattr(root.storage, "map", replaced)
        with pytest.raises(ContentionError):
            hold(root, [b"key"], deadline_after(0.05), may_lock=not root.storage.maps_at_once)

    def test_the_same_misfit_twice_is_damage(self, root: Root) -> None:
        put(root, b"key", bytes(5000))
        (name,) = os.listdir(root.segments)
        os.unlink(f"{root.segments}/{name}")
        for may_lock in (True, False):
            with pytest.raises(CorruptionError) as caught:
                hold(root, [b"key"], deadline_after(5), may_lock=may_lock)
            assert (caught.value.key, caught.value.path) == ("key", f"{root.segments}/{name}")


class TestLocalFiles(StorageContract):
    kind = LocalFiles

    def test_no_file_stays_open(self, root: Root) -> None:
        extent = self.put(root)
        with root.reading():
            held = root.storage.map(record_of(extent))
        assert held is not None and not _open_segments(root)
        assert not in_child(self.is_free, root), "the mapping keeps the lock"
        del held
        assert in_child(self.is_free, root)


class TestOverlay(StorageContract):
    """Here a mapping would keep the lock, and the driver doesn't rely on it. On overlay itself: test_overlay.py."""

    kind = Overlay

    @pytest.fixture(autouse=True)
    def _finds_overlay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(opening, "mappings_keep_locks", lambda path: False)

    def test_a_file_stays_open_as_long_as_it_is_mapped(self, root: Root) -> None:
        extent = self.put(root)
        with root.reading():
            held = [root.storage.map(record_of(extent)), root.storage.map_beside([extent], extent.size)]
        assert len(_open_segments(root)) == 2
        held.pop()
        assert len(_open_segments(root)) == 1
        held.clear()
        assert _open_segments(root) == []

    def test_a_parked_file_stays_open(self, root: Root) -> None:
        writer, _ = self.fill(root)
        writer.file.park(root.guard)
        assert writer.file.lock_file.fd >= 0 and len(_open_segments(root)) == 1
        writer.close()


class TestSharedStorage(StorageContract):
    kind = SharedStorage
    options = {"shared": "copy"}

    @pytest.fixture(autouse=True)
    def _has_state(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state"))

    def test_no_file_is_used_again(self, root: Root) -> None:
        seen: set[str] = set()
        for number in range(6):
            put(root, b"key", bytes([number]) * 5000)
            fresh = set(os.listdir(root.segments)) - seen
            assert len(fresh) == 1 and root.next_put.file is None
            seen |= fresh
        root.mutex.run(root.catalog.update, deadline_after(10), _end_leases)
        put(root, b"key", bytes(5000))
        assert len(set(os.listdir(root.segments)) - seen) == 1
        assert root.storage.limit(root.catalog.view(Transaction.counters)) == 0

    def test_a_file_that_another_host_removes_while_it_is_read_is_not_that_put_any_more(
        self, root: Root, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        extent, real = self.put(root), shared.read_stored

        def read(file: OwnedFile, pieces: Sequence[tuple[int, int, int]]) -> bool:
            is_read = real(file, pieces)
            with open(f"{root.segments}/{FIRST:016x}.safetensors", "r+b") as written:
                erase_put_id(written.fileno())
            return is_read

        monkeypatch.setattr(shared, "read_stored", read)
        assert self.map(root, extent) is None

    def test_no_rows_are_written_in_place(self, root: Root) -> None:
        extent = self.put(root)
        with pytest.raises(UnsupportedFilesystemError):
            root.storage.check_writable()
        with pytest.raises(UnsupportedFilesystemError):
            root.storage.map_segment(extent, writable=True)


def _layout() -> object:
    return lay_out([Span(("data",), "uint8", 1, (len(DATA),), len(DATA))])


def _nothing() -> None:
    pass


def _claim_and_die(root: Root) -> None:
    assert root.storage.claim(FIRST) is not None


def _end_leases(transaction: Transaction) -> None:
    for segment, _ in transaction.numbers("leases", 1000):
        transaction.delete_number("leases", segment)


def _open_segments(root: Root) -> list[str]:
    return [path for path in open_files(root.path) if "/segments/" in path]
