"""What hosts say to each other: requests, and their answers. Decision 016 has the table.

All are msgpack arrays that begin with a number, so that a message is of one kind and has its fields checked, types and
bounds, when it is decoded. Those of sharded puts stand in `attempt_messages.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from memstore.distributed.rules.attempt_messages import (
    OUTCOMES_LIMIT,
    Ended,
    Forgotten,
    GiveUp,
    Look,
    Outcome,
    PartsChanged,
    Pending,
    Prepare,
    Prepared,
    Publish,
    Renew,
)
from memstore.distributed.rules.members import Member, View
from memstore.distributed.rules.terms import (
    BATCH_LIMIT,
    KEY_LIMIT,
    LANES,
    LONGEST_WAIT,
    ROWS_LIMIT,
    Call,
    Id,
    Key,
    Number,
    Place,
    Prefix,
    Text,
)

_PLACE, _NUMBERS = 40, 64  # bytes, at most


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A version of a key.

    Attributes:
        body: what the record says beside that, opaque here.
        places: where its bytes lie; none, if the body has them.
        is_mutable: its rows are written in place, on the host of its only place; no ordinary value is put over it.
    """

    version: Number
    body: bytes
    places: Annotated[tuple[Place, ...], Meta(max_length=1 << 16)] = ()
    is_mutable: bool = False

    @property
    def nbytes(self) -> int:
        """That it takes in a message, with its key, or less."""
        return _nbytes(self.body, self.places)


class Change(msgspec.Struct, frozen=True, array_like=True):
    """One key's part of a commit: its new content, or with `body` None its deletion.

    Attributes:
        expect: the version that the key must have; 0: it must not exist; None: whatever it has.
        is_mutable: as of `Entry`.
        seals: the put id of the mutable entry that the key must have; 0: it must have none. With `is_mutable`, that
            entry gets a new version, and nothing else changes.
    """

    key: Key
    body: bytes | None
    places: Annotated[tuple[Place, ...], Meta(max_length=1 << 16)] = ()
    expect: Number | None = None
    missing_ok: bool = False
    is_mutable: bool = False
    seals: Number = 0

    @property
    def renews(self) -> bool:
        return self.is_mutable and self.seals != 0

    @property
    def nbytes(self) -> int:
        """That it takes in a message, or less."""
        return _nbytes(self.body or b"", self.places)


def _nbytes(body: bytes, places: tuple[Place, ...]) -> int:
    return len(body) + _PLACE * len(places) + KEY_LIMIT + _NUMBERS


Rows = Annotated[tuple[tuple[Key, Entry], ...], Meta(max_length=ROWS_LIMIT)]
Keys = Annotated[tuple[Key, ...], Meta(min_length=1, max_length=BATCH_LIMIT)]


# --- requests ---------------------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A new session. Its answer is `Opened`.

    Attributes:
        lasts: it doesn't end for want of a connection.
    """

    lasts: bool = False


class Close(msgspec.Struct, frozen=True, array_like=True, tag=2):
    session: Number


class Lookup(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The records of one moment.

    Attributes:
        pin: their bytes are to stay for a while.
        brief: only their versions are asked for.
    """

    epoch: Number
    keys: Keys
    pin: bool = False
    brief: bool = False


class Wait(msgspec.Struct, frozen=True, array_like=True, tag=4):
    epoch: Number
    key: Key
    newer_than: Number
    milliseconds: Annotated[int, Meta(ge=0, le=LONGEST_WAIT)]


class List(msgspec.Struct, frozen=True, array_like=True, tag=5):
    epoch: Number
    prefix: Prefix
    after: Prefix
    limit: Annotated[int, Meta(ge=1, le=ROWS_LIMIT)]


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    call: Call
    changes: Annotated[tuple[Change, ...], Meta(min_length=1, max_length=BATCH_LIMIT)]


class Resolve(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """What became of a call. If it never came, it never will be made."""

    session: Number
    lane: Annotated[int, Meta(ge=0, lt=LANES)]
    number: Number


class Named(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Which of these places the records of these keys name. Its answer is `AreNamed`."""

    epoch: Number
    rows: Annotated[tuple[tuple[Key, Place], ...], Meta(max_length=ROWS_LIMIT)]


class Release(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """To the host of these places: nothing names them any more."""

    places: Annotated[tuple[Place, ...], Meta(max_length=ROWS_LIMIT)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """To the seed: who this is, and how far it has come. Its answer is `IsView`.

    Attributes:
        cluster: that its root belongs to; None: to none yet.
        is_settled: in `epoch`.
        versions: no version of its root is larger.
    """

    member: Member
    cluster: Id | None
    epoch: Number
    is_settled: bool
    versions: Number


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """To the seed: this member is dead, and won't come back."""

    member: Id


class Give(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """To a new home: records of keys that are at home there from this epoch on, and what their sharded puts became.

    Attributes:
        damaged: keys whose records can't be read. They stay where they are, and the new home knows that they were.
    """

    epoch: Number
    giver: Id
    rows: Rows
    outcomes: Annotated[tuple[Outcome, ...], Meta(max_length=OUTCOMES_LIMIT)] = ()
    damaged: Annotated[tuple[Key, ...], Meta(max_length=ROWS_LIMIT)] = ()


class Given(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """That was all, and the giver has none of them any more."""

    epoch: Number
    giver: Id


# --- answers ----------------------------------------------------------------------------------------------------------


class Done(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """It is done, and there is nothing more to say."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=65):
    session: Number


class Found(msgspec.Struct, frozen=True, array_like=True, tag=66):
    """One for each key that was asked for, or for the first ones, as many as a message has room for.

    None: there is no such key.
    """

    entries: Annotated[tuple[Entry | None, ...], Meta(max_length=BATCH_LIMIT)]


class IsAt(msgspec.Struct, frozen=True, array_like=True, tag=67):
    """The version that a wait was for; 0: there was none within its time."""

    version: Number


class Listed(msgspec.Struct, frozen=True, array_like=True, tag=68):
    rows: Annotated[tuple[tuple[Key, Number], ...], Meta(max_length=ROWS_LIMIT)]


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=69):
    """New versions; of deletions the old ones, or 0."""

    versions: Annotated[tuple[Number, ...], Meta(max_length=BATCH_LIMIT)]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=70):
    """An error that has changed nothing: the name of its class, its text, and its attributes."""

    error: Annotated[str, Meta(max_length=64)]
    text: Text
    key: Key | None = None
    expected: Number = 0
    found: Number = 0


class Never(msgspec.Struct, frozen=True, array_like=True, tag=71):
    """The call was not made, and never will be."""


class AreNamed(msgspec.Struct, frozen=True, array_like=True, tag=72):
    named: Annotated[tuple[bool, ...], Meta(max_length=ROWS_LIMIT)]


class IsView(msgspec.Struct, frozen=True, array_like=True, tag=73):
    view: View


class Stale(msgspec.Struct, frozen=True, array_like=True, tag=74):
    """The request is of an older epoch than this one. It was not made, and never will be."""

    epoch: Number


class Later(msgspec.Struct, frozen=True, array_like=True, tag=75):
    """Not yet: the home is of an older epoch, or waits for records. Try again."""


class NoSession(msgspec.Struct, frozen=True, array_like=True, tag=76):
    """The session has ended, or the call is older than the last one of its lane. It will not be made again."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=77):
    """This root can't be a member. `is_removed`: it was one, and never will be again."""

    why: Text
    is_removed: bool = False


Request = (
    Open | Close | Lookup | Wait | List | Commit | Resolve | Named | Release
    | Ask | Remove | Give | Given | Prepare | Look | Renew | Publish | GiveUp
)  # fmt: skip
Answer = (
    Done | Opened | Found | IsAt | Listed | Committed | Failed | Never | AreNamed
    | IsView | Stale | Later | NoSession | Refused | Prepared | Pending | Ended | PartsChanged | Forgotten
)  # fmt: skip
