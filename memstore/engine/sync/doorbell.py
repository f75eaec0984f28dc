"""A doorbell: futex words in memory that processes share. Who waits for a change sleeps on one of them.

Who changes something changes a word, and then wakes those that sleep on it. Who waits loads the word, looks whether
what it waits for is there, and sleeps only while the word is as it was loaded: so no change is slept through.
"""

from __future__ import annotations

import os

import xxhash

from memstore.engine import syscalls
from memstore.engine.sync.shared_page import SharedPage

BELLS = 1024  # words in a page
_AWAKE = 0


class Watch:
    """One word by which threads hear of every change, whatever it is of: a mark while one of them sleeps, else 0.

    1. A watcher calls `mark`, **then** looks for what it waits for, then calls `sleep`.
    2. Who has changed something, and finds the word marked, takes the mark away and wakes all watchers.
    So a change that the look missed finds the mark. While nobody watches, it costs one comparison.

    Each mark is a number of its own, and its watcher sleeps only while it stands there: so watchers of several
    processes may share the word. Where one has written over the other's mark, that one looks again before it sleeps.
    (With one mark for all, the second would restore the first one's, of which a change has just taken notice.)
    One object is for one thread: see `another`.
    """

    __slots__ = ("_mark", "_memory", "address", "word")

    def __init__(self, address: int, memory: object) -> None:
        """`memory` keeps the word mapped."""
        self.address, self._memory = address, memory
        self.word = syscalls.words(address, 1)
        self._mark = 1

    def another(self) -> Watch:
        """Of the same word, for another thread."""
        return Watch(self.address, self._memory)

    def mark(self) -> None:
        # Not of the module `random`, whose numbers are the program's: ranks that are seeded alike would draw the same.
        self._mark = int.from_bytes(os.urandom(4), "little") | 1
        self.word[0] = self._mark

    def sleep(self, seconds: float) -> None:
        """Until somebody rings, and `seconds` at most; may return early."""
        syscalls.futex_wait(self.address, self._mark, seconds)

    def ring(self) -> None:
        self.word[0] = _AWAKE
        syscalls.futex_wake(self.address)


class Doorbell:
    """Words at an address. What they stand for is hashed onto them, so a waiter may wake for something else.

    Attributes:
        watch: told of each wake; None: nobody can watch.
    """

    __slots__ = ("_count", "_memory", "_watched", "_words", "address", "watch")

    def __init__(self, address: int, count: int, memory: object, watch: Watch | None = None) -> None:
        """`memory` keeps the words mapped: a thread may wait on them after everybody else has let go of this."""
        self.address, self._count, self._memory, self.watch = address, count, memory, watch
        self._words = syscalls.words(address, count)
        self._watched = (_AWAKE,) if watch is None else watch.word

    @classmethod
    def open(cls, path: str, *, writable: bool, watch: Watch | None = None) -> Doorbell:
        """The one that fills a file of one page. Its inode is never replaced while somebody may wait."""
        page = SharedPage(path, writable=writable)
        page.close_file()
        return cls(page.address, BELLS, page, watch)

    def bell(self, key: bytes) -> int:
        return xxhash.xxh3_64_intdigest(key) % self._count

    def load(self, bell: int) -> int:
        return self._words[bell]

    def news(self, seen: dict[int, int]) -> list[int]:
        """The bells whose words aren't those in `seen` any more, which has the new ones then."""
        words = self._words
        changed = [bell for bell, word in seen.items() if words[bell] != word]
        for bell in changed:
            seen[bell] = words[bell]
        return changed

    def state(self) -> int:
        """A number for all words together: another one after a change of any key."""
        return xxhash.xxh3_64_intdigest(memoryview(self._words).cast("B"))

    def words(self) -> list[int]:
        """All of them, by bell: for who counts changes."""
        return [self._words[bell] for bell in range(self._count)]

    def change(self, bell: int) -> None:
        """Under a mutex, so that no change is lost."""
        self._words[bell] = (self._words[bell] + 1) & 0xFFFFFFFF

    def wake(self, bell: int) -> None:
        syscalls.futex_wake(self.address + 4 * bell)
        if self._watched[0]:
            self._ring_watch()

    def _ring_watch(self) -> None:
        if self.watch is not None:
            self.watch.ring()

    def wait(self, bell: int, seen: int, seconds: float) -> None:
        """Sleeps while the word is `seen`, and `seconds` at most; may return early."""
        syscalls.futex_wait(self.address + 4 * bell, seen, seconds)

    def ring_all(self) -> None:
        """Under the mutex, as `change`."""
        for bell in range(self._count):
            self.change(bell)
            self.wake(bell)
