"""The catalog: the host-local index, an LMDB database. The only importer of lmdb.

Its tables are in `tables.py`. Callers hold the store's mutex for every `update`. Each call takes the catalog's guard,
a lock of this process that forks take too: so no fork splits a transaction, and no two threads share the slot below.

What LMDB needs to be safe here, each rule seen to be needed:
- data.mdb is allocated up to the map size, so that a full tmpfs can't fail a commit, and grown in steps;
- a tenth of the map is kept for deletes, which need pages too (copy on write). Free pages that a reader keeps
  (`readers.py`) don't count for it: a stopped process would use it up;
- lock.mdb is allocated before the first opening: it is sparse, and a touch of it on a full tmpfs would be a SIGBUS;
- lock.mdb is never opened by us while the environment is: closing it would drop LMDB's own locks;
- no transaction outlives a call: an idle reader makes the map grow without end;
- its slot in the table of readers does: to take one, LMDB locks a mutex of its own, and a process that is stopped in
  this moment keeps all others from reading, without a timeout. So a slot is taken while the store's mutex is held, when
  the catalog is opened, and kept (decision 009).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import lmdb

from memstore.engine import syscalls
from memstore.engine.catalog.readers import count_free, reader_of_the_past
from memstore.engine.catalog.tables import NAMES, Transaction
from memstore.engine.format import Record, decode_record
from memstore.errors import CorruptionError, NotAStoreError, ResourceLimitError, StoreClosedError, StoreFullError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

STEP = 8 << 20
MAX_READERS = 4096
_LOCK_FILE_SIZE = MAX_READERS * 64 + syscalls.PAGE
_RESERVED_FOR_DELETES = 0.1
_PAGES_AN_UPDATE, _MOST_UNLOOKED = 64, 16  # that one takes at most, as a rule; updates between two looks for room
_META = struct.Struct("<II8x8xI92xQQ")  # of LMDB 0.9: magic, version, page size, last page, transaction
_META_AT = 16
_LMDB_MAGIC = 0xBEEFC0DE
_REFUSALS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


class Catalog:
    """One LMDB environment. Open it once a process, while the root folder is locked, and under the store's mutex:
    naming the tables takes a write transaction, for which LMDB would wait without end.

    Attributes:
        guard: held in every call. Who needs several calls, or files between them, without a fork in between, takes it.
    """

    def __init__(self, folder: str, *, durable: bool, writable: bool, locked: bool = True) -> None:
        """`locked` False doesn't touch lock.mdb: for who reads while nobody else uses the store."""
        self.guard = threading.RLock()
        self._folder, self._durable, self._writable, self._locked = folder, durable, writable, locked
        self._env: Any = None
        self._tables: dict[str, Any] = {}
        self._ended: Any = None  # the last read transaction, which has the slot that the next one takes over
        self._keeps_slot = True
        self._unlooked = 0  # updates until the next look for room
        self._closed = False
        self._page_size = syscalls.PAGE
        self._identity: tuple[int, int] | None = None
        for attempt in range(3):  # another process may be writing the page that is read here
            try:
                self._check_size()
                break
            except CorruptionError:
                if attempt == 2:
                    raise
        if writable:
            self._allocate_lock_file()
        self._open()

    # --- opening ------------------------------------------------------------------------------------------------------

    def _check_size(self) -> None:
        """A truncated data.mdb would be a SIGBUS inside LMDB."""
        path = f"{self._folder}/data.mdb"
        try:
            with open(path, "rb") as file:
                head = file.read(_META_AT + _META.size)
                if not head:
                    return  # a creator was killed before LMDB wrote anything
                if len(head) < _META_AT + _META.size or _META.unpack_from(head, _META_AT)[0] != _LMDB_MAGIC:
                    raise _damaged(path, "it doesn't start as an LMDB file does")
                page_size = _META.unpack_from(head, _META_AT)[2]
                file.seek(page_size)
                other = file.read(_META_AT + _META.size)
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return
        metas = [_META.unpack_from(page, _META_AT) for page in (head, other) if len(page) == _META_AT + _META.size]
        last_page = max(metas, key=lambda meta: meta[4])[3]
        if (last_page + 1) * page_size > size:
            raise _damaged(path, f"{size:,} bytes, but it names page {last_page:,}: it was truncated")
        states = tuple(int(meta[4]) for meta in metas)
        if self._writable and not _follow(states):  # others look without the mutex: pages of two moments, maybe
            raise _damaged(
                path,
                f"it starts with states {states}, which don't follow one another, so one may be older than it says: "
                "close the store everywhere, and run memstore.repair",
            )

    def _allocate_lock_file(self) -> None:
        path = f"{self._folder}/lock.mdb"
        if os.path.lexists(path) and os.lstat(path).st_size >= _LOCK_FILE_SIZE:
            return
        fd = syscalls.open_file(path, os.O_RDWR | os.O_CREAT)  # new, or its creator was killed
        try:
            syscalls.allocate(fd, _LOCK_FILE_SIZE)
        finally:
            syscalls.close(fd)

    def _open(self) -> None:
        path = f"{self._folder}/data.mdb"
        size = os.stat(path).st_size if os.path.exists(path) else 0
        try:
            self._env = lmdb.open(
                self._folder,
                map_size=max(size // syscalls.PAGE * syscalls.PAGE, STEP),
                sync=self._durable,
                metasync=self._durable,
                readonly=not self._writable,
                lock=self._locked,
                readahead=False,
                max_readers=MAX_READERS,
                max_dbs=len(NAMES) + 2,
                max_spare_txns=int(self._keeps_slot),
            )
            self._page_size = self._env.stat()["psize"]  # that of the machine which made it
            self._tables = {name: self._env.open_db(name.encode(), create=self._writable) for name in NAMES}
            self._check_identity(path, os.stat(path))
            if self._writable:
                self.forget_dead_readers()
            self._end(self._begin())
            if self._writable and size < STEP:
                self._allocate(STEP)
        except BaseException as error:
            self.release()  # left open, it would bar this process from opening it again
            if isinstance(error, lmdb.Error):
                raise self._translate(error) from error
            raise

    def _check_identity(self, path: str, status: os.stat_result) -> None:
        """Who opens by the path again, as a forked child does, may find another store there."""
        found = (status.st_dev, status.st_ino)
        if self._identity not in (None, found):
            raise NotAStoreError(f"{path} was replaced while it was open: open the store again")
        self._identity = found

    def _allocate(self, size: int) -> None:
        path = f"{self._folder}/data.mdb"
        fd = syscalls.open_file(path, os.O_RDWR)
        try:
            self._check_identity(path, syscalls.status(fd))
            syscalls.allocate(fd, size)
        finally:
            syscalls.close(fd)

    def close(self) -> None:
        self._closed = True
        self.release()

    @property
    def is_released(self) -> bool:
        """The next call opens it again, and is to be made under the store's mutex."""
        return self._env is None and not self._closed

    def leave_to_parent(self) -> None:
        """In a forked child, before it does anything: the guard and the environment are the parent's."""
        self.guard = threading.RLock()
        self.release()

    def reopen(self) -> None:
        """Opens what was released. Under the store's mutex, as any opening."""
        with self.guard:
            self._environment()

    def release(self) -> None:
        """Closes the environment until the next call."""
        self._ended = None  # first: what ends with the environment gives up its slot, which in a child is the parent's
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _environment(self) -> Any:
        if self._env is None:
            if self._closed:
                raise StoreClosedError("the store is closed: memstore.open it again")
            self._open()
        return self._env

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, key: bytes) -> Record | None:
        """As `view` with `Transaction.record`, in one frame: every get of one key comes here."""
        with self.guard:
            self._ended = None
            try:
                handle = self._env.begin(None, None, False, False)
            except (AttributeError, lmdb.Error):  # released; or what `_begin` knows a way out of
                return self.view(Transaction.record, key)
            try:
                stored = handle.get(key, None, self._tables["entries"])
            except lmdb.Error as error:
                raise self._translate(error) from error
            finally:
                self._end(handle)
                del handle
        try:
            return None if stored is None else decode_record(key, stored)
        except CorruptionError as error:
            raise self._located(error) from None

    def view(
        self,
        action: Callable[Concatenate[Transaction, Arguments], Result],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Result:
        """Calls `action` with one moment of the catalog, and the arguments."""
        with self.guard:
            handle = self._begin()
            transaction = Transaction(handle, self._tables)
            try:
                return action(transaction, *arguments, **keywords)
            except BaseException as error:
                transaction.forget()  # who keeps the error keeps its frames, and with them the transaction's slot
                if isinstance(error, lmdb.Error):
                    raise self._translate(error) from error
                if isinstance(error, CorruptionError):
                    raise self._located(error) from None
                raise
            finally:
                self._end(handle)
                del handle

    def _begin(self) -> Any:
        """A read transaction; `_end` it. Not within another one, which has the slot."""
        for _ in range(8):
            env = self._env or self._environment()
            self._ended = None  # only now has LMDB's binding its slot, and this very call takes it over
            try:
                return env.begin(None, None, False, True)
            except lmdb.MapResizedError:
                env.set_mapsize(0)
            except lmdb.BadRslotError:  # something here has opened and closed lock.mdb, as a copy of the folder does
                self._keeps_slot = False
                self.release()
            except lmdb.ReadersFullError as error:
                if not env.reader_check():  # none of them is dead
                    raise self._translate(error) from None
        raise _damaged(f"{self._folder}/data.mdb", "its size keeps changing")

    def _end(self, handle: Any) -> None:
        """Nothing of it remains but its slot. Not even that is left to LMDB's binding, which frees it in a child."""
        handle.abort()
        if self._keeps_slot:
            self._ended = handle

    def forget_dead_readers(self) -> None:
        """Their slots are free then. Under the store's mutex: where there are any, LMDB locks its table."""
        with self.guard:
            self._environment().reader_check()

    # --- writing ------------------------------------------------------------------------------------------------------

    def update(self, action: Callable[[Transaction], Result], *, is_delete: bool = False) -> Result:
        """Calls `action` in a write transaction and commits it; more than once if the map had to grow."""
        with self.guard:
            for _ in range(64):
                try:
                    if not is_delete:
                        self._unlooked -= 1
                        if self._unlooked < 0 and self._nearly_full():
                            self._grow()
                    handle = self._environment().begin(None, None, True, True)
                    try:
                        result = action(Transaction(handle, self._tables))
                        handle.commit()
                        return result
                    except BaseException as error:
                        with contextlib.suppress(lmdb.Error):  # a failed commit has ended it
                            handle.abort()
                        if isinstance(error, CorruptionError):
                            raise self._located(error) from None
                        raise
                except lmdb.MapResizedError:  # another process has grown it
                    self._map(0)
                except lmdb.MapFullError:
                    if not self._environment().reader_check():  # the pages that a dead reader kept are free: try again
                        self._grow()
                except lmdb.Error as error:
                    raise self._translate(error) from error
            raise self._full("the catalog can't be grown fast enough for this transaction")

    def _nearly_full(self) -> bool:
        info = self._environment().info()
        pages = info["map_size"] // self._page_size
        room = int((1 - _RESERVED_FOR_DELETES) * pages) - info["last_pgno"]
        if room > 0:
            self._unlooked = min(room // _PAGES_AN_UPDATE, _MOST_UNLOOKED)
            return False
        used = self.view(Transaction.pages)  # those that were freed are used again: count those in use
        reserve = int(2 * _RESERVED_FOR_DELETES * pages)
        if used > pages - reserve:
            return True
        reader, room = reader_of_the_past(self._environment()), pages - info["last_pgno"] - 1
        if reader is None or room >= reserve:
            return False
        free = count_free(f"{self._folder}/data.mdb", self._page_size, reader.moment, reserve - room)
        return room + free < reserve

    @property
    def growth(self) -> int:
        """Bytes that the catalog has taken beyond its first step, which count against the store's capacity."""
        with self.guard:
            return max(self._environment().info()["map_size"] - STEP, 0)

    def _grow(self) -> None:
        size = self._environment().info()["map_size"]
        size += max(STEP, size // 4 // STEP * STEP)
        counters = self.view(lambda transaction: transaction.counters())
        if counters.capacity and counters.allocated + size - STEP > counters.capacity:
            raise self._full(
                f"the store may take {counters.capacity:,} bytes, and the catalog has to grow to {size:,} beside "
                f"{counters.allocated:,} of its files"
            )
        try:
            self._allocate(size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._full(f"no room to grow the catalog to {size:,} bytes") from None
        self._map(size)

    def _map(self, size: int) -> None:
        """Maps what the file has grown to, or is to have; the readers' slot goes with the old mapping."""
        self._environment().set_mapsize(size)
        self._end(self._begin())

    def _full(self, why: str) -> StoreFullError:
        """Names the oldest reader: there may be room enough, but for the pages that it keeps."""
        env = self._environment()
        reader = reader_of_the_past(env)
        if reader is not None:
            behind = env.info()["last_txnid"] - reader.moment
            why += f"; pid {reader.pid} has read since {behind:,} changes ago: what they replaced is kept until it ends"
        return StoreFullError(f"{self._folder}: {why}")

    def _located(self, error: CorruptionError) -> CorruptionError:
        """A damaged row knows its key, and not where it lies."""
        if error.path is not None:
            return error
        path = f"{self._folder}/data.mdb"
        return CorruptionError(f"{path}: {error}", key=error.key, path=path, detail=error.detail)

    def _translate(self, error: lmdb.Error) -> Exception:
        path = f"{self._folder}/data.mdb"
        if isinstance(error, lmdb.DiskError):
            return StoreFullError(f"{path}: {error}")
        if isinstance(error, lmdb.ReadersFullError):
            text = (
                f"{self._folder}: {MAX_READERS} processes have this store open, and it has room for no more; "
                "if many of them were killed, gc in one that lives makes room"
            )
            return ResourceLimitError(text, code=errno.EAGAIN)
        if "already open in this process" in str(error):
            text = f"{self._folder}: something else than memstore has it open in this process: close that first"
            return ResourceLimitError(text, code=errno.EBUSY)
        for code in _REFUSALS:
            if os.strerror(code) in str(error):  # LMDB's binding keeps the text only
                if code == errno.EIO and self._is_disk_full():  # a short write is an I/O error to LMDB
                    code = errno.ENOSPC
                return OSError(code, os.strerror(code), path)
        return _damaged(path, str(error))

    def _is_disk_full(self) -> bool:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize < STEP

    @property
    def nbytes(self) -> int:
        return os.stat(f"{self._folder}/data.mdb").st_size + os.stat(f"{self._folder}/lock.mdb").st_size


def has_gone_back(folder: str) -> bool:
    """Whether LMDB may take another state of the catalog than the newest, though both can be read. Nobody uses it."""
    try:
        with open(f"{folder}/data.mdb", "rb") as file:
            head = file.read(_META_AT + _META.size)
            file.seek(_META.unpack_from(head, _META_AT)[2])
            other = file.read(_META_AT + _META.size)
        return not _follow(tuple(int(_META.unpack_from(page, _META_AT)[4]) for page in (head, other)))
    except (OSError, ValueError, struct.error):  # whoever reads it will say it
        return False


def _follow(states: tuple[int, ...]) -> bool:
    """Each commit writes the page that the one before left alone, by its number's last bit. A new file has two 0."""
    newest = max(states)
    return len(states) == 2 and (newest == 0 or (states[newest % 2], states[1 - newest % 2]) == (newest, newest - 1))


def _damaged(path: str, detail: str) -> CorruptionError:
    return CorruptionError(path=path, detail=detail)
