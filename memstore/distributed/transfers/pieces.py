"""Ranges of memory on their way through a socket: large ones from and to where they lie, small ones packed.

The kernel takes 1,024 parts a call. To make a part of each range costs 0.2 us, so ranges of less than 256 bytes are
gathered into one buffer, and scattered from one, by an index of each byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from memstore.distributed.transfers.ranges import Numbers
from memstore.engine import syscalls

MOST_PARTS = 1024  # that one call takes, on Linux
_SMALL = 256  # bytes
_PACKED = 4096  # ranges that are packed at once: 1 MiB at most, and the index takes eight times as much

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Pieces(NamedTuple):
    """Memory in pieces, in the order in which they go through the socket: their addresses and sizes."""

    addresses: Numbers
    sizes: Numbers

    def groups(self) -> Iterator[tuple[Pieces, bool]]:
        """As many as go through one call, and whether they are to be packed."""
        is_small = self.sizes < _SMALL
        edges = [0, *(np.flatnonzero(is_small[1:] != is_small[:-1]) + 1).tolist(), len(self.sizes)]
        for first, last in zip(edges, edges[1:], strict=False):
            small = bool(is_small[first])
            step = _PACKED if small else MOST_PARTS
            for at in range(first, last, step):
                stop = min(at + step, last)
                yield Pieces(self.addresses[at:stop], self.sizes[at:stop]), small and stop > at + 1

    def parts(self) -> list[memoryview]:
        """The memory of each."""
        first, size = self._hull()
        window = syscalls.memory_at(first, size)
        starts, stops = (self.addresses - first).tolist(), (self.addresses - first + self.sizes).tolist()
        return [window[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def split(self, nbytes: int) -> tuple[Pieces, Pieces]:
        """The first so many bytes of them, and the others."""
        ends = np.cumsum(self.sizes)
        at = int(np.searchsorted(ends, nbytes))
        if at >= len(ends):
            return self, Pieces(self.addresses[:0], self.sizes[:0])
        over = int(ends[at]) - nbytes
        first = Pieces(self.addresses[: at + 1], np.array(self.sizes[: at + 1]))
        first.sizes[-1] -= over
        if not over:
            return first, Pieces(self.addresses[at + 1 :], self.sizes[at + 1 :])
        rest = Pieces(np.array(self.addresses[at:]), np.array(self.sizes[at:]))
        rest.addresses[0] += rest.sizes[0] - over
        rest.sizes[0] = over
        return first, rest

    def copy_to(self, address: int) -> None:
        """One behind the other."""
        for group, is_packed in self.groups():
            if is_packed:
                data = group.gather()
                syscalls.copy(address, syscalls.buffer_address(data), len(data))
                address += len(data)
            else:
                for start, size in zip(group.addresses.tolist(), group.sizes.tolist(), strict=True):
                    syscalls.copy(address, start, size)
                    address += size

    def gather(self) -> memoryview:
        """A copy of all of them."""
        return self._window()[self._index()].data

    def scatter(self, data: bytearray) -> None:
        """The opposite of `gather`."""
        self._window()[self._index()] = np.frombuffer(data, np.uint8)

    def _hull(self) -> tuple[int, int]:
        """The address of the first, and how many bytes there are to the end of the last."""
        first = int(self.addresses.min())
        return first, int((self.addresses + self.sizes).max()) - first

    def _window(self) -> Bytes:
        return np.frombuffer(syscalls.memory_at(*self._hull()), np.uint8)

    def _index(self) -> Numbers:
        """Where each byte lies, in the window."""
        ends = np.cumsum(self.sizes)
        shifts = self.addresses - self.addresses.min() - (ends - self.sizes)
        return np.repeat(shifts, self.sizes) + np.arange(int(ends[-1]), dtype=np.int64)


def skip(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The parts without their first bytes."""
    for at, part in enumerate(parts):
        if nbytes < len(part):
            return [part[nbytes:], *parts[at + 1 :]]
        nbytes -= len(part)
    return []
