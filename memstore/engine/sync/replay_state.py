"""The state of a replay buffer that processes share beside its rows. The rules: docs/decisions/015.

Two parts lie in the control page of the entry (`pages.py`). From 320 on stand the numbers, `RingNumbers`, and from 512
on the queue before the rate limiter, `LimiterQueue`. Its callers wait there in the order in which they came, inserts
and samples apart.

The table of claims (`ClaimTable`) says who writes which slots. A thread holds the mutex of its claim from the claim to
the publication. The kernel unlocks that mutex when the thread ends, after its last store. So a claim that isn't free,
and whose mutex nobody holds, belongs to a dead thread.

Everything changes under the entry's mutex, except that a claim's mutex is unlocked outside of it.
"""

from __future__ import annotations

import os
from typing import Any

from memstore.engine import syscalls
from memstore.engine.sync.primitives import boot_clock, describe_thread
from memstore.engine.syscalls import Float64, Structure, Uint64
from memstore.errors import CorruptionError

# --- numbers ---------------------------------------------------------------------------------------------------------


RING_AT = 320
_POSITIONS = 1 << 46  # as many fit a slot's word


class RingNumbers(Structure):
    """The numbers of a ring, from `RING_AT` on in its control page.

    Attributes:
        head: how many positions were handed out.
        added: how many rows were ever published.
        rows: how many slots have a whole row.
        cursor: no row before this position waits to be handed out, except late ones.
        top: no row from this position on waits to be handed out.
        late: whether rows may wait that were published after the ring had passed over them.
        other_boot: whether the page was written anew in another boot than the slots, which nobody has checked since.
        sampled: how many rows were sampled, if there is a rate limiter.
        sequence: odd while the tree of priorities changes.
        given: the largest priority ever given; 0: none was.
    """

    head: int
    added: int
    rows: int
    cursor: int
    top: int
    late: int
    other_boot: int
    sampled: int
    sequence: int
    given: float
    _fields_ = (  # in lines of 64 bytes: what different calls change lies apart
        *((name, Uint64) for name in ("head", "added", "rows", "cursor", "top", "late", "other_boot")),
        ("_to_384", Uint64),
        ("sampled", Uint64),
        ("_to_448", Uint64 * 7),
        ("sequence", Uint64),
        ("given", Float64),
    )

    @classmethod
    def in_page(cls, address: int) -> RingNumbers:
        """Returns the numbers in the control page at an address. The caller keeps the page mapped."""
        return cls.from_address(address + RING_AT)

    @property
    def largest(self) -> float:
        """The largest priority ever given; 1 at first."""
        return self.given or 1.0

    def check(self, capacity: int) -> None:
        """Raises CorruptionError if no ring of so many slots can have these numbers."""
        if max(self.head, self.added, self.cursor, self.top) > _POSITIONS or self.rows > capacity:
            raise CorruptionError(
                f"its control page has head {self.head:,}, {self.added:,} rows added, {self.rows:,} of them "
                f"there, cursor {self.cursor:,} and top {self.top:,}, of {capacity:,} slots, which can't be: run "
                "memstore.repair"
            )

    def count_published(self, first: int, end: int, added: int, capacity: int) -> None:
        """Notes that rows from `first` to before `end` wait to be handed out. To repeat it changes nothing.

        Args:
            added: how many rows were ever published, these included.
            capacity: of the ring.
        """
        self.added = added
        if first < self.cursor:
            self.cursor = first
        if end > self.top:
            self.top = end
        if first < self.head - capacity:
            self.late = True


# --- claims ----------------------------------------------------------------------------------------------------------


CLAIMS = 128
FREE, CLAIMING, CLAIMED, PUBLISHING = range(4)  # stages


class Claim(Structure):
    """An entry of the table. Its slots are those of the positions from `first` to `end` whose words name it.

    Attributes:
        lock: the first word of the mutex, which names its owner.
        rows: how many slots there are.
        before: how many rows had been added before its publication began.
    """

    lock: int
    stage: int
    first: int
    end: int
    rows: int
    before: int
    _fields_ = (
        ("lock", Uint64),
        ("_mutex", Uint64 * (syscalls.MUTEX_SIZE // 8 - 1)),
        *((name, Uint64) for name in ("stage", "first", "end", "rows", "before")),
        ("_to_128", Uint64 * 3),
    )

    @property
    def owner(self) -> int:
        """The thread that holds the mutex, 0 if none does."""
        return self.lock & syscalls.MUTEX_OWNER

    def __repr__(self) -> str:
        return f"stage {self.stage}, {self.rows} rows from {self.first} to {self.end}"


CLAIM_SIZE = 128
CLAIMS_SIZE = CLAIMS * CLAIM_SIZE
_CLAIM_WORDS, _STAGE = CLAIM_SIZE // 8, syscalls.MUTEX_SIZE // 8

# The table whose memory must stay, and the thread, by the address of a mutex that the thread may hold.
_held_by_threads: dict[int, tuple[ClaimTable, int]] = {}


class ClaimTable:
    """The claims at an address. Call it under the entry's mutex.

    Attributes:
        claims: all of them, by their numbers.
        mine: by thread of this process, the claim whose mutex it holds or held last.
    """

    __slots__ = ("_address", "_memory", "_words", "claims", "mine")

    def __init__(self, address: int, memory: object) -> None:
        """Takes a table, which `memory` keeps mapped."""
        self._address, self._memory = address, memory
        self.claims = [Claim.from_address(address + number * CLAIM_SIZE) for number in range(CLAIMS)]
        self._words = syscalls.long_words(address, CLAIMS * _CLAIM_WORDS)
        self.mine: dict[int, int] = {}
        for mutex, (_, thread) in list(_held_by_threads.items()):
            if not os.path.exists(f"/proc/self/task/{thread}"):  # it ended, or is one of a forked child's parent
                _held_by_threads.pop(mutex, None)

    def create(self) -> None:
        """Makes all claims free, while nobody uses them."""
        for number, claim in enumerate(self.claims):
            syscalls.mutex_create(self._address + number * CLAIM_SIZE)
            claim.stage = FREE

    # --- of this thread -----------------------------------------------------------------------------------------------

    def left_over(self) -> int | None:
        """Returns the claim that this thread still holds, because an exception came at an unlucky moment."""
        number = self.mine.get(syscalls.thread_id())
        return number if number is not None and self.claims[number].owner == syscalls.thread_id() else None

    def take(self) -> int | None:
        """Locks the mutex of a free claim for this thread. Returns None if there is none."""
        me = syscalls.thread_id()
        last = self.mine.get(me)
        if last is not None and self._take(last, me):
            return last
        if len(self.mine) > 2 * CLAIMS:  # of threads that are gone
            self.mine = {thread: number for thread, number in self.mine.items() if self.claims[number].owner == thread}
        for number in range(CLAIMS):  # a generator's end swallows an interrupt
            if self._take(number, me):
                return number
        return None

    def _take(self, number: int, me: int) -> bool:
        claim = self.claims[number]
        if claim.stage != FREE or claim.owner:
            return False
        address = self._address + number * CLAIM_SIZE
        self.mine[me] = number  # before the mutex is locked: `left_over` finds what an interrupt leaves
        _held_by_threads[address] = self, me
        code = syscalls.mutex_lock(address, 0.0)
        if code == syscalls.OWNER_DIED:
            syscalls.mutex_recovered(address)
        return code != syscalls.TIMED_OUT

    def find_free(self) -> int | None:
        """Returns a free claim, for a thread that frees it in the same hold. Returns None if there is none."""
        for number, claim in enumerate(self.claims):
            if claim.stage == FREE and not claim.lock & syscalls.MUTEX_OWNER:
                return number
        return None

    def release(self, number: int, *, is_left_over: bool = False) -> None:
        """Unlocks the mutex of a claim that this thread holds.

        Args:
            is_left_over: an interrupt may have come before the mutex was said to be whole again.
        """
        address = self._address + number * CLAIM_SIZE
        if is_left_over:
            syscalls.mutex_recovered(address)
        syscalls.mutex_unlock(address)
        _held_by_threads.pop(address, None)

    # --- of all -------------------------------------------------------------------------------------------------------

    def in_use(self) -> list[int]:
        """Returns all claims that aren't free."""
        stages = self._words[_STAGE::_CLAIM_WORDS]  # a fifth of the time that a look at each claim takes
        return [number for number, stage in enumerate(stages) if stage != FREE]

    def of_the_dead(self) -> list[int]:
        """Returns the claims whose threads are dead."""
        return [number for number in self.in_use() if not self.claims[number].owner]

    def writers(self) -> str:
        """Names the processes that have claims, for an error."""
        threads = [self.claims[number].owner for number in self.in_use()]
        return ", ".join(sorted({describe_thread(thread) for thread in threads if thread})) or "nobody"


# --- the queue before a rate limiter ---------------------------------------------------------------------------------


INSERTS, SAMPLES = range(2)
QUEUE_SIZE = 12  # a side; a caller that finds no place waits without one, and comes after all others
_RENEWED_WITHIN = 3_000_000_000  # nanoseconds; a waiting caller looks each second


class QueuePlace(Structure):
    """The place of a caller in the queue.

    Attributes:
        ticket: grows from caller to caller; 0: the place is empty.
        thread: the caller's.
        renewed: when the caller looked last, in nanoseconds since boot.
        rows: how many rows the caller wants.
    """

    ticket: int
    thread: int
    renewed: int
    rows: int
    _fields_ = tuple((name, Uint64) for name in ("ticket", "thread", "renewed", "rows"))


class _Queue(Structure):
    next_ticket: int
    sides: Any
    _fields_ = (("next_ticket", Uint64), ("_to_576", Uint64 * 7), ("sides", QueuePlace * QUEUE_SIZE * 2))


class LimiterQueue:
    """The queue, in a control page at an address. Call it under the entry's mutex."""

    __slots__ = ("_memory", "_queue", "_sides")

    def __init__(self, page: int, memory: object) -> None:
        """Takes the queue of a page, which `memory` keeps mapped."""
        self._memory = memory
        self._queue = _Queue.from_address(page + 512)
        self._sides: list[list[QueuePlace]] = [list(side) for side in self._queue.sides]

    def waiting(self, side: int) -> list[QueuePlace]:
        """Returns the places of those who wait, in the order in which they came.

        Places become empty whose thread is dead, or hasn't renewed them: it was stopped, or left by an exception.
        """
        found: list[QueuePlace] = []
        for place in self._sides[side]:
            if not place.ticket:
                continue
            if 0 <= boot_clock() - place.renewed <= _RENEWED_WITHIN and os.path.exists(f"/proc/{place.thread}"):
                found.append(place)
            else:
                place.ticket = 0
        return sorted(found, key=lambda place: place.ticket)

    def keep(self, side: int, ticket: int, rows: int) -> int:
        """Renews the place of a ticket, or takes a place for the ticket 0. Returns its ticket; 0: no place is left."""
        place = next((place for place in self._sides[side] if place.ticket == ticket), None)
        if place is None:  # taken for gone, or all are taken
            return self.keep(side, 0, rows) if ticket else 0
        if not ticket:
            self._queue.next_ticket = ticket = self._queue.next_ticket + 1
        place.thread, place.renewed, place.rows = syscalls.thread_id(), boot_clock(), rows
        place.ticket = ticket
        return ticket

    def leave(self, side: int, ticket: int) -> None:
        """Empties the place of a ticket."""
        for place in self._sides[side]:
            if ticket and place.ticket == ticket:
                place.ticket = 0
