"""Between values and bytes: what a put writes, and what a get makes of what it maps. Imports torch.

writing      drafts of puts: a value taken apart, or a rank's part of one
deltas       drafts of values that share the bytes of unchanged leaves with an earlier version
merging      the parts of all ranks as one value; in a repair, headers made anew and values of headers
reading      a mapped entry as a value; what a rank says of a sharded one, and where its boxes lie; checksums
             compared; bytes that lie on other hosts; how many bytes were read
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.contents.deltas import draft_delta, put_deltas_whole, with_origins
from memstore.contents.merging import content_of_headers, header_of, header_of_part, merge
from memstore.contents.reading import (
    CHECKSUM_SIZE,
    PLAIN_READ,
    ReadOptions,
    blame,
    box_table,
    boxes_of,
    bring,
    bring_rows,
    bytes_read,
    count_read,
    damaged,
    encode_boxes,
    locate,
    memory_of,
    read,
    read_bare,
    read_content,
    receive_rows,
    verify,
)
from memstore.contents.writing import (
    PartDraft,
    draft,
    draft_part,
    flatten,
    inline_limit,
    inline_limit_when_crowded,
)
from memstore.sharding import Boxes, StoredBox
