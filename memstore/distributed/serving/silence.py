"""Hosts that give no answer for a while: the index process says so once, and once when they answer again."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG = 2.0  # seconds: an index process that was killed is back long before


class Silences:
    """Thread-safe: a line may come twice, if two threads ask one host.

    Args:
        tell: is given lines for people.
        clock: seconds.
    """

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._since: dict[str, float] = {}  # by address
        self._told: set[str] = set()

    def begin(self, address: str, why: str) -> None:
        """It gave no answer. `why` may be empty."""
        since = self._since.setdefault(address, self._clock())
        if self._clock() - since >= LONG and address not in self._told:
            self._told.add(address)
            self._tell(f"{address} does not answer ({why or 'no answer in time'}): it is asked again and again")

    def end(self, address: str) -> None:
        """It has answered, or said why it won't."""
        if self._since.pop(address, None) is not None and address in self._told:
            self._told.discard(address)
            self._tell(f"{address} answers again")
