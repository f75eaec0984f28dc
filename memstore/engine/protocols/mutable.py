"""Mutable entries: how one is opened, what each write checks, and how it ends. The rules: docs/decisions/015.

A put creates one (`put.py`), with three differences: the file is always a new one; its first page of data is a control
page; the commit expects that there is no such key.

1. *Open* (`open_mutable`): as a get (`get.py`), but mapped shared. The mapping keeps the file's lock.
2. *Write anew* (`_write_anew`): the first opener to write in another boot, or of another file, writes the control page
   anew, under the store's mutex. A kill in between leaves a page that the next opener writes anew.
3. *Check* (`MutableEntry.check_open`), before each write, whether the entry is deleted or sealed.
4. *Seal* (`MutableEntry.seal`), under the entry's mutex: note that it begins, put the rows as an ordinary value, note
   that it is done. If the sealer dies, or doesn't know whether the rows were put, the next owner of the mutex asks the
   catalog. Where another host owns the key, it asks that one (`Elsewhere.is_unsealed`). Until then nobody writes.

The entry's mutex comes before the store's. Nobody waits for an entry's mutex under the store's.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from memstore.engine import syscalls
from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.mapping import Mapping
from memstore.engine.files.segments import segment_path
from memstore.engine.format.records import LIVE, MutableKind, Record, SegmentExtent
from memstore.engine.protocols.change import gone_while_sealed, missing, mutable_entry
from memstore.engine.protocols.elsewhere import elsewhere_of, find_record, is_served
from memstore.engine.root.roots import Root, reopen_root, use_root
from memstore.engine.sync.pages import OPEN, SEALED, SEALING, ControlPage, FileIdentity
from memstore.engine.usage import resource_errors
from memstore.errors import (
    ContentionError,
    CorruptionError,
    CrossHostError,
    HomeUnavailableError,
    MutableEntryError,
    StoreFullError,
    StoreTimeoutError,
    VersionGoneError,
)

Result = TypeVar("Result")

_TRIES = 2  # before the store's mutex is taken
_NOTHING_PUT = (HomeUnavailableError, StoreFullError, StoreTimeoutError)  # these say so for certain


class MutableEntry:
    """A mutable entry that is open. Its rows stay mapped as long as this lives, or a tensor over them.

    Attributes:
        root, key, record: of the entry.
        writable: whether rows can be stored. Otherwise the mapping is private, and nobody else sees what is written.
        mapping: the file. The data section starts at `record.start`.
        page: the control page. Its mutex is for those who may write.
        errors: a `with` whose errors of the system name store and key.
    """

    __slots__ = ("__weakref__", "_use", "errors", "key", "mapping", "page", "record", "root", "writable")

    def __init__(self, root: Root, key: str, record: Record, mapping: Mapping, page: ControlPage, *, writable: bool):
        self._use = use_root(root)
        self.root, self.key, self.record, self.mapping = root, key, record, mapping
        self.page, self.writable = page, writable
        self.errors = resource_errors(root.path, key, root)

    @property
    def length(self) -> int:
        """The rows that are whole. Raises CorruptionError."""
        page = self.page
        if not self.writable and self.root.settings.durable and not page.is_of_this_boot:
            return page.flushed
        return page.length

    def run(self, action: Callable[[], Result], deadline: float) -> Result:
        """Calls `action` under the entry's mutex.

        Raises StoreTimeoutError, which names who holds it, and HomeUnavailableError while it isn't known whether it was
        sealed.
        """
        with self.errors:
            if self.page.forks and self.root.catalog.is_released:
                reopen_root(self.root, deadline)
            return self.page.run(functools.partial(self._settled, action, deadline), deadline)

    def _settled(self, action: Callable[[], Result], deadline: float) -> Result:
        page, record = self.page, self.record
        if page.state == SEALING:  # who seals holds the mutex: this one died, or didn't hear what came of it
            is_open = _is_unsealed(self.root, self.key.encode(), record.segment, record.put_id, deadline)
            page.state = OPEN if is_open else SEALED
        return action()

    def check_held(self) -> None:
        """Raises ContentionError in a child that was forked in the middle of an action of `run`."""
        if not self.page.is_held:
            raise ContentionError(
                f"{self.key!r}: this process was forked in the middle of a change, which its parent does"
            )

    @property
    def ended_as(self) -> str:
        """Says "deleted", "sealed", or "" if it can be written, for a description."""
        return "deleted" if self.page.is_gone else "sealed" if self.page.state == SEALED else ""

    def check_in_place(self) -> None:
        """Raises NotAStoreError where the store was removed. Call it before rows are read or written, not in `run`.

        Raises FencedError where this host's lease is over.
        """
        self.root.glance()
        if self.root.host_lease[0]:
            self.root.check_lease()

    def check_open(self) -> None:
        """Raises MutableEntryError where the entry was deleted or sealed. Call it before a write."""
        if not self.page.has_ended:
            return
        if self.page.is_gone:
            raise MutableEntryError(f"{self.key!r} was deleted: nobody else sees what is written", key=self.key)
        raise MutableEntryError(f"{self.key!r} was sealed: it can't be written any more", key=self.key)

    def check_before_write(self, deadline: float) -> None:
        """Checks what `check_in_place` and `check_open` check, for a write that takes no mutex.

        It waits for a seal that goes on.
        """
        self.check_in_place()
        if self.page.state == SEALING:
            self.run(self.check_open, deadline)
        self.check_open()

    def check_written(self, deadline: float) -> None:
        """Raises MutableEntryError after a write that took no mutex, unless a later seal is sure to have seen it.

        That is sure only if no seal has begun meanwhile.
        """
        fence()
        if self.page.state == SEALING and not self.page.is_gone:
            self.run(_nothing, deadline)  # until the seal has succeeded or failed
        if self.page.is_gone or self.page.state != OPEN:
            how = "deleted" if self.page.is_gone else "sealed"
            text = f"{self.key!r} was {how} while rows were written: they may or may not be in the sealed version"
            raise MutableEntryError(text, key=self.key)

    def seal(self, put_rows: Callable[[int], Result], deadline: float) -> Result:
        """Seals the entry: `put_rows` is called with the length, and puts that many rows in its place.

        Raises MutableEntryError if it is sealed or deleted already. What `put_rows` raises is raised too.
        """
        return self.run(functools.partial(self._seal, put_rows), deadline)

    def _seal(self, put_rows: Callable[[int], Result]) -> Result:
        page = self.page
        self.check_open()
        page.state = SEALING
        fence()
        try:
            result = put_rows(page.length)
        except _NOTHING_PUT:
            page.state = OPEN
            raise
        page.state = SEALED  # after another error, the next owner of the mutex finds out what it is
        return result

    def version_to_seal(self, deadline: float) -> int:
        """Returns its version, which a seal expects: so it can be made sure that a seal is not made any more.

        Raises MutableEntryError where it was deleted; HomeUnavailableError.
        """
        record = find_record(self.root, self.key.encode(), deadline)
        if record is None or record.put_id != self.record.put_id:
            raise gone_while_sealed(self.key)
        return record.version


def _is_live(root: Root, segment: int, put_id: int) -> bool:
    row = root.catalog.view(Transaction.segment, segment)
    return row is not None and row.put_id == put_id and row.state == LIVE


def _is_unsealed(root: Root, key: bytes, segment: int, put_id: int, deadline: float) -> bool:
    """Whether the entry is neither sealed nor deleted, and no seal that was begun can be made any more.

    The segment's row says so. But where another host owns the key, this one may hear of a seal a while later.
    """
    if not _is_live(root, segment, put_id):
        return False
    return not is_served(root) or elsewhere_of(root).is_unsealed(key, segment, put_id, deadline)


def _nothing() -> None:
    pass


_lock = threading.Lock()


def fence() -> None:
    """Makes the stores before it visible before the loads behind it: to take a lock is a locked instruction."""
    with _lock:
        pass


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


# --- open -------------------------------------------------------------------------------------------------------------


def open_mutable(
    root: Root,
    key: str,
    kind: MutableKind,
    capacity_of: Callable[[Record], int],
    deadline: float,
    *,
    writable: bool,
    put_id: int = 0,
) -> MutableEntry:
    """Opens a mutable entry.

    Args:
        capacity_of: the rows that a record has room for. It raises CorruptionError where the record can't be right.
        put_id: the put that created the entry; 0: any.

    Raises:
        KeyNotFoundError: no such key.
        MutableEntryError: an entry of another kind.
        VersionGoneError: the entry is of another put than `put_id`.
        CorruptionError: the file, or its control page, isn't whole.
        CrossHostError: it is on another host.
    """
    if root.catalog.is_released:
        reopen_root(root, deadline)
    name = key.encode()
    before, may_lock = None, False
    for _ in range(_TRIES):
        record = _checked(root, name, find_record(root, name, deadline), kind, put_id)
        mapping = _map(root, name, record, writable=writable)
        if mapping is not None:
            return _entry(root, key, record, mapping, capacity_of(record), deadline, writable=writable)
        may_lock = root.lock is not None and root.owners.is_alone
        if before is not None and before.put_id == record.put_id and not may_lock:
            raise _damaged(root, key, record)
        before = record
    if not may_lock:
        raise ContentionError(f"{key!r} was replaced each time it was opened: open it again", key=key)

    def under_the_mutex() -> tuple[Record, Mapping | None]:
        record = _checked(root, name, root.catalog.read(name), kind, put_id)
        return record, _map(root, name, record, writable=writable)

    record, mapping = root.mutex.run(under_the_mutex, deadline)
    if mapping is None:
        raise _damaged(root, key, record)
    return _entry(root, key, record, mapping, capacity_of(record), deadline, writable=writable)


def _checked(root: Root, name: bytes, record: Record | None, kind: MutableKind, put_id: int) -> Record:
    """Returns the record if it is the one that is meant, and lies on this host. Raises as `open_mutable`."""
    key = name.decode()
    if record is not None and put_id and record.put_id != put_id:
        record = None
    if record is None and put_id:
        raise VersionGoneError(f"{key!r} was deleted, sealed or created anew since the reference was made", key=key)
    if record is None:
        raise missing(name)
    if not record.is_mutable:
        text = f"{key!r} is an ordinary entry, and no {kind}: read it with store.get or store.view"
        raise MutableEntryError(text, key=key)
    if record.mutable_kind != kind:
        raise mutable_entry(name, record.mutable_kind)
    if record.hosts is not None:
        host = elsewhere_of(root).name_of(record.hosts[0])
        text = f"{key!r} is a {kind} on {host}, and its rows are written in place: open it there"
        raise CrossHostError(text, key=key)
    return record


def _map(root: Root, name: bytes, record: Record, *, writable: bool) -> Mapping | None:
    """Maps the file of a record. Returns None if it was replaced since."""
    with root.guard:
        extent = SegmentExtent(record.segment, record.put_id, record.size, record.start)
        try:
            return root.storage.map_segment(extent, live=True, writable=writable)
        except CorruptionError as error:
            key = name.decode()
            raise CorruptionError(f"{key!r}: {error}", key=key, path=error.path, detail=error.detail) from None


def _entry(
    root: Root, key: str, record: Record, mapping: Mapping, capacity: int, deadline: float, *, writable: bool
) -> MutableEntry:
    path = segment_path(root.segments, record.segment)
    try:
        status = os.stat(path.rpartition("/")[2], dir_fd=root.segments_fd, follow_symlinks=False)
    except FileNotFoundError:  # it is mapped, so nobody of memstore's has removed it
        raise _damaged(root, key, record) from None
    file = FileIdentity(status.st_dev, status.st_ino)
    page = ControlPage(mapping.address + record.start, capacity, file, mapping, name=f"{path} ({key!r})", path=path)
    entry = MutableEntry(root, key, record, mapping, page, writable=writable)
    if writable:
        if not page.is_ours:
            _write_anew(entry, deadline)
        page.recover = _nothing  # what a dead owner left is seen by the page's words
    return entry


def _write_anew(entry: MutableEntry, deadline: float) -> None:
    root, page, record = entry.root, entry.page, entry.record
    # What another boot began to seal its owner knows, which is asked before the store's mutex is taken.
    is_open = not page.was_used or _is_unsealed(root, entry.key.encode(), record.segment, record.put_id, deadline)

    def write() -> None:
        if not page.is_ours:
            is_live = is_open and _is_live(root, record.segment, record.put_id)
            page.write_anew(survived=not root.settings.durable, is_live=is_live)

    root.mutex.run(write, deadline)


def _damaged(root: Root, key: str, record: Record) -> CorruptionError:
    """Returns the error to raise. Raises NotAStoreError itself if the store is gone, or is being removed."""
    root.check_missing()
    detail = f"the file is missing, is locked by somebody else, or is not that of put {record.put_id:#x}"
    return CorruptionError(key=key, path=segment_path(root.segments, record.segment), detail=detail)


def sync_rows(entry: MutableEntry, start: int, stop: int) -> None:
    """Brings what was stored from byte `start` to `stop` of the data section to the disk, if there is one."""
    if entry.root.on_tmpfs or start >= stop:
        return
    at = (entry.record.start + start) // syscalls.PAGE * syscalls.PAGE
    end = entry.record.start + stop
    syscalls.sync_mapped(entry.mapping.address + at, end - at)
