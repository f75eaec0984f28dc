"""Deltas: versions that share bytes with earlier ones of their key, so that unchanged leaves are not copied, or sent.

A delta names several segments, as a sharded value does: those of earlier versions, and behind them its own, which has
the leaves that changed. All are mapped into one range of addresses, where its description says where each leaf lies.

1. The putter holds the base, by a mapping, and compares leaves with it (`contents/deltas.py`). It puts its own segment
   as any other, whose header names the files that it shares, for a repair (`DeltaHeader`).
2. The commit's transaction looks whether all shared files are live under their put ids (`share`), before anything is
   changed. If one isn't, since the base went meanwhile, it refuses (`BaseGone`), and the caller puts the whole value.
3. `SegmentRow.shared` counts the versions that name a file, beside the first. Who takes a version out subtracts one,
   and the last one retires the file (`reuse.retire_row`). So the base may go when it likes, and no put uses a file
   again that some version names.
4. The headers of shared files say *retired* once their own version was replaced, as all do. So a get asks only the
   header of the delta's own segment whether it is live, and a repair never takes an earlier version for the present
   one.

That is so in a store of one host. In a store of several, a delta has all of its bytes in one file, which is lent, owed
and drained as any other. Its record says which of them were first put as earlier versions (`OriginRange`): whoever puts
it has compared them. A host that has a copy of such a version takes these bytes from there, and fetches the others
(`distributed/transfers/copies.py`). Put ids never repeat, so an origin names its bytes for good, also when the version
is gone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from memstore.engine.catalog.tables import Transaction
from memstore.engine.files.segments import SealedSegment
from memstore.engine.format.records import (
    LIVE,
    OriginRange,
    Record,
    SegmentExtent,
    decode_origins,
    encode_extents,
)
from memstore.engine.protocols.change import Content
from memstore.engine.root import folder
from memstore.engine.root.roots import Root
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


def share(root: Root, transaction: Transaction, shares: Sequence[SegmentExtent]) -> None:
    """Counts one more version that names these files. Raises BaseGone, and then the transaction is to be aborted."""
    settings = folder.read_settings(root.state)  # what this process knows of them may be old
    if settings is None or folder.CLUSTER in settings.features:
        raise BaseGone
    for extent in shares:
        row = transaction.segment(extent.segment)
        if row is None or (row.state, row.put_id) != (LIVE, extent.put_id):
            raise BaseGone
        transaction.put_segment(extent.segment, msgspec.structs.replace(row, shared=row.shared + 1))


# --- origins ---------------------------------------------------------------------------------------------------------

_LEAST_CARRIED = 64 << 10  # bytes: to fetch less takes no longer than to say where it is
_MOST_CARRIED = 2048  # ranges: a record has 30 bytes of each

Moved = tuple[int, int, int]
"""Bytes that two data sections have: their offset in the one, that in the other, and how many."""


def origins_of(record: Record, host: bytes) -> list[OriginRange]:
    """Returns where all bytes of a value were first put, range by range. Raises CorruptionError.

    Args:
        record: of a value in one segment.
        host: the id of the host where that lies.
    """
    (segment,) = record.segments
    found, end = list[OriginRange](), 0
    for one in () if record.origins is None else decode_origins(record.origins, record.nbytes):
        if one.offset > end:
            found.append(OriginRange(end, one.offset - end, host, segment.put_id, end))
        found.append(one)
        end = one.offset + one.nbytes
    if record.nbytes > end:
        found.append(OriginRange(end, record.nbytes - end, host, segment.put_id, end))
    return found


def carry(base: Sequence[OriginRange], kept: Iterable[Moved]) -> list[OriginRange]:
    """Returns the origins of bytes that a new value has of an earlier one: of the longest ranges, in order.

    Args:
        base: the origins of the earlier value.
        kept: the bytes that both have, by their offsets in the new value, in order, and in the earlier one.
    """
    found: list[OriginRange] = []
    starts = [one.offset for one in base]
    for offset, at, nbytes in kept:
        for one in base[max(bisect_right(starts, at) - 1, 0) :]:
            first, end = max(one.offset, at), min(one.offset + one.nbytes, at + nbytes)
            if one.offset >= at + nbytes:
                break
            if first >= end:
                continue
            new = OriginRange(offset + first - at, end - first, one.host, one.put_id, one.at + first - one.offset)
            last = found[-1] if found else None
            if last is not None and _follows(last, new):
                found[-1] = msgspec.structs.replace(last, nbytes=last.nbytes + new.nbytes)
            else:
                found.append(new)
    longest = sorted(found, key=lambda one: -one.nbytes)[:_MOST_CARRIED]
    return sorted((one for one in longest if one.nbytes >= _LEAST_CARRIED), key=lambda one: one.offset)


def _follows(one: OriginRange, next: OriginRange) -> bool:
    is_of_same_put = (one.host, one.put_id) == (next.host, next.put_id)
    return is_of_same_put and (one.offset + one.nbytes, one.at + one.nbytes) == (next.offset, next.at)


def in_both(wanted: Sequence[OriginRange], there: Sequence[OriginRange]) -> list[Moved]:
    """Returns the bytes of a value that another one has, in order."""
    puts: dict[tuple[bytes, int], list[OriginRange]] = {}
    for one in sorted(there, key=lambda one: one.at):
        puts.setdefault((one.host, one.put_id), []).append(one)
    found: list[Moved] = []
    for one in wanted:
        others = puts.get((one.host, one.put_id), [])
        for other in others[max(bisect_right(others, one.at, key=lambda other: other.at) - 1, 0) :]:
            first, end = max(one.at, other.at), min(one.at + one.nbytes, other.at + other.nbytes)
            if other.at >= one.at + one.nbytes:
                break
            if first < end:
                found.append((one.offset + first - one.at, other.offset + first - other.at, end - first))
    return found
