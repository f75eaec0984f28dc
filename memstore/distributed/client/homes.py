"""Which keys have their home on this host, by what was read of the catalog last."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.distributed import catalog
from memstore.distributed.rules import Member, Standing, Tables, group_of, one_home
from memstore.engine import Root, deadline_after
from memstore.errors import StaleMembershipError

_GROUPS = 1 << 16  # that are remembered
_TO_OPEN = 5.0  # seconds for the store's mutex, when tables are opened that came since, of a call without a deadline


class Homes:
    """One reading. It is never changed, but for what it remembers.

    Attributes:
        membership: the number of the catalog's counters that it was read under.
        here: groups of keys that were asked after, and whose home is here. Puts look into it.
    """

    def __init__(self, membership: int, standing: Standing) -> None:
        self.membership, self.standing = membership, standing
        self.here: set[bytes] = set()

    def are_here(self, keys: Sequence[bytes]) -> bool:
        """Whether this host is the home of all of them, and has all that was put under them. Raises CrossHostError."""
        for key in keys:
            if group_of(key) not in self.here and not self._look(key):
                if len(keys) > 1 and not self.standing.is_removed:
                    one_home(self.standing, keys)
                return False
        return True

    def _look(self, key: bytes) -> bool:
        if not self.standing.has_all_of(key):
            return False
        if len(self.here) >= _GROUPS:
            self.here.clear()
        self.here.add(group_of(key))
        return True


def homes_of(tables: Tables) -> Homes | None:
    """In a transaction. None: nobody has served the root yet."""
    standing = tables.standing()
    return None if standing is None else Homes(tables.membership(), standing)


class KnownHomes:
    """What a process knows of the homes of a root's store. Thread-safe.

    It refers to nothing of what asks it. So what a closed store had goes at once, its files too, and not when Python
    next looks for circles.

    Attributes:
        homes: as last read; None: not yet.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.homes: Homes | None = None

    def take_in(self, deadline: float | None = None) -> Homes:
        """Reads them. Raises StaleMembershipError."""
        homes = catalog.look(self._root, homes_of, deadline_after(_TO_OPEN) if deadline is None else deadline)
        if homes is None:
            raise StaleMembershipError(f"{self._root.path} is served, and doesn't say by whom: serve it anew")
        self.homes = homes
        return homes

    def home_of(self, key: bytes, deadline: float | None = None) -> bytes:
        return (self.homes or self.take_in(deadline)).standing.view.home_of(key)

    def cluster(self) -> bytes:
        return (self.homes or self.take_in()).standing.view.cluster

    def member_of(self, member: bytes) -> Member | None:
        """As the catalog says now: what was taken in may be older than what a home has answered."""
        return self.take_in().standing.view.member(member)
