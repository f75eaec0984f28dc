"""When the catalog grows, and by how much.

A tenth of the map is kept for deletes, which need pages too, because LMDB writes a changed page to a free one. Pages
that were replaced since a reader began (`readers.py`) are not free: while a process is stopped in a read, overwrites
would use the tenth up. So they are counted.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from memstore.engine.catalog.environment import STEP, Environment
from memstore.engine.catalog.readers import count_free, reader_of_the_past
from memstore.engine.catalog.tables import Counters
from memstore.errors import StoreFullError

_RESERVED_FOR_DELETES = 0.1
_PAGES_AN_UPDATE, _MOST_UNLOOKED = 64, 16  # that one takes at most, as a rule; updates between two looks for room


class Growth:
    """Looks for room before an update, and makes some. Under the store's mutex.

    Attributes:
        unlooked: updates until the next look; negative: it is due.
    """

    __slots__ = ("_environment", "unlooked")

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.unlooked = 0

    def is_due(self, count_used: Callable[[], int]) -> bool:
        """Whether the map is nearly full. `count_used` counts the pages that tables take."""
        info = self._environment.opened().info()
        pages = info["map_size"] // self._environment.page_size
        room = int((1 - _RESERVED_FOR_DELETES) * pages) - info["last_pgno"]
        if room > 0:
            self.unlooked = min(room // _PAGES_AN_UPDATE, _MOST_UNLOOKED)
            return False
        reserve = int(2 * _RESERVED_FOR_DELETES * pages)
        if count_used() > pages - reserve:  # pages that were freed are used again
            return True
        reader = reader_of_the_past(self._environment.opened())  # `count_used` may have opened another one
        room = pages - info["last_pgno"] - 1
        if reader is None or room >= reserve:
            return False
        free = count_free(self._environment.path, reader.moment, reserve - room)
        return room + free < reserve

    def grow(self, counters: Counters) -> None:
        size = self._environment.opened().info()["map_size"]
        size += max(STEP, size // 4 // STEP * STEP)
        if counters.capacity and counters.allocated + size - STEP > counters.capacity:
            raise self.full(
                f"the store may take {counters.capacity:,} bytes, and the catalog has to grow to {size:,} beside "
                f"{counters.allocated:,} of its files"
            )
        try:
            self._environment.allocate(size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self.full(f"no room to grow the catalog to {size:,} bytes") from None
        self._environment.map(size)

    def full(self, why: str) -> StoreFullError:
        """Names the oldest reader: there may be room enough, but for the pages that it keeps."""
        env = self._environment.opened()
        reader = reader_of_the_past(env)
        if reader is not None:
            behind = env.info()["last_txnid"] - reader.moment
            why += f"; pid {reader.pid} has read since {behind:,} changes ago: what they replaced is kept until it ends"
        return StoreFullError(f"{self._environment.folder}: {why}")
