"""The table of claims of a replay buffer: who writes which of its slots. The rules: docs/decisions/015.

A claim has 128 bytes: a robust mutex, which its thread holds from the claim to the publication, and what it notes:
stage, first, end, rows, before. The kernel lets go of the mutex when the thread ends, behind its last store. So a claim
that isn't free, and whose mutex nobody holds, is of a thread that is dead.

All of it changes under the entry's mutex, but for that release.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from memstore.engine import syscalls
from memstore.engine.sync.mutex import describe_thread

CLAIMS = 128
CLAIM_SIZE = 128
CLAIMS_SIZE = CLAIMS * CLAIM_SIZE
FREE, CLAIMING, CLAIMED, PUBLISHING = range(4)  # stages

_WORDS = CLAIM_SIZE // 8  # of a claim
_STAGE, _FIRST, _END, _ROWS, _BEFORE = range(syscalls.MUTEX_SIZE // 8, syscalls.MUTEX_SIZE // 8 + 5)

_kept: dict[int, tuple[ClaimTable, int]] = {}  # whose memory must stay, by the mutex that a thread may hold; the thread


class Claim(NamedTuple):
    """What a claim says: its slots are those of the positions from `first` to `end` whose words name it.

    Attributes:
        rows: how many of them there are.
        before: how many rows had been added before it, once it is published.
    """

    stage: int
    first: int
    end: int
    rows: int
    before: int


class ClaimTable:
    """The claims at an address. Thread-safe as its callers are: under the entry's mutex."""

    __slots__ = ("_address", "_memory", "_mine", "_words")

    def __init__(self, address: int, memory: object) -> None:
        """`memory` keeps the table mapped."""
        self._address, self._memory = address, memory
        self._words = syscalls.long_words(address, CLAIMS * _WORDS)
        self._mine: dict[int, int] = {}  # the claim that a thread has, or had last
        _forget_the_dead()

    def create(self) -> None:
        """Makes all claims free, while nobody uses them."""
        for number in range(CLAIMS):
            syscalls.mutex_create(self._address + number * CLAIM_SIZE)
            self._words[number * _WORDS + _STAGE] = FREE

    # --- of this thread -----------------------------------------------------------------------------------------------

    def left_over(self) -> int | None:
        """The claim that this thread still holds, because an exception came at an unlucky moment."""
        number = self._mine.get(syscalls.thread_id())
        return number if number is not None and self.is_mine(number) else None

    def take(self) -> int | None:
        """Locks the mutex of a free claim for this thread. None: there is none."""
        me = syscalls.thread_id()
        last = self._mine.get(me)
        if last is not None and self._take(last, me):
            return last
        if len(self._mine) > 2 * CLAIMS:  # of threads that are gone
            self._mine = {thread: number for thread, number in self._mine.items() if self.owner(number) == thread}
        for number in range(CLAIMS):  # a generator's end swallows an interrupt
            if self._take(number, me):
                return number
        return None

    def find_free(self) -> int | None:
        """A free claim, for a thread that lets go of it before it lets go of the entry's mutex. None: there is none."""
        for number in range(CLAIMS):
            if self._is_free(number):
                return number
        return None

    def _is_free(self, number: int) -> bool:
        at = number * _WORDS
        return self._words[at + _STAGE] == FREE and not self._words[at] & syscalls.MUTEX_OWNER

    def _take(self, number: int, me: int) -> bool:
        if not self._is_free(number):
            return False
        address = self._address + number * CLAIM_SIZE
        self._mine[me] = number  # before the mutex is: what an interrupt leaves is found by `left_over`
        _kept[address] = self, me
        code = syscalls.mutex_lock(address, 0.0)
        if code == syscalls.OWNER_DIED:
            syscalls.mutex_recovered(address)
        return code != syscalls.TIMED_OUT

    def release(self, number: int) -> None:
        """Unlocks the mutex of a claim that this thread holds."""
        address = self._address + number * CLAIM_SIZE
        syscalls.mutex_unlock(address)
        _kept.pop(address, None)

    def release_left_over(self, number: int) -> None:
        """As `release`, where an interrupt may have come before the mutex was said to be whole."""
        syscalls.mutex_recovered(self._address + number * CLAIM_SIZE)
        self.release(number)

    def is_mine(self, number: int) -> bool:
        return self._words[number * _WORDS] & syscalls.MUTEX_OWNER == syscalls.thread_id()

    # --- what claims say ----------------------------------------------------------------------------------------------

    def owner(self, number: int) -> int:
        """The thread that holds its mutex, 0 if none does."""
        return self._words[number * _WORDS] & syscalls.MUTEX_OWNER

    def stage(self, number: int) -> int:
        return self._words[number * _WORDS + _STAGE]

    def set_stage(self, number: int, stage: int) -> None:
        self._words[number * _WORDS + _STAGE] = stage

    def read(self, number: int) -> Claim:
        at = number * _WORDS
        return Claim(*self._words[at + _STAGE : at + _BEFORE + 1])

    def note(self, number: int, first: int, end: int, rows: int) -> None:
        """Says what a claim is about to take. Its stage then is CLAIMING."""
        words, at = self._words, number * _WORDS
        words[at + _FIRST], words[at + _END], words[at + _ROWS] = first, end, rows
        words[at + _STAGE] = CLAIMING

    def note_publication(self, number: int, before: int) -> None:
        """The moment of publication: from here on, the rows are completed by whoever comes next."""
        words, at = self._words, number * _WORDS
        words[at + _BEFORE] = before
        words[at + _STAGE] = PUBLISHING

    def in_use(self) -> list[int]:
        """All claims that aren't free."""
        stages = self._words[_STAGE::_WORDS]
        return [number for number, stage in enumerate(stages) if stage != FREE]

    def of_the_dead(self) -> list[int]:
        """The claims whose threads are dead."""
        return [number for number in self.in_use() if not self.owner(number)]

    def writers(self) -> str:
        """Who has claims, for an error."""
        threads = [self.owner(number) for number in self.in_use()]
        return ", ".join(sorted({describe_thread(thread) for thread in threads if thread})) or "nobody"


def _forget_the_dead() -> None:
    """Threads that ended, or stayed with the parent of a forked child, hold no mutex here."""
    for address, (_, thread) in list(_kept.items()):
        if not os.path.exists(f"/proc/self/task/{thread}"):
            _kept.pop(address, None)
