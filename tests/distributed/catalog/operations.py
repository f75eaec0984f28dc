"""Changes of a served root that a process is killed in, with what the catalog says before and after them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from memstore.distributed.catalog import CatalogTables, look, record_of, run
from memstore.distributed.rules import Change, Entry, LastCall, Lent, Member, Place
from memstore.distributed.rules.messages import Done
from memstore.distributed.rules.owning import apply
from memstore.distributed.rules.roster import found
from memstore.engine import Creation, close_root, open_root
from memstore.engine.catalog.tables import Transaction
from memstore.engine.format.records import LIVE, PREPARED
from memstore.engine.protocols.put import fill_segment
from memstore.engine.protocols.spill import make_room
from memstore.engine.repair.survey import inspect
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from tests.distributed.catalog.filling import Filled, asked, fill, published
from tests.engine.bytes_store import draft
from tests.inside import put_raw_row, raw_row

OTHER = b"o" * 16
BYTES = b"x" * 5_000
LENT = b" version=%016x " % 0  # in the header of a segment that is lent


def serve(root: Root) -> None:
    member = Member(root.member_id(), "here")
    run(root, lambda tables: found(tables, member, b"C" * 16), deadline_after(10))


def before_serve(root: Root) -> None:
    pass


def before_change(root: Root) -> None:
    """Owned values, a lent one, one that lies elsewhere, and a copy."""
    serve(root)
    for key in (b"replaced", b"given", b"lent"):
        filled = fill(root, key, BYTES)
        change = asked(root, filled)
        run(
            root,
            lambda tables, change=change: apply(tables, tables.standing(), [change]),
            deadline_after(10),
            sealed=filled.sealed,
        )
        published(root, filled)
    run(root, lambda tables: give(tables, b"lent"), deadline_after(10))
    filled = fill(root, b"elsewhere", BYTES)
    body = asked(root, filled).body
    places = (Place(OTHER, *_numbers(filled)),)
    run(root, lambda tables: apply(tables, tables.standing(), [Change(b"elsewhere", body, places)]), deadline_after(10))
    put_copy(root, filled)
    published(root, filled)
    run(root, lambda tables: tables.new_session(), deadline_after(10))


def put(root: Root, filled: Filled) -> None:
    asked_for = [asked(root, filled)]
    run(root, lambda tables: apply(tables, tables.standing(), asked_for), deadline_after(10), sealed=filled.sealed)


def change(root: Root) -> None:
    """All that a transaction may do to files, in one."""
    writers: list[Any] = []
    filled = [
        Filled(fill_segment(root, draft(root, key, BYTES), writers, deadline_after(10)), [])
        for key in (b"replaced", b"for another")
    ]
    owned, lent = (asked(root, one) for one in filled)

    def act(tables: CatalogTables) -> None:
        session = next(number for number in range(1 << 10) if tables.has_session(number))
        tables.put_last_call(session, 3, LastCall(1, Done()))
        apply(tables, tables.standing(), [owned, Change(b"elsewhere", None)])
        tables.lend(lent.places[0], Lent(lent.key, OTHER, 1, 2, 3, 4))
        give(tables, b"given")
        place, _ = next(row for row in tables.all_lent(0, 10) if row[1].key == b"lent")
        tables.retire(place)
        tables.delete_copy(b"elsewhere")

    sealed = [segment for one in filled for segment in one.sealed]
    run(root, act, deadline_after(10), sealed=sealed)
    for writer in writers:
        writer.close()


def before_change_of_moved(root: Root) -> None:
    """The same, with all values but the copy in a spill folder."""
    before_change(root)
    close_root(open_root(root.path, "r+", Creation(spill=f"{root.path}.spill"), 10.0))
    assert make_room(root, 1 << 20, deadline_after(10)) > 2 * len(BYTES)


def before_lend(root: Root) -> None:
    """Files that nobody needs any more, of the size that is put next."""
    serve(root)
    for key in (b"first", b"second"):
        lend(root, key)
    for place, _ in look(root, lambda tables: tables.all_lent(0, 10), deadline_after(10)):
        run(root, lambda tables, place=place: tables.retire(place), deadline_after(10))


def lend(root: Root, key: bytes = b"lent") -> None:
    """As a put does whose home is elsewhere, of a process that has put as many bytes before."""
    filled = fill(root, key, BYTES)
    (place,) = asked(root, filled).places
    root.next_put.filled_before = filled.sealed[0].used
    run(root, lambda tables: tables.lend(place, Lent(key, OTHER)), deadline_after(10), sealed=filled.sealed)
    published(root, filled)


def give(tables: CatalogTables, key: bytes) -> None:
    entry = tables.record(key)
    assert entry is not None
    tables.delete_record(key)
    tables.lend(entry.places[0], Lent(key, OTHER))


def put_copy(root: Root, filled: Filled) -> None:
    """Of the value that lies elsewhere."""
    here = asked(root, filled)
    assert here.body is not None
    record = record_of(Entry(77, here.body, here.places), root.member_id())
    places = (Place(OTHER, *_numbers(filled)),)
    run(root, lambda tables: tables.put_copy(b"elsewhere", places, record), deadline_after(10), sealed=filled.sealed)


def _numbers(filled: Filled) -> tuple[int, int]:
    (segment,) = filled.sealed
    return segment.put_id, segment.segment


OPERATIONS: dict[str, tuple[Callable[[Root], None], Callable[[Root], None]]] = {
    "serve": (before_serve, serve),
    "change": (before_change, change),
    "change moved": (before_change_of_moved, change),
    "lend": (before_lend, lend),
}


# --- what there is ----------------------------------------------------------------------------------------------------


def state_of(root: Root) -> dict[str, object]:
    """What the catalog says, without numbers that differ from root to root."""

    def read(tables: CatalogTables) -> dict[str, object]:
        rows = [(key, entry) for key, entry in tables.page(b"", 100) if entry is not None]
        return {
            "membership": tables.membership(),
            "is served": tables.standing() is not None,
            "records": [(key, [place.host == OTHER for place in entry.places]) for key, entry in rows],
            "first": [entry.places[0].put_id for key, entry in rows if key == b"replaced"],
            "lent": [lent.key for _, lent in tables.all_lent(0, 100)],
            "owed": len(tables.owed(100)),
            "copies": [key for key, _ in tables.copies(b"", 100)],
            "parts": [(part.attempt, part.rank, part.place.host == OTHER) for part in tables.parts()],
            "outcomes": [(outcome.attempt, outcome.version > 0) for outcome in tables.outcomes()],
            "calls": [tables.last_call(session, 3) for session in range(100)].count(LastCall(1, Done())),
        }

    return look(root, read, deadline_after(10))


def damage_of(root: Root) -> list[object]:
    """What doesn't fit, in the catalog, and between it and the headers of files."""
    said: list[Any] = []

    class Sender:
        def say(self, *words: Any) -> None:
            said.append(words)

        def flush(self) -> None:
            pass

    sender: Any = Sender()
    inspect(root.catalog, sender, with_rows=False, longest=math.inf)
    damage: list[object] = [words for words in said if words[0] not in ("end", "alive")]
    rows = root.catalog.view(lambda transaction: dict(transaction.segments()))
    for segment, row in rows.items():
        path = f"{root.segments}/{segment:016x}.safetensors"
        if not os.path.exists(path):
            path = f"{root.storage.spill_folder()}/{segment:016x}.safetensors"
        head = b""
        if os.path.exists(path):
            with open(path, "rb") as file:
                head = file.read(128)
        is_live = b" state=live " in head
        if is_live is not (row.state == LIVE) and not (is_live and row.state == PREPARED and LENT in head):
            damage.append((segment, row, head))
    return damage


def flipped(table: str, key: bytes | None = None) -> Callable[[Transaction], None]:
    """A change that flips a bit in a row, of that key or the first one: its checksum doesn't fit then."""

    def change(transaction: Transaction) -> None:
        name = key if key is not None else bytes(next(iter(transaction.rows(table)))[0])
        stored = bytearray(raw_row(transaction, table, name))
        stored[-1] ^= 1
        put_raw_row(transaction, table, name, bytes(stored))

    return change
