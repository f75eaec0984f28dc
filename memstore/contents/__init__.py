"""Between values and bytes: what a put writes, and what a get makes of what it maps. Imports torch.

parts        what a rank says of a sharded value, read and checked; where the bytes of its boxes lie
writing      drafts of puts: a value taken apart, or a rank's part of one
merging      the parts of all ranks as one value; in a repair, headers made anew and values of headers
reading      a mapped entry as a value; checksums compared; bytes that lie on other hosts; how many bytes were read
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.contents.merging import content_of_headers, header_of, header_of_part, merge
from memstore.contents.parts import CHECKSUM_SIZE, box_table, boxes_of, encode_boxes, read_content
from memstore.contents.reading import (
    PLAIN_READ,
    ReadOptions,
    blame,
    bring,
    bring_rows,
    bytes_read,
    count_read,
    damaged,
    locate,
    memory_of,
    read,
    read_bare,
    receive_rows,
    verify,
)
from memstore.contents.writing import (
    PartDraft,
    draft,
    draft_delta,
    draft_part,
    flatten,
    inline_limit,
    inline_limit_when_crowded,
)
from memstore.sharding import Boxes, StoredBox
