"""The LMDB environment: its files, how it is opened, this process's slot in its table of readers, and its errors.

What LMDB needs to be safe here, each rule seen to be needed:
- data.mdb is checked before LMDB maps it (`check_file`), and allocated up to the map size, so that a full tmpfs can't
  fail a commit;
- lock.mdb is allocated before the first opening: it is sparse, and a touch of it on a full tmpfs would be a SIGBUS;
- lock.mdb is never opened by us while the environment is: closing it would drop LMDB's own locks;
- no transaction outlives a call: an idle reader makes the map grow without end;
- the slot in LMDB's table of readers is kept between calls: to take one, LMDB locks a mutex of its own, and a process
  that is stopped in this moment keeps all others from reading, without a timeout. So a slot is taken while the store's
  mutex is held, when the environment is opened (decision 009).

Two things are read here from data.mdb itself, as LMDB 0.9 lays it out.

- The two pages that it starts with (`read_metas`). Each commit writes one of them, in turn; LMDB opens the newer state.
  It doesn't ask whether the file is long enough; and if the page of the newest state is damaged, it silently opens the
  older one.
- The table of free pages (`count_free`), which LMDB's binding doesn't show. A page that was replaced is used again once
  nobody reads a moment from before. It is read under the store's mutex, so that nobody writes there. To guess from the
  number of transactions instead was tried, in a store of 4 MiB that had been full once, beside a stopped reader: at 64
  pages a transaction 23 puts were possible instead of 210; and batches of 100 left room for 10 deletes instead of 49.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import lmdb

from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.errors import CorruptionError, NotAStoreError, ResourceLimitError, StoreClosedError, StoreFullError

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
        with syscalls.file_open(path, os.O_RDWR | os.O_CREAT) as fd:  # new, or its creator was killed
            syscalls.allocate(fd, _LOCK_FILE_SIZE)

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
            self.open_optional()
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

    def open_optional(self) -> None:
        """Opens the tables that later versions have added. Under the store's mutex, unless it only reads."""
        for name in tables.OPTIONAL:
            if name not in self.tables:
                with contextlib.suppress(lmdb.NotFoundError):  # who may not write can't create it
                    self.tables[name] = self.opened().open_db(name.encode(), create=self._writable)

    def open_served(self) -> None:
        """Opens the tables of a store that is served, if they are there. Under the store's mutex, as any opening."""
        if tables.SERVED[-1] in self.tables:
            return
        with contextlib.suppress(lmdb.NotFoundError):  # the first one, mostly: the store was never served
            for name in tables.SERVED:  # an older version has made some of them
                self.tables[name] = self.handle.open_db(name.encode(), create=False)

    def _check_identity(self, status: os.stat_result) -> None:
        """Raises NotAStoreError if the path, which a forked child opens again, leads to another store by now."""
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
        """Allocates so much of data.mdb, to be mapped afterwards."""
        with syscalls.file_open(self.path, os.O_RDWR) as fd:
            self._check_identity(syscalls.status(fd))
            syscalls.allocate(fd, size)

    def map(self, size: int) -> None:
        """Maps so much of data.mdb; 0: all that others have made it. The readers' slot goes with the old mapping."""
        self.opened().set_mapsize(size)
        self.end(self.begin())

    @property
    def nbytes(self) -> int:
        return os.stat(self.path).st_size + os.stat(f"{self.folder}/lock.mdb").st_size

    def translated(self, error: lmdb.Error) -> Exception:
        return translated(error, self.folder, MAX_READERS)


# --- LMDB's errors, as memstore's ------------------------------------------------------------------------------------


_REFUSALS = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
)
_FULL_DISK = 8 << 20  # bytes: a disk that has fewer left has none for the catalog


def translated(error: lmdb.Error, folder: str, max_readers: int) -> Exception:
    path = f"{folder}/data.mdb"
    if isinstance(error, lmdb.DiskError):
        return StoreFullError(f"{path}: {error}")
    if isinstance(error, lmdb.ReadersFullError):
        text = (
            f"{folder}: {max_readers} processes have this store open, and it has room for no more; "
            "if many of them were killed, gc in one that lives makes room"
        )
        return ResourceLimitError(text, code=errno.EAGAIN)
    if "already open in this process" in str(error):
        text = f"{folder}: something else than memstore has it open in this process: close that first"
        return ResourceLimitError(text, code=errno.EBUSY)
    for code in _REFUSALS:
        if os.strerror(code) in str(error):  # LMDB's binding keeps the text only
            if code == errno.EIO:  # so LMDB tells a short write
                code = _why_write_was_short(folder, path)
            return OSError(code, os.strerror(code), path)
    return damaged(path, str(error))


def located(error: CorruptionError, folder: str) -> CorruptionError:
    """A damaged row knows its key, and not where it lies."""
    if error.path is not None:
        return error
    path = f"{folder}/data.mdb"
    return CorruptionError(f"{path}: {error}", key=error.key, path=path, detail=error.detail)


def _why_write_was_short(folder: str, path: str) -> int:
    """The errno of the next write, had there been one; EIO if nothing but the disk explains it."""
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < _FULL_DISK:
        return errno.ENOSPC
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < os.stat(path).st_size:
        return errno.EFBIG
    return errno.EIO


# --- the two pages that a data.mdb starts with -----------------------------------------------------------------------


_META_AT = 16  # bytes, of any page
_META_PAGE = struct.Struct("<II8x8xI36xQ48xQQ")
_MAGIC = 0xBEEFC0DE


class MetaPage(NamedTuple):
    magic: int
    version: int
    page_size: int
    free_root: int  # the page where the table of free pages starts
    last_page: int
    state: int  # the number of the transaction that wrote it


def check_file(path: str, *, is_stable: bool) -> None:
    """Raises CorruptionError where LMDB would end the process, or take an older state for the newest.

    `is_stable` False: somebody may be committing meanwhile, so the two pages may be of two moments.
    """
    try:
        metas, size = read_metas(path)
    except FileNotFoundError:
        return
    if not size:
        return  # a creator was killed before LMDB wrote anything
    if not metas or metas[0].magic != _MAGIC:
        raise damaged(path, "it doesn't start as an LMDB file does")
    last_page = max(metas, key=lambda meta: meta.state).last_page
    if (last_page + 1) * metas[0].page_size > size:  # a SIGBUS in LMDB
        raise damaged(path, f"{size:,} bytes, but it names page {last_page:,}: it was truncated")
    if is_stable and not _are_successive(metas):
        states = tuple(meta.state for meta in metas)
        raise damaged(
            path,
            f"it starts with states {states}, which don't follow one another, so one may be older than it says: "
            "close the store everywhere, and run memstore.repair",
        )


def has_gone_back(folder: str) -> bool:
    """Whether LMDB may take another state of the catalog than the newest, though both can be read. Nobody uses it."""
    try:
        metas, _ = read_metas(f"{folder}/data.mdb")
    except (OSError, ValueError):  # whoever reads it will say it
        return False
    return len(metas) == 2 and not _are_successive(metas)


def read_metas(path: str) -> tuple[list[MetaPage], int]:
    """The pages, unchecked, fewer than two where the file is too short; and its size."""
    metas: list[MetaPage] = []
    with open(path, "rb") as file:
        for _ in range(2):
            page = file.read(_META_AT + _META_PAGE.size)
            if len(page) < _META_AT + _META_PAGE.size:
                break
            metas.append(MetaPage._make(_META_PAGE.unpack_from(page, _META_AT)))
            file.seek(metas[0].page_size)
        return metas, os.fstat(file.fileno()).st_size


def _are_successive(metas: Sequence[MetaPage]) -> bool:
    """Whether they are of two commits in a row: each writes the page of its number's last bit. A new file has two 0."""
    states = [meta.state for meta in metas]
    newest = max(states)
    return len(states) == 2 and (newest == 0 or (states[newest % 2], states[1 - newest % 2]) == (newest, newest - 1))


def damaged(path: str, detail: str) -> CorruptionError:
    return CorruptionError(path=path, detail=detail)


# --- readers, and the pages that they leave free ---------------------------------------------------------------------


_PAGE_HEAD = 16  # bytes
_NO_ROOT = 2**64 - 1
_FLAGS_AT, _END_AT = 10, 12  # in a page: what it is; where the places of its nodes end
_BRANCH = 1
_NODE = struct.Struct("<HHHH")  # two halves of a size, or of a page's number; flags, or that number's top; size of key
_ELSEWHERE = 1  # flag: instead of its data, the node has the number of the page where they start
_MOST_PAGES = 1 << 16  # that are looked at: a damaged one may name itself


class CatalogReader(NamedTuple):
    pid: int
    moment: int  # the transaction whose outcome it reads


def reader_of_the_past(env: Any) -> CatalogReader | None:
    """The oldest living reader of LMDB's environment, if it reads what was changed since."""
    reader = _oldest(env)
    if reader is not None and env.reader_check():  # some were dead
        reader = _oldest(env)
    return reader


def _oldest(env: Any) -> CatalogReader | None:
    reader = parse_readers(env.readers())
    return reader if reader is not None and reader.moment < env.info()["last_txnid"] else None


def parse_readers(listed: str) -> CatalogReader | None:
    """The oldest of LMDB's list: a head, then process, thread and transaction a line; "-" where none is open."""
    lines = [line.split() for line in listed.splitlines()]
    readers = [CatalogReader(int(words[0]), int(words[2])) for words in lines if len(words) == 3 and words[2].isdigit()]
    return min(readers, key=lambda reader: reader.moment, default=None)


def count_free(path: str, moment: int, enough: int) -> int:
    """How many free pages of a data.mdb a writer may use while `moment` is read; it stops counting at `enough`."""
    found, (metas, _) = 0, read_metas(path)
    fd = syscalls.open_file(path, os.O_RDONLY)
    try:
        for freed_by, count in _lists_of_free_pages(fd, max(metas, key=lambda meta: meta.state)):
            if freed_by >= moment or found >= enough:
                break
            found += count
    except (struct.error, IndexError, OverflowError) as error:
        detail = f"its list of free pages can't be read: {error}"
        raise CorruptionError(path=path, detail=detail) from error
    finally:
        syscalls.close(fd)
    return found


def _lists_of_free_pages(fd: int, meta: MetaPage) -> Iterator[tuple[int, int]]:
    """Transactions in their order, and how many pages each has freed."""
    page_size, pages = meta.page_size, [meta.free_root] if meta.free_root != _NO_ROOT else []
    for _ in range(_MOST_PAGES):
        if not pages:
            return
        page = syscalls.read_at(fd, page_size, pages.pop() * page_size)
        nodes = list(_nodes(page))
        if page[_FLAGS_AT] & _BRANCH:
            pages += [low | high << 16 | top << 32 for _, low, high, top, _ in reversed(nodes)]
            continue
        for place, _, _, flags, key_size in nodes:
            data = page[place + key_size :]
            if flags & _ELSEWHERE:
                data = syscalls.read_at(fd, 8, _word(data) * page_size + _PAGE_HEAD)
            yield _word(page, place), _word(data)


def _nodes(page: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields for each node of a page where its key starts, and the four words of its head: see `_NODE`."""
    end = int.from_bytes(page[_END_AT : _END_AT + 2], "little")
    for (place,) in struct.iter_unpack("<H", page[_PAGE_HEAD:end]):
        yield place + _NODE.size, *_NODE.unpack_from(page, place)


def _word(content: bytes, place: int = 0) -> int:
    return int.from_bytes(content[place : place + 8], "little")
