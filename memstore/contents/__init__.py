"""Between values and bytes: what a put writes, and what a get makes of what it maps. Imports torch.

writing      a value into a segment or a record, and the batch published
reading      a mapped entry as a value; verify, and headers made anew
checksums    of leaves: made by the one, compared by the other
"""

from __future__ import annotations

from memstore.contents.checksums import CHECKSUM_SIZE
from memstore.contents.reading import PLAIN, Options, damaged, header_of, locate, memory_of, read, read_bare, verify
from memstore.contents.writing import flatten, publish_batch, publish_one

__all__ = [
    "CHECKSUM_SIZE",
    "PLAIN",
    "Options",
    "damaged",
    "flatten",
    "header_of",
    "locate",
    "memory_of",
    "publish_batch",
    "publish_one",
    "read",
    "read_bare",
    "verify",
]
