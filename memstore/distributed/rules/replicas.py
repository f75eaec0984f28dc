"""Replicas: the values of a group lie on a second host, too, whole. Decision 034 has the reasons.

A *replica* is a backup with bytes of its own (`recovery.py`): the record of a version at a host that is not the owner,
which names a copy on that host. So a recovery finds it as it finds every backup, and whoever replaces or deletes a
value tells its hosts as it tells every keeper. The owner's record names bytes on the owner's host: with both, a host
that dies takes nothing.

**A put.** 1. The owner's host commits. In that transaction the key *lacks* a replica: a row says so, which a kill
doesn't take. Bytes of another host are copied to the owner's before the commit (`commit_copied`): else the death of
that host would take what was there before, too. 2. The owner asks a second host (`secure`), which asks back what the
present version is (`Keep`), copies it, and writes its row (`keep_replicas`). Or the putter's host has it already, and
says so (`hold`). 3. The row of what lacks goes (`_confirm`), and those are told who keep an older version. 4. The put
returns.

Until 3, nobody is told that an older version is replaced. So the owner's death leaves one of the two.

**In the background** (`Replicas`): an index process goes on with what its host's puts have left, and looks through all
records when the roster is another one: hosts come, go, are drained, and recovered groups have one copy of each value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from zlib import crc32

import msgspec

from memstore.distributed.rules.history import dispose, is_here
from memstore.distributed.rules.messages import (
    CALL_BYTES_LIMIT,
    PORTION,
    ROWS_LIMIT,
    Answer,
    Commit,
    Committed,
    Failed,
    Found,
    KeepAll,
    Later,
    NotOwner,
    Refused,
    Replicate,
    Replicated,
)
from memstore.distributed.rules.nouns import Backup, Change, Entry, Grant, Member, Roster, Standing, group_of
from memstore.distributed.rules.owning import answer_again, commit, keep_answer
from memstore.distributed.rules.recovery import (
    WINDOW,
    add_keepers,
    forget_replica,
    is_known,
    let_go,
    noted,
    tell_keepers,
)
from memstore.distributed.rules.steps import Lent, Steps, Tables, own_standing, pause, send, send_all, transact, view
from memstore.errors import CorruptionError

RATE = 128 << 20  # bytes a second that are copied in the background, at most
LEFT_AFTER = 5_000_000_000  # nanoseconds after which an index process goes on with a put that has not ended
_AT_ONCE = 64  # keys of one message
_TRIES = 20  # of a host that is to have a replica, where the value is replaced again and again
_AGAIN = 0.1  # seconds
_BETWEEN = 0.002  # seconds between two portions, in which puts come to the mutex
_MUTABLE = "it is a dataset or a replay buffer, whose rows are written in place: it has replicas once it is sealed"
_ATTACHED = "it is attached, and lies in files of others: put it with attach(copy=True)"
_NOBODY = "no other host of the cluster that stays can have it: serve another one"
_SILENT = "no other host answers that could have it"
_MOVES = "its group is being handed over"

log = logging.getLogger("memstore")

Settle = Callable[[Sequence[Entry]], Steps[bool]]
"""Makes copies live, in one transaction: of entries that name them. Returns whether a row names them then."""
Fetch = Callable[[Sequence[tuple[bytes, Entry]], Settle], Steps["bool | Failed"]]
"""Copies the bytes of entries that lie on other hosts to this one, and calls `settle`.

Returns what that does; False, too, if the bytes can't be had; or why there is no room for them.
"""


# --- policies ---------------------------------------------------------------------------------------------------------


def is_sync(standing: Standing | None, key: bytes) -> bool:
    """Returns whether a put of a key waits until a second host has its value."""
    policy = None if standing is None else standing.roster.policy_of(group_of(key))
    return policy is not None and not policy.is_async


def candidates(roster: Roster, owner: bytes, group: bytes) -> list[Member]:
    """Returns the hosts that may have replicas of a group, the best first: all of its keys go to the same one.

    Those that are never owners come last: they may go at any moment, with most of their kind.
    """
    able = [member for member in roster.members if member.id != owner and not roster.is_leaver(member.id)]
    return sorted(able, key=lambda member: (not member.is_owner, crc32(member.id + group)))


def _why_not(entry: Entry) -> Failed | None:
    """Returns why a value can't have replicas."""
    if entry.is_mutable:
        return Failed("MutableEntryError", _MUTABLE)
    return Failed("CrossHostError", _ATTACHED) if any(not place.segment for place in entry.places) else None


# --- the owner --------------------------------------------------------------------------------------------------------


def is_copied_first(standing: Standing | None, request: Commit) -> bool:
    """Returns whether bytes of another host are to be copied to this one before they are committed."""
    return standing is not None and any(_is_foreign(standing, change) for change in request.changes)


def _is_foreign(standing: Standing, change: Change) -> bool:
    if change.body is None or change.is_mutable or not is_sync(standing, change.key):
        return False
    return bool(change.places) and all(place.segment and not is_here(standing, place) for place in change.places)


def commit_copied(request: Commit, fetch: Fetch) -> Steps[Answer]:
    """Makes a commit of another host, once its bytes are here. It is made once, as every call.

    Returns `Later` where the bytes could not be had: its sender asks again, if it is there.
    """
    standing, answered = yield from view(lambda tables: (own_standing(tables), answer_again(tables, request.call)))
    if answered is not None:
        return answered
    foreign = [number for number, change in enumerate(request.changes) if _is_foreign(standing, change)]
    made: list[Answer] = []

    def settle(copies: Sequence[Entry]) -> Steps[bool]:
        changes = list(request.changes)
        for number, copy in zip(foreign, copies, strict=True):
            changes[number] = msgspec.structs.replace(changes[number], body=copy.body, places=copy.places)

        def make(tables: Tables) -> tuple[Answer, bool]:
            is_new = answer_again(tables, request.call) is None
            answer = commit(tables, own_standing(tables), request, changes)
            return answer, is_new and isinstance(answer, Committed)

        answer, names_them = yield from transact(make)
        made.append(answer)
        return names_them

    entries = [(change.key, Entry(0, change.body or b"", change.places)) for change in request.changes]
    found = yield from fetch([entries[number] for number in foreign], settle)
    if isinstance(found, Failed):
        failed = found
        return (yield from transact(lambda t: answer_again(t, request.call) or keep_answer(t, request.call, failed)))
    return made[-1] if made else Later()


class _Unit(msgspec.Struct):
    """Keys that get their replicas at one moment, on one host.

    Attributes:
        rows: keys, each with the grant by which another host is to keep it.
        keepers: hosts that may have the present version of the first one already.
    """

    rows: tuple[tuple[bytes, Grant], ...]
    keepers: Collection[bytes]

    @property
    def keys(self) -> list[bytes]:
        return [key for key, _ in self.rows]


def secure(keys: Iterable[bytes], silent: set[bytes], copied: list[int] | None = None) -> Steps[dict[bytes, Failed]]:
    """Has other hosts keep the present versions of keys that lack a replica. Returns those that got none, and why.

    Args:
        silent: hosts that gave no answer before: they are asked last.
        copied: is given how many bytes were copied.
    """
    left: dict[bytes, None] = dict.fromkeys(keys)
    missing: dict[bytes, Failed] = {}
    tried: dict[bytes, set[bytes]] = {}
    why: dict[bytes, Failed] = {}
    rounds: dict[bytes, int] = {}
    while left:
        untold = yield from view(lambda tables, keys=list(left): _untold(tables, keys))
        if untold:
            yield from tell_keepers(untold, set())
        standing, units, failed = yield from view(lambda t, keys=list(left): (own_standing(t), *_plan(t, keys)))
        missing |= failed
        covered = {key for unit in units for key in unit.keys}
        left = dict.fromkeys(key for key in left if key in covered)
        requests: list[tuple[Member, Replicate]] = []
        singles: dict[bytes, list[tuple[bytes, Grant]]] = {}
        for unit in units:
            first = unit.keys[0]
            able = [one.id for one in candidates(standing.roster, standing.member, group_of(first))]
            able.sort(key=lambda host, unit=unit: (host in silent, host not in unit.keepers))
            host = next((one for one in able if not any(one in tried.get(key, ()) for key in unit.keys)), None)
            member = None if host is None else standing.roster.member(host)
            if member is None:
                for key in unit.keys:
                    if key in left:
                        missing[key] = why.get(key) or Failed("HomeUnavailableError", _SILENT if able else _NOBODY)
                        del left[key]
            elif len(unit.rows) == 1:
                singles.setdefault(member.id, []).extend(unit.rows)
            else:
                requests.append((member, Replicate(standing.member, unit.rows, standing.member, is_whole=True)))
        for host, rows in singles.items():
            member = standing.roster.member(host)
            assert member is not None, "candidates are members"
            requests += [
                (member, Replicate(standing.member, tuple(rows[first : first + _AT_ONCE]), standing.member))
                for first in range(0, len(rows), _AT_ONCE)
            ]
        if len(requests) == 1:
            answers = [(yield from send(*requests[0]))]
        else:
            answers = yield from send_all(requests)
        for (member, request), answer in zip(requests, answers, strict=True):
            names = [key for key, _ in request.rows]
            if not isinstance(answer, Replicated) or len(answer.versions) != len(names):
                silent.add(member.id)
                for key in names:
                    tried.setdefault(key, set()).add(member.id)
                continue
            silent.discard(member.id)
            if copied is not None:
                copied.append(answer.nbytes)
            pairs = list(zip(names, answer.versions, strict=True))
            done = yield from transact(lambda t, p=pairs, h=member.id: _confirm_all(t, p, h))
            for (key, version), is_done in zip(pairs, done, strict=True):
                rounds[key] = rounds.get(key, 0) + 1
                if is_done:
                    left.pop(key, None)
                elif (not version and answer.why is not None) or rounds[key] >= _TRIES:
                    tried.setdefault(key, set()).add(member.id)
                    if answer.why is not None:
                        why[key] = answer.why
            if request.is_whole and not any(answer.versions) and answer.why is None:
                yield from pause(_AGAIN)  # others are to be kept with them by now
    return missing


def _untold(tables: Tables, keys: Sequence[bytes]) -> list[bytes]:
    found, seen = dict[bytes, None](), set[bytes]()
    for key in keys:
        if key not in seen:
            together, untold = _together(tables, key)
            seen.update(together)
            found |= dict.fromkeys(untold)
    return list(found)


def _together(tables: Tables, key: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns a key, with those that get their replicas at the same moment; and those of which to tell others first.

    A host that keeps a key in the version in which one call has put it with others must keep none of these in an older
    one, nor may anybody else: after a death it would be half of what that call has put. So all that lack a replica come
    with it in their present versions, and what was put with those. Of others, which are gone or newer, everybody was
    told before.
    """
    found, untold, waiting, nbytes = {key: None}, dict[bytes, None](), [key], 0
    while waiting:
        number = tables.batch_of(waiting.pop())
        for other in tables.batch(number) if number else ():
            if other in found:
                continue
            if tables.lacking(other) is not None:
                found[other] = None
                waiting.append(other)
                nbytes += _size_of(tables, other)
                if len(found) > ROWS_LIMIT or nbytes > CALL_BYTES_LIMIT:  # too many for a message: each by itself
                    return [key], []
            elif tables.is_unnoted(other):
                untold[other] = None
    return list(found), list(untold)


def _size_of(tables: Tables, key: bytes) -> int:
    """Returns the bytes of a record in a message, at most; 0 of a damaged one, which is in none."""
    entry = _record_of(tables, key)
    return entry.nbytes if isinstance(entry, Entry) else 0


def _plan(tables: Tables, keys: Iterable[bytes]) -> tuple[list[_Unit], dict[bytes, Failed]]:
    """Returns what is kept together of keys that lack a replica, and which of them can't have one now, and why."""
    units, failed, seen = list[_Unit](), dict[bytes, Failed](), set[bytes]()
    for key in keys:
        if key in seen or tables.lacking(key) is None:
            continue
        rows, keepers = list[tuple[bytes, Grant]](), set[bytes]()
        for one in _together(tables, key)[0]:
            why = _plan_one(tables, one)
            if isinstance(why, Failed):
                if one == key or why.text == _MOVES:
                    failed[key] = why
            elif why is not None:
                grant, known = why
                rows.append((one, grant))
                keepers = keepers if len(rows) > 1 else known
        if key not in failed and rows:
            units.append(_Unit(tuple(rows), keepers))
            seen |= {one for one, _ in rows}
    return units, failed


def _plan_one(tables: Tables, key: bytes) -> tuple[Grant, set[bytes]] | Failed | None:
    """Returns by which grant a host is to keep a key, and which ones may have its present version already.

    None: it is gone.
    """
    try:
        entry = tables.head(key)
    except CorruptionError as error:
        return Failed("CorruptionError", str(error), key)
    if entry is None:
        return None
    grant, group = tables.owned(group_of(key)), group_of(key)
    if grant is None or tables.leaving(group) is not None:
        return Failed("HomeUnavailableError", _MOVES)
    return _why_not(entry) or (grant, {host for host, at in tables.keepers(key) if at == entry.version})


def keep_all(tables: Tables, request: KeepAll) -> Answer:
    """Returns the records that another host is to keep from now on: of all that belongs together, or of one key."""
    keys = [key for key, _ in request.rows]
    found, untold = _together(tables, keys[0])
    together, asked = set(found), set(keys)
    if untold or not is_known(own_standing(tables), request.keeper):
        return Later()
    if not all(key in asked or isinstance(_plan_one(tables, key), Failed | None) for key in together):
        return Later()
    entries = [tables.record(key) if key in together else None for key in keys]
    versions = {key: entry.version for key, entry in zip(keys, entries, strict=True) if entry is not None}
    add_keepers(tables, request.keeper, versions)
    return Found(tuple(entries))


def _confirm_all(tables: Tables, pairs: Sequence[tuple[bytes, int]], host: bytes) -> list[bool]:
    """Notes which versions a host has. What was put together, and lacks nothing any more, is forgotten as such."""
    numbers = {tables.batch_of(key) for key, _ in pairs} - {0}
    done = [bool(version) and _confirm(tables, key, version, host) for key, version in pairs]
    for number in numbers:
        _drop_batch(tables, number)
    return done


def _drop_batch(tables: Tables, number: int) -> None:
    """Forgets which keys one call put, once none of them lacks a replica in that version."""
    if not any(tables.batch_of(key) == number for key in tables.batch(number)):
        tables.put_batch(number, ())


def _confirm(tables: Tables, key: bytes, version: int, host: bytes) -> bool:
    """Notes that a host has a replica, if it is of the present version. Hosts that leave let theirs go then."""
    standing, entry = own_standing(tables), tables.head(key)
    if entry is None or entry.version != version or (host, version) not in tables.keepers(key):
        return False
    if not all(is_here(standing, place) for place in entry.places):
        return False
    tables.put_lacking(key, None)
    tables.put_replica(key, (host, version))
    noted(tables, host, [(key, version - 1)])
    _let_leavers_go(tables, key)
    return True


def _leaving_keepers(tables: Tables, key: bytes) -> set[bytes]:
    roster = own_standing(tables).roster
    return {host for host, at in tables.keepers(key) if at and roster.is_leaver(host)}


def _let_leavers_go(tables: Tables, key: bytes) -> None:
    """Notes that hosts which leave are to be told that they keep nothing of a key."""
    leavers = _leaving_keepers(tables, key)
    if leavers:
        tables.put_keepers(key, [(host, 0 if host in leavers else at) for host, at in tables.keepers(key)])
        tables.put_unnoted(key, True)


def hold(request: Replicate, fetch: Fetch, silent: set[bytes], untold: set[bytes]) -> Steps[Answer]:
    """Answers, as the owner, a host that has put values: which of them are on two hosts now.

    Args:
        silent: as of `secure`.
        untold: as of `recovery.tell_keepers`.
    """
    kept = request.kept or (0,) * len(request.rows)
    pairs = [(key, version) for (key, _), version in zip(request.rows, kept, strict=True)]
    keys = [key for key, _ in pairs]
    yield from transact(lambda t: _confirm_all(t, pairs, request.sender))
    missing: dict[bytes, Failed] = {}
    for key in keys:
        failed = yield from draw(key, fetch)
        if failed is not None:
            missing[key] = failed
    missing |= yield from secure([key for key in keys if key not in missing], silent)
    yield from go_on_without(missing)
    yield from tell_keepers(keys, untold)
    versions = yield from view(lambda tables: [_version(tables, key) for key in keys])
    found = tuple(0 if key in missing else at for key, at in zip(keys, versions, strict=True))
    return Replicated(found, 0, next(iter(missing.values()), None))


def _version(tables: Tables, key: bytes) -> int:
    entry = tables.head(key)
    return 0 if entry is None else entry.version


def go_on_without(keys: Collection[bytes]) -> Steps[None]:
    """Notes that puts return though there is no replica, where that is allowed: what they replaced is not waited for.

    So nothing older comes back after a death.
    """

    def action(tables: Tables) -> None:
        roster = own_standing(tables).roster
        for key in keys:
            policy = roster.policy_of(group_of(key))
            if (policy is None or not policy.fails) and tables.lacking(key):
                tables.put_lacking(key, False, tables.batch_of(key))

    if keys:
        yield from transact(action)


def draw(key: bytes, fetch: Fetch) -> Steps[Failed | None]:
    """Copies bytes that a record here names on other hosts to this one. Returns why that can't be."""
    for _ in range(_TRIES):
        standing, entry = yield from view(lambda tables: (own_standing(tables), _record_of(tables, key)))
        if isinstance(entry, Failed):
            return entry
        if entry is None or all(is_here(standing, place) for place in entry.places):
            return None
        failed = _why_not(entry)
        if failed is not None:
            return failed

        def settle(copies: Sequence[Entry], before: Entry = entry) -> Steps[bool]:
            return transact(lambda tables: _name_here(tables, key, before, copies[0]))

        found = yield from fetch([(key, entry)], settle)
        if isinstance(found, Failed):
            return found
        if found:
            return None
        yield from pause(_AGAIN)
    return Failed("HomeUnavailableError", "the host that has its bytes does not answer")


def _record_of(tables: Tables, key: bytes) -> Entry | Failed | None:
    try:
        return tables.record(key)
    except CorruptionError as error:  # no other key waits for it
        return Failed("CorruptionError", str(error), key)


def _name_here(tables: Tables, key: bytes, before: Entry, after: Entry) -> bool:
    """Names copies of this host in a record. A host that keeps all of what it named may have a replica in that.

    Nothing happens, and False is returned, if the record is another one, or its group leaves.
    """
    standing, group, now = own_standing(tables), group_of(key), tables.record(key)
    if not standing.may_change or tables.owned(group) is None or tables.leaving(group) is not None:
        return False
    if now is None or (now.version, now.places) != (before.version, before.places):
        return False
    tables.put_record(key, after)
    for place in after.places:
        if place not in before.places:
            tables.own(place, key)
    hosts, known = {place.host for place in before.places}, tables.keepers(key)
    if any(len(hosts) > 1 or host not in hosts for host, at in known if at == before.version):
        stays = hosts if len(hosts) == 1 else set[bytes]()  # the others keep no bytes, or not all of them
        tables.put_keepers(key, [(host, at if host in stays else 0) for host, at in known])
        tables.put_unnoted(key, True)
    dispose(tables, standing, [place for place in before.places if place not in after.places])
    return True


# --- a host that keeps a replica --------------------------------------------------------------------------------------


def keep_replicas(request: Replicate, fetch: Fetch) -> Steps[Answer]:
    """Keeps the present versions of keys of another owner, with their bytes."""
    standing = yield from view(own_standing)
    owner = standing.roster.member(request.owner)
    if owner is None or not standing.may_change or standing.roster.is_leaver(standing.member):
        return Refused("it keeps nothing for that host")
    versions, why = list[int](), None
    for rows in [request.rows] if request.is_whole else [(row,) for row in request.rows]:
        found = yield from _keep_replicas(owner, rows, fetch)
        versions += (0,) * len(rows) if isinstance(found, Failed) else found
        why = why or (found if isinstance(found, Failed) else None)
    return Replicated(tuple(versions), 0, why)


def _keep_replicas(owner: Member, rows: tuple[tuple[bytes, Grant], ...], fetch: Fetch) -> Steps[list[int] | Failed]:
    """Returns the versions that are kept, all from one moment; 0: there is none, or another host owns the key."""
    nothing = [0] * len(rows)
    for _ in range(_TRIES):
        began, member = yield from view(lambda tables: (tables.now(), own_standing(tables).member))
        answer = yield from send(owner, KeepAll(rows, member))
        if isinstance(answer, NotOwner | Refused) or (isinstance(answer, Later) and len(rows) > 1):
            return nothing
        if not isinstance(answer, Found) or len(answer.entries) != len(rows):
            yield from pause(_AGAIN)
            continue
        entries = answer.entries
        there = [(key, grant, entry) for (key, grant), entry in zip(rows, entries, strict=True) if entry is not None]
        if not there:
            return nothing
        failed = next(filter(None, (_why_not(entry) for _, _, entry in there)), None)
        if failed is not None:
            return failed
        here = yield from view(lambda tables, there=there: _all_here(tables, there))
        foreign = [(key, entry) for key, _, entry in there if key not in here]

        def settle(
            copies: Sequence[Entry], there: Any = there, here: Any = here, foreign: Any = foreign, since: int = began
        ) -> Steps[bool]:
            copy_of = here | {key: copy for (key, _), copy in zip(foreign, copies, strict=True)}
            copied = [_Copy(key, entry.version, grant, copy_of[key]) for key, grant, entry in there]
            return _settle(owner, copied, since)

        done: bool | Failed = yield from (fetch(foreign, settle) if foreign else settle(()))
        if isinstance(done, Failed):
            return done
        if done:
            return [0 if entry is None else entry.version for entry in entries]
        yield from pause(_AGAIN)
    return Failed("HomeUnavailableError", "it is replaced again and again, or its host does not answer")


class _Copy(msgspec.Struct):
    """A copy that this host is to keep: a version, and where its bytes are here."""

    key: bytes
    version: int
    grant: Grant
    copy: Entry


def _all_here(tables: Tables, rows: Sequence[tuple[bytes, Grant, Entry]]) -> dict[bytes, Entry]:
    """Returns those of which all bytes are here: replicas already, or what the owner's record names."""
    member, found = own_standing(tables).member, dict[bytes, Entry]()
    for key, _, entry in rows:
        known = _kept_here(tables, key, entry)
        if known is not None:
            found[key] = msgspec.structs.replace(entry, body=known.body, places=known.places)
        elif all(place.host == member for place in entry.places):
            found[key] = entry
    return found


def kept(tables: Tables, key: bytes, version: int) -> int:
    """Returns a version, if this host keeps it, with all of its bytes; else 0."""
    return version if _kept_here(tables, key, Entry(version, b"")) is not None else 0


def _kept_here(tables: Tables, key: bytes, entry: Entry) -> Backup | None:
    """Returns what this host keeps of a version, if that is whole."""
    backup, member = tables.backup(key), own_standing(tables).member
    if backup is None or backup.version != entry.version:
        return None
    is_whole = all(place.host == member and tables.is_there(place) for place in backup.places)
    return backup if is_whole else None


def _settle(owner: Member, rows: Sequence[_Copy], began: int) -> Steps[bool]:
    """Writes rows of copies. If that took long, the owner is asked once more whether they are the present versions."""
    while True:
        written = yield from transact(lambda tables, at=began: _write(tables, owner, rows, at))
        if written is not None:
            return written
        began, member = yield from view(lambda tables: (tables.now(), own_standing(tables).member))
        answer = yield from send(owner, KeepAll(tuple((row.key, row.grant) for row in rows), member))
        if not isinstance(answer, Found) or len(answer.entries) != len(rows):
            return False
        if any(entry is None or entry.version != row.version for row, entry in zip(rows, answer.entries, strict=True)):
            return False


def _write(tables: Tables, owner: Member, rows: Sequence[_Copy], began: int) -> bool | None:
    """Writes all rows or none. None: it took too long since the owner was asked: a note that came may be forgotten."""
    standing = own_standing(tables)
    if owner.id not in standing.roster.ids or not standing.may_change or standing.roster.is_leaver(standing.member):
        return False
    if not 0 <= tables.now() - began <= WINDOW:
        return None
    for row in rows:
        known = tables.backup(row.key)
        if tables.void(row.key)[0] >= row.version or (known is not None and known.version > row.version):
            return False
        if known is not None and known.places != row.copy.places and _kept_here(tables, row.key, row.copy) is not None:
            return False  # another thread was first
    for row in rows:
        let_go(tables, row.key, row.copy.places)
        for place in row.copy.places:  # anew, by `until`: an audit may be told just now that they were named no more
            tables.lend(place, Lent(row.key, owner.id, until=tables.now()))
        said = row.copy.body, row.copy.places
        backup = Backup(row.version, row.grant.number, *said, is_replica=True, history=row.copy.history)
        tables.put_backup(row.key, backup)
    return True


# --- in the background ------------------------------------------------------------------------------------------------


class Replicas:
    """The work of this host for values that lack a replica, since its index process was started.

    Args:
        clock: nanoseconds of this host's clock since boot.

    Attributes:
        silent: hosts that gave no answer when they were to keep one.
        why: of the last pass, by key.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.silent: set[bytes] = set()
        self.why: dict[bytes, Failed] = {}
        self._looked: tuple[int, int] | None = None  # the position of the roster when it looked through all records
        self._since: dict[bytes, int] = {}  # puts that have not ended, and since when that is known

    def run(self, fetch: Fetch) -> Steps[bool]:
        """Goes on with all that lacks a replica, once. Returns whether some is left."""
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or not standing.may_change or standing.is_joining:
            return False
        if not standing.roster.policies and not (yield from view(lambda tables: tables.all_lacking(b"", 1))):
            return False
        if self._looked != standing.roster.position:
            yield from _look_through()
            self._looked = standing.roster.position
        after, why, since = b"", dict[bytes, Failed](), dict[bytes, int]()
        while page := (yield from view(lambda tables, start=after: _lacking_page(tables, start))):
            after = page[-1][0]
            for key, holds in page:
                began = since[key] = self._since.get(key, self._clock())
                if holds and self._clock() - began < LEFT_AFTER:
                    continue  # its put goes on, most likely
                copied = list[int]()
                failed = yield from draw(key, fetch)
                if failed is None:
                    failed = (yield from secure([key], self.silent, copied)).get(key)
                if failed is None:
                    yield from transact(lambda tables, key=key: _drop_stray(tables, key))
                else:
                    why[key] = failed
                    if not candidates(standing.roster, standing.member, group_of(key)):
                        yield from transact(lambda tables, key=key: _let_leavers_go(tables, key))
                yield from pause(max(_BETWEEN, sum(copied) / RATE))
        self.why, self._since = why, since
        over = yield from view(lambda tables: tables.all_batches(0, PORTION))
        if over:  # of what was deleted, or handed over, since
            yield from transact(lambda tables: [_drop_batch(tables, one) for one in over])
        return bool(since)


def _lacking_page(tables: Tables, after: bytes) -> list[tuple[bytes, bool]]:
    return [(key, bool(tables.lacking(key))) for key in tables.all_lacking(after, PORTION)]


def _drop_stray(tables: Tables, key: bytes) -> None:
    """Forgets that a key lacks a replica which is deleted, or another owner's."""
    if tables.lacking(key) is not None and tables.head(key) is None:
        forget_replica(tables, key)


def _look_through() -> Steps[None]:
    """Notes which records lack a replica, and are to have one."""
    after: bytes = b""
    while True:
        found, last = yield from view(lambda tables, start=after: _page(tables, start))
        for first in range(0, len(found), PORTION):
            yield from transact(lambda t, some=found[first : first + PORTION]: [_mend(t, key) for key in some])
            yield from pause(_BETWEEN)
        if last is None:
            return
        after = last
        yield from pause(_BETWEEN)


def _page(tables: Tables, after: bytes) -> tuple[list[bytes], bytes | None]:
    page = tables.heads(after, ROWS_LIMIT)
    found = [key for key, entry in page if entry and (_lacks(tables, key, entry) or _leaving_keepers(tables, key))]
    return found, page[-1][0] if page else None


def _lacks(tables: Tables, key: bytes, entry: Entry) -> bool:
    """Returns whether a record is to have a replica, and may have none.

    That a host was asked to have one, and stands among the keepers, says nothing.
    """
    standing = own_standing(tables)
    roster = standing.roster
    if roster.policy_of(group_of(key)) is None or tables.lacking(key) is not None or _why_not(entry) is not None:
        return False
    host, version = tables.replica(key) or (b"", 0)
    is_there = version == entry.version and host in roster.ids and not roster.is_leaver(host)
    return not (is_there and all(is_here(standing, place) for place in entry.places))


def _mend(tables: Tables, key: bytes) -> None:
    entry = tables.head(key)
    if entry is not None and _lacks(tables, key, entry):
        tables.put_lacking(key, False)
    elif tables.lacking(key) is None and not _names_leavers(tables, entry):
        _let_leavers_go(tables, key)


def _names_leavers(tables: Tables, entry: Entry | None) -> bool:
    """Returns whether a record has bytes on a host that leaves: these are taken over first."""
    roster = own_standing(tables).roster
    return entry is not None and any(roster.is_leaver(place.host) for place in entry.places)
