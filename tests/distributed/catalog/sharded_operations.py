"""Changes of a sharded put's home that a process is killed in: a part comes, all are published, they are given up."""

from __future__ import annotations

from collections.abc import Callable

from memstore.distributed.catalog import CatalogTables, run
from memstore.distributed.rules import GiveUp, Lent, Place, Publish, sharded
from memstore.engine import Failure, PendingPart
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from tests.distributed.catalog.filling import Filled, asked, fill, fill_in_parts, given_up, published
from tests.distributed.catalog.operations import BYTES, OTHER, put, serve

KEY = b"sharded"
RANKS = 3
LEASE = 600_000_000_000  # nanoseconds


def part(place: Place, rank: int, attempt: str, ranks: int = RANKS) -> PendingPart:
    put = place.put_id, place.segment
    return PendingPart(KEY, attempt, 0, rank, ranks, *put, len(BYTES), waits_ns=LEASE, host=place.host)


def take_in(tables: CatalogTables, one: PendingPart, content: bytes) -> None:
    standing = tables.standing()
    assert standing is not None
    sharded.prepare(tables, standing, one, content)


# --- a part comes -----------------------------------------------------------------------------------------------------


def before_prepare(root: Root) -> None:
    """A part has been lent to another home, and this host is the home by now."""
    serve(root)
    filled = fill(root, KEY, BYTES)
    (place,) = asked(root, filled).places
    run(root, lambda tables: tables.lend(place, Lent(KEY, OTHER)), deadline_after(10), sealed=filled.sealed)
    published(root, filled)


def prepare(root: Root) -> None:
    """The part that was lent, and one that this process has filled."""
    filled = fill(root, KEY, BYTES)
    (place,) = asked(root, filled).places

    def act(tables: CatalogTables) -> None:
        ((lent, _),) = tables.all_lent(0, 10)
        take_in(tables, part(lent, 0, "one"), b"lent")
        take_in(tables, part(place, 1, "one"), b"filled")

    run(root, act, deadline_after(10), sealed=filled.sealed)
    for writer in filled.writers:
        writer.close()


# --- all are there ----------------------------------------------------------------------------------------------------


def before_end(root: Root) -> None:
    """Two parts of this host and one of another, beside a part of an older attempt, and a version."""
    serve(root)
    old = fill(root, KEY, BYTES)
    put(root, old)
    published(root, old)

    older = fill(root, KEY, BYTES)
    (abandoned,) = asked(root, older).places
    run(root, lambda tables: take_in(tables, part(abandoned, 0, "older"), b""), deadline_after(10), sealed=older.sealed)

    filled = fill_in_parts(root, KEY, [BYTES] * RANKS)
    merged = asked(root, filled)
    *here, last = merged.places
    places = (*here, Place(OTHER, last.put_id, last.segment))

    def act(tables: CatalogTables) -> None:
        for rank, place in enumerate(places):
            take_in(tables, part(place, rank, "one"), merged.body or b"")

    run(root, act, deadline_after(10), sealed=filled.sealed[: len(here)])
    given_up(root, Filled(filled.change, [filled.writers.pop()]))
    for writer in (*older.writers, *filled.writers):
        writer.close()


def publish(root: Root) -> None:
    def act(tables: CatalogTables) -> None:
        standing, parts = tables.standing(), tables.parts(KEY, "one")
        assert standing is not None
        places = tuple(one.place for one in parts)
        request = Publish(KEY, "one", parts[0].number, places, tables.content(parts[0]))
        sharded.publish(tables, standing, request)

    run(root, act, deadline_after(10))


def give_up(root: Root) -> None:
    def act(tables: CatalogTables) -> None:
        standing, parts = tables.standing(), tables.parts(KEY, "one")
        assert standing is not None
        failure = Failure("PartialCommitError", "given up")
        sharded.end_by(tables, standing, GiveUp(KEY, "one", parts[0].number, failure))

    run(root, act, deadline_after(10))


OPERATIONS: dict[str, tuple[Callable[[Root], None], Callable[[Root], None]]] = {
    "prepare": (before_prepare, prepare),
    "publish": (before_end, publish),
    "give up": (before_end, give_up),
}
