"""Tiers: values that nobody has read for longest move to a folder on a disk, where memory lacks room.

A put that finds no room calls `make_room` before it takes kept versions out, or fails. A value of a file moves as a
whole: its file is copied into the spill folder (`root/spill.py`) under the same name, byte for byte, and then removed
here. Its record stays as it is, and so do its pins, leases and history. Only the row of the segment says that it takes
no memory (`SegmentRow.nbytes` is 0), and a row of `spilled` how many bytes it has on the disk.

1. One process moves at a time (`_turn`); others wait for it, and try their puts again. In one hold of the mutex it
   clears away what a killed one has left (`_clear_away`).
2. *Choose*: the files that were not read for longest, by the time of access that the kernel keeps with each file. With
   `relatime`, as nearly everywhere, it notes the first access after a file's status has changed: so whoever has looked
   sets the status of all files anew (`_look_again_from_now`), and the next look sees which of them were read since. So
   a get pays nothing. With `noatime` they go in the order of their puts.
3. *Copy* the file, which a shared lock keeps as it is, into `moving`; sync it if the store is durable; rename it. A
   kill leaves a file that no row names.
4. *Switch*, in one hold of the mutex (`_switch`): lock the file here for oneself, or give up if somebody has it mapped;
   **commit the rows: this is the moment**; erase its put id and unlink it. A kill before the commit leaves a copy that
   no row names; one after it a file that the rows don't count.

A get finds no file, or one that is locked, and maps the copy (`LocalFiles.map`): so nobody waits for a move, in mode
"r" neither. Pages of the copy that are read stay in the kernel's page cache, as long as memory has room for them: a
value that is used again is in memory again, and there is nothing to move back. A put of its key lies in memory.

A version that is replaced or deleted goes with its copy: its row goes to `held`, since no put can use that file, and
the sweep behind the commit removes it (`remove_moved`).

In a store of several hosts each host moves what lies there, whoever owns the keys: files that are lent, replicas, parts
of sharded values. No record says so, and no other host is told: who sends a file finds it as a get does. What was
fetched from other hosts doesn't move: it is dropped before (`sweep.py`), since it can be fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Generator
from typing import NamedTuple

import msgspec

from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.mapping import LockFile, Mapping, OwnedFile
from memstore.engine.files.segments import ClaimedFile, erase_put_id, remove_file, segment_path
from memstore.engine.format.headers import HEAD_SIZE, header_size, may_be_mutable, read_header
from memstore.engine.format.records import LIVE, SegmentExtent, SegmentRow, is_mutable
from memstore.engine.root.folder import give_to_group
from memstore.engine.root.roots import Root
from memstore.engine.root.spill import MOVING
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CorruptionError, MemstoreError, StorageError, StoreTimeoutError, lack_of

log = logging.getLogger("memstore")

_SHARE = 8  # of the bytes that live files take, one part in so many moves at once: the next puts find room too
_CLEANUP_TIMEOUT = 0.5  # seconds
_AT_ONCE = 64 << 20  # bytes a call
_NAME = re.compile(r"([0-9a-f]{16})\.safetensors")


def make_room(root: Root, needed: int, deadline: float) -> int:
    """Moves values of so many bytes, and of a part of all.

    Returns how many bytes were moved, by others too while this process waited for its turn. Raises StorageError if the
    spill folder isn't there or fails, StoreTimeoutError.
    """
    folder = root.storage.spill_folder()
    if folder is None:
        return 0
    root.storage.check_spill()
    capacity = root.catalog.view(Transaction.counters).capacity
    if capacity and needed > capacity:  # it would not fit into an empty store
        return 0
    before = root.catalog.view(Transaction.counters).live
    with _turn(root, folder, deadline) as is_ours:
        if not is_ours:
            raise StoreTimeoutError(f"{root.path}: waited for another process to move values to {folder}")
        others = before - root.catalog.view(Transaction.counters).live
        if others > needed:  # another process has made room
            return others
        try:
            root.mutex.run(_clear_away, deadline, root, folder)
            return _move(root, folder, needed, deadline)
        except BaseException:  # an interrupt, for one
            with contextlib.suppress(OSError, MemstoreError):  # the next move does it
                root.mutex.run(_clear_away, deadline_after(_CLEANUP_TIMEOUT), root, folder)
            raise


@contextlib.contextmanager
def _turn(root: Root, folder: str, deadline: float) -> Generator[bool]:
    """Yields whether it is this process's turn, which it holds then."""
    with root.guard:
        file = LockFile(folder, os.O_RDONLY | os.O_DIRECTORY)
    with file:
        while not (is_ours := file.lock()) and time.monotonic() < deadline:
            time.sleep(0.001)
        yield is_ours


def clear_away(root: Root, deadline: float) -> None:
    """Removes what a process has left that was killed in the middle of a move, unless another one moves values now."""
    folder = root.storage.spill_folder()
    if folder is not None and os.path.isdir(folder):
        with _turn(root, folder, 0.0) as is_ours:
            if is_ours:
                root.mutex.run(_clear_away, deadline, root, folder)


def _clear_away(root: Root, folder: str) -> None:
    """Takes the step of `clear_away`. Under the mutex, by who has the turn."""
    # Not `view`: after a kill between LMDB's commit and the word that tells readers of it, they see the past.
    moved = root.catalog.update(tables.spilled_segments, is_delete=True)
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if name == MOVING or (match is not None and int(match[1], 16) not in moved):
            remove_file(f"{folder}/{name}")
    for segment in moved:
        path = segment_path(root.segments, segment)
        if os.path.lexists(path) and os.path.lexists(segment_path(folder, segment)):
            with root.guard:
                file = root.storage.claim(segment)
            if file is not None:  # else its readers have it still
                _remove(root, segment, file)
                file.close()


# --- which values move -----------------------------------------------------------------------------------------------


class _Candidate(NamedTuple):
    accessed: int  # nanoseconds
    put_id: int
    segment: int
    row: SegmentRow


def _candidates(root: Root) -> list[_Candidate]:
    """Returns the live files that lie here, those that nobody has read for longest first."""
    rows = root.catalog.view(lambda transaction: list(transaction.segments()))
    found: list[_Candidate] = []
    for segment, row in rows:
        if row.state == LIVE and row.nbytes:
            with contextlib.suppress(OSError):  # replaced meanwhile
                status = os.stat(os.path.basename(segment_path("", segment)), dir_fd=root.segments_fd)
                found.append(_Candidate(status.st_atime_ns, row.put_id, segment, row))
    found.sort()
    return found


def _look_again_from_now(root: Root, left: list[_Candidate]) -> None:
    """Makes the kernel note the next access of each file: it does if the last one is older than the status."""
    for one in left:
        name = os.path.basename(segment_path("", one.segment))
        with contextlib.suppress(OSError):  # gone, or another user's
            status = os.stat(name, dir_fd=root.segments_fd)
            if status.st_atime_ns > status.st_ctime_ns:
                os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=root.segments_fd)


def _is_copy(transaction: Transaction, segment: int, row: SegmentRow) -> bool:
    """Returns whether a file is a copy of another host's value."""
    copy = tables.kept_row(transaction, tables.COPIES, row.key)
    return copy is not None and (segment, row.put_id) in copy.segments


# --- the move --------------------------------------------------------------------------------------------------------


def _move(root: Root, folder: str, needed: int, deadline: float) -> int:
    """Takes steps 2 to 4."""
    candidates = _candidates(root)
    goal = max(needed, sum(one.row.nbytes for one in candidates) // _SHARE, 1)
    moved = passed = 0
    for one in candidates:
        if moved >= goal:
            break
        passed += 1
        try:
            if _copy(root, folder, one) and _switch_file(root, folder, one, deadline):
                moved += one.row.nbytes
        except CorruptionError as error:  # a verify says so, too
            log.warning("%s: the value of %r can't be moved: %s", root.path, one.row.key, str(error))
        except OSError as error:
            if isinstance(error, MemstoreError) or lack_of(error) is not None:
                raise
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise _failed(root, folder, error) from error
            root.mutex.run(_clear_away, deadline, root, folder)
            break  # the disk is full
    _look_again_from_now(root, candidates[passed:])
    log.debug("%s: moved %d bytes to %s", root.path, moved, folder)
    return moved


def _failed(root: Root, folder: str, error: OSError) -> StorageError:
    """Makes the error of a disk that fails."""
    text = f"{root.path}: a value can't be moved to {folder}: {error.strerror}: nothing was lost, and nothing was put"
    return StorageError(text, code=error.errno, path=folder)


def _map(root: Root, one: _Candidate) -> Mapping | None:
    """Maps a file that may move. Returns None if it was replaced meanwhile, is written in place, or is a copy.

    Its header says where its data begins: of what is lent, this host has no record.
    """
    if root.catalog.view(_is_copy, one.segment, one.row):
        return None
    path, size = segment_path(root.segments, one.segment), one.row.nbytes
    with root.guard:
        try:
            with OwnedFile(path, os.O_RDONLY, dir_fd=root.segments_fd) as file:
                start = header_size(syscalls.read_at(file.fd, HEAD_SIZE, 0), size)
        except FileNotFoundError:
            return None
        mapping = root.storage.map_segment(SegmentExtent(one.segment, one.row.put_id, size, start))
    if mapping is None:
        return None
    header = bytes(mapping.view()[:start])
    return None if may_be_mutable(header) and is_mutable(read_header(header, size).description) else mapping


def _copy(root: Root, folder: str, one: _Candidate) -> bool:
    """Takes step 3. Returns False if the file stays: see `_map`. Raises OSError if the disk is full, or fails."""
    mapping = _map(root, one)
    if mapping is None:
        return False
    moving, target = f"{folder}/{MOVING}", segment_path(folder, one.segment)
    try:
        with contextlib.suppress(FileNotFoundError):
            syscalls.unlink(moving)
        with OwnedFile(moving, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file, mapping.view() as content:
            give_to_group(file.fd, root.settings)
            syscalls.allocate(file.fd, len(content))  # a full disk shows here
            for at in range(0, len(content), _AT_ONCE):
                syscalls.write_at(file.fd, content[at : at + _AT_ONCE], at)
            if root.settings.durable:
                syscalls.sync(file.fd)
    finally:
        del mapping  # the traceback of an error would keep the file from others
    syscalls.rename(moving, target)
    if root.settings.durable:
        syscalls.sync_folder(folder)
    return True


def _switch_file(root: Root, folder: str, one: _Candidate, deadline: float) -> bool:
    """Takes step 4. Returns False, and removes the copy, if somebody has the file mapped, or the value was replaced."""
    file = root.mutex.run(_switch, deadline, root, folder, one)
    if file is None:  # after an error the rows may name it
        remove_file(segment_path(folder, one.segment))
        return False
    with contextlib.suppress(OSError):  # a file system without holes
        syscalls.free_blocks(file.lock_file.fd, one.row.nbytes)  # a writer's mapping may keep them
    file.close()
    return True


def _switch(root: Root, folder: str, one: _Candidate) -> ClaimedFile | None:
    segment, row = one.segment, one.row

    def switch(transaction: Transaction) -> bool:
        if transaction.segment(segment) != row:
            return False
        counters = transaction.counters()
        counters.live -= row.nbytes
        transaction.put_segment(segment, msgspec.structs.replace(row, nbytes=0))
        transaction.put_row(tables.SPILLED, tables.pack_number(segment), tables.pack_number(row.nbytes))
        transaction.put_counters(counters)
        return True

    with root.guard:
        try:
            file = root.storage.claim(segment)
        except FileNotFoundError:
            return None
        if file is None:
            return None
        try:
            _copy_slots(root, file, segment_path(folder, segment))
            if not root.catalog.update(switch, is_delete=True):
                file.close()
                return None
            _remove(root, segment, file)
        except BaseException:
            file.close()
            raise
    return file


def _copy_slots(root: Root, file: ClaimedFile, target: str) -> None:
    """Copies the header's words that may have changed since the file was copied. Nobody changes them now."""
    head = syscalls.read_at(file.lock_file.fd, HEAD_SIZE, 0)
    with OwnedFile(target, os.O_RDWR) as copy:
        if syscalls.read_at(copy.fd, HEAD_SIZE, 0) != head:
            syscalls.write_at(copy.fd, head, 0)
            if root.settings.durable:
                syscalls.sync(copy.fd)


def _remove(root: Root, segment: int, file: ClaimedFile) -> None:
    """Removes the file of a value that was moved. Who has just opened it must not take it for the value."""
    erase_put_id(file.lock_file.fd)
    root.storage.unlink(segment, file)


# --- a version that was moved, and is replaced -----------------------------------------------------------------------


def remove_moved(root: Root, transaction: Transaction, segment: int) -> bool:
    """Removes the copy of a version that was replaced, with its row. Returns False if somebody has it mapped.

    Where the disk isn't there, the file stays, and the next move removes it: no row names it any more.
    """
    file = root.storage.open_spilled(segment)
    if file is not None:
        with file:
            if not file.lock():
                return False
            erase_put_id(file.fd)
            remove_file(segment_path(root.storage.spill_folder() or "", segment))
    transaction.delete_row(tables.SPILLED, tables.pack_number(segment))
    return True
