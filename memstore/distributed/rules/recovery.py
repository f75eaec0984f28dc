"""What a death leaves: each host keeps what it has put and others own, and an heir makes of that a dead owner's groups.

**Backups.** A host whose process puts a value of another owner keeps a row of its own, the version with its record,
before the put returns (`keep`). So of each version whose put has returned there is a record beside the owner's, on the
host that has its bytes. The owner remembers for each key which hosts may keep a version, its *keepers*. A change that
it makes itself or for another host is acknowledged once the keepers of older versions have been told (`Note`): a
replaced or deleted value doesn't come back. A keeper that gives no answer for a while counts as lost, and is told
later.

A process may be stopped between the owner's answer and its row, while the owner tells its host that the version is
replaced. So a note leaves a mark, the *void*, for longer than a process may take for its row (`WINDOW`); who has taken
longer asks the owner once more (`Keep`).

**Recovery.** The roster that removes a member names its *heir*. The heir asks the seed which groups the member owned,
and all members what they keep of them (`Recovery`). Of each key the largest version is the newest one that was
acknowledged, unless the dead host had a newer one, whose keepers had been told. What it finds it keeps beside its own
records, as a hand-over from the dead member. When all have answered, the seed writes so into the roster, and from then
on gives it the groups, which it opens as it would those of a hand-over.

A member answers only when it knows that the owner was removed. From then on its processes write no row of that owner's:
their puts raise UnknownOutcomeError. Rows of an owner before a hand-over don't count (`Ownership.since`).

**On storage that hosts share** the dead host's files are there still. Records that name them stay (`are_there`), and
the heir reads the folder as the answer of one more member (`Left`): what the dead host has put into its own groups, by
the headers of its files. A file that was replaced or deleted says so before that is acknowledged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from zlib import crc32

import msgspec

from memstore.distributed.rules.messages import (
    BYTES_LIMIT,
    PORTION,
    ROWS_LIMIT,
    Answer,
    BackedUp,
    Done,
    FindBackups,
    FindOwners,
    Found,
    Inherit,
    Inherited,
    Keep,
    Later,
    Lost,
    Note,
    NotOwner,
    Owners,
    Place,
    Recovered,
    Refused,
)
from memstore.distributed.rules.nouns import (
    EPOCH_BITS,
    Backup,
    Change,
    Departed,
    Entry,
    Grant,
    Member,
    Ownership,
    Roster,
    Standing,
    group_of,
    groups_of,
)
from memstore.distributed.rules.steps import (
    KeptGroup,
    Send,
    Steps,
    Tables,
    own_standing,
    pause,
    send,
    send_all,
    transact,
    view,
)
from memstore.errors import CorruptionError

LARGEST = 4096 + 1024  # bytes of a value without a segment, with what its record says, that is kept
WINDOW = 10_000_000_000  # nanoseconds from the question to the owner until the row of its answer is written, at most
VOIDS_LAST = 3 * WINDOW
NOTE_WITHIN = 1.0  # seconds that a keeper may take for one answer
NOTE_TRIES = 20  # after which a process goes on without a keeper that can't be reached
NOTE_SILENT = 2_000_000_000  # nanoseconds after which an index process does
LOST_LIMIT = 1000  # names that a host remembers of what was lost
_AGAIN = 0.1  # seconds between two tries
_AT_ONCE = 512  # rows of one transaction of an heir: puts of its host wait for it, some 7 ms
_SHOWN = 20  # names in a line of the log
_LONGEST_WHO = 400  # characters

log = logging.getLogger("memstore")
_BETWEEN = 0.002  # seconds between two portions, in which puts come to the mutex
SOON = 0.0005  # the same, of an heir, for whom callers wait


class NotRecovered(Later, frozen=True, array_like=True, tag=75):
    """A group was a removed member's, and isn't its heir's yet. Whoever asks is told so at once, to name the heir."""


def is_kept(change: Change) -> bool:
    """Returns whether the host that puts a value keeps its record."""
    return change.body is not None and (change.renews or bool(change.places) or len(change.body) <= LARGEST)


# --- the owner --------------------------------------------------------------------------------------------------------


def note_change(
    tables: Tables,
    standing: Standing,
    change: Change,
    version: int,
    keepers: Collection[bytes] = (),
    *,
    is_alone: bool = True,
    batch: int = 0,
) -> None:
    """Notes, in the transaction of a change, which hosts are to be told of it before it is acknowledged.

    Args:
        version: the new one; 0: the key was deleted.
        keepers: hosts that keep the new version, once they have heard of it.
        is_alone: it is one, which writes it over an older one before anybody hears that it was put. One of several
            need not have when a rank of another host returns: it is told of the older one.
        batch: as of `note_lacking`.
    """
    note_lacking(tables, standing, change, is_alone=is_alone, batch=batch)
    known, keep = tables.keepers(change.key), is_kept(change)
    if not known and not (keepers and keep):
        return
    rows = [row for row in known if row[0] in standing.roster.ids]
    if keep:
        rows = [(host, at) for host, at in rows if not (is_alone and host in keepers)]
        rows += [(host, version) for host in keepers]
    tables.put_keepers(change.key, rows)
    tables.put_unnoted(change.key, any(_is_due(at, version) for _, at in rows))


def note_batch(tables: Tables, standing: Standing, changes: Sequence[Change]) -> int:
    """Notes which keys one call puts, if their values are to have replicas. Returns its number; 0: they aren't several.

    A call of more keys than one message has room for is none: its keys get their replicas one by one.
    """
    keys = [change.key for change in changes if _is_replicated(standing, change)]
    if not 1 < len(keys) <= ROWS_LIMIT:
        return 0
    number = tables.version + 1  # of its first value, at the least
    tables.put_batch(number, keys)
    return number


def _is_replicated(standing: Standing, change: Change) -> bool:
    is_value = change.body is not None and not change.is_mutable
    return is_value and standing.roster.policy_of(group_of(change.key)) is not None


def note_lacking(tables: Tables, standing: Standing, change: Change, *, is_alone: bool, batch: int = 0) -> None:
    """Notes, in the transaction of a change, that its value is to have a replica: see `replicas.py`.

    Where the put waits for it, keepers aren't told before that an older version is replaced: after a death, that is the
    one which was acknowledged.

    Args:
        is_alone: one host puts it. Ranks of a sharded put don't wait.
        batch: of `note_batch`.
    """
    policy = standing.roster.policy_of(group_of(change.key))
    if policy is not None and _is_replicated(standing, change):
        tables.put_lacking(change.key, is_alone and not policy.is_async, batch)
    else:
        forget_replica(tables, change.key)


def forget_replica(tables: Tables, key: bytes) -> None:
    """Notes that a key is to have no replica: it is deleted, or another host's."""
    if tables.lacking(key) is not None:
        tables.put_lacking(key, None)
    if tables.replica(key) is not None:
        tables.put_replica(key, None)


def keep_current(tables: Tables, request: Keep) -> Answer:
    """Returns the record that another host keeps from now on, if that is still the present version (0: whatever is)."""
    entry = tables.record(request.key)
    if entry is None or request.version not in (0, entry.version):
        return Found((None,))
    if not is_known(own_standing(tables), request.keeper):
        return Later()
    add_keepers(tables, request.keeper, {request.key: entry.version})
    return Found((entry,))


def add_keepers(tables: Tables, host: bytes, versions: Mapping[bytes, int]) -> None:
    known = tables.keepers_of(list(versions))
    rows = {key: (*known.get(key, ()), (host, version)) for key, version in versions.items()}
    tables.put_keepers_of({key: keepers for key, keepers in rows.items() if keepers[-1] not in keepers[:-1]})


def forget_keepers(tables: Tables, key: bytes) -> None:
    """Notes that what hosts keep of a key is to be replaced, though its version stays: its bytes lie elsewhere now."""
    known = tables.keepers(key)
    if known:
        tables.put_keepers(key, tuple((host, 0) for host in dict(known)))
        tables.put_unnoted(key, True)


def due(tables: Tables, keys: Collection[bytes]) -> dict[bytes, list[tuple[bytes, int]]]:
    """Returns, by host, keys of which it may keep older versions, and up to which version these are replaced."""
    found: dict[bytes, list[tuple[bytes, int]]] = {}
    standing = tables.standing()
    for key in keys if standing is not None else ():
        if not tables.is_unnoted(key) or tables.lacking(key):
            continue
        version = _version_of(tables, key)
        uptos: dict[bytes, int] = {}
        for host, at in tables.keepers(key):
            if _is_due(at, version) and standing is not None and host in standing.roster.ids:
                upto = tables.version if not version else version if not at else version - 1
                uptos[host] = max(upto, uptos.get(host, 0))
        for host, upto in uptos.items():
            found.setdefault(host, []).append((key, upto))
    return found


def _version_of(tables: Tables, key: bytes) -> int:
    try:
        entry = tables.head(key)
    except CorruptionError:  # nobody can read it any more
        return 0
    return 0 if entry is None else entry.version


def noted(tables: Tables, host: bytes, rows: Sequence[tuple[bytes, int]]) -> None:
    """Notes that a host was told."""
    ids = own_standing(tables).roster.ids
    for key, upto in rows:
        version = _version_of(tables, key)
        if version and version <= upto and tables.replica(key) == (host, version):
            doubt_replica(tables, key)
        left = tuple((one, at) for one, at in tables.keepers(key) if one in ids and (one != host or at > upto))
        tables.put_keepers(key, left)
        tables.put_unnoted(key, any(_is_due(at, version) for _, at in left))


def _is_due(at: int, version: int) -> bool:
    """Returns whether a host that keeps a version (0: any, see `forget_keepers`) is to be told of the present one.

    *Schedule (found):* bytes are taken over, and before the keepers are told of that, the key is deleted (0).
    """
    return at != version or not version


def doubt_replica(tables: Tables, key: bytes) -> None:
    """Notes that a key lacks a replica: who has it was told, later, that what it keeps of this version counts no more.

    *Schedule (found):* the bytes of a sharded value are copied to its owner, so keepers are told that theirs go. One of
    them becomes the host of the replica while the note is on its way, and drops it.
    """
    tables.put_replica(key, None)
    tables.put_lacking(key, False)


def tell_keepers(keys: Sequence[bytes], silent: set[bytes]) -> Steps[None]:
    """Tells hosts of a change that a process of the owner's host has made, before it is acknowledged.

    Args:
        silent: keepers that gave no answer before: they are asked once more, and not waited for.
    """
    tries: dict[bytes, int] = {}
    while True:
        standing, rows_of = yield from view(lambda tables: (tables.standing(), due(tables, keys)))
        left = {host: rows for host, rows in rows_of.items() if tries.get(host, 0) < NOTE_TRIES}
        if standing is None or not left:
            return
        for host, rows in left.items():
            member = standing.roster.member(host)
            assert member is not None, "those that are due are members"
            some = tuple(rows[:ROWS_LIMIT])
            answer = yield Send(member.address, member.id, Note(some, standing.member), NOTE_WITHIN)
            if isinstance(answer, Done):
                silent.discard(host)
                tries.pop(host, None)
                yield from transact(lambda tables, host=host, some=some: noted(tables, host, some))
                continue
            took = 1 if answer is not None else int(NOTE_WITHIN / _AGAIN)
            tries[host] = NOTE_TRIES if host in silent else tries.get(host, 0) + took
            if tries[host] >= NOTE_TRIES:
                silent.add(host)
        if any(count < NOTE_TRIES for count in tries.values()):
            yield from pause(_AGAIN)


class Notes:
    """What an index process tells keepers, since it was started.

    Args:
        clock: nanoseconds of this host's clock since boot.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._failing: dict[bytes, int] = {}  # keepers that gave no answer, and since when

    def are_due(self, tables: Tables, keys: Collection[bytes], asker: bytes | None = None) -> bool:
        """Returns whether a change of these keys can't be acknowledged yet.

        Args:
            asker: the host that has asked for it, which is told what it keeps of them by the answer.
        """
        if not tables.all_unnoted(b"", 1):
            return False
        hosts, now = due(tables, keys).keys() - {asker}, self._clock()
        return any(now - self._failing.get(host, now) < NOTE_SILENT for host in hosts)

    def run(self) -> Steps[bool]:
        """Tells keepers what they haven't been told. Returns whether some is left: one gave no answer."""
        while (told := (yield from self._tell())) is not False:
            if told is None:
                return True
        return False

    def _tell(self) -> Steps[bool | None]:
        """Tells a portion. Returns whether there was any; None: somebody gave no answer."""
        standing, keys, rows_of = yield from view(_all_due)
        if standing is None or not keys:
            return False
        is_whole = True
        told: list[tuple[bytes, tuple[tuple[bytes, int], ...]]] = [
            (host, tuple(rows[:ROWS_LIMIT])) for host, rows in rows_of.items()
        ]
        members = [(standing.roster.member(host), Note(rows, standing.member)) for host, rows in told]
        requests = [(member, note) for member, note in members if member is not None]
        if len(requests) == 1:
            answers = [(yield from send(*requests[0]))]
        else:
            answers = yield from send_all(requests)
        for (host, rows), answer in zip(told, answers, strict=True):
            if isinstance(answer, Done):
                self._failing.pop(host, None)
                yield from transact(lambda tables, host=host, rows=rows: noted(tables, host, rows))
            else:
                is_whole = False
                self._failing.setdefault(host, self._clock())
        stray = [key for key in keys if not any(key == one for rows in rows_of.values() for one, _ in rows)]
        if stray:  # their keepers were removed
            yield from transact(lambda tables: _drop_strays(tables, stray))
        return True if is_whole else None


def _all_due(tables: Tables) -> tuple[Standing | None, list[bytes], dict[bytes, list[tuple[bytes, int]]]]:
    """Finds a portion of keys of which somebody is to be told now."""
    keys, after = list[bytes](), b""
    while len(keys) < PORTION and (page := tables.all_unnoted(after, PORTION)):
        keys += [key for key in page if not tables.lacking(key)]
        after = page[-1]
    return tables.standing(), keys, due(tables, keys)


def _drop_strays(tables: Tables, keys: Sequence[bytes]) -> None:
    for key in keys:
        noted(tables, b"", [(key, 0)])


# --- a keeper ---------------------------------------------------------------------------------------------------------


def is_known(standing: Standing, member: bytes) -> bool:
    """Returns whether one is a member, as far as this host has heard. One that isn't is gone, or asks again.

    *Schedule (found):* an owner tells of a delete, and is lost. Its heir finds the value here, and has it kept as a
    replica again. Then the note comes, which was long on its way.
    """
    return member in standing.roster.ids


def take_note(tables: Tables, request: Note) -> Answer:
    """Drops what is replaced, and marks it for who has not written a row of it yet. Its owner `is_known`."""
    _drop_replaced(tables, request.rows)
    return Done()


def _drop_replaced(tables: Tables, rows: Sequence[tuple[bytes, int]]) -> None:
    for key, upto in rows:
        backup = tables.backup(key)
        if backup is not None and backup.version <= upto:
            let_go(tables, key)
        if tables.void(key)[0] < upto:
            tables.put_void(key, upto)


def let_go(tables: Tables, key: bytes, others: Collection[Place] = ()) -> None:
    """Drops what this host keeps of a key, with its bytes, if they are a replica's: no record names these.

    Args:
        others: bytes that stay.
    """
    backup, standing = tables.backup(key), tables.standing()
    tables.drop_backup(key)
    for place in backup.places if backup is not None and backup.is_replica else ():
        if place not in others and standing is not None and place.host == standing.member:
            try:
                tables.retire(place)
            except CorruptionError as error:
                tables.pass_over(key, error)


class ToKeep(msgspec.Struct):
    """A version that this host is to keep.

    Attributes:
        version: 0: the one that names `place`.
        backup: None: its owner is to be asked for it.
        replica: what is kept of it, whatever the owner's record names; None: what that names.
    """

    key: bytes
    version: int
    grant: Grant
    backup: Backup | None = None
    place: Place | None = None
    replica: Backup | None = None


def keep(
    owner: Member,
    rows: Sequence[ToKeep],
    began: int,
    tries: int | None = None,
    replaced: Sequence[tuple[bytes, int]] = (),
) -> Steps[bool]:
    """Writes rows of what the owner has acknowledged, before the put returns. False: the owner was removed before.

    Args:
        replaced: keys of which this host keeps nothing up to a version any more, as the owner's answer says.
        began: a time on this host's clock, before the owner was asked.
        tries: how often it asks; None: until it is answered.
    """
    left, member = list(rows), b""
    while (left or replaced) and tries != 0:
        tries = None if tries is None else tries - 1
        asked = [row for row in left if row.backup is None]
        if asked:
            began, member = yield from view(lambda tables: (tables.now(), own_standing(tables).member))
        for row in asked:
            answer = yield from send(owner, Keep(row.key, row.version, row.grant, member))
            if isinstance(answer, Found) and answer.entries:
                entry = answer.entries[0]
                if entry is None or (row.place is not None and row.place not in entry.places):
                    left.remove(row)
                elif row.replica is not None and row.replica.version == entry.version:
                    row.backup = row.replica
                else:
                    said = entry.body, entry.places, entry.is_mutable
                    row.backup = Backup(entry.version, row.grant.number, *said, history=entry.history)
            elif isinstance(answer, NotOwner | Refused):
                left.remove(row)
        if all(row.backup is not None for row in left):
            written = yield from transact(lambda tables, at=began: _write_backups(tables, owner, left, at, replaced))
            if written is None:
                for row in left:
                    row.backup = None
                continue
            return written
        yield from pause(_AGAIN)
        if (yield from view(lambda tables: owner.id not in own_standing(tables).roster.ids)):
            return False
    return True


def _write_backups(
    tables: Tables, owner: Member, rows: Sequence[ToKeep], began: int, replaced: Sequence[tuple[bytes, int]]
) -> bool | None:
    """None: it took too long since the owner was asked: a note that came meanwhile may be forgotten."""
    if owner.id not in own_standing(tables).roster.ids:
        return False
    _drop_replaced(tables, replaced)
    if rows and not 0 <= tables.now() - began <= WINDOW:
        return None
    is_whole = len(rows) == 1 or not any(_is_gone(tables, row) for row in rows)
    for row in rows:
        known = tables.backup(row.key)
        assert row.backup is not None
        if row.backup.is_replica and not (is_whole and all(map(tables.is_there, row.backup.places))):
            continue  # an audit has given the bytes back: the owner's record doesn't name them
        if max(known.version if known else 0, tables.void(row.key)[0]) < row.backup.version:
            if known is not None and known.is_replica:
                let_go(tables, row.key, row.backup.places)
            tables.put_backup(row.key, row.backup)
    return True


def _is_gone(tables: Tables, row: ToKeep) -> bool:
    """Returns whether this host can't have a replica any more. Then it has none of what was put with it."""
    backup = row.backup
    if backup is None or not backup.is_replica:
        return False
    return tables.void(row.key)[0] >= backup.version or not all(map(tables.is_there, backup.places))


def find_backups(tables: Tables, standing: Standing, request: FindBackups) -> Answer:
    """Says what this host keeps of a removed member's groups. What it has no bytes of any more is left out."""
    if request.member in standing.roster.ids:
        return Later()
    rows: list[tuple[bytes, Backup]] = []
    nbytes = 0
    for group in request.groups:
        after = request.after if group == group_of(request.after) else b""
        while page := tables.backups_of(group, after, asked := ROWS_LIMIT + 1 - len(rows)):  # one more: there is more
            for key, backup in page:
                after = key
                if backup.places and any(
                    place.host == standing.member and not tables.is_there(place) for place in backup.places
                ):
                    continue
                nbytes += backup.nbytes
                if rows and (nbytes > BYTES_LIMIT or len(rows) == ROWS_LIMIT):
                    return BackedUp(tuple(rows), rows[-1][0])
                rows.append((key, backup))
            if len(page) < asked:  # of many groups, which have a key each, that is half of the work
                break
    return BackedUp(tuple(rows))


def drop_voids() -> Steps[None]:
    """Forgets marks that no process of this host needs any more."""
    while (yield from view(lambda tables: tables.has_voids(tables.now() - VOIDS_LAST))):
        yield from transact(lambda tables: tables.drop_voids(tables.now() - VOIDS_LAST, PORTION))
        yield from pause(_BETWEEN)


def drop_named(tables: Tables, key: bytes, place: Place) -> None:
    """Forgets what is kept of a key, if it names bytes that go."""
    backup = tables.backup(key)
    if backup is not None and place in backup.places:
        let_go(tables, key, [place])


def is_outdated(row: Ownership | None, number: int) -> bool:
    """Returns whether a row of the directory is older than a grant that is known here.

    A seed says so that was replaced, and doesn't know it: this host itself, perhaps. That nobody owns a group isn't
    said by such a one.
    """
    return row is not None and row.grant.number < number


def drop_stale(dropped: Callable[[Sequence[Place]], None]) -> Steps[bool]:
    """Drops what this host keeps of groups that were handed over since, or are its own, or nobody's.

    Returns whether the directory has answered for all of them.

    Args:
        dropped: is told whose bytes these were: an audit finds out whether records name them.
    """
    standing = yield from view(own_standing)
    after: bytes = b""
    while page := (yield from view(lambda tables, start=after: tables.all_backups(start, ROWS_LIMIT))):
        after = page[-1][0]
        groups = groups_of(key for key, _ in page)
        answer = yield from send(standing.seed, FindOwners(groups, (0,) * len(groups)))
        if not isinstance(answer, Owners):
            return False
        row_of = dict(zip(groups, answer.rows, strict=True))
        stale: list[tuple[bytes, Backup]] = []
        for key, backup in page:
            row = row_of[group_of(key)]
            if is_outdated(row, backup.number):
                continue
            if row is None or row.owner == standing.member or backup.number < row.first:
                stale.append((key, backup))
        if stale:
            yield from transact(lambda tables, some=stale: _drop_backups(tables, some))
            dropped([place for _, backup in stale for place in backup.places])
        yield from pause(_BETWEEN)
    return True


def _drop_backups(tables: Tables, rows: Sequence[tuple[bytes, Backup]]) -> None:
    for key, backup in rows:
        if tables.backup(key) == backup:
            tables.drop_backup(key)


# --- the seed ---------------------------------------------------------------------------------------------------------


def heirs(roster: Roster, members: Sequence[Member], departed: Sequence[Departed]) -> tuple[Departed, ...]:
    """Returns the members without whom the next roster is, and whose groups have no owner, with their heirs."""
    ids = {member.id for member in members}
    able = [member for member in members if member.is_owner and not roster.is_leaver(member.id)]
    able = able or [member for member in members if member.is_owner or member.id in roster.holders] or list(members)
    able.sort(key=lambda member: member.id)
    found = [one for one in departed if one.member.id not in ids]
    for member in roster.members:
        is_owner = member.is_owner or member.id in roster.holders
        if member.id not in ids and is_owner:
            found.append(Departed(member, b""))
    return tuple(
        one if one.heir in ids else Departed(one.member, able[crc32(one.member.id) % len(able)].id) for one in found
    )


def is_pending(tables: Tables, roster: Roster, groups: Collection[bytes]) -> bool:
    """Returns whether one of these groups was a removed member's, and isn't its heir's yet."""
    waiting = {one.member.id for one in roster.departed if not one.is_ready}
    if not waiting:
        return False
    rows = (tables.ownership(group) for group in groups)
    return any(row is not None and row.owner in waiting and row.giver not in roster.ids for row in rows)


# --- the heir ---------------------------------------------------------------------------------------------------------


Left = Callable[[bytes], Sequence[tuple[bytes, Entry]] | None]
"""Reads what a removed member has put into groups of its own, by key. None: it can't be read now."""


class Recovery:
    """What this host does as an heir, since its index process was started.

    Args:
        left: on storage that hosts share.

    Attributes:
        silent: members that have not said yet what they keep.
    """

    def __init__(self, left: Left | None = None) -> None:
        self.silent: tuple[Member, ...] = ()
        self._left = left
        self._found: dict[bytes, Sequence[tuple[bytes, Entry]]] = {}  # what `left` has read, by member
        self._groups: dict[bytes, list[bytes]] = {}  # by member, names of the groups that it owned, for people

    def run(self) -> Steps[bool]:
        """Goes on as far as it comes. Returns whether this host is to open groups."""
        standing = yield from view(lambda tables: tables.standing())
        if standing is None or not standing.may_change:
            return False
        own = [one for one in standing.roster.departed if one.heir == standing.member]
        for one in own:
            if not one.is_ready:
                found = yield from self._collect(standing, one.member.id)
                if found is not None:
                    yield from send(standing.seed, Recovered(one.member.id, standing.member, is_over=not found))
            elif not (yield from view(lambda tables, one=one: _has_kept(tables, one.member.id))):
                self._found.pop(one.member.id, None)
                yield from tell_lost(one.member.label, self._groups.pop(one.member.id, []))
                yield from send(standing.seed, Recovered(one.member.id, standing.member, is_over=True))
        if not own:
            self.silent = ()
        return bool(own)

    def _collect(self, standing: Standing, dead: bytes) -> Steps[bool | None]:
        """Asks all members what they keep of a member's groups. Returns whether it had any; None: not all have said."""
        after, found = 0, False
        while True:
            answer = yield from self._ask_seed(standing, Inherit(dead, after))
            if not isinstance(answer, Inherited):
                return None
            rows = {row.group: row for row in answer.rows}
            if not after:
                self._groups[dead] = []
            found = found or bool(rows)
            if rows and not (yield from self._collect_groups(standing, dead, rows)):
                return None
            lost = yield from view(lambda tables, rows=rows: [name for name in rows if not _is_whole(tables, name)])
            self._groups[dead] += lost[: LOST_LIMIT - len(self._groups[dead])]
            if not answer.after:
                return found
            after = answer.after

    def _ask_seed(self, standing: Standing, request: Inherit) -> Steps[Answer | None]:
        return (yield from send(standing.seed, request))

    def _collect_groups(self, standing: Standing, dead: bytes, rows: Mapping[bytes, Ownership]) -> Steps[bool]:
        first_asked = FindBackups(dead, tuple(sorted(rows)))
        asked: list[tuple[Member, FindBackups]] = [(member, first_asked) for member in standing.roster.members]
        merging: Steps[None] | None = None
        while asked:  # for the next portion while this one is written
            answers = yield from self._ask_keepers(standing, asked, merging)
            self.silent = tuple(
                member for (member, _), answer in zip(asked, answers, strict=True) if not isinstance(answer, BackedUp)
            )
            if self.silent:
                return False
            said, asked_before, asked = list[tuple[bytes, BackedUp]](), asked, []
            for (member, request), answer in zip(asked_before, answers, strict=True):
                assert isinstance(answer, BackedUp)
                said.append((member.id, answer))
                if answer.after:
                    left = tuple(group for group in request.groups if group >= group_of(answer.after))
                    asked.append((member, FindBackups(dead, left, answer.after)))
            merging = _merge_all(dead, rows, said)
        if merging is not None:
            yield from merging
        return (yield from self._read_left(dead, rows))

    def _ask_keepers(
        self, standing: Standing, asked: Sequence[tuple[Member, FindBackups]], meanwhile: Steps[None] | None
    ) -> Steps[list[Answer | None]]:
        """Asks members, of which this host may be one. Returns their answers in this order."""
        others = [(member, request) for member, request in asked if member.id != standing.member]
        answers = iter((yield from send_all(others, meanwhile)))
        found: list[Answer | None] = []
        for member, request in asked:
            if member.id != standing.member:
                found.append(next(answers))
            else:
                here = yield from view(lambda tables, it=request: find_backups(tables, own_standing(tables), it))
                found.append(here)
        return found

    def _read_left(self, dead: bytes, rows: Mapping[bytes, Ownership]) -> Steps[bool]:
        """Takes in what the member has left of these groups. Returns whether it could be read."""
        if self._left is None:
            return True
        found = self._found.get(dead)
        if found is None:
            found = self._left(dead)  # once all members know of the removal
            if found is None:
                return False
            self._found[dead] = found
        some = [(key, _left_backup(rows[group_of(key)], entry)) for key, entry in found if group_of(key) in rows]
        counting = [(key, backup) for key, backup in some if backup is not None]
        for first in range(0, len(counting), _AT_ONCE):
            portion = counting[first : first + _AT_ONCE]
            yield from transact(lambda tables, some=portion: _merge(tables, dead, dead, rows, some))
            yield from pause(SOON)
        return True


def _left_backup(row: Ownership, entry: Entry) -> Backup | None:
    """Returns what a file of the owner stands for; None: it may be of an earlier time when it owned the group.

    *Schedule:* a group is handed over, its next owner deletes a key, and hands it back; the file's host has not heard
    yet that it is to go, and dies. So nothing of a group that was handed over to it counts, but from an heir's time on.
    """
    is_first = not row.grant.after or row.grant.recovered == row.grant.epoch
    if not is_first or entry.version < row.grant.epoch << EPOCH_BITS:
        return None
    return Backup(entry.version, row.grant.number, entry.body, entry.places)


def are_there(tables: Tables, standing: Standing, places: Collection[Place]) -> bool:
    """Returns whether bytes lie on members, or on storage that hosts share."""
    there = standing.roster.ids | {standing.member}  # its own removal may not count yet
    return tables.is_shared or all(place.host in there for place in places)


def _is_whole(tables: Tables, group: bytes) -> bool:
    """Returns whether all that was acknowledged of a group is there, most likely.

    Its puts waited for a second host; or it is one key, and is there: of this an older version doesn't come back. What
    had no replica yet, of sharded puts, or from before there was a policy, nobody knows.
    """
    standing, flat = own_standing(tables), tables.kept_of([group]).get(group) if group else None
    if flat is not None and are_there(tables, standing, flat.places):
        return True
    policy = standing.roster.policy_of(group)
    return policy is not None and not policy.is_async and tables.kept(group) is not None


def tell_lost(who: str, names: Sequence[bytes]) -> Steps[None]:
    """Tells all members, once, what was lost with a host that was removed: people ask any of them."""
    names = [name for name in names if name][:LOST_LIMIT]
    if not names:
        return
    shown = ", ".join(repr(name.decode(errors="replace")) for name in names[:_SHOWN])
    more = ", ..." if len(names) > _SHOWN else ""
    log.warning("%s was removed, and what lay there alone is lost, of: %s%s", who, shown, more)
    standing = yield from transact(lambda tables: note_lost(tables, who, names))
    if standing is not None:
        others = [member for member in standing.roster.members if member.id != standing.member]
        yield from send_all([(member, Lost(who[:_LONGEST_WHO], tuple(names))) for member in others])


def note_lost(tables: Tables, who: str, names: Sequence[bytes]) -> Standing | None:
    left = LOST_LIMIT - tables.count_lost()
    for name in names[: max(left, 0)]:
        tables.note_lost(name, who)
    return tables.standing()


def _has_kept(tables: Tables, dead: bytes) -> bool:
    after: bytes | None = None
    while page := tables.all_kept(after, ROWS_LIMIT):
        if any(kept.giver == dead for _, kept in page):
            return True
        after = page[-1][0]
    return False


def _merge_all(dead: bytes, groups: Mapping[bytes, Ownership], said: Sequence[tuple[bytes, BackedUp]]) -> Steps[None]:
    for host, answer in said:
        for first in range(0, len(answer.rows), _AT_ONCE):
            some = answer.rows[first : first + _AT_ONCE]
            yield from transact(lambda tables, host=host, some=some: _merge(tables, dead, host, groups, some))
            yield from pause(SOON)


def _merge(
    tables: Tables,
    dead: bytes,
    host: bytes,
    groups: Mapping[bytes, Ownership],
    rows: Sequence[tuple[bytes, Backup]],
) -> None:
    """Keeps the largest version of each key, and notes who else keeps one. The dead host keeps none."""
    taken, counting = dict[bytes, bool](), list[tuple[bytes, Backup]]()
    for key, backup in rows:
        row = groups.get(group_of(key))
        if row is None or backup.number < row.first:
            continue
        if row.group not in taken:
            taken[row.group] = _begin(tables, dead, row)
        if taken[row.group]:
            counting.append((key, backup))
    known_of, newer = tables.kept_of([key for key, _ in counting]), dict[bytes, Entry | None]()
    for key, backup in counting:
        known = known_of.get(key)
        if known is not None:
            is_whole = all(place.host == host for place in backup.places)  # else one of its bytes may be gone
            if known.version >= backup.version + (is_whole and known.version == backup.version):
                continue
        newer[key] = Entry(backup.version, backup.body, backup.places, backup.is_mutable, backup.history)
    tables.keep(newer)
    if host not in (own_standing(tables).member, dead):
        add_keepers(tables, host, {key: backup.version for key, backup in counting})


def _begin(tables: Tables, dead: bytes, row: Ownership) -> bool:
    """Notes that records of a group are kept here, as of a hand-over. Returns whether they are to be."""
    if tables.owned(row.group) is not None:
        return False
    kept = tables.kept(row.group)
    if kept is not None and kept.of != row.grant.number:  # of a hand-over that came to nothing
        tables.drop_kept(row.group)
    if kept is None or kept.of != row.grant.number or kept.version is None:
        tables.put_kept(row.group, KeptGroup(dead, row.grant.number, 0, is_free=True))
    return True
