"""Storage drivers: what the files of segments can do, by the kind of storage that they lie on.

A driver is chosen once, when the folder is opened (`opening.py`), and is `root.storage`. Protocols call it, and don't
ask which one it is (docs/decisions/028).

- `LocalFiles`: whoever fills a file holds an exclusive lock on it, whoever reads it a shared one, which its mapping
  keeps. Retired files are used again.
- `Overlay`: there a mapping keeps no lock, so files stay open.
- `SharedStorage` (`shared.py`): on storage that hosts share nobody locks a segment. Retired files are never used again.
"""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from memstore.engine import syscalls
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.engine.files.mapping import LockFile, Mapping, OwnedFile, address_in
from memstore.engine.files.segments import (
    ClaimedFile,
    ClaimedOnOverlay,
    KeptMappings,
    SegmentWriter,
    map_segment,
    map_segment_over,
    map_segments,
    remove_file,
    segment_path,
)
from memstore.engine.format.records import Extent, Record, SegmentExtent, base_after, end_of
from memstore.engine.root.filesystem import mappings_lose_locks
from memstore.engine.root.folder import SETTINGS, Settings, read_settings
from memstore.engine.root.spill import missing_spill, spill_folder
from memstore.errors import CorruptionError, MemstoreError, NotAStoreError, PermissionDeniedError, StoreClosedError

OPEN_AGAIN = "open the store again, where it is now"


class StorePaths(NamedTuple):
    """The paths of the parts of a store.

    Attributes:
        path: the store's folder, as its users name it.
        state: the folder of catalog, lock page, doorbell and settings of this host: `path`, but for shared storage.
        segments: the folder of the files that this host writes.
    """

    path: str
    state: str
    segments: str


class PlacedSegment(NamedTuple):
    """Segment of a record, with the id of the host that has written it, and its path as this host sees it."""

    member: str
    path: str
    extent: SegmentExtent


class RetiredRow(NamedTuple):
    """Row of the table `retired`, or with size 0 of `held`."""

    size: int
    sequence: int
    segment: int


def mapped_size(record: Record, extents: Sequence[Extent]) -> int:
    """Returns how many addresses a value takes: at least those of all its files, whatever the record says.

    Raises CorruptionError where the room behind the files is more than leaves can need that are put together.
    """
    end = end_of(extents)
    if record.start:
        return end
    if record.nbytes - base_after(end, 0) > base_after(end, 0) * len(extents):
        raise CorruptionError(f"{record.nbytes:,} bytes can't come of {end:,} bytes of files")
    return max(record.nbytes, end)


class StorageDriver(ABC):
    """Storage of one opened store's segments.

    Attributes:
        path: the folder of the segments that this host writes.
        store: the id of this host's part of the store, which its headers have.
        durable: files are synced before they are published.
        fd: of that folder, whatever its path names by now; -1: closed.
        is_replaced: this process has opened what the path names by now, and keeps this one for its holders.
        mappings: writable mappings of files that are likely to be filled again.
    """

    maps_at_once: ClassVar[bool] = True  # `map` takes microseconds: it may be called under the guard and the mutex
    sees_all_hosts: ClassVar[bool] = False  # the files of all hosts of the store are read here: nothing is sent

    sweep_every: ClassVar[float] = 0.0  # seconds between two sweeps of what may not stay; 0: whoever retires sweeps
    look_every: ClassVar[float] = 0.02  # seconds between two looks of a process at held files
    swept_at_least: ClassVar[int] = 0  # files that a sweep looks at, though it is asked for less

    claimed_file: ClassVar[type[ClaimedFile]] = ClaimedFile
    segment_writer: ClassVar[type[SegmentWriter]] = SegmentWriter

    def __init__(self, places: StorePaths, settings: Settings) -> None:
        self.root, _, self.path = places
        self.store, self.durable, self._file_mode = settings.store, settings.durable, settings.file_mode
        self._folder = OwnedFile(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self.fd = self._folder.fd
        self.is_replaced = False
        self.mappings = KeptMappings()

    def close(self) -> None:
        self.fd = -1
        self._folder.close()
        self.mappings.clear()

    def closed_error(self) -> MemstoreError:
        """Makes the error of a call on a store that another thread has closed, or opened anew."""
        if self.is_replaced:
            what = "was moved or replaced while it was open, and opened anew since"
            return NotAStoreError(f"{self.root} {what}: {OPEN_AGAIN}")
        return StoreClosedError(f"the store {self.root} was closed: memstore.open it again")

    # --- create and claim: by a lock that its process's death gives up ------------------------------------------------
    # Call these under the store's mutex, and under the guard: no forked child is to have the lock too.

    def create(self, segment: int) -> ClaimedFile:
        """Creates a file, and claims it. Raises FileExistsError."""
        path = segment_path(self.path, segment)
        file = self._open(segment, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if not file.lock():
            raise BlockingIOError(errno.EAGAIN, f"{path} is new, and locked")
        return self.claimed_file(path, file, self.fd)

    def claim(self, segment: int) -> ClaimedFile | None:
        """Claims a file that is there. Returns None if somebody holds it, or may not be asked.

        Raises FileNotFoundError where there is no file of memstore's.
        """
        path = segment_path(self.path, segment)
        try:
            file = self._open(segment, path, os.O_RDWR)
        except PermissionError:  # another user's, killed before it got the store's group: theirs to sweep
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):  # planted: a link is unlinked, what it names isn't touched
                raise FileNotFoundError(errno.ENOENT, "no file of memstore's", error.filename) from None
            raise
        return self.claimed_file(path, file, self.fd) if file.lock() else None

    def _open(self, segment: int, path: str, flags: int) -> LockFile:
        """Opens a file to be claimed."""
        if self.fd < 0:
            raise self.closed_error()
        return LockFile(path, flags, self._file_mode, self.fd)

    def writer(self, file: ClaimedFile, segment: int, put_id: int, size: int, *, is_new: bool) -> SegmentWriter:
        """Returns what fills a claimed file."""
        if is_new:
            return self.segment_writer(file, segment, put_id, size, is_new=True)
        kept, is_frequent = self.mappings.take(segment, size), self.mappings.note_filled(segment)
        return self.segment_writer(file, segment, put_id, size, is_new=False, is_frequent=is_frequent, spare=kept)

    # --- map ----------------------------------------------------------------------------------------------------------
    # All return None where a segment holds another put by now. They raise CorruptionError, StorageError.

    @abstractmethod
    def map(self, record: Record, *, live: bool = False) -> Mapping | None:
        """Maps or reads the segments of a record; with `live`, None too if their headers don't say that they are."""

    @abstractmethod
    def map_segment(self, extent: SegmentExtent, *, live: bool = False, writable: bool = False) -> Mapping | None:
        """Maps a segment of this host; with `writable`, its rows are written in place.

        Raises UnsupportedFilesystemError where that can't be.
        """

    @abstractmethod
    def map_beside(self, extents: Sequence[SegmentExtent], size: int) -> Mapping | None:
        """Maps segments of this host at their bases, in a range of `size` addresses that is zeros elsewhere."""

    def map_over(self, extent: SegmentExtent, mapping: Mapping, base: int, nbytes: int) -> bool:
        """Maps the first `nbytes` of a segment into a range of `map_beside`. False: it was replaced, or can't be."""
        return False

    @abstractmethod
    def check_writable(self) -> None:
        """Raises UnsupportedFilesystemError where rows can't be written in place."""

    def placed(self, record: Record) -> list[PlacedSegment]:
        """Returns the segments of a record. Unless `sees_all_hosts`, only the paths of this host's are right."""
        extents = record.segments
        hosts = [self.store] * len(extents) if record.hosts is None else map(bytes.hex, record.hosts)
        return [
            PlacedSegment(host, segment_path(self._folder_of(host), extent.segment), extent)
            for host, extent in zip(hosts, extents, strict=False)
        ]

    def _folder_of(self, member: str) -> str:
        return self.path

    def leased(self, record: Record) -> Sequence[SegmentExtent] | None:
        """Returns the segments that a lease keeps for a record's sake; None where no lease of this host can."""
        return record.segments if record.hosts is None else None

    # --- use files again ----------------------------------------------------------------------------------------------

    @abstractmethod
    def room_for(self, nbytes: int) -> int:
        """Returns the size of the data section of a new file: larger than the data where later puts may use it."""

    @abstractmethod
    def reusable(self, transaction: Transaction, need: int) -> Sequence[RetiredRow]:
        """Returns the retired files that a put of `need` bytes may claim, the best first."""

    @abstractmethod
    def open_replaced(self, segment: int, size: int) -> ClaimedFile | None:
        """Opens a live file that the next put is to fill. It is not locked yet. None if it can't be had, or used."""

    # --- retire and remove --------------------------------------------------------------------------------------------

    @abstractmethod
    def retire(self, transaction: Transaction, segments: Iterable[int]) -> None:
        """Keeps files, in the transaction that retires them, from being removed while readers may need them."""

    @abstractmethod
    def limit(self, counters: Counters) -> int:
        """Returns how many bytes of retired files may stay, to be used again."""

    def unlink(self, segment: int, file: ClaimedFile | None) -> OwnedFile | None:
        """Removes a file that was claimed, or is none. Returns it if its blocks are to be freed after the mutex."""
        remove_file(segment_path(self.path, segment), self.fd)
        return None if file is None else file.lock_file

    def spill_folder(self) -> str | None:
        """Returns the folder of values that were moved to a disk; None: this store moves none."""
        return None

    def open_spilled(self, segment: int) -> LockFile | None:
        """Opens the file of a value that was moved; None if it isn't there."""
        return None

    def check_spill(self) -> None:  # noqa: B027 - most stores have none
        """Raises StorageError if the folder of moved values isn't there."""

    # --- errors -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def error(self, error: OSError, key: str | None = None) -> Exception:
        """Returns what an error of the kernel means: an error with advice, or the same."""

    @abstractmethod
    def unseen_error(self, error: OSError | None) -> Exception:
        """Makes the error for a folder that can't be looked at any more; or, with None, that is another one by now."""


# --- local files ------------------------------------------------------------------------------------------------------


_CLASSES_A_DOUBLING = 8
_TRIES = 4  # files that a claim asks for
_FREE_SHARE = 0.1  # of the file system's free space
_LOOKS = 64  # rows among which it looks for files that this process has mapped


def size_class(nbytes: int) -> int:
    """Returns the room for so much data: whole pages, eight sizes a doubling, so at most 12.5 % or a page is slack."""
    step = max(syscalls.PAGE, (1 << max(nbytes - 1, 0).bit_length()) // (2 * _CLASSES_A_DOUBLING))
    return -(-nbytes // step) * step


def largest_for(need: int) -> int:
    """Returns the size of the largest file that is used again for so many bytes."""
    return need + need // _CLASSES_A_DOUBLING + syscalls.PAGE


class LocalFiles(StorageDriver):
    """Files of a local file system, or in memory."""

    keeps_open: ClassVar[bool] = False  # a file that is mapped

    def __init__(self, places: StorePaths, settings: Settings) -> None:
        super().__init__(places, settings)
        self._spill = spill_folder(settings)
        self._settings_read: int = 0  # the inode of the settings that say so

    def map(self, record: Record, *, live: bool = False) -> Mapping | None:
        if self.fd < 0:
            raise self.closed_error()
        if not record.segment:
            extents = record.segments
            own = record.put_id if record.is_delta else 0
            return self._map_all(extents, mapped_size(record, extents), live=live, own=own)
        path = segment_path(self.path, record.segment)
        extent = SegmentExtent(record.segment, record.put_id, record.size, record.start)
        found = map_segment(path, extent, store=self.store, dir_fd=self.fd, live=live, keep_open=self.keeps_open)
        if found is None and (folder := self.spill_folder()) is not None:  # it may have been moved
            path, keep_open = segment_path(folder, record.segment), mappings_lose_locks(folder)
            return map_segment(path, extent, store=self.store, live=live, keep_open=keep_open)
        return found

    def map_segment(self, extent: SegmentExtent, *, live: bool = False, writable: bool = False) -> Mapping | None:
        if self.fd < 0:
            raise self.closed_error()
        path, keep_open = segment_path(self.path, extent.segment), self.keeps_open
        found = map_segment(
            path, extent, store=self.store, dir_fd=self.fd, live=live, keep_open=keep_open, shared=writable
        )
        if found is None and not writable and (folder := self.spill_folder()) is not None:
            path = segment_path(folder, extent.segment)
            keep_open = keep_open or mappings_lose_locks(folder)
            return map_segment(path, extent, store=self.store, live=live, keep_open=keep_open)
        return found

    def map_beside(self, extents: Sequence[SegmentExtent], size: int) -> Mapping | None:
        return self._map_all(extents, size, live=False)

    def map_over(self, extent: SegmentExtent, mapping: Mapping, base: int, nbytes: int) -> bool:
        if self.keeps_open:  # as long as the range is mapped, which was made without this file
            return False
        place, path = address_in(mapping, base, nbytes), segment_path(self.path, extent.segment)
        return map_segment_over(place, nbytes, path, extent, store=self.store, dir_fd=self.fd)

    def check_writable(self) -> None:
        """Does nothing: all of them can."""

    def _map_all(self, extents: Sequence[SegmentExtent], size: int, *, live: bool, own: int = 0) -> Mapping | None:
        if self.fd < 0:
            raise self.closed_error()
        files = [(segment_path(self.path, extent.segment), extent) for extent in extents]
        keep_open = self.keeps_open
        found = map_segments(files, size, store=self.store, dir_fd=self.fd, live=live, own=own, keep_open=keep_open)
        if found is None and (spill := self.spill_folder()) is not None:
            keep_open = keep_open or mappings_lose_locks(spill)
            fd = self.fd
            return map_segments(
                files, size, store=self.store, dir_fd=fd, live=live, own=own, keep_open=keep_open, otherwise=spill
            )
        return found

    def placed(self, record: Record) -> list[PlacedSegment]:
        found = super().placed(record)
        spill = self._spill
        if spill is None:
            return found
        return [
            one if os.path.lexists(one.path) else one._replace(path=segment_path(spill, one.extent.segment))
            for one in found
        ]

    def spill_folder(self) -> str | None:
        """As in the driver. Another process may have named it: what it has written is read here."""
        try:
            inode = os.stat(f"{self.root}/{SETTINGS}").st_ino
            if inode != self._settings_read:
                settings = read_settings(self.root)
                if settings is not None and settings.store == self.store:
                    self._spill, self._settings_read = spill_folder(settings), inode
        except (OSError, MemstoreError):  # the store is being removed, which others say
            pass
        return self._spill

    def open_spilled(self, segment: int) -> LockFile | None:
        folder = self.spill_folder()
        with contextlib.suppress(OSError):  # missing, planted, another user's
            return None if folder is None else LockFile(segment_path(folder, segment), os.O_RDWR)
        return None

    def check_spill(self) -> None:
        folder = self.spill_folder()
        if folder is not None and not os.path.isdir(folder):
            raise missing_spill(self.root, folder)

    def room_for(self, nbytes: int) -> int:
        return size_class(nbytes)

    def reusable(self, transaction: Transaction, need: int) -> Sequence[RetiredRow]:
        """Returns the smallest files that fit, and before them those that this process has mapped.

        If the ranks of sharded puts took each other's files, each would map its file anew, and fault it in.
        """
        looks = _LOOKS if self.mappings else _TRIES
        rows = [RetiredRow(*found) for found in transaction.retired(need, largest_for(need), looks)]
        if self.mappings:
            rows.sort(key=lambda row: not self.mappings.has(row.segment, row.size))
        return rows[:_TRIES]

    def open_replaced(self, segment: int, size: int) -> ClaimedFile | None:
        path = segment_path(self.path, segment)
        try:
            file = LockFile(path, os.O_RDWR, dir_fd=self.fd)
            return self.claimed_file(path, file, self.fd) if syscalls.size_of(file.fd) == size else None
        except OSError:  # missing, another user's, planted; or too many are open
            return None

    def retire(self, transaction: Transaction, segments: Iterable[int]) -> None:
        """Does nothing: a reader's lock keeps its file."""

    def limit(self, counters: Counters) -> int:
        wanted = max(counters.live, 2 * counters.recent)
        if counters.retired <= min(counters.recent, wanted):
            return wanted
        status = os.fstatvfs(self.fd)
        free = int(status.f_bavail * status.f_frsize * _FREE_SHARE)
        return min(wanted, max(free, counters.recent))

    def error(self, error: OSError, key: str | None = None) -> OSError:
        return error

    def unseen_error(self, error: OSError | None) -> Exception:
        if error is None:
            what = "is another store than was opened: it was replaced meanwhile"
            return NotAStoreError(f"{self.root} {what}; {OPEN_AGAIN}")
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            what = error.filename if os.path.lexists(self.root) else self.root
            return NotAStoreError(f"{what} was removed or moved while the store was open: {OPEN_AGAIN}")
        if error.errno in (errno.EACCES, errno.EPERM):
            return PermissionDeniedError(
                f"{self.root}: this process may not look any more whether its store is still there "
                f"({error.strerror}): give it back the x bits of the folders above"
            )
        return error


class Overlay(LocalFiles):
    """Local files where a mapping keeps no lock: see `filesystem.mappings_keep_locks`. So they stay open."""

    claimed_file = ClaimedOnOverlay
    keeps_open = True
