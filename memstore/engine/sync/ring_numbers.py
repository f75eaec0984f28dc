"""What a replay buffer says of itself in its control page. The rules: docs/decisions/015.

    320  head, added, rows, cursor, top, late; 368: in another boot
    384  rows sampled
    448  the sequence of the priorities' tree, odd while it changes; the largest priority ever given, a float

All of it changes under the entry's mutex.
"""

from __future__ import annotations

from memstore.engine import syscalls
from memstore.errors import CorruptionError

RING_AT = 320
OTHER_BOOT_AT = 368
_WORDS = (512 - RING_AT) // 8
_HEAD, _ADDED, _ROWS, _CURSOR, _TOP, _LATE, _OTHER_BOOT, _, _SAMPLED = range(9)
_SEQUENCE, _LARGEST = (448 - RING_AT) // 8, (456 - RING_AT) // 8
_POSITIONS = 1 << 46  # as many fit a slot's word


class RingNumbers:
    """The numbers, in a page at an address."""

    __slots__ = ("_floats", "_memory", "_words")

    def __init__(self, page: int, memory: object) -> None:
        """`memory` keeps the page mapped."""
        self._memory = memory
        self._words = syscalls.long_words(page + RING_AT, _WORDS)
        self._floats = syscalls.doubles(page + RING_AT, _WORDS)

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
