"""Rules of relays: which host a reader is sent to, for the bytes of a version that others have or are fetching.

The host where the bytes were put, their *origin*, keeps for each of its segments that is fetched a *tree* of the hosts
that fetch it, in memory alone. It sends the bytes itself to the first `CHILDREN` hosts. It tells every later one the
*parent* that it is to fetch them from: a host of the tree that has fewer than `CHILDREN` of its own, the first that
came. Whether that host has all of the bytes by then, or is still fetching them, is of no matter: it passes on what has
arrived.

- **A reader whose parent is of no use** (it can't be reached, makes no progress, hasn't the bytes any more, or sends
  wrong ones) tells the origin. The parent gets no further children, until it asks for bytes again itself, and its place
  at its own parent is free. The reader gets the next host on the way to the origin, each of which takes `SPARE` readers
  more than others do; else another parent, or the bytes.
- **No host waits for itself**: each has a *depth*, by which it is named to its parent, and only waits for hosts of a
  lesser one. The depth of a host that others were sent to stays what it is. A relay compares depths all the time, since
  an origin that was started again makes new trees, and some readers still have parents of the old ones.
- **A reader that has lost `MOST_LOST` parents** gets the bytes from the origin, which is what ends its search.
- **Nothing of it is stored**, and nobody says that he is done: each host that comes brings room for `CHILDREN`, and
  takes room for one.
- **A host that asks again** for the same bytes is sent to the same parent: a transfer has several streams, and one
  that has lost its copy fetches it anew.

So the origin sends the bytes `CHILDREN` times, and in addition what readers had not received yet of parents that were
lost. The depth of the tree grows as the logarithm of the number of hosts.
"""

from __future__ import annotations

from collections import OrderedDict

CHILDREN = 2  # of a host, and of the origin
SPARE = 1  # children in addition, of those whose parents were lost
MOST_LOST = 3  # parents of one reader
MOST_TREES = 256  # of an origin, the last that were asked for
MOST_HOSTS = 1 << 14  # of a tree: it begins anew then


class _Host:
    """A host that fetches a version, or has fetched it.

    Attributes:
        depth: how many transfers the bytes take to it, or fewer.
        parent: None: the origin.
        children: how many were sent to it, but for those that were lost.
        lost: how many parents it has lost.
        is_lost: a reader said that it is of no use.
    """

    __slots__ = ("children", "depth", "is_lost", "lost", "parent")

    def __init__(self) -> None:
        self.parent: bytes | None = None
        self.depth = self.children = self.lost = 0
        self.is_lost = False


class Tree:
    """The hosts that fetch the bytes of one segment."""

    def __init__(self) -> None:
        self._hosts: dict[bytes, _Host] = {}
        self._open: dict[bytes, None] = {}  # those that may have more children, the first that came first
        self._own = 0  # readers that the origin sends to

    def source_of(self, reader: bytes, lost: bytes | None = None) -> tuple[bytes | None, int]:
        """Returns the host that a reader is to fetch the bytes from, and the reader's depth. None: the origin.

        Args:
            lost: the parent that it could not have them from.
        """
        host = self._hosts.get(reader)
        if host is None:
            if len(self._hosts) >= MOST_HOSTS:
                self._hosts, self._open, self._own = {}, {}, 0
            host = _Host()
            self._attach(reader, host, lost)
            self._hosts[reader] = host
        else:
            if host.is_lost:  # it is there again
                host.is_lost = False
                self._count(host.parent, 1)
            if lost is not None and lost == host.parent:  # else another stream of the reader has told it before
                host.lost += 1
                self._give_up(lost)
            if host.parent is not None and self._is_lost(host.parent):
                self._attach(reader, host, host.parent)
        if host.children < CHILDREN:
            self._open[reader] = None
        return host.parent, host.depth

    def _attach(self, reader: bytes, host: _Host, lost: bytes | None) -> None:
        host.parent = self._choose(reader, host, lost)
        if host.parent is None:
            host.depth = 1
        else:
            depth = self._hosts[host.parent].depth + 1
            host.depth = max(host.depth, depth) if host.children else depth
        self._count(host.parent, 1)

    def _choose(self, reader: bytes, host: _Host, lost: bytes | None) -> bytes | None:
        if self._own < CHILDREN or host.lost >= MOST_LOST:
            return None
        if lost is not None:
            above: bytes | None = lost
            while above is not None and (found := self._hosts.get(above)) is not None:
                if not found.is_lost and found.children < CHILDREN + SPARE and above not in (reader, lost):
                    return above
                above = found.parent
            if self._own < CHILDREN + SPARE:
                return None
        for other in self._open:
            is_higher = not host.children or self._hosts[other].depth < host.depth
            if other not in (reader, lost) and is_higher:
                return other
        return None

    def _count(self, parent: bytes | None, change: int) -> None:
        """Counts a child of a host, or of the origin."""
        if parent is None:
            self._own += change
            return
        host = self._hosts.get(parent)
        if host is None:
            return
        host.children += change
        if host.children >= CHILDREN:
            self._open.pop(parent, None)
        elif not host.is_lost:
            self._open[parent] = None

    def _give_up(self, lost: bytes) -> None:
        host = self._hosts.get(lost)
        if host is not None and not host.is_lost:
            host.is_lost = True
            self._open.pop(lost, None)
            self._count(host.parent, -1)

    def _is_lost(self, one: bytes) -> bool:
        host = self._hosts.get(one)
        return host is None or host.is_lost


class Trees:
    """The trees of an origin, by segment and put id. Not thread-safe."""

    def __init__(self) -> None:
        self._trees: OrderedDict[tuple[int, int], Tree] = OrderedDict()

    def of(self, segment: int, put_id: int) -> Tree:
        name = segment, put_id
        tree = self._trees.get(name)
        if tree is None:
            tree = self._trees[name] = Tree()
            if len(self._trees) > MOST_TREES:
                self._trees.popitem(last=False)
        self._trees.move_to_end(name)
        return tree
