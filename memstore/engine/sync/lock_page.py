"""The lock page of a store: the robust mutex under which the store changes, and what its owner notes for the next one.

Layout: the mutex; the page's identity; three long words: how many publications have rung the doorbell, the batch that
is being published, and the mutex's dirty word; a word by which an index process hears of publications. The file's
inode is never replaced while the store lives.

The identity says for whom the page was written: boot, device, inode, pid namespace. If it doesn't fit, the page lived
through a reboot or was copied, and its mutex may look held though its owner is no more: the page is written anew,
unless somebody uses it. Every process that maps it holds a shared flock on it, which tells. Two pid namespaces can't
share a store: their thread ids, which mutexes and LMDB tell owners by, say nothing to each other.
"""

from __future__ import annotations

import errno
import logging
import sys
from typing import NamedTuple

from memstore.engine import syscalls
from memstore.engine.sync.clocks import boot_id
from memstore.engine.sync.doorbell import Watch
from memstore.engine.sync.mutex import Refusal, RobustMutex
from memstore.engine.sync.shared_page import SharedPage
from memstore.errors import (
    CorruptionError,
    KeyNotFoundError,
    MutableEntryError,
    ResourceLimitError,
    ShardMismatchError,
    VersionConflictError,
)

log = logging.getLogger("memstore")

_MAGIC = int.from_bytes(b"memstor1", "little")
_IDENTITY_AT = syscalls.MUTEX_SIZE  # magic, boot id (2 words), device, inode, pid namespace
_IDENTITY_SIZE = 6
_NOTES_AT = _IDENTITY_AT + 8 * _IDENTITY_SIZE
_PUBLICATIONS, _BATCH, _DIRTY = range(3)
_WATCH_AT = _NOTES_AT + 8 * 3


class LockPage(RobustMutex):
    """The store's mutex, and its owner's notes. Open it only while the root folder is locked.

    Attributes:
        watch: for the store's doorbell.
    """

    __slots__ = ("_notes", "_page", "watch")

    def __init__(self, path: str, *, keep_open: bool = False) -> None:
        """With `keep_open`, the file stays open as long as the page: see `filesystem.mappings_keep_locks`."""
        page = SharedPage(path)
        notes_at = page.address + _NOTES_AT
        nothing_changed = (KeyNotFoundError, VersionConflictError, ShardMismatchError, MutableEntryError, Refusal)
        super().__init__(page.address, name=path, dirty_at=notes_at + 8 * _DIRTY, refusals=nothing_changed)
        self._page, self._notes = page, syscalls.long_words(notes_at, 2)
        self.watch = Watch(page.address + _WATCH_AT, page)
        self._take_over(path)
        if not keep_open:
            page.close_file()

    def _take_over(self, path: str) -> None:
        """Writes the page anew if it isn't ours, and says that it is in use."""
        page = self._page
        written = syscalls.long_words(page.address + _IDENTITY_AT, _IDENTITY_SIZE)
        identity = (_MAGIC, *_boot_id(), page.status.st_dev, page.status.st_ino, syscalls.pid_namespace())
        if tuple(written) != identity:
            if not syscalls.lock_exclusive(page.fd):
                raise _in_use(path, in_other_namespace=tuple(written[:-1]) == identity[:-1])
            if written[0] != _MAGIC:
                self.publications_rung = 0  # it was no page of ours, or is damaged: what it says means nothing
            if any(written):  # else it is the page of a store that is being created
                log.debug("%s: %s", path, _why_anew(tuple(written), identity))
            written[0] = 0
            self.batch = 0
            self.create()
            written[:] = identity
        syscalls.lock_shared(page.fd)

    @property
    def batch(self) -> int:
        """The batch that is being published, 0 if none is."""
        return self._notes[_BATCH]

    @batch.setter
    def batch(self, value: int) -> None:
        self._notes[_BATCH] = value

    @property
    def publications_rung(self) -> int:
        """How many publications have rung the doorbell."""
        return self._notes[_PUBLICATIONS]

    @publications_rung.setter
    def publications_rung(self, value: int) -> None:
        self._notes[_PUBLICATIONS] = value


def _why_anew(written: tuple[int, ...], identity: tuple[int, ...]) -> str:
    if written[0] != _MAGIC:
        return "the page was damaged, and is written anew"
    if written[1:3] != identity[1:3]:
        return "the store is opened for the first time since this host started"
    if written[3:5] != identity[3:5]:
        return "the store was copied or moved here, and is opened for the first time"
    return "the store is opened for the first time in this pid namespace"


def _in_use(path: str, *, in_other_namespace: bool) -> Exception:
    if in_other_namespace:
        return ResourceLimitError(
            f"{path}: processes of another pid namespace use the store: run all of its processes in one "
            "(containers: --pid=container:... or --pid=host)",
            code=errno.EAGAIN,
        )
    detail = "it was overwritten while processes use the store: end them all, and open it again"
    return CorruptionError(path=path, detail=detail)


def _boot_id() -> tuple[int, int]:
    number = int.from_bytes(boot_id(), "big")
    return number >> 64, number & (2**64 - 1)


# --- the notes, for who doesn't open the page ------------------------------------------------------------------------


class Notes(NamedTuple):
    """As `LockPage` has them; all 0 where the page is damaged."""

    batch: int = 0
    publications_rung: int = 0


def read_notes(content: bytes | bytearray) -> Notes:
    """From the content of a lock page that nobody uses."""
    if not is_lock_page(content):
        return Notes()
    words = memoryview(content)[_NOTES_AT:][:16].cast("Q")
    return Notes(words[_BATCH], words[_PUBLICATIONS])


def is_lock_page(content: bytes | bytearray) -> bool:
    """Whether it is one, and not damaged: then what `read_notes` says of it means something."""
    return len(content) == syscalls.PAGE and content[_IDENTITY_AT:][:8] == _MAGIC.to_bytes(8, sys.byteorder)


def publications_rung(path: str) -> int:
    """`LockPage.publications_rung` for who may only read the page, which is in use: 0 if it is damaged."""
    page = SharedPage(path, writable=False)
    (magic,) = syscalls.long_words(page.address + _IDENTITY_AT, 1)
    return syscalls.long_words(page.address + _NOTES_AT, 1)[_PUBLICATIONS] if magic == _MAGIC else 0
