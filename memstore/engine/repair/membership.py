"""What a repair keeps of a store that is served as a member of a cluster.

Rows that name segments for other hosts count as records do: what is lent, and what is on its way to its home. Copies
are dropped, since they can be fetched again.

Of a catalog that wasn't whole, sessions and calls are dropped: a call that came again might be made twice, where its
answer was lost; so it is refused, as one of a session that has ended. Files that say live, and that nothing names, are
lent to nobody in particular: an audit asks the homes of their keys whether they are needed.

If the row is gone that says of which cluster the store is, or if the catalog is older than its files, the store can't
be a member any more. Its counters say that it was one, so each commit, and each get of what isn't there, raises an
error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from memstore.engine.catalog import served
from memstore.engine.format import LIVE, SegmentRow
from memstore.engine.repair.salvage import OldCatalog, SegmentFile

IsHome = Callable[[bytes, bytes], bool]
"""Called with what the row `cluster` says, and a key. Whether the key is at home on this host."""

Rows = dict[tuple[str, bytes], bytes]


@dataclass(slots=True)
class Membership:
    """What the repaired store is to have.

    Attributes:
        number: as of its counters; 0: it is no member.
        rows: by table and key.
        segments: that these rows name.
        is_lost: it was a member, and nobody knows of which cluster.
        lost: keys of rows whose segments are gone.
    """

    number: int = 0
    rows: Rows = field(default_factory=Rows)
    segments: dict[int, SegmentRow] = field(default_factory=dict[int, SegmentRow])
    is_lost: bool = False
    lost: set[bytes] = field(default_factory=set[bytes])


def said_of(old: OldCatalog) -> bytes | None:
    """What the row `cluster` of the old catalog says, if that can be believed."""
    stored = None if old.is_older else old.served.get((served.CLUSTER, served.MEMBERS))
    return None if stored is None else served.body_of(stored)


def membership_of(
    old: OldCatalog, files: dict[int, SegmentFile], store: str, unnamed: Iterable[SegmentFile]
) -> Membership:
    """Of a store that was served.

    Args:
        unnamed: files of this store that say live, and that no entry names.
    """
    if old.is_sound and not old.counters.membership:
        return Membership()  # nobody had told it yet who the members are
    kept = Membership(old.counters.membership + 1, is_lost=said_of(old) is None)
    dropped = {served.COPIES} if old.is_sound else {served.COPIES, served.SESSIONS, served.CALLS}
    if kept.is_lost:
        dropped.add(served.CLUSTER)
    for (table, key), stored in old.served.items():
        if table not in dropped:
            _keep(kept, old, files, store, table, key, stored)
    if not old.is_sound:
        copied = {segment for segment, _ in _named_by(old, served.COPIES)}
        for file in unnamed:
            if file.segment not in copied and file.segment not in kept.segments:
                _lend(kept, file)
    return kept


def _keep(
    kept: Membership,
    old: OldCatalog,
    files: dict[int, SegmentFile],
    store: str,
    table: str,
    key: bytes,
    stored: bytes,
) -> None:
    rows: dict[int, SegmentRow] = {}
    for segment, put_id in served.read_kept(table, key, stored).segments if table in served.KEEPING else ():
        row, file = old.rows.get(segment), files.get(segment)
        if file is None or not _is_that_put(file, put_id, store):
            kept.lost |= {row.key} if row is not None else set()
            return
        rows[segment] = SegmentRow(_key_of(file, row), put_id, LIVE, file.size)
    kept.rows[table, key] = stored
    kept.segments |= rows


def _is_that_put(file: SegmentFile, put_id: int, store: str) -> bool:
    """A file whose header is damaged may be: who reads it finds out."""
    return file.found is None or (file.found.store, file.found.put_id) == (store, put_id)


def _key_of(file: SegmentFile, row: SegmentRow | None) -> bytes:
    return row.key if row is not None else file.key or b""


def _lend(kept: Membership, file: SegmentFile) -> None:
    if file.found is None or file.key is None:
        return
    put_id = file.found.put_id
    row = served.Kept(((file.segment, put_id),), b"")
    kept.rows[served.LENT, served.number(put_id)] = served.encode_kept(served.number(put_id), row)
    kept.segments[file.segment] = SegmentRow(file.key, put_id, LIVE, file.size)


def _named_by(old: OldCatalog, table: str) -> list[tuple[int, int]]:
    return [
        pair
        for (name, key), stored in old.served.items()
        if name == table
        for pair in served.read_kept(table, key, stored).segments
    ]
