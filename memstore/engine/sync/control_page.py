"""The control page of a mutable entry: what the processes share beside its rows. The rules: docs/decisions/015.

The first page of the segment's data. All numbers have 8 bytes; what different calls change stands in different lines of
64 bytes, which the page names:

    0    the entry's robust mutex
    64   magic, boot id (2 words), device, inode, pid namespace; 112: the mutex's dirty word
    128  *gone*, 136 *state*
    192  length, flushed: in rows
    256  doorbell (4 bytes), 264 whether somebody sleeps on it

From 320 on it belongs to replay buffers (`ring_numbers.py`, `seats.py`), and from `SPARE_AT` to `SPARE_END` to what is
built on a dataset: zeros at first, written under the mutex. The words of a page that isn't of this boot, or of another
file, say nothing of the mutex: `ControlPage.write_anew`.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple

from memstore.engine import syscalls
from memstore.engine.sync.clocks import boot_id
from memstore.engine.sync.doorbell import Doorbell
from memstore.engine.sync.mutex import Refusal, RobustMutex
from memstore.engine.sync.ring_numbers import OTHER_BOOT_AT
from memstore.errors import (
    CorruptionError,
    MutableEntryError,
    StoreFullError,
)
from memstore.late_imports import Hooks, around_forks

OPEN, SEALING, SEALED = 0, 1, 2
CONTROL_SIZE = syscalls.PAGE
SPARE_AT, SPARE_END = 2048, 2176
GONE_AT = 128
_MAGIC = int.from_bytes(b"memrows1", "little")
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
    words[_MAGIC_WORD], words[_LENGTH], words[_FLUSHED] = _MAGIC, length, length
    return b"".join(word.to_bytes(8, "little") for word in words)


def check_page(content: bytes | bytearray | memoryview, capacity: int) -> None:
    """Raises CorruptionError unless the page is whole, for that many rows."""
    if len(content) < CONTROL_SIZE:
        detail = f"{len(content):,} bytes have no room for a control page"
        raise CorruptionError(detail)
    words = memoryview(content)[:CONTROL_SIZE].cast("B").cast("Q")
    _check(words, capacity, None)


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
        self._identity = (_MAGIC, *self._boot, *file, syscalls.pid_namespace())
        _check(self._words, capacity, path)
        _pages.add(self)

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
            _check(self._words, self.capacity, self._path)
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


def _check(words: Any, capacity: int, path: str | None) -> None:
    length, flushed = words[_LENGTH], words[_FLUSHED]
    detail = ""
    if words[_MAGIC_WORD] != _MAGIC:
        detail = "its control page doesn't start with the magic number"
    elif max(length, flushed) > capacity or words[_STATE] > SEALED or words[_GONE] > 1:
        detail = (
            f"its control page has {length:,} rows, {flushed:,} of them flushed, of at most {capacity:,}, "
            f"state {words[_STATE]} and gone {words[_GONE]}, which can't be"
        )
    if detail:
        raise CorruptionError(f"{path}: {detail}: run memstore.repair" if path else detail, path=path, detail=detail)


_pages: weakref.WeakSet[ControlPage] = weakref.WeakSet()


def _forget_threads() -> None:
    for page in list(_pages):
        page.forget_threads()


def _nothing() -> None:
    pass


around_forks(Hooks(_nothing, _nothing, _forget_threads))
