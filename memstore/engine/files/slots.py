"""Rewrites the slots of a segment's header in place: the words of fixed width that change while the file lives.

Call these under the mutex, or with the file's exclusive lock.
"""

from __future__ import annotations

from memstore.engine import syscalls
from memstore.engine.format import PUT_ID_AT, RETIRED, SLOTS_OFFSET, STATE_AT, Slots, state_word


def write_slots(fd: int, slots: Slots) -> None:
    syscalls.write_at(fd, slots.encode(), SLOTS_OFFSET)


def write_state(fd: int, state: int) -> None:
    syscalls.write_at(fd, state_word(state), STATE_AT)


def erase_put_id(fd: int) -> None:
    """From here on the file holds no put's contents: readers that come with an older record see it."""
    syscalls.write_at(fd, b"0" * 16, PUT_ID_AT)


def vacate(fd: int) -> None:
    """Erases the put id and marks what the file held as retired, by one write."""
    syscalls.write_at(fd, b"%016x state=%s" % (0, state_word(RETIRED)), PUT_ID_AT)
