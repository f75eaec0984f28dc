"""A doorbell: futex words in memory that processes share. Who waits for a change sleeps on one of them.

Who changes something changes a word, and then wakes those that sleep on it. Who waits loads the word, looks whether
what it waits for is there, and sleeps only while the word is as it was loaded: so no change is slept through.
"""

from __future__ import annotations

import xxhash

from memstore.engine import syscalls
from memstore.engine.sync.shared_page import SharedPage

BELLS = 1024  # words in a page


class Doorbell:
    """Words at an address. What they stand for is hashed onto them, so a waiter may wake for something else."""

    __slots__ = ("_count", "_memory", "_words", "address")

    def __init__(self, address: int, count: int, memory: object) -> None:
        """`memory` keeps the words mapped: a thread may wait on them after everybody else has let go of this."""
        self.address, self._count, self._memory = address, count, memory
        self._words = syscalls.words(address, count)

    @classmethod
    def open(cls, path: str, *, writable: bool) -> Doorbell:
        """The one that fills a file of one page. Its inode is never replaced while somebody may wait."""
        page = SharedPage(path, writable=writable)
        page.close_file()
        return cls(page.address, BELLS, page)

    def bell(self, key: bytes) -> int:
        return xxhash.xxh3_64_intdigest(key) % self._count

    def load(self, bell: int) -> int:
        return self._words[bell]

    def change(self, bell: int) -> None:
        """Under a mutex, so that no change is lost."""
        self._words[bell] = (self._words[bell] + 1) & 0xFFFFFFFF

    def wake(self, bell: int) -> None:
        syscalls.futex_wake(self.address + 4 * bell)

    def wait(self, bell: int, seen: int, seconds: float) -> None:
        """Sleeps while the word is `seen`, and `seconds` at most; may return early."""
        syscalls.futex_wait(self.address + 4 * bell, seen, seconds)

    def ring_all(self) -> None:
        """Under the mutex, as `change`."""
        for bell in range(self._count):
            self.change(bell)
            self.wake(bell)
