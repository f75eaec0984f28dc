"""When an agent takes its index process for hung: it has said nothing for too long, while the agent was there to hear.

A machine that was suspended, or a container that was stopped as a whole, isn't silent: its agent was stopped too. So
the agent counts looks, and not the clock: each of them counts for the time that it was meant to take, at most.
"""

from __future__ import annotations

HANG_AFTER = 10.0  # seconds
LEAST = 0.5  # seconds that an index process has at least
_LOOKS = 5  # that fit into the time it has
_LONGEST_LOOK = 1.0  # seconds
_TO_BEGIN = 60.0  # seconds until its first word: imports from a disk that is cold, or far away


def look_every(hang_after: float) -> float:
    """Seconds between two words of the index process, and between two looks of its agent."""
    return min(hang_after / _LOOKS, _LONGEST_LOOK)


class Watchdog:
    """Args:
    hang_after: seconds of silence, from the first word on.
    now: monotonic, as in all calls.
    """

    def __init__(self, hang_after: float, now: float) -> None:
        self._limit, self._every = hang_after, look_every(hang_after)
        self._patience = max(hang_after, _TO_BEGIN)
        self._silence, self._looked = 0.0, now

    @property
    def look_every(self) -> float:
        return self._every

    def hear(self, now: float) -> None:
        """The index process has said something."""
        self._patience = self._limit
        self._silence, self._looked = 0.0, now

    def is_over(self, now: float) -> bool:
        """A look at which it had said nothing. Whether it was the last one."""
        self._silence += min(now - self._looked, self._every)
        self._looked = now
        return self._silence >= self._patience
