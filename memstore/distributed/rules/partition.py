"""A host's partition of the index: what it answers for the keys whose home it is.

What a host's records hold, no other host may change. So a record that is found is right; who finds none asks whether
the home is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence

import msgspec

from memstore.distributed.rules.calls import answer_again, keep_answer
from memstore.distributed.rules.members import Standing
from memstore.distributed.rules.messages import (
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
from memstore.distributed.rules.tables import Tables
from memstore.distributed.rules.terms import BYTES_LIMIT
from memstore.errors import CorruptionError

_SEALED_BY_NOBODY = "it was deleted while it was sealed: nothing was put"
_IS_MUTABLE = "it is a dataset or a replay buffer, whose rows are written in place: open it as such, or delete it"


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
    if refused is not None:
        return refused
    entries: list[Entry | None] = []
    nbytes = 0
    for entry in map(tables.record, request.keys):
        if request.brief:
            entries.append(entry and Entry(entry.version, b""))
            continue
        nbytes += 0 if entry is None else entry.nbytes
        if nbytes > BYTES_LIMIT and entries:
            break
        entries.append(entry)
    return Found(tuple(entries))


def version_of(tables: Tables, standing: Standing, request: Wait) -> Answer:
    """The version, or 0 if there is none that the wait is for."""
    refused = refusal(standing, request.epoch, [request.key])
    if refused is not None:
        return refused
    entry = tables.head(request.key)
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
        rows += [(key, entry.version if entry else 0) for key, entry in page if standing.is_home_of(key)]
        after = page[-1][0]
    return Listed(tuple(rows[: request.limit]))


def are_named(tables: Tables, standing: Standing, request: Named) -> Answer:
    """By records, or by parts that wait for others."""
    refused = refusal(standing, request.epoch, [key for key, _ in request.rows])
    if refused is not None:
        return refused
    return AreNamed(tuple(is_named(tables, key, place) for key, place in request.rows))


def is_named(tables: Tables, key: bytes, place: Place) -> bool:
    try:
        entry = tables.head(key)
    except CorruptionError as error:  # it may name the place: that stays
        tables.pass_over(key, error)
        return True
    if entry is not None and place in entry.places:
        return True
    return any(part.place == place for part in tables.parts(key))


# --- changing ---------------------------------------------------------------------------------------------------------


def commit(tables: Tables, standing: Standing, request: Commit) -> Answer:
    """A commit that another host has sent."""
    answered = answer_again(tables, request.call)
    if answered is not None:
        return answered
    refused = refusal(standing, request.call.epoch, [change.key for change in request.changes])
    if refused is not None:
        return refused
    if any(place.host == standing.member for change in request.changes for place in change.places):
        return keep_answer(tables, request.call, lies_here(request.changes[0].key))
    return keep_answer(tables, request.call, apply(tables, standing, request.changes))


def lies_here(key: bytes) -> Failed:
    """What is lent lies where it was put: who sends a message has nothing on the host of the home."""
    return Failed("CorruptionError", "its bytes are said to lie with the home, which never put them", key)


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
    found = [tables.head(change.key) for change in changes]
    refused = next(filter(None, map(_refused, changes, found)), None) or bytes_gone(tables, standing, changes)
    if refused is not None:
        return refused
    versions: list[int] = []
    for change, old in zip(changes, found, strict=True):
        if change.body is None:
            versions.append(old.version if old is not None else 0)
            tables.delete_record(change.key)
        else:
            tables.version += 1
            versions.append(tables.version)
            whole = tables.record(change.key) if change.renews else None
            if whole is not None:
                tables.put_record(change.key, msgspec.structs.replace(whole, version=tables.version))
                continue
            entry = Entry(tables.version, change.body, change.places, change.is_mutable)
            write(tables, standing, change.key, entry)
        if old is not None:
            dispose(tables, standing, old.places)
    return Committed(tuple(versions))


def _refused(change: Change, old: Entry | None) -> Failed | None:
    """Why a change can't be made to what was found."""
    mutable = old.places[0].put_id if old is not None and old.is_mutable and old.places else 0
    if change.body is not None and (change.seals or not change.is_mutable) and change.seals != mutable:
        return Failed("MutableEntryError", _SEALED_BY_NOBODY if change.seals else _IS_MUTABLE, change.key)
    at = old.version if old is not None else 0
    if change.expect is not None and change.expect != at:
        return Failed("VersionConflictError", "", change.key, change.expect, at)
    if change.body is None and old is None and not change.missing_ok:
        return Failed("KeyNotFoundError", "", change.key)
    return None


def bytes_gone(tables: Tables, standing: Standing | None, changes: Sequence[Change]) -> Failed | None:
    """An audit gives back what was lent for longer than its call was to take, also if the client was only stopped."""
    for change in changes:
        if not all(tables.is_there(place) for place in change.places if is_here(standing, place)):
            return Failed("StoreTimeoutError", "its time was over, and its bytes have been given back", change.key)
    return None


def write(tables: Tables, standing: Standing | None, key: bytes, entry: Entry) -> None:
    """Writes a record; segments of this host that it names are its own."""
    tables.put_record(key, entry)
    for place in entry.places:
        if is_here(standing, place):
            tables.own(place, key)


def dispose(tables: Tables, standing: Standing | None, places: Sequence[Place]) -> None:
    """Nothing names these bytes any more. Other hosts are told later: they are owed it."""
    for place in places:
        if is_here(standing, place):
            tables.retire(place)
        elif standing is not None and place.host in standing.view.ids:
            tables.owe(place)


@contextlib.contextmanager
def passing_over(tables: Tables, key: bytes) -> Generator[None]:
    """What becomes of the bytes of a damaged segment is no reason for other keys to wait. People are told."""
    try:
        yield
    except CorruptionError as error:
        tables.pass_over(key, error)


def is_here(standing: Standing | None, place: Place) -> bool:
    return standing is None or place.host == standing.member
