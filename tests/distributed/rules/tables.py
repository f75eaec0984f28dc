"""A host's catalog and segments as dicts, for the simulation."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from memstore.distributed.rules import (
    Entry,
    Grant,
    KeptGroup,
    LastCall,
    LeavingGroup,
    Lent,
    Ownership,
    Place,
    Remembered,
    ReplacedRow,
    Roster,
    Standing,
    dispose,
    group_of,
)
from memstore.distributed.rules.nouns import Backup
from memstore.engine import AttemptOutcome, KeptVersion, PendingPart
from memstore.errors import CorruptionError
from tests.support.explore import Fault

MERGED = b"merged "  # what bodies of sharded values begin with


def body_of(value: int, places: tuple[Place, ...]) -> bytes:
    return MERGED + msgspec.msgpack.encode((value, places))


def merged_of(body: bytes) -> tuple[int, tuple[Place, ...]]:
    return msgspec.msgpack.decode(body[len(MERGED) :], type=tuple[int, tuple[Place, ...]])


@dataclass
class Segment:
    """What its bytes are, and what says that it is live: "" (it is being filled), "own", "lent" or "part" (not yet).

    `header`: of a file: the key, and the record that named it when it became live; None: it became live for others.
    """

    value: int
    state: str = ""
    header: tuple[bytes, Entry] | None = None


@dataclass
class SimTables:
    member: bytes
    is_shared: bool = False
    version: int = 0
    number: int = 0  # of sessions and puts
    records: dict[bytes, Entry] = field(default_factory=dict[bytes, Entry])
    replaced: dict[bytes, dict[int, Entry]] = field(default_factory=dict[bytes, dict[int, Entry]])
    damaged: set[bytes] = field(default_factory=set[bytes])  # keys
    passed_over: list[bytes] = field(default_factory=list[bytes])
    own_standing: Standing | None = None
    open_sessions: set[int] = field(default_factory=set[int])
    ended_sessions: dict[int, int] = field(default_factory=dict[int, int])  # and when
    calls: dict[tuple[int, int], LastCall] = field(default_factory=dict[tuple[int, int], LastCall])
    segments: dict[int, Segment] = field(default_factory=dict[int, Segment])
    retired: dict[int, Segment] = field(default_factory=dict[int, Segment])  # their headers say so
    lendings: dict[Place, Lent] = field(default_factory=dict[Place, Lent])
    own_groups: dict[bytes, Grant] = field(default_factory=dict[bytes, Grant])
    leaving_groups: dict[bytes, LeavingGroup] = field(default_factory=dict[bytes, LeavingGroup])
    kept_groups: dict[bytes, KeptGroup] = field(default_factory=dict[bytes, KeptGroup])
    kept_records: dict[bytes, Entry | None] = field(default_factory=dict[bytes, Entry | None])
    directory: dict[bytes, Ownership] = field(default_factory=dict[bytes, Ownership])
    granted: int = 0
    mirrored: tuple[int, int] = (0, 0)
    early_promise: tuple[bytes, int] = (b"", 0)
    changes: int = 0  # of what this host owns
    debts: dict[Place, None] = field(default_factory=dict[Place, None])
    pending: dict[tuple[bytes, str, int], tuple[PendingPart, bytes]] = field(
        default_factory=dict[tuple[bytes, str, int], tuple[PendingPart, bytes]]
    )
    ends: dict[tuple[bytes, str], AttemptOutcome] = field(default_factory=dict[tuple[bytes, str], AttemptOutcome])
    published: dict[bytes, int] = field(default_factory=dict[bytes, int])  # the latest attempt of each key
    backups: dict[bytes, Backup] = field(default_factory=dict[bytes, Backup])
    voids: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])
    keeping: dict[bytes, tuple[tuple[bytes, int], ...]] = field(
        default_factory=dict[bytes, tuple[tuple[bytes, int], ...]]
    )
    unnoted: set[bytes] = field(default_factory=set[bytes])
    lacks: dict[bytes, bool] = field(default_factory=dict[bytes, bool])
    lacks_of: dict[bytes, int] = field(default_factory=dict[bytes, int])
    batches: dict[int, tuple[bytes, ...]] = field(default_factory=dict[int, tuple[bytes, ...]])
    replicated: dict[bytes, tuple[bytes, int]] = field(default_factory=dict[bytes, tuple[bytes, int]])
    lost: dict[bytes, str] = field(default_factory=dict[bytes, str])
    remembering: bool = False
    memory: dict[bytes, Remembered] = field(default_factory=dict[bytes, Remembered])
    clock: Callable[[], int] = lambda: 0
    changed: Callable[[Roster, Roster], None] = lambda before, after: None  # told of each roster that is written
    owns: Callable[[bytes], None] = lambda group: None  # told of each group that this host begins to own
    hands: Callable[[bytes], None] = lambda group: None  # and of each that it begins to hand over

    # --- records ------------------------------------------------------------------------------------------------------

    def record(self, key: bytes) -> Entry | None:
        if key in self.damaged:
            raise CorruptionError("its record is damaged", key=key.decode())
        return self.records.get(key)

    def head(self, key: bytes) -> Entry | None:
        entry = self.record(key)
        return None if entry is None else msgspec.structs.replace(entry, body=b"")

    def put_record(self, key: bytes, entry: Entry) -> None:
        if entry.body.startswith(MERGED) and merged_of(entry.body)[1] != entry.places:
            raise Fault(f"{merged_of(entry.body)} was merged, and {entry.places} are named")
        self.records[key] = entry
        self.damaged.discard(key)

    def put_records(self, entries: Sequence[tuple[bytes, Entry]]) -> dict[bytes, CorruptionError]:
        for key, entry in entries:
            self.put_record(key, msgspec.structs.replace(entry, replaced=()))
        return {}

    def put_damaged(self, key: bytes) -> None:
        if key not in self.records:
            self.damaged.add(key)

    def delete_record(self, key: bytes) -> None:
        self.records.pop(key, None)

    def hold_to_quotas(self, keys: Sequence[bytes]) -> None:
        """Does nothing: tests of quotas are over real catalogs."""

    def page(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]:
        keys = sorted(key for key in {*self.records, *self.damaged} if key.startswith(prefix))
        first = bisect.bisect_right(keys, after)
        return [(key, None if key in self.damaged else self.records[key]) for key in keys[first : first + limit]]

    def heads(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]:
        return [
            (key, entry and msgspec.structs.replace(entry, body=b"")) for key, entry in self.page(after, limit, prefix)
        ]

    def groups(self, start: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        firsts: dict[bytes, bytes] = {}  # of each run of keys, its first one
        for key in sorted({*self.records, *self.damaged}):
            if key >= start:
                firsts.setdefault(group_of(key) + b"/" if b"/" in key else key, key)
        keys = list(firsts.values())
        return [group_of(key) for key in keys[:limit]], keys[limit] if len(keys) > limit else None

    def raise_version(self, key: bytes, version: int) -> None:
        if key in self.records:
            self.records[key] = msgspec.structs.replace(self.records[key], version=version)

    def pass_over(self, key: bytes, why: CorruptionError) -> None:
        self.passed_over.append(key)

    # --- versions that were replaced ----------------------------------------------------------------------------------

    def keep_replaced(self, key: bytes) -> None:
        entry = self.records.get(key)
        if entry is not None:
            self.replaced.setdefault(key, {})[entry.version] = entry

    def replaced_versions(self, key: bytes) -> list[KeptVersion]:
        """Each takes a byte for each of its places, or else of its body."""
        kept = self.replaced.get(key, {})
        return [KeptVersion(b"", one, len(kept[one].places) or len(kept[one].body)) for one in sorted(kept)]

    def replaced_version(self, key: bytes, version: int) -> Entry | None:
        return self.replaced.get(key, {}).get(version)

    def put_replaced(self, key: bytes, entry: Entry) -> None:
        for place in entry.places:
            if place.host == self.member:
                if place.put_id not in self.segments:
                    raise Fault(f"{key!r}: a replaced version names bytes that have been given back")
                self.lendings.pop(place, None)
                self.segments[place.put_id].state = "own"
        self.replaced.setdefault(key, {})[entry.version] = entry

    def drop_replaced(self, key: bytes, version: int) -> Entry | None:
        kept = self.replaced.get(key, {})
        entry = kept.pop(version, None)
        if not kept:
            self.replaced.pop(key, None)
        return entry

    def all_replaced(self, after: bytes, limit: int) -> list[ReplacedRow]:
        rows = [
            ReplacedRow(key + b"\0%020d" % version, key, msgspec.structs.replace(entry, body=b""))
            for key, kept in self.replaced.items()
            for version, entry in kept.items()
        ]
        return sorted(row for row in rows if row.name > after)[:limit]

    def pinned(self, key: bytes) -> frozenset[int]:
        return frozenset()

    # --- the cluster --------------------------------------------------------------------------------------------------

    def standing(self) -> Standing | None:
        return self.own_standing

    def put_standing(self, standing: Standing) -> None:
        old = self.own_standing
        if old is not None and (
            old.roster.position > standing.roster.position
            or old.floor > standing.floor
            or old.promised > standing.promised
        ):
            raise Fault(f"the standing goes back from {old} to {standing}")
        if (
            old is None
            or standing.is_removed
            or old.is_joining != standing.is_joining
            or standing.is_sealed
            or old.roster.policies != standing.roster.policies
        ):
            self.changes += 1
        self.own_standing = standing
        if old is not None and old.roster != standing.roster:
            self.changed(old.roster, standing.roster)
        if old is None:
            for group in self.own_groups:
                self.owns(group)

    def membership(self) -> int:
        return self.changes

    def owned(self, group: bytes) -> Grant | None:
        return self.own_groups.get(group)

    def put_owned(self, group: bytes, grant: Grant) -> None:
        self.own_groups[group] = grant
        self.owns(group)

    def drop_owned(self, group: bytes) -> None:
        del self.own_groups[group]
        self.changes += 1

    def all_owned(self, after: bytes | None, limit: int) -> list[tuple[bytes, Grant]]:
        return [row for row in sorted(self.own_groups.items()) if after is None or row[0] > after][:limit]

    def leaving(self, group: bytes) -> LeavingGroup | None:
        return self.leaving_groups.get(group)

    def put_leaving(self, group: bytes, leaving: LeavingGroup) -> None:
        self.hands(group)
        self.leaving_groups[group] = leaving
        self.changes += 1

    def drop_leaving(self, group: bytes) -> None:
        self.leaving_groups.pop(group, None)

    def all_leaving(self) -> list[tuple[bytes, LeavingGroup]]:
        return list(self.leaving_groups.items())

    def kept(self, group: bytes) -> KeptGroup | None:
        return self.kept_groups.get(group)

    def put_kept(self, group: bytes, kept: KeptGroup) -> None:
        self.kept_groups[group] = kept

    def drop_kept(self, group: bytes) -> None:
        self.kept_groups.pop(group, None)
        for key in [key for key in self.kept_records if group_of(key) == group]:
            del self.kept_records[key]

    def all_kept(self, after: bytes | None = None, limit: int = 1 << 20) -> list[tuple[bytes, KeptGroup]]:
        return [row for row in sorted(self.kept_groups.items()) if after is None or row[0] > after][:limit]

    def keep(self, rows: Mapping[bytes, Entry | None]) -> None:
        self.kept_records.update(rows)

    def kept_page(self, group: bytes, limit: int) -> list[tuple[bytes, Entry | None]]:
        return sorted(row for row in self.kept_records.items() if group_of(row[0]) == group)[:limit]

    def kept_of(self, keys: Sequence[bytes]) -> dict[bytes, Entry | None]:
        return {key: self.kept_records[key] for key in keys if key in self.kept_records}

    def take_kept(self, group: bytes, limit: int) -> list[tuple[bytes, Entry | None]]:
        page = self.kept_page(group, limit)
        for key, _ in page:
            del self.kept_records[key]
        return page

    # --- the directory ------------------------------------------------------------------------------------------------

    def ownership(self, group: bytes) -> Ownership | None:
        return self.directory.get(group)

    def ownerships_of(self, groups: Sequence[bytes]) -> dict[bytes, Ownership]:
        return {group: self.directory[group] for group in groups if group in self.directory}

    def put_ownerships(self, rows: Sequence[Ownership]) -> None:
        self.directory.update((row.group, row) for row in rows)

    def drop_ownership(self, group: bytes) -> None:
        del self.directory[group]

    def ownerships(self, after: int, limit: int) -> list[Ownership]:
        rows = [row for row in self.directory.values() if row.grant.number > after]
        return sorted(rows, key=lambda row: row.grant.number)[:limit]

    # --- calls --------------------------------------------------------------------------------------------------------

    def new_session(self) -> int:
        self.number += 1
        self.open_sessions.add(self.number)
        return self.number

    def has_session(self, session: int) -> bool:
        return session in self.open_sessions

    def sessions(self, after: int, limit: int) -> list[int]:
        return sorted(session for session in self.open_sessions if session > after)[:limit]

    def end_session(self, session: int) -> None:
        self.open_sessions.discard(session)
        self.ended_sessions[session] = self.clock()
        for lane in [lane for lane in self.calls if lane[0] == session]:
            del self.calls[lane]

    def last_call(self, session: int, lane: int) -> LastCall | None:
        return self.calls.get((session, lane))

    def put_last_call(self, session: int, lane: int, call: LastCall) -> None:
        self.calls[session, lane] = call

    # --- segments -----------------------------------------------------------------------------------------------------

    def fill(self, value: int) -> int:
        """Steps 1 to 3 of a put: a new segment with these bytes. Returns the put id."""
        self.number += 1
        self.segments[self.number] = Segment(value)
        return self.number

    def own(self, place: Place, key: bytes) -> None:
        if place.put_id not in self.segments:
            raise Fault(f"{key!r}: its record names bytes that have been given back")
        self.lendings.pop(place, None)
        segment = self.segments[place.put_id]
        if segment.state in ("", "part") and key in self.records:
            segment.header = key, self.records[key]
        segment.state = "own"

    def lend(self, place: Place, lent: Lent) -> None:
        if place.put_id not in self.segments:
            raise Fault(f"{lent.key!r}: bytes are lent that have been given back")
        self.lendings[place] = lent
        self.segments[place.put_id].state = "lent"

    def is_there(self, place: Place) -> bool:
        return place.put_id in self.segments

    def retire(self, place: Place) -> None:
        self.lendings.pop(place, None)
        retired = self.segments.pop(place.put_id, None)
        if retired is not None:
            self.retired[place.put_id] = retired

    def left(self) -> list[tuple[bytes, Entry]]:
        """What the headers of its files say that are there, of the newest version of each key."""
        newest: dict[bytes, Entry] = {}
        for segment in self.segments.values():
            if segment.header is not None:
                key, entry = segment.header
                if all(map(self.is_there, entry.places)) and entry.version > newest.get(key, Entry(0, b"")).version:
                    newest[key] = entry
        return sorted(newest.items())

    def lent(self, place: Place) -> Lent | None:
        return self.lendings.get(place)

    def all_lent(self, after: int, limit: int) -> list[tuple[Place, Lent]]:
        rows = [(place, lent) for place, lent in self.lendings.items() if place.put_id > after]
        return sorted(rows, key=lambda row: row[0].put_id)[:limit]

    # --- sharded puts -------------------------------------------------------------------------------------------------

    def now(self) -> int:
        return self.clock()

    def new_number(self) -> int:
        self.number += 1
        return self.number

    def parts(self, key: bytes | None = None, attempt: str | None = None) -> list[PendingPart]:
        found = [part for part, _ in self.pending.values()]
        found = [part for part in found if key in (None, part.key) and attempt in (None, part.attempt)]
        return sorted(found, key=lambda part: (part.key, part.attempt, part.rank))

    def content(self, part: PendingPart) -> bytes:
        return self.pending[part.key, part.attempt, part.rank][1]

    def put_part(self, part: PendingPart, content: bytes | None) -> None:
        name = part.key, part.attempt, part.rank
        if part.host == self.member and part.places:
            if part.place.put_id not in self.segments:
                raise Fault(f"{name} names bytes that have been given back")
            self.segments[part.place.put_id].state = self.segments[part.place.put_id].state or "part"
        self.pending[name] = part, self.content(part) if content is None else content

    def delete_part(self, part: PendingPart) -> None:
        del self.pending[part.key, part.attempt, part.rank]

    def has_bytes(self, part: PendingPart) -> bool:
        return part.host != self.member or self.is_there(part.place)

    def drop_bytes(self, part: PendingPart) -> None:
        dispose(self, self.standing(), part.places)

    def outcome(self, key: bytes, attempt: str) -> AttemptOutcome | None:
        return self.ends.get((key, attempt))

    def outcomes(self) -> list[AttemptOutcome]:
        return list(self.ends.values())

    def put_outcome(self, outcome: AttemptOutcome) -> None:
        if outcome.version and group_of(outcome.key) in self.own_groups:  # else it is of the owner before
            if outcome.number < self.published.get(outcome.key, 0):
                raise Fault(f"{outcome} was published after a later one")
            self.published[outcome.key] = outcome.number
        self.ends[outcome.key, outcome.attempt] = outcome

    def drop_outcomes(self, limit: int) -> None:
        for name, outcome in list(self.ends.items())[:limit]:
            if outcome.expires <= self.clock():
                del self.ends[name]

    def tell(self, key: bytes) -> None:
        """Who waits looks again and again."""

    def tell_all(self) -> None:
        """As `tell`."""

    # --- backups ------------------------------------------------------------------------------------------------------

    def backup(self, key: bytes) -> Backup | None:
        return self.backups.get(key)

    def put_backup(self, key: bytes, backup: Backup) -> None:
        self.backups[key] = backup

    def drop_backup(self, key: bytes) -> None:
        self.backups.pop(key, None)

    def backups_of(self, group: bytes, after: bytes, limit: int) -> list[tuple[bytes, Backup]]:
        rows = [row for row in sorted(self.backups.items()) if group_of(row[0]) == group]
        return [row for row in rows if row[0] > after][:limit]

    def all_backups(self, after: bytes, limit: int) -> list[tuple[bytes, Backup]]:
        return [row for row in sorted(self.backups.items()) if row[0] > after][:limit]

    def void(self, key: bytes) -> tuple[int, int]:
        return self.voids.get(key, (0, 0))

    def put_void(self, key: bytes, version: int) -> None:
        self.voids[key] = (version, self.clock())

    def has_voids(self, until: int) -> bool:
        return any(since < until for _, since in self.voids.values())

    def drop_voids(self, until: int, limit: int) -> None:
        for key in [key for key, (_, since) in self.voids.items() if since < until][:limit]:
            del self.voids[key]

    def keepers(self, key: bytes) -> tuple[tuple[bytes, int], ...]:
        return self.keeping.get(key, ())

    def put_keepers(self, key: bytes, keepers: Sequence[tuple[bytes, int]]) -> None:
        if keepers:
            self.keeping[key] = tuple(keepers)
        else:
            self.keeping.pop(key, None)

    def keepers_of(self, keys: Sequence[bytes]) -> dict[bytes, tuple[tuple[bytes, int], ...]]:
        return {key: self.keeping[key] for key in keys if key in self.keeping}

    def put_keepers_of(self, rows: Mapping[bytes, Sequence[tuple[bytes, int]]]) -> None:
        for key, keepers in rows.items():
            self.put_keepers(key, keepers)

    def all_keepers(self, after: bytes, limit: int) -> list[tuple[bytes, tuple[tuple[bytes, int], ...]]]:
        return sorted(row for row in self.keeping.items() if row[0] > after)[:limit]

    def is_unnoted(self, key: bytes) -> bool:
        return key in self.unnoted

    def put_unnoted(self, key: bytes, unnoted: bool) -> None:
        if unnoted:
            self.unnoted.add(key)
        else:
            self.unnoted.discard(key)

    def all_unnoted(self, after: bytes, limit: int) -> list[bytes]:
        return [key for key in sorted(self.unnoted) if key > after][:limit]

    def lacking(self, key: bytes) -> bool | None:
        return self.lacks.get(key)

    def put_lacking(self, key: bytes, holds: bool | None, batch: int = 0) -> None:
        self.lacks_of.pop(key, None)
        if holds is None:
            self.lacks.pop(key, None)
        else:
            self.lacks[key] = holds
        if batch and holds is not None:
            self.lacks_of[key] = batch

    def batch_of(self, key: bytes) -> int:
        return self.lacks_of.get(key, 0)

    def batch(self, number: int) -> tuple[bytes, ...]:
        return self.batches.get(number, ())

    def put_batch(self, number: int, keys: Sequence[bytes]) -> None:
        if keys:
            self.batches[number] = tuple(keys)
        else:
            self.batches.pop(number, None)

    def all_batches(self, after: int, limit: int) -> list[int]:
        return sorted(number for number in self.batches if number > after)[:limit]

    def replica(self, key: bytes) -> tuple[bytes, int] | None:
        return self.replicated.get(key)

    def put_replica(self, key: bytes, replica: tuple[bytes, int] | None) -> None:
        if replica is None:
            self.replicated.pop(key, None)
        else:
            self.replicated[key] = replica

    def all_lacking(self, after: bytes, limit: int) -> list[bytes]:
        return [key for key in sorted(self.lacks) if key > after][:limit]

    def have_more(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        return frozenset(keys) & (self.backups.keys() | self.lacks.keys() | self.replicated.keys())

    def note_lost(self, name: bytes, who: str) -> None:
        self.lost[name] = who

    def count_lost(self) -> int:
        return len(self.lost)

    # --- debts --------------------------------------------------------------------------------------------------------

    def owe(self, place: Place) -> None:
        self.debts[place] = None

    def settle(self, place: Place) -> None:
        self.debts.pop(place, None)

    def owed(self, limit: int) -> list[Place]:
        return list(self.debts)[:limit]

    def drop_lost(self, name: bytes, who: str) -> None:
        if not who or self.lost.get(name) == who:
            self.lost.pop(name, None)

    def remembers(self) -> bool:
        return self.remembering

    def put_remembers(self, remembers: bool) -> None:
        self.remembering = remembers

    def remembered(self, key: bytes) -> Remembered | None:
        return self.memory.get(key)

    def put_remembered(self, key: bytes, row: Remembered) -> None:
        self.memory[key] = row

    def forget(self, key: bytes) -> None:
        self.memory.pop(key, None)

    def all_remembered(self, limit: int) -> list[bytes]:
        return sorted(self.memory)[:limit]

    def count_remembered(self) -> int:
        return len(self.memory) + self.remembering
