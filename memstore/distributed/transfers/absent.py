"""Values of other hosts in memory of this process: the bytes that are needed come, and no others.

The value gets a range of addresses as if it were mapped. Segments of this host are mapped there; where those of others
would lie is memory without a file, which is filled before somebody reads it. What has come stays as long as the value
is held. Rows that are read into new memory come straight to it, the first time: most are read once, and to keep them
takes as long as to receive them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from memstore.distributed.transfers.asking import Part
from memstore.distributed.transfers.kept import Kept
from memstore.distributed.transfers.ranges import NO_RANGES, Ranges, merged, one_range, together
from memstore.engine import MappedEntry, Record, SegmentExtent
from memstore.engine import Mapping as MappedRange
from memstore.errors import HomeUnavailableError, VersionGoneError

_LET_GO = (
    "its host has let go of it before all of it had come, since its index process was started again or the connection "
    "broke"
)
GAP = 16  # bytes between two ranges: to name both takes as many


class Reader(Protocol):
    """What brings parts of other hosts' segments, by the ids of these. False: one of them is gone.

    Raises HomeUnavailableError; StorageError on storage that hosts share.
    """

    def __call__(self, hosts: Mapping[bytes, Sequence[Part]], deadline: float) -> bool: ...


class AbsentBytes:
    """The bytes of one value that lie elsewhere.

    Args:
        elsewhere: segments of other hosts, with the ids of these.
        mapping: the range of addresses of the whole value.
        read: brings parts of them.
        seconds: for each time that bytes are needed.
        localize: makes a copy of the value in this host's store.
        kept: as long as it lives, the other hosts keep the bytes; None: they don't.
        why_gone: for the error where they have been replaced, and are there no more.
    """

    def __init__(
        self,
        key: bytes,
        record: Record,
        elsewhere: Sequence[tuple[bytes, SegmentExtent]],
        mapping: MappedRange,
        read: Reader,
        seconds: float,
        localize: Callable[[float], MappedEntry | None],
        kept: Kept | None = None,
        why_gone: str = _LET_GO,
    ) -> None:
        self._key, self._record, self._elsewhere = key, record, elsewhere
        self._address, self._size = mapping.address, mapping.size
        self._bring_parts, self._seconds, self._localize = read, seconds, localize
        self._why_gone = why_gone
        self._there, self._kept = one_range(0, mapping.size).without(self._all()), kept
        self._passed = NO_RANGES  # what has come, and lies elsewhere in this process

    def _all(self) -> Ranges:
        """Where the data sections of others' segments lie, in the range of addresses."""
        if self._record.start:  # one plain segment; what is behind its data is slack
            return one_range(self._record.start, self._record.start + self._record.nbytes)
        found = [one_range(one.base + one.start, one.base + one.size) for _, one in self._elsewhere]
        return together(found)

    def need(self, starts: Any, stops: Any) -> None:
        places, ends = np.asarray(starts, np.int64) - self._address, np.asarray(stops, np.int64) - self._address
        self._bring(merged(places, ends).cut(0, self._size), time.monotonic() + self._seconds)

    def receive(self, starts: Any, stops: Any, into: Any) -> bool:
        """See `engine.Absent`. What has come so once, and is asked for again, is kept from then on."""
        wanted = Ranges(np.asarray(starts, np.int64) - self._address, np.asarray(stops, np.int64) - self._address)
        if wanted.meets(self._there) or wanted.meets(self._passed):
            return False
        hosts: dict[bytes, list[Part]] = {}
        for host, extent in self._elsewhere:
            inside = (wanted.starts >= extent.base) & (wanted.stops <= extent.base + extent.size)
            if inside.any():
                moved = Ranges(wanted.starts[inside] - extent.base, wanted.stops[inside] - extent.base)
                hosts.setdefault(host, []).append(Part(extent, moved, into[inside] - moved.starts))
        deadline = time.monotonic() + self._seconds
        if not self._fetch(hosts, deadline):
            raise self._gone()
        self._passed = together([self._passed, wanted])
        return True

    def need_all(self) -> None:
        self._bring(self._all(), time.monotonic() + self._seconds)

    def bring_all(self, deadline: float) -> bool:
        """As `need_all`, until a deadline (monotonic). False where the version was replaced."""
        return self._read(self._all().without(self._there), deadline)

    def header(self, deadline: float) -> bool:
        """Brings the header of a plain segment. False where the version was replaced."""
        return self._read(one_range(0, self._record.start), deadline)

    def localized(self) -> MappedEntry:
        held = self._localize(time.monotonic() + self._seconds)
        if held is None:
            raise self._gone()
        return held

    def _bring(self, wanted: Ranges, deadline: float) -> None:
        lacking = wanted.without(self._there)
        if lacking and not self._read(lacking, deadline):
            raise self._gone()

    def _read(self, lacking: Ranges, deadline: float) -> bool:
        lacking = together([lacking], GAP)
        hosts: dict[bytes, list[Part]] = {}
        for host, extent in self._elsewhere:
            ranges = lacking.cut(extent.base, extent.base + extent.size)
            if ranges:
                moved = Ranges(ranges.starts - extent.base, ranges.stops - extent.base)
                hosts.setdefault(host, []).append(Part(extent, moved, self._address + extent.base))
        if not self._fetch(hosts, deadline):
            return False
        # Another thread may have brought others meanwhile, and be forgotten here: then they come once more.
        self._there = together([self._there, lacking])
        return True

    def _fetch(self, hosts: Mapping[bytes, Sequence[Part]], deadline: float) -> bool:
        if self._kept is not None:
            self._kept.renew(hosts, deadline)
        try:
            return self._bring_parts(hosts, deadline)
        except HomeUnavailableError as error:
            raise of_key(self._key, error) from error

    def _gone(self) -> VersionGoneError:
        key = self._key.decode()
        return VersionGoneError(
            f"version {self._record.version} of {key!r} was replaced, and {self._why_gone}: get the key anew; where a "
            "value must outlive that, get it whole instead of viewing it",
            key=key,
        )


def of_key(key: bytes, error: HomeUnavailableError) -> HomeUnavailableError:
    """The error of a host that doesn't send bytes, told of the key that they belong to."""
    return HomeUnavailableError(f"{key.decode()!r}: {error}", key=key.decode())
