"""History: versions of a key that were replaced, and stay readable, at the owner of the key.

A change may say how many versions of its key stay readable (`Change.history`). The key's record has that, and each
later change hands it on. `memstore/engine/protocols/history.py` has the same for changes that take no messages.

- The transaction that replaces a record makes it a replaced version, and lets those go that are beyond the limits. So
  the owner alone says which versions there are. Their bytes stay where they were put: the owner owes the hosts of a
  version a release when that goes, and not when it is replaced. Until then an audit finds the bytes named.
- A lookup names the version. What it finds is fetched as the present version is.
- A hand-over brings replaced versions with the record, as far as one message has room, and a drain takes over their
  bytes. One that can't be taken over goes, and the log says so.
- Backups and replicas are of present versions alone. So replaced ones are lost with their owner, and with the host of
  their bytes; an heir goes on with the history that the last put of a key has asked for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence

import msgspec

from memstore.distributed.rules.messages import BYTES_LIMIT, PORTION, ROWS_LIMIT, Failed, Place
from memstore.distributed.rules.nouns import Entry, Limits, OlderVersion, Standing
from memstore.distributed.rules.recovery import are_there
from memstore.distributed.rules.steps import Lent, ReplacedRow, Steps, Tables, own_standing, pause, transact, view
from memstore.engine import count_within
from memstore.errors import CorruptionError

log = logging.getLogger("memstore")
_BETWEEN = 0.002  # seconds between two portions, in which puts come to the mutex


# --- what nothing names any more --------------------------------------------------------------------------------------


def dispose(tables: Tables, standing: Standing | None, places: Sequence[Place]) -> None:
    """Lets go of bytes that nothing names any more. Other hosts are told later: they are owed it."""
    for place in places:
        if is_here(standing, place):
            tables.retire(place)
        elif standing is not None and place.host in standing.roster.ids:
            tables.owe(place)


@contextlib.contextmanager
def passing_over(tables: Tables, key: bytes) -> Generator[None]:
    """Goes on: what becomes of the bytes of a damaged segment is no reason for other keys to wait. People are told."""
    try:
        yield
    except CorruptionError as error:
        tables.pass_over(key, error)


def is_here(standing: Standing | None, place: Place) -> bool:
    return standing is None or place.host == standing.member


# --- at the owner -----------------------------------------------------------------------------------------------------


def keep_replaced(tables: Tables, standing: Standing | None, key: bytes, limits: Limits | None) -> Limits | None:
    """Keeps the version that is replaced, in the transaction of the change, as far as limits and pins say so.

    Args:
        limits: of the change, or else of the record that it replaces; None: the key is deleted.

    Returns:
        The limits of the record that replaces it; None: there is nothing to keep by them.
    """
    most, most_bytes = limits or (1, 0)
    tables.keep_replaced(key)
    versions = tables.replaced_versions(key)
    beyond = versions[: len(versions) - count_within(versions, most - 1, most_bytes)]
    pinned = tables.pinned(key) if beyond else frozenset[int]()
    gone = [one for one in beyond if one.version not in pinned]
    for one in gone:
        _let_go(tables, standing, key, one.version)
    return None if most == 1 and len(gone) == len(versions) else limits


def _let_go(tables: Tables, standing: Standing | None, key: bytes, version: int) -> None:
    with passing_over(tables, key):
        entry = tables.drop_replaced(key, version)
        dispose(tables, standing, entry.places if entry is not None else ())


def put_replaced(tables: Tables, standing: Standing, key: bytes, versions: Sequence[OlderVersion]) -> None:
    """Writes the versions that a hand-over has brought with a record, which replaced them, as far as they are there."""
    for one in versions:
        with passing_over(tables, key):
            if are_there(tables, standing, one.places):
                tables.put_replaced(key, Entry(one.version, one.body, one.places))
            else:
                dispose(tables, standing, one.places)


def with_replaced(tables: Tables, key: bytes, entry: Entry) -> Entry:
    """Returns a record as a hand-over gives it: with the versions that it has replaced, of which a message has room."""
    if entry.history is None:
        return entry
    found: list[OlderVersion] = []
    nbytes = entry.nbytes
    for one in reversed(tables.replaced_versions(key)):
        try:
            kept = tables.replaced_version(key, one.version)
        except CorruptionError as error:
            tables.pass_over(key, error)
            continue
        nbytes += 0 if kept is None else kept.nbytes
        if kept is None or nbytes > BYTES_LIMIT:
            break
        found.append(OlderVersion(kept.version, kept.body, kept.places))
    return msgspec.structs.replace(entry, replaced=tuple(reversed(found)))


def hand_on(tables: Tables, standing: Standing, key: bytes, entry: Entry, taker: bytes) -> int:
    """Drops the replaced versions of a record that a hand-over has given. Bytes that lie here are lent to its taker.

    Returns how many others there were: these go.
    """
    given, count = {one.version for one in with_replaced(tables, key, entry).replaced}, 0
    for one in tables.replaced_versions(key):
        if one.version not in given:
            _let_go(tables, standing, key, one.version)
            count += 1
            continue
        with passing_over(tables, key):
            kept = tables.drop_replaced(key, one.version)
            for place in kept.places if kept is not None else ():
                if is_here(standing, place):
                    tables.lend(place, Lent(key, taker))
    return count


def give_up(tables: Tables, standing: Standing | None, key: bytes) -> None:
    """Lets all replaced versions of a key go."""
    for one in tables.replaced_versions(key):
        _let_go(tables, standing, key, one.version)


def find(tables: Tables, key: bytes, version: int) -> Entry | None:
    """Returns a version of a key, the present one or one that is kept; 0: the present one. None: there is none."""
    entry = tables.record(key)
    if not version or (entry is not None and entry.version == version):
        return entry
    return tables.replaced_version(key, version)


def versions_of(tables: Tables, key: bytes) -> tuple[int, ...]:
    """Returns the versions of a key that can be read, sorted."""
    entry = tables.head(key)
    kept = [one.version for one in tables.replaced_versions(key)]
    return tuple(kept) if entry is None else (*kept, entry.version)


def names(tables: Tables, key: bytes, place: Place) -> bool:
    """Returns whether a replaced version names a place. A damaged one may."""
    for one in tables.replaced_versions(key):
        try:
            entry = tables.replaced_version(key, one.version)
        except CorruptionError as error:
            tables.pass_over(key, error)
            return True
        if entry is not None and place in entry.places:
            return True
    return False


def let_lost_go() -> Steps[None]:
    """Lets replaced versions go whose bytes lay on hosts that are no members any more."""
    after, count = b"", 0
    while page := (yield from view(lambda tables, start=after: tables.all_replaced(start, ROWS_LIMIT))):
        after = page[-1].name
        lost = yield from view(lambda tables, page=page: [one for one in page if _is_lost(tables, one)])
        for first in range(0, len(lost), PORTION):
            yield from transact(lambda tables, some=lost[first : first + PORTION]: _let_go_all(tables, some))
            yield from pause(_BETWEEN)
        count += len(lost)
    if count:
        log.warning("%d replaced versions are lost: some of their bytes lay on a host that was removed", count)


def _is_lost(tables: Tables, row: ReplacedRow) -> bool:
    return not are_there(tables, own_standing(tables), row.entry.places)


def _let_go_all(tables: Tables, rows: Sequence[ReplacedRow]) -> None:
    standing = own_standing(tables)
    for row in rows:
        _let_go(tables, standing, row.key, row.entry.version)


# --- a drain ----------------------------------------------------------------------------------------------------------


def take_over(leaver: bytes, take: Callable[[bytes, Entry, bytes], Steps[bool | Failed]]) -> Steps[bool]:
    """Takes over what replaced versions name on a host that leaves: see `draining.py`. What can't be taken over goes.

    Returns:
        Whether nothing is named there any more.
    """
    after, is_whole = b"", True
    while page := (yield from view(lambda tables, start=after: tables.all_replaced(start, ROWS_LIMIT))):
        after = page[-1].name
        for row in page:
            if any(place.host == leaver for place in row.entry.places):
                is_whole = (yield from _take(leaver, row, take)) and is_whole
        yield from pause(_BETWEEN)
    return is_whole


def _take(leaver: bytes, row: ReplacedRow, take: Callable[[bytes, Entry, bytes], Steps[bool | Failed]]) -> Steps[bool]:
    key, version = row.key, row.entry.version
    try:
        entry = yield from view(lambda tables: tables.replaced_version(key, version))
    except CorruptionError:  # nobody can read it
        entry = row.entry
    if entry is None or all(place.host != leaver for place in entry.places):
        return True
    met: bool | Failed = Failed("CrossHostError", "its files are attached there")
    if all(place.segment for place in entry.places):
        met = yield from take(key, entry, leaver)
    if isinstance(met, Failed):
        log.warning("version %d of %r, which was replaced, goes: %s", version, key.decode(errors="replace"), met.text)
        yield from transact(lambda tables: _let_go_all(tables, [row]))
        return True
    return met
