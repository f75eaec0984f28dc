"""Segments that are really claimed and filled, and not published: what a put has before its commit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memstore import engine
from memstore.distributed import rules
from memstore.distributed.catalog import change_of
from memstore.engine.files.segments import SegmentWriter
from memstore.engine.protocols.put import close_published, fill_segment
from memstore.engine.protocols.sweep import clean_up
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from tests.engine.bytes_store import draft


class Filled(msgspec.Struct):
    """What is to be committed, with the segments that this process has open."""

    change: engine.Change
    writers: list[SegmentWriter]

    @property
    def sealed(self) -> Sequence[engine.SealedSegment]:
        return self.change.segments


def fill(root: Root, key: bytes, data: bytes) -> Filled:
    """Steps 1 to 3 of a put. Up to 1,536 bytes are inline, and have no segment."""
    writers: list[SegmentWriter] = []
    return Filled(fill_segment(root, draft(root, key, data), writers, deadline_after(10)), writers)


def fill_in_parts(root: Root, key: bytes, parts: Sequence[bytes]) -> Filled:
    """One value in several segments, as a sharded one has them."""
    writers: list[SegmentWriter] = []
    changes = [fill_segment(root, draft(root, key, part), writers, deadline_after(10)) for part in parts]
    segments = tuple(segment for change in changes for segment in change.segments)
    extents: list[engine.SegmentExtent] = []
    for one in segments:
        base = engine.base_after(engine.end_of(extents), one.size)
        extents.append(engine.SegmentExtent(one.segment, one.put_id, one.size, one.start, base))
    content = engine.Content(b"parts", b"", engine.end_of(extents), parts=engine.encode_extents(extents))
    return Filled(engine.Change(key, content, segments=segments), writers)


def published(root: Root, filled: Filled) -> None:
    close_published(root, filled.writers)


def given_up(root: Root, filled: Filled) -> None:
    clean_up(root, filled.writers, ValueError("given up"))


def asked(root: Root, filled: Filled) -> rules.Change:
    """As the rules have it."""
    return change_of(filled.change, root.member_id())
