"""Writable mappings of segments that this process has filled, kept for the next time that it fills the same files.

A new mapping costs its page faults: 0.6 us for each small page, so that an overwrite through one is six times slower
than a memcpy where the kernel refuses huge pages. A kept mapping holds no lock: others may claim the file and fill it,
or unlink it. Whoever unlinks it gives its memory back by punching a hole, since a mapping would keep the memory: see
`sweep.close_unlinked`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from memstore.engine.syscalls import Reservation

_MOST = 3  # mappings: of one file that is live, one retired, and one being filled
_MOST_BYTES = 4 << 30  # of all of them: with small pages, these take 8 MiB of page tables


class Spare(NamedTuple):
    """A mapping of a whole file."""

    mapping: Reservation
    address: int  # where the file starts
    size: int


class Spares:
    """The kept mappings of one root in this process, by segment: a file keeps its segment's number for life."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Spare] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, segment: int, size: int) -> bool:
        spare = self._kept.get(segment)
        return spare is not None and spare.size == size

    def take(self, segment: int, size: int) -> Spare | None:
        spare = self._kept.pop(segment, None)
        return spare if spare is not None and spare.size == size else None

    def keep(self, segment: int, spare: Spare) -> None:
        self._kept[segment] = spare
        while len(self._kept) > _MOST or sum(kept.size for kept in self._kept.values()) > _MOST_BYTES:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Call it before a fork too: the child gets no such mapping, but would inherit the objects that unmap them."""
        self._kept.clear()
