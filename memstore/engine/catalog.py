"""The catalog: the host-local index, an LMDB database. The only importer of lmdb.

Tables: `entries` (key -> record), `segments` (id -> row), `filling` (id -> batch), `retired` (sequence -> id),
`leases` (id -> until), `counters`. Callers hold the process's guard for every call, so that a fork never splits a
transaction, and the store's mutex for every `update`.

What LMDB needs to be safe here, each rule seen to be needed:
- data.mdb is allocated up to the map size, so that a full tmpfs can't fail a commit, and grown in steps;
- a tenth of the map is kept for deletes, which need pages too (copy on write);
- lock.mdb is allocated before the first opening: it is sparse, and a touch of it on a full tmpfs would be a SIGBUS;
- lock.mdb is never opened by us while the environment is: closing it would drop LMDB's own locks;
- no transaction outlives a call: an idle reader makes the map grow without end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import lmdb

from memstore.engine import syscalls
from memstore.engine.record import Record, SegmentRow, decode_record, decode_row, encode_record, encode_row
from memstore.errors import CorruptionError, NotAStoreError, ResourceLimitError, StoreClosedError, StoreFullError

Result = TypeVar("Result")

STEP = 8 << 20
MAX_READERS = 4096
_LOCK_FILE_SIZE = MAX_READERS * 64 + syscalls.PAGE
_RESERVED_FOR_DELETES = 0.1
_TABLES = ("entries", "segments", "filling", "retired", "leases", "counters")
_META = struct.Struct("<II8x8xI92xQQ")  # of LMDB 0.9: magic, version, page size, last page, transaction
_META_AT = 16
_LMDB_MAGIC = 0xBEEFC0DE
_REFUSALS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
_U64 = struct.Struct(">Q")
_COUNTERS = struct.Struct("<QQQQ")


@dataclass(frozen=True, slots=True)
class Counters:
    """Numbers that never repeat in a store."""

    version: int = 0
    number: int = 0  # the last segment or put id
    retired: int = 0  # the last sequence in `retired`
    publications: int = 0


class Catalog:
    """One LMDB environment. Open it once a process, while the root folder is locked, and under the store's mutex:
    naming the tables takes a write transaction, for which LMDB would wait without end.
    """

    def __init__(self, folder: str, *, durable: bool, writable: bool) -> None:
        self._folder, self._durable, self._writable = folder, durable, writable
        self._env: Any = None
        self._tables: dict[str, Any] = {}
        self._closed = False
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
                readahead=False,
                max_readers=MAX_READERS,
                max_dbs=len(_TABLES) + 2,
                max_spare_txns=0,  # a child that closes its copy would free their slots, which are the parent's
            )
            self._tables = {name: self._env.open_db(name.encode(), create=self._writable) for name in _TABLES}
            self._check_identity(path)
            if self._writable:
                self._env.reader_check()
            if self._writable and size < STEP:
                self._allocate(STEP)
        except BaseException as error:
            self.release()  # left open, it would bar this process from opening it again
            if isinstance(error, lmdb.Error):
                raise self._translate(error) from error
            raise

    def _check_identity(self, path: str) -> None:
        """A forked child opens again by the path, which may name another store by then."""
        status = os.stat(path)
        found = (status.st_dev, status.st_ino)
        if self._identity not in (None, found):
            raise NotAStoreError(f"{path} was replaced while it was open: open the store again")
        self._identity = found

    def _allocate(self, size: int) -> None:
        fd = syscalls.open_file(f"{self._folder}/data.mdb", os.O_RDWR)
        try:
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

    def release(self) -> None:
        """Closes the environment until the next call. A forked child must, before it does anything."""
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
        return self.view(lambda transaction: transaction.record(key))

    def view(self, action: Callable[[Transaction], Result]) -> Result:
        """Calls `action` with one moment of the catalog."""
        for _ in range(8):
            env = self._environment()
            try:
                handle = env.begin(None, None, False, True)
            except lmdb.MapResizedError:
                env.set_mapsize(0)
                continue
            except lmdb.ReadersFullError:
                if env.reader_check():
                    continue
                raise ResourceLimitError(
                    f"{self._folder}: {MAX_READERS} processes read this store, and it has room for no more",
                    code=errno.EAGAIN,
                ) from None
            try:
                return action(Transaction(handle, self._tables))
            except lmdb.Error as error:
                raise _damaged(f"{self._folder}/data.mdb", str(error)) from error
            finally:
                handle.abort()
        raise _damaged(f"{self._folder}/data.mdb", "its size keeps changing")

    # --- writing ------------------------------------------------------------------------------------------------------

    def update(self, action: Callable[[Transaction], Result], *, is_delete: bool = False) -> Result:
        """Calls `action` in a write transaction and commits it; more than once if the map had to grow."""
        for _ in range(64):
            env = self._environment()
            try:
                if not is_delete and self._nearly_full(env):
                    self._grow(env)
                handle = env.begin(None, None, True, True)
                try:
                    result = action(Transaction(handle, self._tables))
                    handle.commit()
                    return result
                except BaseException:
                    with contextlib.suppress(lmdb.Error):  # a failed commit has ended it
                        handle.abort()
                    raise
            except lmdb.MapResizedError:  # another process has grown it
                env.set_mapsize(0)
            except lmdb.MapFullError:
                if not env.reader_check():  # the pages that a dead reader kept are free then: try again
                    self._grow(env)
            except lmdb.Error as error:
                raise self._translate(error) from error
        raise StoreFullError(f"{self._folder}: the catalog can't be grown fast enough for this transaction")

    def _nearly_full(self, env: Any) -> bool:
        info = env.info()
        allowed = (1 - _RESERVED_FOR_DELETES) * info["map_size"] / syscalls.PAGE
        if info["last_pgno"] < allowed:
            return False
        with env.begin() as handle:  # pages that were freed are used again: count those in use
            stats = [handle.stat(table) for table in self._tables.values()]
        used = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return used > allowed - 0.1 * info["map_size"] / syscalls.PAGE

    def _grow(self, env: Any) -> None:
        size = env.info()["map_size"]
        size += max(STEP, size // 4 // STEP * STEP)
        try:
            self._allocate(size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreFullError(f"{self._folder}: no room to grow the catalog to {size:,} bytes") from None
        env.set_mapsize(size)

    def _translate(self, error: lmdb.Error) -> Exception:
        path = f"{self._folder}/data.mdb"
        if isinstance(error, lmdb.DiskError):
            return StoreFullError(f"{path}: {error}")
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


class Transaction:
    """The tables, typed. What it returns are copies."""

    __slots__ = ("_handle", "_tables")

    def __init__(self, handle: Any, tables: dict[str, Any]) -> None:
        self._handle, self._tables = handle, tables

    def record(self, key: bytes) -> Record | None:
        stored = self._handle.get(key, None, self._tables["entries"])
        return None if stored is None else decode_record(key, stored)

    def put_record(self, key: bytes, record: Record) -> None:
        self._handle.put(key, encode_record(key, record), db=self._tables["entries"])

    def delete_record(self, key: bytes) -> None:
        self._handle.delete(key, db=self._tables["entries"])

    def keys(self, prefix: bytes, after: bytes | None, limit: int) -> list[bytes]:
        """Up to `limit` keys with the prefix, in order, beyond `after`."""
        found: list[bytes] = []
        with self._handle.cursor(db=self._tables["entries"]) as cursor:
            more = cursor.set_range(after if after is not None else prefix) if after or prefix else cursor.first()
            while more and len(found) < limit:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    break
                if key != after:
                    found.append(key)
                more = cursor.next()
        return found

    def count(self, table: str) -> int:
        return int(self._handle.stat(self._tables[table])["entries"])

    def segment(self, segment: int) -> SegmentRow | None:
        stored = self._handle.get(_U64.pack(segment), None, self._tables["segments"])
        return None if stored is None else decode_row(stored)

    def put_segment(self, segment: int, row: SegmentRow) -> None:
        self._handle.put(_U64.pack(segment), encode_row(row), db=self._tables["segments"])

    def segments(self) -> Iterator[tuple[int, SegmentRow]]:
        with self._handle.cursor(db=self._tables["segments"]) as cursor:
            for key, stored in cursor:
                yield _number(key), decode_row(stored)

    def delete_segment(self, segment: int) -> None:
        self._handle.delete(_U64.pack(segment), db=self._tables["segments"])

    def put_number(self, table: str, key: int, value: int) -> None:
        self._handle.put(_U64.pack(key), _U64.pack(value), db=self._tables[table])

    def number(self, table: str, key: int) -> int | None:
        stored = self._handle.get(_U64.pack(key), None, self._tables[table])
        return None if stored is None else _number(stored)

    def delete_number(self, table: str, key: int) -> None:
        self._handle.delete(_U64.pack(key), db=self._tables[table])

    def numbers(self, table: str, limit: int, start: int = 0) -> list[tuple[int, int]]:
        """The first rows of `filling`, `retired` or `leases`, from the key `start` on."""
        found: list[tuple[int, int]] = []
        with self._handle.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(_U64.pack(start))
            while more and len(found) < limit:
                found.append((_number(cursor.key()), _number(cursor.value())))
                more = cursor.next()
        return found

    def counters(self) -> Counters:
        stored = self._handle.get(b"counters", None, self._tables["counters"])
        if stored is not None and len(stored) != _COUNTERS.size:
            raise CorruptionError(detail := f"the catalog's counters have {len(stored)} bytes", detail=detail)
        return Counters() if stored is None else Counters(*_COUNTERS.unpack(stored))

    def put_counters(self, counters: Counters) -> None:
        packed = _COUNTERS.pack(counters.version, counters.number, counters.retired, counters.publications)
        self._handle.put(b"counters", packed, db=self._tables["counters"])

    def clear(self, table: str) -> None:
        self._handle.drop(self._tables[table], delete=False)

    def store_id(self) -> str | None:
        stored = self._handle.get(b"store", None, self._tables["counters"])
        return None if stored is None else bytes(stored).decode(errors="replace")

    def put_store_id(self, store: str) -> None:
        self._handle.put(b"store", store.encode(), db=self._tables["counters"])


def _number(packed: bytes | memoryview) -> int:
    if len(packed) != _U64.size:
        raise CorruptionError(detail := f"a row of the catalog has a number of {len(packed)} bytes", detail=detail)
    return int(_U64.unpack(packed)[0])


def _damaged(path: str, detail: str) -> CorruptionError:
    return CorruptionError(f"{path}: {detail}", path=path, detail=detail)
