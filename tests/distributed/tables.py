"""A host's catalog and segments as dicts, for the simulation."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from memstore.distributed import Entry, Joining, LastCall, Lent, Place, Standing
from memstore.testing.explore import Fault


@dataclass
class Segment:
    """What its bytes are, and what says that it is live: "" (it is being filled), "own" or "lent"."""

    value: int
    state: str = ""


@dataclass
class SimTables:
    member: bytes
    version: int = 0
    number: int = 0  # of sessions and puts
    records: dict[bytes, Entry] = field(default_factory=dict[bytes, Entry])
    own_standing: Standing | None = None
    changes_of_standing: int = 0
    sessions: set[int] = field(default_factory=set[int])
    calls: dict[tuple[int, int], LastCall] = field(default_factory=dict[tuple[int, int], LastCall])
    segments: dict[int, Segment] = field(default_factory=dict[int, Segment])
    lendings: dict[int, Lent] = field(default_factory=dict[int, Lent])
    from_before: dict[bytes, Joining] = field(default_factory=dict[bytes, Joining])
    debts: dict[Place, None] = field(default_factory=dict[Place, None])

    # --- records ------------------------------------------------------------------------------------------------------

    def record(self, key: bytes) -> Entry | None:
        return self.records.get(key)

    def put_record(self, key: bytes, entry: Entry) -> None:
        self.records[key] = entry

    def delete_record(self, key: bytes) -> None:
        del self.records[key]

    def page(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry]]:
        keys = sorted(key for key in self.records if key.startswith(prefix))
        first = bisect.bisect_right(keys, after)
        return [(key, self.records[key]) for key in keys[first : first + limit]]

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

    def new_session(self) -> int:
        self.number += 1
        self.sessions.add(self.number)
        return self.number

    def has_session(self, session: int) -> bool:
        return session in self.sessions

    def end_session(self, session: int) -> None:
        self.sessions.discard(session)
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

    def own(self, put_id: int, key: bytes) -> None:
        if put_id not in self.segments:
            raise Fault(f"{key!r}: its record names bytes that have been given back")
        self.lendings.pop(put_id, None)
        self.segments[put_id].state = "own"

    def lend(self, put_id: int, lent: Lent) -> None:
        if put_id not in self.segments:
            raise Fault(f"{lent.key!r}: bytes are lent that have been given back")
        self.lendings[put_id] = lent
        self.segments[put_id].state = "lent"

    def is_there(self, put_id: int) -> bool:
        return put_id in self.segments

    def retire(self, put_id: int) -> None:
        self.lendings.pop(put_id, None)
        self.segments.pop(put_id, None)

    def lent(self, put_id: int) -> Lent | None:
        return self.lendings.get(put_id)

    def all_lent(self, after: int, limit: int) -> list[tuple[int, Lent]]:
        return sorted((put_id, lent) for put_id, lent in self.lendings.items() if put_id > after)[:limit]

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
