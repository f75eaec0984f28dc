"""Between values and bytes: what a put writes, and what a get makes of what it maps. Imports torch.

writing      a value taken apart, and drafted for a put: what goes into its record or segment
parts        what a rank says of a sharded value, read and checked
part_drafts  the draft of that, and of the bytes that the rank holds
merge        the parts of all ranks as one value
reading      a mapped entry as a value; verify
mending      what a repair asks: headers made anew, and sharded values of headers
boxes        where the bytes of leaves lie that are spread over segments
absent       bytes that lie on other hosts until they are read
counting     how many bytes were read
checksums    of leaves: made by the one, compared by the other
"""

from __future__ import annotations

from memstore.contents.absent import bring, bring_rows, receive_rows
from memstore.contents.boxes import NO_BOXES, Boxes, BoxTable, StoredBox, box_table, boxes_of, encode_boxes
from memstore.contents.checksums import CHECKSUM_SIZE
from memstore.contents.counting import bytes_read, count_read
from memstore.contents.mending import content_of_headers, header_of, header_of_part
from memstore.contents.merge import merge
from memstore.contents.part_drafts import PartDraft, draft_part
from memstore.contents.parts import RankPart, read_content, read_part
from memstore.contents.reading import PLAIN, Options, blame, damaged, locate, memory_of, read, read_bare, verify
from memstore.contents.writing import draft, flatten, inline_limit, inline_limit_when_crowded

__all__ = [
    "BoxTable",
    "Boxes",
    "CHECKSUM_SIZE",
    "NO_BOXES",
    "Options",
    "PLAIN",
    "PartDraft",
    "RankPart",
    "StoredBox",
    "blame",
    "bring",
    "bring_rows",
    "box_table",
    "boxes_of",
    "bytes_read",
    "count_read",
    "encode_boxes",
    "content_of_headers",
    "damaged",
    "draft",
    "draft_part",
    "flatten",
    "header_of",
    "header_of_part",
    "inline_limit",
    "inline_limit_when_crowded",
    "locate",
    "memory_of",
    "merge",
    "read",
    "read_bare",
    "read_content",
    "read_part",
    "receive_rows",
    "verify",
]
