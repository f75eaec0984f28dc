"""When the catalog grows, and by how much.

A tenth of the map is kept for deletes, which need pages too, because LMDB writes a changed page to a free one. Pages
that were replaced since a reader began (`readers.py`) are not free: while a process is stopped in a read, overwrites
would use the tenth up. So they are counted.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import lmdb

from memstore.engine.catalog.environment import STEP, Environment
from memstore.engine.catalog.readers import count_free, reader_of_the_past
from memstore.engine.catalog.tables import Counters, Transaction
from memstore.errors import StoreFullError

_RESERVED_FOR_DELETES = 0.1
MOST_FOR_VALUES = 64 << 20  # bytes of data.mdb up to which it is grown for the sake of large values
_MOST_OF_VALUES = 48 << 20  # bytes of large values that it takes in: small ones may have made it larger still
_PART_FOR_VALUES = 0.7  # of the map: where it can't grow, segments still need their rows
_PAGES_AN_UPDATE, _MOST_UNLOOKED = 64, 16  # that one takes at most, as a rule; updates between two looks for room


class CatalogCrowded(Exception):
    """Raised where the catalog would have to grow too large for a value that can lie in a segment as well.

    The change was given up. Whoever put the value puts it into a segment then; users never see this.
    """


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

    def check_values(self, transaction: Transaction) -> None:
        """Looks before a large value is written whether there is room for it, beside room for the rows of segments.

        Raises:
            CatalogCrowded: there are as many large values as the catalog may have.
            lmdb.MapFullError: the map has to grow.
        """
        environment = self._environment.opened()
        taken, size = transaction.pages_of_values() * self._environment.page_size, environment.info()["map_size"]
        if taken > _MOST_OF_VALUES:
            raise CatalogCrowded
        if size > MOST_FOR_VALUES and reader_of_the_past(environment) is not None:
            raise CatalogCrowded  # what is replaced now isn't free before it ends
        if taken > _PART_FOR_VALUES * size:
            raise lmdb.MapFullError

    def grow(self, counters: Counters, most: int | None = None) -> None:
        """Grows the map by a quarter, or by a step.

        Raises:
            CatalogCrowded: it would have more than `most` bytes, or there is no room for it.
            StoreFullError: there is no room, and `most` is None.
        """
        size = self._environment.opened().info()["map_size"]
        size += max(STEP, size // 4 // STEP * STEP)
        if most is not None and size > most:
            raise CatalogCrowded
        try:
            self._grow_to(size, counters)
        except StoreFullError:
            if most is None:
                raise
            raise CatalogCrowded from None

    def _grow_to(self, size: int, counters: Counters) -> None:
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
