"""What ranks of a sharded put and the home of its key say to each other. Decision 012 has the words.

An attempt stays at the home where it began, and is known there by a number that never comes again. So only a part that
comes needs a call, and who gives up without knowing that number: what names it is done once, however often it is sent.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from memstore.distributed.rules.terms import LONGEST_WAIT, Call, Key, Number, Place

_MOST_RANKS = 1 << 16
CONTENTS_LIMIT = 32 << 20  # bytes of what parts say, of one answer; a part's own may be more
LARGEST_CONTENT = 64 << 20
LONGEST_TEXT = 1 << 16  # characters of an error
LARGEST_DETAILS = 1 << 18  # bytes
OUTCOMES_LIMIT = 64  # of one message

LONGEST_LEASE = 1_000_000_000_000_000_000  # nanoseconds: 30 years
Lease = Annotated[int, Meta(ge=0, le=LONGEST_LEASE)]  # so a moment that lies so far ahead is a number still
Name = Annotated[str, Meta(min_length=1, max_length=1 << 16)]
Rank = Annotated[int, Meta(ge=0, lt=_MOST_RANKS)]
Body = Annotated[bytes, Meta(max_length=LARGEST_CONTENT)]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has put in an attempt.

    Attributes:
        number: of the attempt: it tells those of one name apart. The home gives it, and `expires`.
        place: of its segment; with segment 0 it holds no bytes, and the home has made up the put id.
        size, start: of the segment's file, and of the data section in it.
        expect: the version that the key must have when the attempt is published; None: whatever it has.
        lease: nanoseconds that it waits for the others.
        expires: on the home's clock since boot.
    """

    key: Key
    attempt: Name
    number: Number
    rank: Rank
    world_size: Annotated[int, Meta(ge=1, le=_MOST_RANKS)]
    place: Place
    size: Number = 0
    start: Number = 0
    expect: Number | None = None
    lease: Lease = 0
    expires: Number = 0

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its bytes lie, if it has any."""
        return (self.place,) if self.place.segment else ()


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The error that every rank of an attempt gets: the name of its class, its text, its attributes as msgpack."""

    error: Annotated[str, Meta(max_length=64)]
    text: Annotated[str, Meta(max_length=LONGEST_TEXT)]
    details: Annotated[bytes, Meta(max_length=LARGEST_DETAILS)] = b"\x80"


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of an attempt: a version, or with version 0 the error that ended it.

    Attributes:
        number: 0: it never began.
        expires: when it may be forgotten, on the home's clock since boot.
    """

    key: Key
    attempt: Name
    number: Number
    version: Number
    failure: Failure | None
    expires: Number


# --- requests ---------------------------------------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A rank's part, whose segment is lent to the home. Its answer is `Prepared`, or `Ended`.

    Attributes:
        content: what the part says of the value, opaque here.
    """

    call: Call
    part: Part
    content: Body


class Look(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """What has become of an attempt. Its answer is `Ended`, `Pending` or `Forgotten`.

    Attributes:
        key, attempt: None: of all keys, or of all attempts of the key.
        number: 0: whatever attempt has this name.
        milliseconds: that the home may wait until the attempt is over, or complete.
        was_complete: the rank knows that it is; only its end is news.
        contents: the parts are to come with what they say.
        rank: the first one whose part is asked for.
    """

    key: Key | None
    attempt: Name | None = None
    number: Number = 0
    milliseconds: Annotated[int, Meta(ge=0, le=LONGEST_WAIT)] = 0
    was_complete: bool = False
    contents: bool = False
    rank: Rank = 0


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """This rank still waits: its part's lease begins anew. Its answer is `Done`, whatever there is."""

    key: Key
    attempt: Name
    number: Number
    rank: Rank


class Publish(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """All parts, merged. Its answer is `Ended`, `PartsChanged` or `Forgotten`.

    Attributes:
        parts: the places of those that were merged, by rank.
        body: of the record.
    """

    key: Key
    attempt: Name
    number: Number
    parts: Annotated[tuple[Place, ...], Meta(max_length=_MOST_RANKS)]
    body: Body


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Ends an attempt, unless it is over. Its answer is `Ended`, `PartsChanged` or `Forgotten`.

    Attributes:
        number: 0: the rank has no part, or doesn't know. The attempt may have begun all the same, or never will.
        call: without a number. It goes by the lane of the part that was sent and never answered: so that one can't come
            any more.
        parts: it is to be ended only if its parts are these; None: whatever they are.
        lease: nanoseconds that the rank would have waited.
    """

    key: Key
    attempt: Name
    number: Number
    failure: Failure
    call: Call | None = None
    parts: Annotated[tuple[Place, ...], Meta(max_length=_MOST_RANKS)] | None = None
    lease: Lease = 0


# --- answers ----------------------------------------------------------------------------------------------------------


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=78):
    """The home keeps the part. `number` is the attempt's."""

    number: Number


class Pending(msgspec.Struct, frozen=True, array_like=True, tag=79):
    """The parts that are there, by rank; with what they say, as far as one answer has room."""

    parts: Annotated[tuple[Part, ...], Meta(max_length=_MOST_RANKS)]
    contents: Annotated[tuple[Body, ...], Meta(max_length=_MOST_RANKS)] = ()
    now: Number = 0  # on the home's clock since boot


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=80):
    outcome: Outcome


class PartsChanged(msgspec.Struct, frozen=True, array_like=True, tag=81):
    """The parts are others than those that were named: look again. Nothing was changed."""


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag=82):
    """There is neither a part nor an outcome of that number: it is over, and its outcome was dropped."""
