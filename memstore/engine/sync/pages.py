"""The two pages that every process of a store maps: the lock page and the doorbell.

Lock page: the robust mutex under which the store changes, and three words about what its owner was doing, for the
next owner if this one dies. Doorbell: 1,024 futex words, keys hashed onto them; a publication changes its keys' words
under the mutex and wakes their waiters after it. Neither file's inode is ever replaced while the store lives.

The lock page's identity says for whom it was written: boot, device, inode, pid namespace. If it doesn't fit, the page
lived through a reboot or was copied, and its mutex may be held by nobody: it is written anew, unless somebody uses it.
Every process that maps the page holds a shared flock on it, which tells. Two pid namespaces can't share a store: their
thread ids, which mutexes and LMDB tell owners by, say nothing to each other.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import xxhash

from memstore.engine import syscalls
from memstore.engine.syscalls import Cleanup
from memstore.errors import (
    ContentionError,
    CorruptionError,
    KeyNotFoundError,
    ResourceLimitError,
    StoreTimeoutError,
    VersionConflictError,
)

Result = TypeVar("Result")

BELLS = 1024
_MAGIC = int.from_bytes(b"memstor1", "little")
_IDENTITY_AT = syscalls.MUTEX_SIZE  # magic, boot id (2 words), device, inode, pid namespace
_IDENTITY_SIZE = 6
_STATE_AT = _IDENTITY_AT + 8 * _IDENTITY_SIZE
_RING, _BATCH, _DIRTY = range(3)
_DIED, _NEW = 1, 2  # bits of the dirty word
_REFUSALS = (KeyNotFoundError, VersionConflictError)


class _Page:
    """One shared page of a file, mapped until nothing refers to it: a thread may still wait on it after a close.

    With `keep_open`, the file stays open as long; see `filesystem.mappings_keep_locks`.
    """

    def __init__(self, path: str, *, writable: bool = True, keep_open: bool = False) -> None:
        fds: list[int] = []
        closing = Cleanup(syscalls.drain, (map(os.close, fds),))
        syscalls.open_into(fds, path, os.O_RDWR if writable else os.O_RDONLY)
        fd = fds[0]
        status = syscalls.status(fd)
        if status.st_size != syscalls.PAGE:
            detail = f"{status.st_size} bytes instead of {syscalls.PAGE}"
            raise CorruptionError(path=path, detail=detail)
        self._mapping, self.address, _ = syscalls.reserve(syscalls.PAGE)
        syscalls.map_shared(self.address, fd, syscalls.PAGE, writable=writable)
        self._opened(fd, status)
        self._file = closing if keep_open else None

    def _opened(self, fd: int, status: os.stat_result) -> None:
        """The page is mapped, and the file still open."""


class LockPage(_Page):
    """The store's mutex. Open it only while the root folder is locked.

    Attributes:
        recover: called under the mutex when an owner died or failed in the middle of a change.
    """

    def __init__(self, path: str, *, keep_open: bool = False) -> None:
        self._path = path
        self._inside: dict[int, bool] = {}  # thread ids in `run`
        self.recover: Callable[[], None] | None = None  # until the catalog is open
        super().__init__(path, keep_open=keep_open)

    def _opened(self, fd: int, status: os.stat_result) -> None:
        self._owner = syscalls.words(self.address, 1)
        self._state = syscalls.long_words(self.address + _STATE_AT, 3)
        written = syscalls.long_words(self.address + _IDENTITY_AT, _IDENTITY_SIZE)
        identity = (_MAGIC, *_boot_id(), status.st_dev, status.st_ino, syscalls.pid_namespace())
        if tuple(written) != identity:
            if not syscalls.lock_exclusive(fd):
                raise self._in_use(tuple(written[:-1]) == identity[:-1])
            if written[0] != _MAGIC:
                self._state[_RING] = 0  # it was no page of ours, or is damaged: what it says means nothing
            written[0] = 0
            syscalls.mutex_create(self.address)
            self._state[_BATCH] = 0
            self._state[_DIRTY] = _NEW
            written[:] = identity
        syscalls.lock_shared(fd)

    def _in_use(self, elsewhere: bool) -> Exception:
        if elsewhere:
            return ResourceLimitError(
                f"{self._path}: processes of another pid namespace use the store: run all of its processes in one "
                "(containers: --pid=container:... or --pid=host)",
                code=errno.EAGAIN,
            )
        detail = "it was overwritten while processes use the store: end them all, and open it again"
        return CorruptionError(path=self._path, detail=detail)

    def run(self, action: Callable[[], Result], deadline: float) -> Result:
        """Calls `action` under the mutex. If it raises, the next owner recovers first.

        Written so that no Python function is entered between a change of the mutex and the code that answers for it:
        a KeyboardInterrupt is raised at such entries, and after calls.
        """
        address, owner, inside, me = self.address, self._owner, self._inside, syscalls.thread_id()
        if me in inside:
            raise ContentionError(
                f"{self._path}: this thread is changing the store already: a signal handler or finalizer must not"
            )
        inside[me] = True
        try:
            self._lock(deadline, me)
            if self._state[_DIRTY] and self.recover is not None:
                self.recover()
                self._state[_DIRTY] = 0
            return action()
        except _REFUSALS:
            raise  # before anything was changed
        except BaseException:
            if owner[0] & syscalls.MUTEX_OWNER == me:
                self._state[_DIRTY] |= _DIED
                syscalls.mutex_recovered(address)  # interrupted before `_lock` said so: unlocked as it is, it is lost
            raise
        finally:
            del inside[me]
            if owner[0] & syscalls.MUTEX_OWNER == me:
                syscalls.mutex_unlock(address)

    def owe_recovery(self) -> None:
        """Under the mutex: the next owner finds what this one leaves as if it had died."""
        self._state[_DIRTY] |= _DIED

    def forget_threads(self) -> None:
        """In a forked child, whose thread ids are others."""
        self._inside.clear()

    def _lock(self, deadline: float, me: int) -> None:
        if self._owner[0] & syscalls.MUTEX_OWNER == me:  # an interrupt got past `run`: we hold it still
            self._state[_DIRTY] |= _DIED
            return
        code = syscalls.mutex_lock(self.address, deadline)
        if code == syscalls.OWNER_DIED:
            self._state[_DIRTY] |= _DIED
            syscalls.mutex_recovered(self.address)
        elif code == syscalls.TIMED_OUT:
            raise StoreTimeoutError(
                f"{self._path}: waited for the store's mutex, {_describe(self.owner())}: look at what it does"
            )

    def owner(self) -> int:
        """The thread id that holds the mutex, 0 if none does."""
        return self._owner[0] & syscalls.MUTEX_OWNER

    @property
    def is_new(self) -> bool:
        """While recovering: the store was not used since it was made, copied, or since the machine booted."""
        return bool(self._state[_DIRTY] & _NEW)

    @property
    def batch(self) -> int:
        """The batch that is being published, 0 if none is."""
        return self._state[_BATCH]

    @batch.setter
    def batch(self, value: int) -> None:
        self._state[_BATCH] = value

    @property
    def ring(self) -> int:
        """How many publications have rung the doorbell."""
        return self._state[_RING]

    @ring.setter
    def ring(self, value: int) -> None:
        self._state[_RING] = value


def noted_batch(page: bytes) -> int:
    """The batch that the content of a lock page notes as being published; 0 if none, or if it is damaged."""
    return _noted(page, _BATCH)


def noted_ring(page: bytes) -> int:
    """`LockPage.ring` by the content of a lock page; 0 if it is damaged."""
    return _noted(page, _RING)


def _noted(page: bytes, word: int) -> int:
    if len(page) != syscalls.PAGE or page[_IDENTITY_AT:][:8] != _MAGIC.to_bytes(8, sys.byteorder):
        return 0
    return int.from_bytes(page[_STATE_AT + 8 * word :][:8], sys.byteorder)


def publications_rung(path: str) -> int:
    """`LockPage.ring` for who may read the page only."""
    page = _Page(path, writable=False)
    (magic,) = syscalls.long_words(page.address + _IDENTITY_AT, 1)
    return syscalls.long_words(page.address + _STATE_AT, 3)[_RING] if magic == _MAGIC else 0


class Doorbell(_Page):
    """Words that change when a key is put."""

    def __init__(self, path: str, *, writable: bool) -> None:
        super().__init__(path, writable=writable)
        self._words = syscalls.words(self.address, BELLS)

    @staticmethod
    def bell(key: bytes) -> int:
        return xxhash.xxh3_64_intdigest(key) % BELLS

    def load(self, bell: int) -> int:
        return self._words[bell]

    def change(self, bell: int) -> None:
        """Under the mutex, so that no change is lost."""
        self._words[bell] = (self._words[bell] + 1) & 0xFFFFFFFF

    def wake(self, bell: int) -> None:
        syscalls.futex_wake(self.address + 4 * bell)

    def wait(self, bell: int, seen: int, seconds: float) -> None:
        """Sleeps while the word is `seen`, and `seconds` at most; may return early."""
        syscalls.futex_wait(self.address + 4 * bell, seen, seconds)

    def ring_all(self) -> None:
        for bell in range(BELLS):
            self.change(bell)
            self.wake(bell)


def _boot_id() -> tuple[int, int]:
    with open(syscalls.BOOT_ID) as file:
        number = int(file.read().strip().replace("-", ""), 16)
    return number >> 64, number & (2**64 - 1)


def _describe(thread: int) -> str:
    """Names the process of a thread id."""
    try:
        with open(f"/proc/{thread}/status") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        return f"held by pid {fields['Tgid'].strip()} ({fields['Name']}, {fields['State']})"
    except (OSError, KeyError, ValueError):
        return f"held by thread {thread}, which can't be seen from here"
