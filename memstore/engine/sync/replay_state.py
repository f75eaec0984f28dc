"""The state of a replay buffer that processes share beside its rows. The rules: docs/decisions/015.

Its numbers (`RingNumbers`) lie in the control page of the entry:

    320  head, added, rows, cursor, top, late; 368: in another boot
    384  rows sampled
    448  the sequence of the priorities' tree, odd while it changes; the largest priority ever given, a float

So does the queue before its rate limiter (`LimiterQueue`), in which callers wait in the order in which they came:

    512  the next ticket
    576  the places of those that insert, and then of those that sample

A place has a ticket (0: empty), the thread, when it was last kept (nanoseconds since boot), and the rows that are
wanted. Who waits keeps its place each second. A place is empty if its thread is dead, or hasn't kept it for longer:
since it was stopped, or left by an exception.

The table of claims (`ClaimTable`) says who writes which of its slots. A claim has 128 bytes: a robust mutex, which its
thread holds from the claim to the publication, and what it notes: stage, first, end, rows, before. The kernel lets go
of the mutex when the thread ends, behind its last store. So a claim that isn't free, and whose mutex nobody holds, is
of a thread that is dead.

All of it changes under the entry's mutex, but for that release.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from memstore.engine import syscalls
from memstore.engine.sync.primitives import boot_clock, describe_thread
from memstore.errors import CorruptionError

# --- numbers ---------------------------------------------------------------------------------------------------------


RING_AT = 320
OTHER_BOOT_AT = 368
_RING_WORDS = (512 - RING_AT) // 8
_HEAD, _ADDED, _ROWS, _CURSOR, _TOP, _LATE, _OTHER_BOOT, _, _SAMPLED = range(9)
_SEQUENCE, _LARGEST = (448 - RING_AT) // 8, (456 - RING_AT) // 8
_POSITIONS = 1 << 46  # as many fit a slot's word


class RingNumbers:
    """The numbers, in a page at an address."""

    __slots__ = ("_floats", "_memory", "_words")

    def __init__(self, page: int, memory: object) -> None:
        """`memory` keeps the page mapped."""
        self._memory = memory
        self._words = syscalls.long_words(page + RING_AT, _RING_WORDS)
        self._floats = syscalls.doubles(page + RING_AT, _RING_WORDS)

    def check(self, capacity: int) -> None:
        """Raises CorruptionError where they can't be those of a ring of so many slots."""
        words = self._words
        if max(words[_HEAD], words[_ADDED], words[_CURSOR], words[_TOP]) > _POSITIONS or words[_ROWS] > capacity:
            raise CorruptionError(
                f"its control page has head {words[_HEAD]:,}, {words[_ADDED]:,} rows added, {words[_ROWS]:,} of them "
                f"there, cursor {words[_CURSOR]:,} and top {words[_TOP]:,}, of {capacity:,} slots, which can't be: run "
                "memstore.repair"
            )

    # --- several at once ----------------------------------------------------------------------------------------------

    def hand_out(self, head: int, covered: int) -> None:
        """Positions before `head` are handed out; in their slots `covered` rows lay."""
        self._words[_ROWS] -= covered
        self._words[_HEAD] = head

    def publish(self, first: int, end: int, added: int, capacity: int) -> None:
        """Rows from `first` to before `end` are whole, with which `added` were. Made twice, it is as made once."""
        words = self._words
        words[_ADDED] = added
        if first < words[_CURSOR]:
            words[_CURSOR] = first
        if end > words[_TOP]:
            words[_TOP] = end
        if first < words[_HEAD] - capacity:
            words[_LATE] = True

    # --- one by one ---------------------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """How many positions were handed out."""
        return self._words[_HEAD]

    @head.setter
    def head(self, value: int) -> None:
        self._words[_HEAD] = value

    @property
    def added(self) -> int:
        """How many rows were ever published."""
        return self._words[_ADDED]

    @added.setter
    def added(self, value: int) -> None:
        self._words[_ADDED] = value

    @property
    def rows(self) -> int:
        """How many slots have a whole row."""
        return self._words[_ROWS]

    @rows.setter
    def rows(self, value: int) -> None:
        self._words[_ROWS] = value

    @property
    def cursor(self) -> int:
        """No row before it waits to be handed out, but for late ones."""
        return self._words[_CURSOR]

    @cursor.setter
    def cursor(self, value: int) -> None:
        self._words[_CURSOR] = value

    @property
    def top(self) -> int:
        """No row from it on waits to be handed out."""
        return self._words[_TOP]

    @top.setter
    def top(self, value: int) -> None:
        self._words[_TOP] = value

    @property
    def late(self) -> bool:
        """Whether rows may wait that were published when the ring had passed over them."""
        return bool(self._words[_LATE])

    @late.setter
    def late(self, value: bool) -> None:
        self._words[_LATE] = value

    @property
    def other_boot(self) -> bool:
        """Whether the page was written anew in another boot than its slots, which nobody has looked at since."""
        return bool(self._words[_OTHER_BOOT])

    @other_boot.setter
    def other_boot(self, value: bool) -> None:
        self._words[_OTHER_BOOT] = value

    @property
    def sampled(self) -> int:
        """How many rows were sampled, if there is a rate limiter."""
        return self._words[_SAMPLED]

    @sampled.setter
    def sampled(self, value: int) -> None:
        self._words[_SAMPLED] = value

    @property
    def sequence(self) -> int:
        """Of the priorities' tree: odd while it changes."""
        return self._words[_SEQUENCE]

    @sequence.setter
    def sequence(self, value: int) -> None:
        self._words[_SEQUENCE] = value

    @property
    def largest(self) -> float:
        """The largest priority ever given; 1 at first."""
        return self._floats[_LARGEST] or 1.0

    @largest.setter
    def largest(self, value: float) -> None:
        self._floats[_LARGEST] = value


# --- claims ----------------------------------------------------------------------------------------------------------


CLAIMS = 128
CLAIM_SIZE = 128
CLAIMS_SIZE = CLAIMS * CLAIM_SIZE
FREE, CLAIMING, CLAIMED, PUBLISHING = range(4)  # stages

_CLAIM_WORDS = CLAIM_SIZE // 8  # of a claim
_STAGE, _FIRST, _END, _CLAIM_ROWS, _BEFORE = range(syscalls.MUTEX_SIZE // 8, syscalls.MUTEX_SIZE // 8 + 5)

_held_by_threads: dict[
    int, tuple[ClaimTable, int]
] = {}  # whose memory must stay, by the mutex that a thread may hold; the thread


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
        self._words = syscalls.long_words(address, CLAIMS * _CLAIM_WORDS)
        self._mine: dict[int, int] = {}  # the claim that a thread has, or had last
        _forget_the_dead()

    def create(self) -> None:
        """Makes all claims free, while nobody uses them."""
        for number in range(CLAIMS):
            syscalls.mutex_create(self._address + number * CLAIM_SIZE)
            self._words[number * _CLAIM_WORDS + _STAGE] = FREE

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
        at = number * _CLAIM_WORDS
        return self._words[at + _STAGE] == FREE and not self._words[at] & syscalls.MUTEX_OWNER

    def _take(self, number: int, me: int) -> bool:
        if not self._is_free(number):
            return False
        address = self._address + number * CLAIM_SIZE
        self._mine[me] = number  # before the mutex is: what an interrupt leaves is found by `left_over`
        _held_by_threads[address] = self, me
        code = syscalls.mutex_lock(address, 0.0)
        if code == syscalls.OWNER_DIED:
            syscalls.mutex_recovered(address)
        return code != syscalls.TIMED_OUT

    def release(self, number: int) -> None:
        """Unlocks the mutex of a claim that this thread holds."""
        address = self._address + number * CLAIM_SIZE
        syscalls.mutex_unlock(address)
        _held_by_threads.pop(address, None)

    def release_left_over(self, number: int) -> None:
        """As `release`, where an interrupt may have come before the mutex was said to be whole."""
        syscalls.mutex_recovered(self._address + number * CLAIM_SIZE)
        self.release(number)

    def is_mine(self, number: int) -> bool:
        return self._words[number * _CLAIM_WORDS] & syscalls.MUTEX_OWNER == syscalls.thread_id()

    # --- what claims say ----------------------------------------------------------------------------------------------

    def owner(self, number: int) -> int:
        """The thread that holds its mutex, 0 if none does."""
        return self._words[number * _CLAIM_WORDS] & syscalls.MUTEX_OWNER

    def stage(self, number: int) -> int:
        return self._words[number * _CLAIM_WORDS + _STAGE]

    def set_stage(self, number: int, stage: int) -> None:
        self._words[number * _CLAIM_WORDS + _STAGE] = stage

    def read(self, number: int) -> Claim:
        at = number * _CLAIM_WORDS
        return Claim(*self._words[at + _STAGE : at + _BEFORE + 1])

    def note(self, number: int, first: int, end: int, rows: int) -> None:
        """Says what a claim is about to take. Its stage then is CLAIMING."""
        words, at = self._words, number * _CLAIM_WORDS
        words[at + _FIRST], words[at + _END], words[at + _CLAIM_ROWS] = first, end, rows
        words[at + _STAGE] = CLAIMING

    def note_publication(self, number: int, before: int) -> None:
        """The moment of publication: from here on, the rows are completed by whoever comes next."""
        words, at = self._words, number * _CLAIM_WORDS
        words[at + _BEFORE] = before
        words[at + _STAGE] = PUBLISHING

    def in_use(self) -> list[int]:
        """All claims that aren't free."""
        stages = self._words[_STAGE::_CLAIM_WORDS]
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
    for address, (_, thread) in list(_held_by_threads.items()):
        if not os.path.exists(f"/proc/self/task/{thread}"):
            _held_by_threads.pop(address, None)


# --- the queue before a rate limiter ---------------------------------------------------------------------------------


INSERTS, SAMPLES = range(2)
QUEUE_SIZE = 12  # a side; who finds none waits without, and comes after them
_NEXT_AT, _PLACES_AT, _PLACE_WORDS = 512, 576, 4
_KEPT_FOR = 3_000_000_000  # nanoseconds; who waits looks each second


class QueuePlace(NamedTuple):
    ticket: int
    rows: int


class LimiterQueue:
    """The queue before a rate limiter, in a page at an address."""

    __slots__ = ("_memory", "_next", "_sides")

    def __init__(self, page: int, memory: object) -> None:
        """`memory` keeps the page mapped."""
        self._memory = memory
        self._next = syscalls.long_words(page + _NEXT_AT, 1)
        size = QUEUE_SIZE * _PLACE_WORDS
        self._sides = [syscalls.long_words(page + _PLACES_AT + side * 8 * size, size) for side in (INSERTS, SAMPLES)]

    def line(self, side: int) -> list[QueuePlace]:
        """Returns who waits, who came first first. Places of those that are gone become empty."""
        words = self._sides[side]
        found: list[QueuePlace] = []
        for at in range(0, QUEUE_SIZE * _PLACE_WORDS, _PLACE_WORDS):
            if not words[at]:
                continue
            ticket, thread, kept, rows = words[at : at + _PLACE_WORDS]
            if 0 <= boot_clock() - kept <= _KEPT_FOR and os.path.exists(f"/proc/{thread}"):
                found.append(QueuePlace(ticket, rows))
            else:
                words[at] = 0
        return sorted(found)

    def sit(self, side: int, ticket: int, rows: int) -> int:
        """Keeps the place of a ticket, or of 0 takes one. Returns its ticket; 0: there is none left."""
        words = self._sides[side]
        at = next((at for at in range(0, QUEUE_SIZE * _PLACE_WORDS, _PLACE_WORDS) if words[at] == ticket), None)
        if at is None:  # taken for gone, or all are taken
            return self.sit(side, 0, rows) if ticket else 0
        if not ticket:
            self._next[0] = ticket = self._next[0] + 1
        words[at + 1], words[at + 2], words[at + 3] = syscalls.thread_id(), boot_clock(), rows
        words[at] = ticket
        return ticket

    def leave(self, side: int, ticket: int) -> None:
        """Makes the place of a ticket empty."""
        words = self._sides[side]
        for at in range(0, QUEUE_SIZE * _PLACE_WORDS, _PLACE_WORDS):
            if ticket and words[at] == ticket:
                words[at] = 0
