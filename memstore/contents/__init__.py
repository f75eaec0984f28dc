"""Between values and bytes: what a put writes, and what a get makes of what it maps. Imports torch.

writing      a value taken apart, and drafted for a put: what goes into its record or segment
reading      a mapped entry as a value; verify, and headers made anew
boxes        where the bytes of leaves lie that are spread over segments
counting     how many bytes were read
checksums    of leaves: made by the one, compared by the other
"""

from __future__ import annotations

from memstore.contents.boxes import NO_BOXES, Boxes, StoredBox, boxes_of
from memstore.contents.checksums import CHECKSUM_SIZE
from memstore.contents.counting import bytes_read, count_read
from memstore.contents.reading import PLAIN, Options, damaged, header_of, locate, memory_of, read, read_bare, verify
from memstore.contents.writing import draft, flatten

__all__ = [
    "CHECKSUM_SIZE",
    "NO_BOXES",
    "PLAIN",
    "Boxes",
    "Options",
    "StoredBox",
    "boxes_of",
    "bytes_read",
    "count_read",
    "damaged",
    "draft",
    "flatten",
    "header_of",
    "locate",
    "memory_of",
    "read",
    "read_bare",
    "verify",
]
