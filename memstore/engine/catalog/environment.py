"""One LMDB environment: its files, how it is opened, and this process's slot in its table of readers.

What LMDB needs to be safe here, each rule seen to be needed:
- data.mdb is checked before LMDB maps it (`meta.py`), and allocated up to the map size, so that a full tmpfs can't fail
  a commit;
- lock.mdb is allocated before the first opening: it is sparse, and a touch of it on a full tmpfs would be a SIGBUS;
- lock.mdb is never opened by us while the environment is: closing it would drop LMDB's own locks;
- no transaction outlives a call: an idle reader makes the map grow without end;
- the slot in LMDB's table of readers is kept between calls: to take one, LMDB locks a mutex of its own, and a process
  that is stopped in this moment keeps all others from reading, without a timeout. So a slot is taken while the store's
  mutex is held, when the environment is opened (decision 009).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import lmdb

from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.lmdb_errors import translated
from memstore.engine.catalog.meta import check_file, damaged
from memstore.errors import CorruptionError, NotAStoreError, StoreClosedError

STEP = 8 << 20  # bytes: the size of a new data.mdb
MAX_READERS = 4096
_LOCK_FILE_SIZE = MAX_READERS * 64 + syscalls.PAGE


class Environment:
    """Open it once a process, while the root folder is locked, and under the store's mutex: naming the tables takes a
    write transaction, for which LMDB would wait without end. Calls are made by one thread at a time.

    Attributes:
        folder: of data.mdb, whose path is `path`, and lock.mdb.
        handle: LMDB's environment; None while it is released, or when `is_closed`.
        tables: LMDB's handles of the tables, by name.
        page_size: that of the machine which made it.
        keeps_slot: whether a read transaction that has ended leaves its slot to the next one.
        ended: the last read transaction, which has the slot that the next one takes over. It is let go of right before.
    """

    __slots__ = (
        *("_durable", "_identity", "_locked", "_writable"),
        *("ended", "folder", "handle", "is_closed", "keeps_slot", "page_size", "path", "tables"),
    )

    def __init__(self, folder: str, *, durable: bool, writable: bool, locked: bool) -> None:
        self.folder, self.path = folder, f"{folder}/data.mdb"
        self._durable, self._writable, self._locked = durable, writable, locked
        self.handle: Any = None
        self.tables: dict[str, Any] = {}
        self.page_size = syscalls.PAGE
        self.ended: Any = None
        self.keeps_slot, self.is_closed = True, False
        self._identity: tuple[int, int] | None = None
        for attempt in range(3):  # another process may be writing the page that is read here
            try:
                check_file(self.path, is_stable=writable)  # who reads only looks without the mutex
                break
            except CorruptionError:
                if attempt == 2:
                    raise
        if writable:
            self._allocate_lock_file()
        self._open()

    # --- opening and closing ------------------------------------------------------------------------------------------

    def _allocate_lock_file(self) -> None:
        path = f"{self.folder}/lock.mdb"
        if os.path.lexists(path) and os.lstat(path).st_size >= _LOCK_FILE_SIZE:
            return
        fd = syscalls.open_file(path, os.O_RDWR | os.O_CREAT)  # new, or its creator was killed
        try:
            syscalls.allocate(fd, _LOCK_FILE_SIZE)
        finally:
            syscalls.close(fd)

    def _open(self) -> None:
        size = os.stat(self.path).st_size if os.path.exists(self.path) else 0
        try:
            self.handle = lmdb.open(
                os.fsencode(self.folder),  # a path may have any bytes
                map_size=max(size // syscalls.PAGE * syscalls.PAGE, STEP),
                sync=self._durable,
                metasync=self._durable,
                readonly=not self._writable,
                lock=self._locked,
                readahead=False,
                max_readers=MAX_READERS,
                max_dbs=len(tables.NAMES) + len(tables.OPTIONAL) + len(tables.SERVED) + 2,
                max_spare_txns=int(self.keeps_slot),
            )
            self.page_size = self.handle.stat()["psize"]
            self.tables = {name: self.handle.open_db(name.encode(), create=self._writable) for name in tables.NAMES}
            for name in tables.OPTIONAL:
                with contextlib.suppress(lmdb.NotFoundError):  # who may not write can't create it
                    self.tables[name] = self.handle.open_db(name.encode(), create=self._writable)
            self.open_served()
            self._check_identity(os.stat(self.path))
            if self._writable:
                self.handle.reader_check()
            self.end(self.begin())
            if self._writable and size < STEP:
                self.allocate(STEP)
        except BaseException as error:
            self.release()  # left open, it would bar this process from opening it again
            if isinstance(error, lmdb.Error):
                raise self.translated(error) from error
            raise

    def open_served(self) -> None:
        """Opens the tables of a store that is served, if they are there. Under the store's mutex, as any opening."""
        if tables.SERVED[0] in self.tables:
            return
        with contextlib.suppress(lmdb.NotFoundError):  # the first one, mostly: the store was never served
            self.tables |= {name: self.handle.open_db(name.encode(), create=False) for name in tables.SERVED}

    def _check_identity(self, status: os.stat_result) -> None:
        """Who opens by the path again, as a forked child does, may find another store there."""
        found = (status.st_dev, status.st_ino)
        if self._identity not in (None, found):
            raise NotAStoreError(f"{self.path} was replaced while it was open: open the store again")
        self._identity = found

    def opened(self) -> Any:
        """LMDB's environment, opened if it was released."""
        if self.handle is None:
            if self.is_closed:
                raise StoreClosedError("the store is closed: memstore.open it again")
            self._open()
        return self.handle

    def release(self) -> None:
        """Closes LMDB's environment until the next call."""
        self.ended = None  # first: what ends with the environment gives up its slot, which in a child is the parent's
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.close()

    def close(self) -> None:
        self.is_closed = True
        self.release()

    # --- read transactions --------------------------------------------------------------------------------------------

    def begin(self) -> Any:
        """A read transaction; `end` it. Not within another one, which has the slot."""
        for _ in range(8):
            handle = self.handle or self.opened()
            self.ended = None  # only now has LMDB's binding its slot, and this very call takes it over
            try:
                return handle.begin(None, None, False, True)
            except lmdb.MapResizedError:
                handle.set_mapsize(0)
            except lmdb.BadRslotError:  # something here has opened and closed lock.mdb, as a copy of the folder does
                self.keeps_slot = False
                self.release()
            except lmdb.ReadersFullError as error:
                if not handle.reader_check():  # none of them is dead
                    raise self.translated(error) from None
        raise damaged(self.path, "its size keeps changing")

    def end(self, transaction: Any) -> None:
        """Nothing of it remains but its slot. Not even that is left to LMDB's binding, which frees it in a child."""
        transaction.abort()
        if self.keeps_slot:
            self.ended = transaction

    # --- size ---------------------------------------------------------------------------------------------------------

    def allocate(self, size: int) -> None:
        """Of data.mdb, to be mapped afterwards."""
        fd = syscalls.open_file(self.path, os.O_RDWR)
        try:
            self._check_identity(syscalls.status(fd))
            syscalls.allocate(fd, size)
        finally:
            syscalls.close(fd)

    def map(self, size: int) -> None:
        """Maps so much of data.mdb; 0: all that others have made it. The readers' slot goes with the old mapping."""
        self.opened().set_mapsize(size)
        self.end(self.begin())

    @property
    def nbytes(self) -> int:
        return os.stat(self.path).st_size + os.stat(f"{self.folder}/lock.mdb").st_size

    def translated(self, error: lmdb.Error) -> Exception:
        return translated(error, self.folder, MAX_READERS)
