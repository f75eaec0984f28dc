"""What a get is given: a version of a key, and its bytes in memory."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from memstore.engine.files import Mapping
from memstore.engine.format import Record, SegmentExtent


class Absent(Protocol):
    """Bytes of a mapping that lie on other hosts until they are needed. Whoever reads some asks for them first.

    All raise HomeUnavailableError within the timeout, and VersionGoneError if the version was replaced before these
    bytes came.
    """

    def need(self, starts: Any, stops: Any) -> None:
        """Brings what lies between these addresses, arrays of int64, as far as it is of the mapping and not there."""
        ...

    def need_all(self) -> None: ...

    def receive(self, starts: Any, stops: Any, into: Any) -> bool:
        """Brings what lies between these addresses to others instead.

        Args:
            starts, stops: as of `need`; of ranges in order, and apart.
            into: an address for each range. After an error anything may lie there.

        Returns:
            False: nothing was done. Some of it is there, or is worth keeping: see `need`.
        """
        ...

    def localized(self) -> MappedEntry:
        """The same version, copied to this host. Raises StoreFullError too."""
        ...


class MappedEntry(msgspec.Struct, frozen=True):
    """A version of a key, and its bytes in memory, which stay there as long as the mapping is referred to.

    The data section starts at `record.start` of the mapping, and is `record.nbytes` long.
    """

    record: Record
    mapping: Mapping | None = None  # None: the value is in the record, or has no bytes
    absent: Absent | None = None  # None: all bytes are there

    def header(self, extent: SegmentExtent | None = None) -> memoryview:
        """The header of a segment: of the only one, or of one of several. It does not keep the mapping alive."""
        if self.mapping is None:
            return memoryview(b"")
        base, start = (0, self.record.start) if extent is None else (extent.base, extent.start)
        return self.mapping.view()[base : base + start]
