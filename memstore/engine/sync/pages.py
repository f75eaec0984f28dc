"""Pages with a mutex, which say for whom they were written: the lock page of a store, the control page of an entry.

**The lock page** has the robust mutex under which the store changes, and notes of its owner for the next one. The
file's inode is never replaced while the store lives.

The identity of a page says for whom it was written: boot, device, inode, pid namespace. If it doesn't fit, the page
lived through a reboot or was copied, and its mutex may look held though its owner is gone. Such a page is written anew,
unless somebody uses it. Every process that maps the lock page holds a shared flock on it, which tells. Two pid
namespaces can't share a store: mutexes and LMDB name owners by thread ids, which mean nothing in another namespace.

**The control page** of a mutable entry has what the processes share beside its rows. The rules: docs/decisions/015. It
is the first page of the segment's data. From 320 on it belongs to replay buffers (`replay_state.py`), and from
`SPARE_AT` on 128 bytes belong to what is built on a dataset: zeros at first, written under the mutex.

`LockNotes` and `_ControlWords` are the layouts. What different calls change lies in different lines of 64 bytes.
"""

from __future__ import annotations

import errno
import logging
import time
import weakref
from typing import Any, NamedTuple

from memstore._threads import Hooks, around_forks
from memstore.engine import syscalls
from memstore.engine.sync.primitives import Refusal, RobustMutex, SharedPage, Watch, boot_id
from memstore.engine.sync.replay_state import RING_AT, RingNumbers
from memstore.engine.syscalls import Structure, Uint32, Uint64
from memstore.errors import (
    CorruptionError,
    KeyNotFoundError,
    MutableEntryError,
    QuotaExceededError,
    ResourceLimitError,
    ShardMismatchError,
    StoreFullError,
    VersionConflictError,
)

# --- the lock page of a store ----------------------------------------------------------------------------------------


log = logging.getLogger("memstore")

_LOCK_MAGIC = int.from_bytes(b"memstor1", "little")
_MUTEX = Uint64 * (syscalls.MUTEX_SIZE // 8)
_IDENTITY = Uint64 * 6  # magic, boot id (2 words), device, inode, pid namespace


class LockNotes(Structure):
    """The words of a lock page: the notes of its mutex's owner, which the next one finds.

    Attributes:
        publications_rung: how many publications have rung the doorbell.
        batch: the batch that is being published, 0 if none is.
        dirty: the mutex's dirty word.
        watch: a word by which an index process hears of publications.
        host_lease: until when processes of this host may use the store, on its clock since boot; 0: for ever.
    """

    identity: Any
    publications_rung: int
    batch: int
    _fields_ = (
        ("mutex", _MUTEX),
        ("identity", _IDENTITY),
        ("publications_rung", Uint64),
        ("batch", Uint64),
        ("dirty", Uint64),
        ("watch", Uint32),
        ("_to_144", Uint32),
        ("host_lease", Uint64),
    )


class HostLeaseWord(Uint64 * 1):
    """The word `host_lease` of a lock page, as an array of one number. It keeps the page mapped."""

    memory: object

    @classmethod
    def of(cls, page: SharedPage) -> HostLeaseWord:
        word = cls.from_address(page.address + LockNotes.host_lease.offset)
        word.memory = page
        return word


class LockPage(RobustMutex):
    """The store's mutex, and its owner's notes. Open it only while the root folder is locked.

    Attributes:
        notes: its words, which are read and written in place under the mutex.
        watch: for the store's doorbell.
        host_lease: its word `host_lease`.
    """

    __slots__ = ("_page", "host_lease", "notes", "watch")

    def __init__(self, path: str, *, keep_open: bool = False) -> None:
        """Opens the page. With `keep_open` its file stays open as long as it: see `filesystem.mappings_keep_locks`."""
        page = SharedPage(path)
        refused = (KeyNotFoundError, VersionConflictError, ShardMismatchError, MutableEntryError, QuotaExceededError)
        nothing_changed = (*refused, Refusal)
        super().__init__(
            page.address, name=path, dirty_at=page.address + LockNotes.dirty.offset, refusals=nothing_changed
        )
        self._page, self.notes = page, LockNotes.from_address(page.address)
        self.host_lease = HostLeaseWord.of(page)
        self.watch = Watch(page.address + LockNotes.watch.offset, page)
        self._take_over(path)
        if not keep_open:
            page.close_file()

    def _take_over(self, path: str) -> None:
        """Writes the page anew if it isn't ours, and says that it is in use."""
        page = self._page
        written = self.notes.identity
        identity = (_LOCK_MAGIC, *_boot_words(), page.status.st_dev, page.status.st_ino, syscalls.pid_namespace())
        if tuple(written) != identity:
            if not syscalls.lock_exclusive(page.fd):
                raise _in_use_error(path, in_other_namespace=tuple(written[:-1]) == identity[:-1])
            if written[0] != _LOCK_MAGIC:
                self.notes.publications_rung = 0  # it was no page of ours, or is damaged: what it says means nothing
            if any(written):  # else it is the page of a store that is being created
                log.debug("%s: %s", path, _why_anew(tuple(written), identity))
            self.notes.host_lease = _lease_of(tuple(written), identity, self.notes.host_lease)
            written[0] = 0
            self.notes.batch = 0
            self.create()
            written[:] = identity
        syscalls.lock_shared(page.fd)


def _lease_of(written: tuple[int, ...], identity: tuple[int, ...], until: int) -> int:
    """Returns the lease of a page that is written anew. One of another boot is over; a copy holds none."""
    if not any(written):  # of a new store, or after a repair: see `emptied`
        return until
    if written[0] != _LOCK_MAGIC or not until:
        return 0
    if written[1:3] != identity[1:3]:
        return 1
    return until if written[3:5] == identity[3:5] else 0


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


# --- the notes, without a LockPage -----------------------------------------------------------------------------------


class LockPageNotes(NamedTuple):
    """Two notes of a lock page; both are 0 where the page is damaged."""

    batch: int = 0
    publications_rung: int = 0


def read_notes(content: bytes | bytearray) -> LockPageNotes:
    """Returns the notes in the content of a lock page that nobody uses."""
    if not is_lock_page(content):
        return LockPageNotes()
    words = LockNotes.from_buffer_copy(content)
    return LockPageNotes(words.batch, words.publications_rung)


def emptied(content: bytes | bytearray, *, is_member: bool) -> bytes:
    """Returns the content that a repair gives a lock page: zeros, but that the lease of a member is over."""
    page = bytearray(syscalls.PAGE)
    if is_member and is_lock_page(content) and LockNotes.from_buffer_copy(content).host_lease:
        LockNotes.from_buffer(page).host_lease = 1
    return bytes(page)


def is_lock_page(content: bytes | bytearray) -> bool:
    """Whether the content is that of a lock page that isn't damaged, so that `read_notes` means something."""
    return len(content) == syscalls.PAGE and LockNotes.from_buffer_copy(content).identity[0] == _LOCK_MAGIC


def publications_rung(path: str) -> int:
    """Returns `LockNotes.publications_rung` of a page that is in use and may only be read; 0 if it is damaged."""
    page = SharedPage(path, writable=False)
    words = LockNotes.from_address(page.address)
    return words.publications_rung if words.identity[0] == _LOCK_MAGIC else 0


# --- the control page of a mutable entry -----------------------------------------------------------------------------


OPEN, SEALING, SEALED = 0, 1, 2
CONTROL_SIZE = syscalls.PAGE
SPARE_AT = 2048
_CONTROL_MAGIC = int.from_bytes(b"memrows1", "little")
_LOOK_AGAIN = 1.0  # seconds: a waiter looks again by itself, should its wake get lost


class _ControlWords(Structure):
    """The control page.

    Attributes:
        dirty: the mutex's dirty word.
        gone: whether the key was deleted.
        state: OPEN, SEALING or SEALED.
        length, flushed: in rows.
        bell: changes with everything that somebody may wait for.
        sleeps: whether somebody sleeps on the bell.
    """

    identity: Any
    gone: Any
    state: int
    length: int
    flushed: int
    bell: Any
    sleeps: int
    _fields_ = (
        ("mutex", _MUTEX),
        ("identity", _IDENTITY),
        ("dirty", Uint64),
        ("_to_128", Uint64),
        ("gone", Uint64),
        ("state", Uint64),
        ("_to_192", Uint64 * 6),
        ("length", Uint64),
        ("flushed", Uint64),
        ("_to_256", Uint64 * 6),
        ("bell", Uint32),
        ("_to_264", Uint32),
        ("sleeps", Uint64),
        ("_to_320", Uint64 * 6),
    )


GONE_AT: int = _ControlWords.gone.offset


class FileIdentity(NamedTuple):
    device: int
    inode: int


def new_page(length: int) -> bytes:
    """Returns the control page of an entry that nobody has opened. The first opener writes it anew."""
    page = bytearray(CONTROL_SIZE)
    words = _ControlWords.from_buffer(page)
    words.identity[0], words.length, words.flushed = _CONTROL_MAGIC, length, length
    return bytes(page)


def check_page(content: bytes | bytearray | memoryview, capacity: int) -> None:
    """Raises CorruptionError unless the page is whole, for that many rows."""
    if len(content) < CONTROL_SIZE:
        detail = f"{len(content):,} bytes have no room for a control page"
        raise CorruptionError(detail)
    _check_words(_ControlWords.from_buffer_copy(content), capacity, None)


class ControlNumbers(NamedTuple):
    """Numbers of a control page, as they are read without its mutex, for people.

    Attributes:
        length: how many rows of a dataset are whole.
        added, rows, sampled: of a replay buffer: as in `RingNumbers`.
        is_sealed: the entry is an ordinary one by now.
    """

    length: int
    added: int
    rows: int
    sampled: int
    is_sealed: bool


def read_numbers(page: bytes) -> ControlNumbers | None:
    """Reads the numbers of a control page that was copied; None if it isn't one."""
    if len(page) < CONTROL_SIZE:
        return None
    words, ring = _ControlWords.from_buffer_copy(page), RingNumbers.from_buffer_copy(page, RING_AT)
    if words.identity[0] != _CONTROL_MAGIC:
        return None
    return ControlNumbers(words.length, ring.added, ring.rows, ring.sampled, words.state == SEALED)


class ControlPage(RobustMutex):
    """A mapped control page. A process that may only read never takes the mutex.

    Attributes:
        capacity: in rows.
        owes_wake: whether the bell was rung while somebody slept: call `wake` after the hold.
        forks: how often this process is a fork of the one that opened the page. Code that compares it with an earlier
            look knows that it goes on in a child, for less than a call of `thread_id`.
    """

    __slots__ = ("__weakref__", "_boot", "_identity", "_memory", "_path", "_words", "capacity", "forks", "owes_wake")

    def __init__(
        self, address: int, capacity: int, file: FileIdentity, memory: object, *, name: str, path: str
    ) -> None:
        """Takes a mapped page, which `memory` keeps mapped. Raises CorruptionError if the page isn't whole."""
        refusals = (Refusal, MutableEntryError, StoreFullError)
        super().__init__(address, name=name, dirty_at=address + _ControlWords.dirty.offset, refusals=refusals)
        self.capacity, self._memory, self._path, self.forks, self.owes_wake = capacity, memory, path, 0, False
        self._words = _ControlWords.from_address(address)
        self._boot = _boot_words()
        self._identity = (_CONTROL_MAGIC, *self._boot, *file, syscalls.pid_namespace())
        _check_words(self._words, capacity, path)
        _control_pages.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether its mutex means something: it was written in this boot, for this file."""
        return tuple(self._words.identity) == self._identity

    @property
    def was_used(self) -> bool:
        """Whether somebody has opened the entry to write, in whatever boot."""
        return any(self._words.identity[1:])

    @property
    def is_of_this_boot(self) -> bool:
        return tuple(self._words.identity[1:3]) == self._boot

    def write_anew(self, *, survived: bool, is_live: bool) -> None:
        """Writes the page for this boot and file, while nobody else has the entry open to write.

        What the page says of its life may be older or newer than the catalog: a folder is copied file by file, and
        after a crash of the host each file is as old as it is.

        Args:
            survived: whether rows that were stored before a crash of the host are there.
            is_live: whether the key is still this entry's.
        """
        words = self._words
        if not self.is_of_this_boot:
            RingNumbers.in_page(self.address).other_boot = True
            if not survived:
                words.length = words.flushed
        words.gone, words.state, words.sleeps = not is_live, OPEN, 0
        self.create()
        words.identity[:] = self._identity

    def forget_threads(self) -> None:
        self.forks += 1
        super().forget_threads()

    # --- the words ----------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """The rows that are whole. Raises CorruptionError if there can't be so many."""
        length = self._words.length
        if length > self.capacity:
            _check_words(self._words, self.capacity, self._path)
        return length

    @length.setter
    def length(self, value: int) -> None:
        self._words.length = value

    @property
    def flushed(self) -> int:
        """The rows that survive a crash of the host, from the first on."""
        return min(self._words.flushed, self.length)

    @flushed.setter
    def flushed(self, value: int) -> None:
        self._words.flushed = value

    @property
    def state(self) -> int:
        return self._words.state

    @state.setter
    def state(self, value: int) -> None:
        self._words.state = value

    @property
    def is_gone(self) -> bool:
        """Whether the key was deleted."""
        return self._words.gone != 0

    @property
    def has_ended(self) -> bool:
        """Whether the entry can't be written any more: it was sealed, or the key was deleted."""
        words = self._words
        return words.gone != 0 or words.state == SEALED

    # --- waiting ------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Changes the bell, under the mutex. Sets `owes_wake` if somebody sleeps."""
        words = self._words
        words.bell = words.bell + 1 & 0xFFFFFFFF
        if words.sleeps:
            words.sleeps, self.owes_wake = 0, True

    def wake(self) -> None:
        """Wakes all that sleep on the bell."""
        self.owes_wake = False
        syscalls.futex_wake(self.address + _ControlWords.bell.offset)

    def listen(self) -> int:
        """Says under the mutex that this thread is about to sleep. Returns the argument for `sleep`."""
        self._words.sleeps = 1
        return self._words.bell

    def sleep(self, seen: int, deadline: float) -> None:
        """Sleeps, without the mutex, until somebody rings, a second at most."""
        seconds = max(min(_LOOK_AGAIN, deadline - time.monotonic()), 0.0)
        syscalls.futex_wait(self.address + _ControlWords.bell.offset, seen, seconds)


def _check_words(words: _ControlWords, capacity: int, path: str | None) -> None:
    detail = ""
    if words.identity[0] != _CONTROL_MAGIC:
        detail = "its control page doesn't start with the magic number"
    elif max(words.length, words.flushed) > capacity or words.state > SEALED or words.gone > 1:
        detail = (
            f"its control page has {words.length:,} rows, {words.flushed:,} of them flushed, of at most {capacity:,}, "
            f"state {words.state} and gone {words.gone}, which can't be"
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
