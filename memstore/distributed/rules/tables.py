"""What the rules ask of a host's catalog. The engine's catalog and the simulated one both have it.

Whatever is done in one call of a `Change` is one transaction under the store's mutex: it is there wholly or not at
all, also after a kill.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from memstore.distributed.rules.attempt_messages import Outcome, Part
from memstore.distributed.rules.members import Standing
from memstore.distributed.rules.messages import Answer, Entry, Place
from memstore.errors import CorruptionError


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """A segment of this host that the record of another home names, or may name soon.

    Attributes:
        home: the member that was asked to name it.
        session, lane, number: of the call that asks for it; session 0: there is none, it was named when the home moved.
        until: on this host's clock since boot; nobody asks after it before.
    """

    key: bytes
    home: bytes
    session: int = 0
    lane: int = 0
    number: int = 0
    until: int = 0


class Joining(msgspec.Struct, frozen=True, array_like=True):
    """A record of a root that had keys when it was first served, on its way to its home.

    Attributes:
        home: that was asked to take it, by the call of this session, lane and number; session 0: none was asked yet.
    """

    entry: Entry
    home: bytes = b""
    session: int = 0
    lane: int = 0
    number: int = 0

    @property
    def call(self) -> tuple[bytes, int, int, int]:
        return self.home, self.session, self.lane, self.number


class LastCall(msgspec.Struct, frozen=True, array_like=True):
    """The last call of a lane, with what it was answered."""

    number: int
    answer: Answer


class Tables(Protocol):
    """One transaction."""

    @property
    def version(self) -> int: ...  # the last one that was assigned here
    @version.setter
    def version(self, version: int) -> None: ...

    # the records of the keys that are at home here, sorted
    def record(self, key: bytes) -> Entry | None: ...
    def head(self, key: bytes) -> Entry | None: ...  # the record, its body perhaps left out
    def put_record(self, key: bytes, entry: Entry) -> None: ...
    def delete_record(self, key: bytes) -> None: ...
    def page(self, after: bytes, limit: int, prefix: bytes = b"") -> list[tuple[bytes, Entry | None]]: ...
    # A damaged record is a CorruptionError of `record`, and None in a page
    def put_damaged(self, key: bytes) -> None: ...  # what came in place of its record, from a home that moved
    def pass_over(self, key: bytes, why: CorruptionError) -> None: ...  # people are told, once

    # the cluster
    def standing(self) -> Standing | None: ...
    def put_standing(self, standing: Standing) -> None: ...
    def membership(self) -> int: ...  # a number that each `put_standing` changes

    # sessions, and the last call of each of their lanes
    def new_session(self, *, lasts: bool = False) -> int: ...
    def lasts(self, session: int) -> bool: ...  # or nobody knows
    def has_session(self, session: int) -> bool: ...
    def end_session(self, session: int) -> None: ...
    def sessions(self, after: int, limit: int) -> list[int]: ...  # by number, beyond that one
    def last_call(self, session: int, lane: int) -> LastCall | None: ...
    def put_last_call(self, session: int, lane: int, call: LastCall) -> None: ...

    # segments of this host
    def own(self, place: Place, key: bytes) -> None: ...  # a record here names it: it is live, and lent no more
    def lend(self, place: Place, lent: Lent) -> None: ...  # a record elsewhere names it: it is live
    def is_there(self, place: Place) -> bool: ...  # filled, and not retired
    def retire(self, place: Place) -> None: ...  # nothing names it; nothing happens if it is gone
    def lent(self, place: Place) -> Lent | None: ...
    def all_lent(self, after: int, limit: int) -> list[tuple[Place, Lent]]: ...  # beyond a put id

    # the parts of sharded puts whose keys are at home here, and what became of such puts. Times are those of `now`
    def now(self) -> int: ...  # nanoseconds of this host's clock since boot
    def new_number(self) -> int: ...  # that no put, session or attempt of this host has
    def parts(self, key: bytes | None = None, attempt: str | None = None) -> list[Part]: ...  # by rank
    def content(self, part: Part) -> bytes: ...
    def put_part(self, part: Part, content: bytes | None) -> None: ...  # None: as it is. A segment here is kept by it
    def delete_part(self, part: Part) -> None: ...
    def outcome(self, key: bytes, attempt: str) -> Outcome | None: ...
    def outcomes(self) -> list[Outcome]: ...
    def put_outcome(self, outcome: Outcome) -> None: ...
    def drop_outcomes(self, limit: int) -> None: ...  # those that are over, of so many rows

    # segments of other hosts that are to be told that nothing names them
    def owe(self, place: Place) -> None: ...
    def settle(self, place: Place) -> None: ...
    def owed(self, limit: int) -> list[Place]: ...

    # records of a root that had keys when it was first served
    def put_joining(self, key: bytes, row: Joining) -> None: ...
    def delete_joining(self, key: bytes) -> None: ...
    def joining(self, limit: int) -> list[tuple[bytes, Joining]]: ...
