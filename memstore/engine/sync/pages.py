"""Pages with a mutex, which say for whom they were written: the lock page of a store, the control page of an entry.

**The lock page** has the robust mutex under which the store changes, and what its owner notes for the next one. Layout:
the mutex; the page's identity; three long words: how many publications have rung the doorbell, the batch that is being
published, and the mutex's dirty word; a word by which an index process hears of publications. The file's inode is never
replaced while the store lives.

The identity says for whom the page was written: boot, device, inode, pid namespace. If it doesn't fit, the page lived
through a reboot or was copied, and its mutex may look held though its owner is no more: the page is written anew,
unless somebody uses it. Every process that maps it holds a shared flock on it, which tells. Two pid namespaces can't
share a store: their thread ids, which mutexes and LMDB tell owners by, say nothing to each other.

**The control page** of a mutable entry has what the processes share beside its rows. The rules: docs/decisions/015. It
is the first page of the segment's data. All numbers have 8 bytes; what different calls change stands in different lines
of 64 bytes:

    0    the entry's robust mutex
    64   magic, boot id (2 words), device, inode, pid namespace; 112: the mutex's dirty word
    128  *gone*, 136 *state*
    192  length, flushed: in rows
    256  doorbell (4 bytes), 264 whether somebody sleeps on it

From 320 on it belongs to replay buffers (`replay_state.py`), and from `SPARE_AT` to `SPARE_END` to what is built on a
dataset: zeros at first, written under the mutex. The words of a page that isn't of this boot, or of another file, say
nothing of the mutex: `ControlPage.write_anew`.
"""

from __future__ import annotations

import errno
import logging
import sys
import time
import weakref
from typing import Any, NamedTuple

from memstore._threads import Hooks, around_forks
from memstore.engine import syscalls
from memstore.engine.sync.primitives import Doorbell, Refusal, RobustMutex, SharedPage, Watch, boot_id
from memstore.engine.sync.replay_state import OTHER_BOOT_AT
from memstore.errors import (
    CorruptionError,
    KeyNotFoundError,
    MutableEntryError,
    ResourceLimitError,
    ShardMismatchError,
    StoreFullError,
    VersionConflictError,
)

# --- the lock page of a store ----------------------------------------------------------------------------------------


log = logging.getLogger("memstore")

_LOCK_MAGIC = int.from_bytes(b"memstor1", "little")
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
        identity = (_LOCK_MAGIC, *_boot_words(), page.status.st_dev, page.status.st_ino, syscalls.pid_namespace())
        if tuple(written) != identity:
            if not syscalls.lock_exclusive(page.fd):
                raise _in_use_error(path, in_other_namespace=tuple(written[:-1]) == identity[:-1])
            if written[0] != _LOCK_MAGIC:
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
    if written[0] != _LOCK_MAGIC:
        return "the page was damaged, and is written anew"
    if written[1:3] != identity[1:3]:
        return "the store is opened for the first time since this host started"
    if written[3:5] != identity[3:5]:
        return "the store was copied or moved here, and is opened for the first time"
    return "the store is opened for the first time in this pid namespace"


def _in_use_error(path: str, *, in_other_namespace: bool) -> Exception:
    if in_other_namespace:
        return ResourceLimitError(
            f"{path}: processes of another pid namespace use the store: run all of its processes in one "
            "(containers: --pid=container:... or --pid=host)",
            code=errno.EAGAIN,
        )
    detail = "it was overwritten while processes use the store: end them all, and open it again"
    return CorruptionError(path=path, detail=detail)


def _boot_words() -> tuple[int, int]:
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
    return len(content) == syscalls.PAGE and content[_IDENTITY_AT:][:8] == _LOCK_MAGIC.to_bytes(8, sys.byteorder)


def publications_rung(path: str) -> int:
    """`LockPage.publications_rung` for who may only read the page, which is in use: 0 if it is damaged."""
    page = SharedPage(path, writable=False)
    (magic,) = syscalls.long_words(page.address + _IDENTITY_AT, 1)
    return syscalls.long_words(page.address + _NOTES_AT, 1)[_PUBLICATIONS] if magic == _LOCK_MAGIC else 0


# --- the control page of a mutable entry -----------------------------------------------------------------------------


OPEN, SEALING, SEALED = 0, 1, 2
CONTROL_SIZE = syscalls.PAGE
SPARE_AT, SPARE_END = 2048, 2176
GONE_AT = 128
_CONTROL_MAGIC = int.from_bytes(b"memrows1", "little")
_MAGIC_WORD, _BOOT_WORD, _FILE_WORD, _END_OF_IDENTITY, _DIRTY_WORD = 8, 9, 11, 14, 14
_GONE, _STATE, _LENGTH, _FLUSHED = GONE_AT // 8, 17, 24, 25
_BELL_AT, _SLEEPS = 256, 33
_OTHER_BOOT = OTHER_BOOT_AT // 8
_LOOK_AGAIN = 1.0  # seconds: a waiter looks again by itself, should its wake get lost


class FileIdentity(NamedTuple):
    device: int
    inode: int


def new_page(length: int) -> bytes:
    """Of an entry that nobody has opened: whoever does first, writes it anew."""
    words = [0] * (CONTROL_SIZE // 8)
    words[_MAGIC_WORD], words[_LENGTH], words[_FLUSHED] = _CONTROL_MAGIC, length, length
    return b"".join(word.to_bytes(8, "little") for word in words)


def check_page(content: bytes | bytearray | memoryview, capacity: int) -> None:
    """Raises CorruptionError unless the page is whole, for that many rows."""
    if len(content) < CONTROL_SIZE:
        detail = f"{len(content):,} bytes have no room for a control page"
        raise CorruptionError(detail)
    words = memoryview(content)[:CONTROL_SIZE].cast("B").cast("Q")
    _check_words(words, capacity, None)


class ControlPage(RobustMutex):
    """The page, mapped. Who may only read never takes the mutex.

    Attributes:
        capacity: in rows.
    """

    __slots__ = ("__weakref__", "_bell", "_boot", "_identity", "_memory", "_path", "_words", "capacity")

    def __init__(
        self, address: int, capacity: int, file: FileIdentity, memory: object, *, name: str, path: str
    ) -> None:
        """`memory` keeps the page mapped. Raises CorruptionError if it isn't whole."""
        refusals = (Refusal, MutableEntryError, StoreFullError)
        super().__init__(address, name=name, dirty_at=address + 8 * _DIRTY_WORD, refusals=refusals)
        self.capacity, self._memory, self._path = capacity, memory, path
        self._words = syscalls.long_words(address, CONTROL_SIZE // 8)
        self._bell = Doorbell(address + _BELL_AT, 1, memory)
        number = int.from_bytes(boot_id(), "big")
        self._boot = (number >> 64, number & (2**64 - 1))
        self._identity = (_CONTROL_MAGIC, *self._boot, *file, syscalls.pid_namespace())
        _check_words(self._words, capacity, path)
        _control_pages.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether its mutex means something: it was written in this boot, for this file."""
        return tuple(self._words[_MAGIC_WORD:_END_OF_IDENTITY]) == self._identity

    @property
    def was_used(self) -> bool:
        """Whether somebody has opened the entry to write, in whatever boot."""
        return any(self._words[_BOOT_WORD:_END_OF_IDENTITY])

    @property
    def is_of_this_boot(self) -> bool:
        return tuple(self._words[_BOOT_WORD:_FILE_WORD]) == self._boot

    def write_anew(self, *, survived: bool, is_live: bool) -> None:
        """While nobody else has it open to write.

        What the page says of its life may be older or newer than the catalog: a folder is copied file by file, and
        after a crash of the host each file is as old as it is.

        Args:
            survived: what was stored before a crash of the host is there.
            is_live: the key is still this entry's.
        """
        words = self._words
        if not self.is_of_this_boot:
            words[_OTHER_BOOT] = 1
            if not survived:
                words[_LENGTH] = words[_FLUSHED]
        words[_GONE], words[_STATE], words[_SLEEPS] = not is_live, OPEN, 0
        self.create()
        words[_MAGIC_WORD:_END_OF_IDENTITY] = self._identity

    # --- the words ----------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """The rows that are whole. Raises CorruptionError if there can't be so many."""
        length = self._words[_LENGTH]
        if length > self.capacity:
            _check_words(self._words, self.capacity, self._path)
        return length

    @length.setter
    def length(self, value: int) -> None:
        self._words[_LENGTH] = value

    @property
    def flushed(self) -> int:
        """Of these, the rows that survive a crash of the host, from the first on."""
        return min(self._words[_FLUSHED], self.length)

    @flushed.setter
    def flushed(self, value: int) -> None:
        self._words[_FLUSHED] = value

    @property
    def state(self) -> int:
        return self._words[_STATE]

    @state.setter
    def state(self, value: int) -> None:
        self._words[_STATE] = value

    @property
    def is_gone(self) -> bool:
        """Whether the key was deleted."""
        return bool(self._words[_GONE])

    # --- waiting ------------------------------------------------------------------------------------------------------

    def ring(self) -> bool:
        """Under the mutex. Whether somebody sleeps, who is to be woken after it by `wake`."""
        self._bell.change(0)
        sleeps, self._words[_SLEEPS] = bool(self._words[_SLEEPS]), 0
        return sleeps

    def wake(self) -> None:
        self._bell.wake(0)

    def listen(self) -> int:
        """Under the mutex: who is about to sleep says so, and gets what `sleep` wants."""
        self._words[_SLEEPS] = 1
        return self._bell.load(0)

    def sleep(self, seen: int, deadline: float) -> None:
        """Without the mutex: until somebody rings, a second at most."""
        self._bell.wait(0, seen, max(min(_LOOK_AGAIN, deadline - time.monotonic()), 0.0))


def _check_words(words: Any, capacity: int, path: str | None) -> None:
    length, flushed = words[_LENGTH], words[_FLUSHED]
    detail = ""
    if words[_MAGIC_WORD] != _CONTROL_MAGIC:
        detail = "its control page doesn't start with the magic number"
    elif max(length, flushed) > capacity or words[_STATE] > SEALED or words[_GONE] > 1:
        detail = (
            f"its control page has {length:,} rows, {flushed:,} of them flushed, of at most {capacity:,}, "
            f"state {words[_STATE]} and gone {words[_GONE]}, which can't be"
        )
    if detail:
        raise CorruptionError(f"{path}: {detail}: run memstore.repair" if path else detail, path=path, detail=detail)


_control_pages: weakref.WeakSet[ControlPage] = weakref.WeakSet()


def _forget_threads() -> None:
    for page in list(_control_pages):
        page.forget_threads()


def _nothing() -> None:
    pass


around_forks(Hooks(_nothing, _nothing, _forget_threads))
