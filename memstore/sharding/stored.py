"""Where the boxes of stored tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from memstore.sharding.box import Box


class StoredBox(NamedTuple):
    """A box of a stored tensor. Its bytes are contiguous.

    Attributes:
        place: of its first byte, in the data section.
        rank: who put it.
        checksum: xxh3-64 of its bytes; None where the store has none.
    """

    box: Box
    place: int
    rank: int
    checksum: bytes | None


Boxes = Mapping[int, tuple[StoredBox, ...]]  # by leaf; leaves that are not in it lie whole at their offset
NO_BOXES: Boxes = MappingProxyType({})
MOST_DIMENSIONS = 64  # of a tensor in boxes, as in torch's own operators
