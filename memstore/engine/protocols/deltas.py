"""Deltas: versions that share the files of earlier versions of their key, so that unchanged leaves are not copied.

A delta names several segments, as a sharded value does: those of earlier versions, and behind them its own, which has
the leaves that changed. All are mapped into one range of addresses, where its description says where each leaf lies.

1. The putter holds the base, by a mapping, and compares leaves with it (`contents/writing.py`). It puts its own segment
   as any other, whose header names the files that it shares, for a repair (`DeltaHeader`).
2. The commit's transaction looks whether all shared files are live under their put ids (`share`), before anything is
   changed. If one isn't, since the base went meanwhile, it refuses (`BaseGone`), and the caller puts the whole value.
3. `SegmentRow.shared` counts the versions that name a file, beside the first. Who takes a version out subtracts one,
   and the last one retires the file (`reuse.retire_row`). So the base may go when it likes, and no put uses a file
   again that some version names.
4. The headers of shared files say *retired* once their own version was replaced, as all do. So a get asks only the
   header of the delta's own segment whether it is live, and a repair never takes an earlier version for the present
   one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.segments import SealedSegment
from memstore.engine.format.records import LIVE, SegmentExtent, encode_extents
from memstore.engine.protocols.change import Content
from memstore.engine.sync.primitives import Refusal
from memstore.engine.syscalls import HUGE_PAGE

DELTA_BASE = HUGE_PAGE  # bytes: the base of a delta's own file is a multiple


class BaseGone(Refusal):
    """Raised by a commit that has changed nothing: a file that a delta shares is no version's any more.

    Its caller puts the whole value. It is never seen by users.
    """


class DeltaDraft(msgspec.Struct, frozen=True):
    """The part of a draft that only deltas have.

    Attributes:
        nbytes: of the data in its own file.
        shares: files of earlier versions.
        own: the base of its own file.
    """

    nbytes: int
    shares: tuple[SegmentExtent, ...]
    own: int

    def placed(self, content: Content, segment: SealedSegment) -> Content:
        """Returns the content with the places of all files, once its own is filled."""
        own = SegmentExtent(segment.segment, segment.put_id, segment.size, segment.start, self.own)
        return msgspec.structs.replace(content, parts=encode_extents((*self.shares, own)))


def share(transaction: Transaction, shares: Sequence[SegmentExtent]) -> None:
    """Counts one more version that names these files. Raises BaseGone, and then the transaction is to be aborted."""
    for extent in shares:
        row = transaction.segment(extent.segment)
        if row is None or (row.state, row.put_id) != (LIVE, extent.put_id):
            raise BaseGone
        transaction.put_segment(extent.segment, msgspec.structs.replace(row, shared=row.shared + 1))
