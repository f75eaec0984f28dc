"""A host's catalog and segments as dicts, for the simulation."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from memstore.distributed.rules import Entry, Joining, LastCall, Lent, Outcome, Part, Place, Standing
from memstore.distributed.rules.members import EPOCH_BITS
from memstore.errors import CorruptionError
from tests.support.explore import Fault

MERGED = b"merged "  # what bodies of sharded values begin with


def body_of(value: int, places: tuple[Place, ...]) -> bytes:
    return MERGED + msgspec.msgpack.encode((value, places))


def merged_of(body: bytes) -> tuple[int, tuple[Place, ...]]:
    return msgspec.msgpack.decode(body[len(MERGED) :], type=tuple[int, tuple[Place, ...]])


@dataclass
class Segment:
    """What its bytes are, and what says that it is live: "" (it is being filled), "own", "lent" or "part" (not yet)."""

    value: int
    state: str = ""


@dataclass
class SimTables:
    member: bytes
    version: int = 0
    number: int = 0  # of sessions and puts
    records: dict[bytes, Entry] = field(default_factory=dict[bytes, Entry])
    damaged: set[bytes] = field(default_factory=set[bytes])  # keys
    passed_over: list[bytes] = field(default_factory=list[bytes])
    own_standing: Standing | None = None
    changes_of_standing: int = 0
    open_sessions: set[int] = field(default_factory=set[int])
    lasting_sessions: set[int] = field(default_factory=set[int])
    ended_sessions: dict[int, int] = field(default_factory=dict[int, int])  # and when
    calls: dict[tuple[int, int], LastCall] = field(default_factory=dict[tuple[int, int], LastCall])
    segments: dict[int, Segment] = field(default_factory=dict[int, Segment])
    lendings: dict[Place, Lent] = field(default_factory=dict[Place, Lent])
    from_before: dict[bytes, Joining] = field(default_factory=dict[bytes, Joining])
    debts: dict[Place, None] = field(default_factory=dict[Place, None])
    pending: dict[tuple[bytes, str, int], tuple[Part, bytes]] = field(
        default_factory=dict[tuple[bytes, str, int], tuple[Part, bytes]]
    )
    ends: dict[tuple[bytes, str], Outcome] = field(default_factory=dict[tuple[bytes, str], Outcome])
    published: dict[bytes, int] = field(default_factory=dict[bytes, int])  # the latest attempt of each key
    clock: Callable[[], int] = lambda: 0

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

    def put_damaged(self, key: bytes) -> None:
        if key not in self.records:
            self.damaged.add(key)

    def delete_record(self, key: bytes) -> None:
        self.records.pop(key, None)

    def page(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]:
        keys = sorted(key for key in {*self.records, *self.damaged} if key.startswith(prefix))
        first = bisect.bisect_right(keys, after)
        return [(key, None if key in self.damaged else self.records[key]) for key in keys[first : first + limit]]

    def pass_over(self, key: bytes, why: CorruptionError) -> None:
        self.passed_over.append(key)

    # --- the cluster --------------------------------------------------------------------------------------------------

    def standing(self) -> Standing | None:
        return self.own_standing

    def put_standing(self, standing: Standing) -> None:
        if self.own_standing is not None and self.own_standing.view.epoch > standing.view.epoch:
            raise Fault(f"the epoch goes back from {self.own_standing.view.epoch} to {standing.view.epoch}")
        self.own_standing = standing
        self.changes_of_standing += 1

    def membership(self) -> int:
        return self.changes_of_standing

    # --- calls --------------------------------------------------------------------------------------------------------

    def new_session(self, *, lasts: bool = False) -> int:
        self.number += 1
        self.open_sessions.add(self.number)
        if lasts:
            self.lasting_sessions.add(self.number)
        return self.number

    def lasts(self, session: int) -> bool:
        return session in self.lasting_sessions

    def has_session(self, session: int) -> bool:
        return session in self.open_sessions

    def sessions(self, after: int, limit: int) -> list[int]:
        return sorted(session for session in self.open_sessions if session > after)[:limit]

    def end_session(self, session: int) -> None:
        self.open_sessions.discard(session)
        self.lasting_sessions.discard(session)
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
        self.segments[place.put_id].state = "own"

    def lend(self, place: Place, lent: Lent) -> None:
        if place.put_id not in self.segments:
            raise Fault(f"{lent.key!r}: bytes are lent that have been given back")
        self.lendings[place] = lent
        self.segments[place.put_id].state = "lent"

    def is_there(self, place: Place) -> bool:
        return place.put_id in self.segments

    def retire(self, place: Place) -> None:
        self.lendings.pop(place, None)
        self.segments.pop(place.put_id, None)

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

    def parts(self, key: bytes | None = None, attempt: str | None = None) -> list[Part]:
        found = [part for part, _ in self.pending.values()]
        found = [part for part in found if key in (None, part.key) and attempt in (None, part.attempt)]
        return sorted(found, key=lambda part: (part.key, part.attempt, part.rank))

    def content(self, part: Part) -> bytes:
        return self.pending[part.key, part.attempt, part.rank][1]

    def put_part(self, part: Part, content: bytes | None) -> None:
        name = part.key, part.attempt, part.rank
        if part.place.host == self.member and part.places:
            if part.place.put_id not in self.segments:
                raise Fault(f"{name} names bytes that have been given back")
            self.segments[part.place.put_id].state = self.segments[part.place.put_id].state or "part"
        self.pending[name] = part, self.content(part) if content is None else content

    def delete_part(self, part: Part) -> None:
        del self.pending[part.key, part.attempt, part.rank]

    def outcome(self, key: bytes, attempt: str) -> Outcome | None:
        return self.ends.get((key, attempt))

    def outcomes(self) -> list[Outcome]:
        return list(self.ends.values())

    def put_outcome(self, outcome: Outcome) -> None:
        if outcome.version > self.version >> EPOCH_BITS << EPOCH_BITS:  # else it is of another home
            if outcome.number < self.published.get(outcome.key, 0):
                raise Fault(f"{outcome} was published after a later one")
            self.published[outcome.key] = outcome.number
        self.ends[outcome.key, outcome.attempt] = outcome

    def drop_outcomes(self, limit: int) -> None:
        for name, outcome in list(self.ends.items())[:limit]:
            if outcome.expires <= self.clock():
                del self.ends[name]

    # --- debts --------------------------------------------------------------------------------------------------------

    def owe(self, place: Place) -> None:
        self.debts[place] = None

    def settle(self, place: Place) -> None:
        self.debts.pop(place, None)

    def owed(self, limit: int) -> list[Place]:
        return list(self.debts)[:limit]

    # --- keys from before ---------------------------------------------------------------------------------------------

    def put_joining(self, key: bytes, row: Joining) -> None:
        self.from_before[key] = row

    def delete_joining(self, key: bytes) -> None:
        del self.from_before[key]

    def joining(self, limit: int) -> list[tuple[bytes, Joining]]:
        return sorted(self.from_before.items(), key=lambda row: row[0])[:limit]
