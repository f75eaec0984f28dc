"""A segment's file that this process has claimed: nobody else writes, sweeps or claims it until it is published."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from typing import Any

from memstore.engine import syscalls
from memstore.engine.files.lockfile import LockFile, OwnedFile
from memstore.engine.files.slots import vacate, write_slots
from memstore.engine.format import Slots
from memstore.engine.syscalls import Reservation
from memstore.errors import CorruptionError

Guard = AbstractContextManager[Any]  # the lock that a fork takes first: see `root.guard`


class ClaimedFile:
    """The file, and the lock that keeps others from it: an exclusive one of the open file, or a parked one.

    This is what a commit and a clean-up need of a segment: they write its header in place, and give up the lock.

    Attributes:
        lock_file: what holds the exclusive lock. It is closed while the file is parked.
    """

    __slots__ = ("_dir_fd", "_page", "lock_file", "path")

    def __init__(self, path: str, lock_file: LockFile, dir_fd: int | None = None) -> None:
        self.path, self.lock_file, self._dir_fd = path, lock_file, dir_fd
        self._page: Reservation | None = None  # keeps the lock of a parked file

    def park(self, guard: Guard) -> None:
        """Closes the file, and keeps a shared lock by a mapping of one page.

        A process may have 65,530 mappings, and 1,024 open files. Call it under the store's mutex, once the segment is
        sealed. An exclusive lock could not be given up by `go_live`: a subprocess that is just being started has the
        file open too, until its exec, and so has the lock. A shared lock is in no reader's way.
        """
        syscalls.lock_shared(self.lock_file.fd)
        self._page, address, start = syscalls.reserve(syscalls.PAGE)
        map_for_writing(address + start, self.lock_file.fd, syscalls.PAGE, guard)
        self.lock_file.close()

    def open(self) -> OwnedFile:
        """The file, opened anew if it is parked. Call it under the store's mutex."""
        return OwnedFile(self.path, os.O_RDWR, dir_fd=self._dir_fd) if self.lock_file.fd < 0 else self.lock_file

    def go_live(self, slots: Slots, *, durable: bool) -> None:
        """Writes what a live segment's header says, and gives up the lock.

        Call it under the store's mutex, right before the catalog's commit; again, if that has to be repeated.
        """
        file = self.open()
        write_slots(file.fd, slots)
        if durable:
            syscalls.sync_data(file.fd)
        if file is self.lock_file:
            syscalls.unlock(file.fd)
        else:
            self._page = None

    def unlock(self) -> None:
        """Gives up the lock of a file that is not parked: a row of the catalog keeps it from here on."""
        syscalls.unlock(self.lock_file.fd)

    def vacate(self) -> None:
        """Makes the header say that the file holds nothing and may be used again. Under the store's mutex."""
        file = self.open()
        vacate(file.fd)

    def close(self) -> None:
        self._page = None
        self.lock_file.close()


class PreparedFile:
    """The file of a prepared segment: no lock keeps it, but a row of the catalog."""

    __slots__ = ("_dir_fd", "path")

    def __init__(self, path: str, dir_fd: int | None = None) -> None:
        self.path, self._dir_fd = path, dir_fd

    def go_live(self, slots: Slots, *, durable: bool) -> None:
        """Writes what a live segment's header says. Under the store's mutex, right before the catalog's commit.

        Raises CorruptionError if the file is not there any more.
        """
        try:
            file = OwnedFile(self.path, os.O_RDWR, dir_fd=self._dir_fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                raise
            detail = "it was put as a part of a sharded value, and somebody has removed it"
            raise CorruptionError(path=self.path, detail=detail) from None
        try:
            write_slots(file.fd, slots)
            if durable:
                syscalls.sync_data(file.fd)
        finally:
            file.close()


def map_for_writing(address: int, fd: int, size: int, guard: Guard) -> None:
    """Maps a file into a reservation. A fork comes before or after both calls: no child inherits the mapping."""
    with guard:
        syscalls.map_shared(address, fd, size)
        syscalls.keep_from_children(address, size)
