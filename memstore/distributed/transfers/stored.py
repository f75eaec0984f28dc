"""Bytes of values on storage that hosts share: a process reads the files itself, and no host sends anything.

What a host has written lies in its own folder there (`engine.segments_of`). Readers lock nothing: see
`engine/files/segments.py` for what they compare instead, and for how long a file stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from memstore.distributed.transfers.asking import Part
from memstore.engine import (
    Record,
    Root,
    SegmentExtent,
    fits,
    open_stored,
    read_stored,
    segment_path,
    segments_of,
    storage_error,
)
from memstore.errors import StorageError

_A_LOOK = 64 << 20  # bytes between two looks at the clock


class StoredFiles:
    """The files of all hosts, seen from one root. Thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def read(self, hosts: Mapping[bytes, Sequence[Part]], deadline: float) -> bool:
        """Reads parts of each host's segments. False: one of them isn't there, and the memory may hold anything.

        Raises StorageError: the storage fails, or isn't mounted; or it takes longer than the deadline (monotonic).
        """
        return all(self._read(host.hex(), part, deadline) for host, parts in hosts.items() for part in parts)

    def are_there(self, record: Record) -> bool:
        """Whether all segments of a value can be seen from here, whole."""
        return all(self._is_there(*place) for place in self._root.storage.placed(record))

    def _is_there(self, host: str, path: str, extent: SegmentExtent) -> bool:
        try:
            return open_stored(path, extent, host) is not None
        except OSError as error:
            raise storage_error(path, error) from error

    def _read(self, host: str, part: Part, deadline: float) -> bool:
        path = segment_path(segments_of(self._root.path, host), part.extent.segment)
        try:
            file = open_stored(path, part.extent, host)
            if file is None:
                return False
            for pieces in _pieces(part):
                if not read_stored(file, pieces):
                    return False
                if time.monotonic() > deadline:
                    raise StorageError(f"{path}: to read it takes longer than the timeout", path=path)
            return fits(file, part.extent, host)
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(path, error) from error


def _pieces(part: Part) -> Iterator[list[tuple[int, int, int]]]:
    """(offset, size, address) of each range, as many as are read between two looks at the clock."""
    pieces, nbytes = list[tuple[int, int, int]](), 0
    addresses = (part.ranges.starts + part.origin).tolist()
    for start, size, address in zip(part.ranges.starts.tolist(), part.ranges.sizes.tolist(), addresses, strict=True):
        for at in range(0, size, _A_LOOK):
            count = min(_A_LOOK, size - at)
            pieces.append((start + at, count, address + at))
            nbytes += count
            if nbytes >= _A_LOOK:
                yield pieces
                pieces, nbytes = [], 0
    if pieces:
        yield pieces
