"""A host's partition of the index: what it answers for the keys whose home it is.

What a host's records hold, no other host may change. So a record that is found is right; who finds none asks whether
the home is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memstore.distributed.calls import answer_again, keep_answer
from memstore.distributed.members import Standing
from memstore.distributed.messages import (
    Answer,
    AreNamed,
    Change,
    Commit,
    Committed,
    Entry,
    Failed,
    Found,
    IsAt,
    Later,
    List,
    Listed,
    Lookup,
    Named,
    Place,
    Refused,
    Stale,
    Wait,
)
from memstore.distributed.tables import Tables


def refusal(standing: Standing, epoch: int, keys: Iterable[bytes]) -> Answer | None:
    """Why requests of that epoch for these keys can't be answered here, or not yet. None: they can.

    A request of an older epoch can't be answered ever after: so a client that hears so may ask elsewhere.
    """
    if standing.is_removed:
        return Refused("this host was removed from the cluster", is_removed=True)
    if epoch != standing.view.epoch:
        return Stale(standing.view.epoch) if epoch < standing.view.epoch else Later()
    for key in keys:
        if not standing.is_home_of(key):
            return Failed("CrossHostError", "the keys of a batch have one home", key)
        if not standing.is_ready_for(key):
            return Later()
    return None


# --- reading ----------------------------------------------------------------------------------------------------------


def look_up(tables: Tables, standing: Standing, request: Lookup) -> Answer:
    refused = refusal(standing, request.epoch, request.keys)
    return refused or Found(tuple(tables.record(key) for key in request.keys))


def version_of(tables: Tables, standing: Standing, request: Wait) -> Answer:
    """The version, or 0 if there is none that the wait is for."""
    refused = refusal(standing, request.epoch, [request.key])
    if refused is not None:
        return refused
    entry = tables.record(request.key)
    return IsAt(entry.version if entry is not None and entry.version > request.newer_than else 0)


def list_page(tables: Tables, standing: Standing, request: List) -> Answer:
    """A page of the keys that are at home here. While some are on their way, it can't be known whether it is whole."""
    refused = refusal(standing, request.epoch, ())
    if refused is not None:
        return refused
    if standing.missing:
        return Later()
    rows: list[tuple[bytes, int]] = []
    after = request.after
    while len(rows) < request.limit and (page := tables.page(after, request.limit, request.prefix)):
        # What is at home elsewhere by now may still be here; the new home lists it.
        rows += [(key, entry.version) for key, entry in page if standing.is_home_of(key)]
        after = page[-1][0]
    return Listed(tuple(rows[: request.limit]))


def are_named(tables: Tables, standing: Standing, request: Named) -> Answer:
    refused = refusal(standing, request.epoch, [key for key, _ in request.rows])
    if refused is not None:
        return refused
    entries = [tables.record(key) for key, _ in request.rows]
    return AreNamed(
        tuple(
            entry is not None and place in entry.places for entry, (_, place) in zip(entries, request.rows, strict=True)
        )
    )


# --- changing ---------------------------------------------------------------------------------------------------------


def commit(tables: Tables, standing: Standing, request: Commit) -> Answer:
    """A commit that another host has sent."""
    answered = answer_again(tables, request.call)
    if answered is not None:
        return answered
    refused = refusal(standing, request.call.epoch, [change.key for change in request.changes])
    if refused is not None:
        return refused
    return keep_answer(tables, request.call, apply(tables, standing, request.changes))


def commit_here(tables: Tables, membership: int, changes: Sequence[Change]) -> Answer | None:
    """A commit of a process of this host. None: the home may be elsewhere by now, look again.

    Args:
        membership: under which the process found that the home is here, and ready.
    """
    if tables.membership() != membership:
        return None
    return apply(tables, tables.standing(), changes)


def apply(tables: Tables, standing: Standing | None, changes: Sequence[Change]) -> Committed | Failed:
    """Makes all changes, or none. `standing` is None where nobody serves the root."""
    found = [tables.record(change.key) for change in changes]
    for change, old in zip(changes, found, strict=True):
        at = old.version if old is not None else 0
        if change.expect is not None and change.expect != at:
            return Failed("VersionConflictError", "another version was expected", change.key, change.expect, at)
        if change.body is None and old is None and not change.missing_ok:
            return Failed("KeyNotFoundError", "there is no such key", change.key)
    gone = bytes_gone(tables, standing, changes)
    if gone is not None:
        return gone
    versions: list[int] = []
    for change, old in zip(changes, found, strict=True):
        if change.body is None:
            versions.append(old.version if old is not None else 0)
            tables.delete_record(change.key)
        else:
            tables.version += 1
            versions.append(tables.version)
            write(tables, standing, change.key, Entry(tables.version, change.body, change.places))
        if old is not None:
            dispose(tables, standing, old)
    return Committed(tuple(versions))


def bytes_gone(tables: Tables, standing: Standing | None, changes: Sequence[Change]) -> Failed | None:
    """An audit gives back what was lent for longer than its call was to take, also if the client was only stopped."""
    for change in changes:
        if not all(tables.is_there(place.put_id) for place in change.places if is_here(standing, place)):
            return Failed("StoreTimeoutError", "its time was over, and its bytes have been given back", change.key)
    return None


def write(tables: Tables, standing: Standing | None, key: bytes, entry: Entry) -> None:
    """Writes a record; segments of this host that it names are its own."""
    tables.put_record(key, entry)
    for place in entry.places:
        if is_here(standing, place):
            tables.own(place.put_id, key)


def dispose(tables: Tables, standing: Standing | None, entry: Entry) -> None:
    """Nothing names the bytes of this entry any more. Other hosts are told later: they are owed it."""
    for place in entry.places:
        if is_here(standing, place):
            tables.retire(place.put_id)
        elif standing is not None and place.host in standing.view.ids:
            tables.owe(place)


def is_here(standing: Standing | None, place: Place) -> bool:
    return standing is None or place.host == standing.member
