"""Sessions end when their client says so, or when it has had no connection for an hour: it was killed, or is cut off.

What may still be on its way for such a session is refused from then on, for ever (`calls.py`): no network keeps a
message for so long.

The hour is counted by looks, in memory: an index process that is started again begins anew. Between two looks it counts
LOOK seconds at most. So a process that was stopped, a host that slept, or a clock that jumps, which all keep clients
from coming back too, ends nobody's session. Sessions that last (`joining.py`) end when their client says so only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from memstore.distributed.rules.steps import Steps, transact, view
from memstore.distributed.rules.tables import Tables
from memstore.distributed.rules.terms import ROWS_LIMIT

LAST = 3_600_000_000_000  # nanoseconds without a connection
LOOK = 60_000_000_000  # nanoseconds between two looks, as they are counted
_ENDED_AT_ONCE = 16  # in one transaction: each has up to 256 calls


class Sessions:
    """Which sessions have had no connection, and for how long, since the index process was started.

    Args:
        clock: nanoseconds, of a clock that nobody sets.
        last, look: see LAST and LOOK.
    """

    def __init__(self, clock: Callable[[], int], *, last: int = LAST, look: int = LOOK) -> None:
        self._clock, self._last, self._look = clock, last, look
        self._looked = clock()
        self._counted = 0  # nanoseconds
        self._idle_since: dict[int, int] = {}  # in what was counted

    def run(self, connected: Callable[[], Collection[int]]) -> Steps[None]:
        """Looks once, and ends those whose time is over.

        Args:
            connected: sessions that have a connection, or had one since this was last called.
        """
        now = self._clock()
        self._counted += min(max(now - self._looked, 0), self._look)
        self._looked = now
        found, after = list[int](), 0
        while page := (yield from view(lambda tables, start=after: _page(tables, start))):
            found += [session for session, lasts in page if not lasts]
            after = page[-1][0]
        here = connected()
        self._idle_since = {
            session: self._idle_since.get(session, self._counted) for session in found if session not in here
        }
        over = [session for session, since in self._idle_since.items() if self._counted - since >= self._last]
        for first in range(0, len(over), _ENDED_AT_ONCE):
            some = over[first : first + _ENDED_AT_ONCE]
            yield from transact(lambda tables, some=some: self._end(tables, some, connected()))

    def _end(self, tables: Tables, over: Collection[int], connected: Collection[int]) -> None:
        """But for those whose clients have come back just now."""
        for session in connected:
            self._idle_since.pop(session, None)
        for session in over:
            if session not in connected:
                tables.end_session(session)


def _page(tables: Tables, after: int) -> list[tuple[int, bool]]:
    return [(session, tables.lasts(session)) for session in tables.sessions(after, ROWS_LIMIT)]
