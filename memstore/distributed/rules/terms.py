"""What messages are made of: keys, numbers, places of bytes, calls. Their bounds are checked when they are decoded."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

ROWS_LIMIT = 1024  # rows of one message, where who sends it may send several
BYTES_LIMIT = 16 << 20  # of the entries of one message, where who sends it may send several; one may have more
CALL_BYTES_LIMIT = 120 << 20  # of the changes of one call: a message has 128 MiB at most
BATCH_LIMIT = 1 << 16  # keys of a call, which is one message, of one moment
KEY_LIMIT = 500  # bytes
LANES = 256
LONGEST_WAIT = 10_000  # milliseconds that a home keeps a wait

Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Key = Annotated[bytes, Meta(min_length=1, max_length=KEY_LIMIT)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=4096)]
Prefix = Annotated[bytes, Meta(max_length=KEY_LIMIT)]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where bytes lie: a segment of a host, known by the put that filled it. Put ids of a host never repeat.

    Attributes:
        segment: the number of the file, by which its host finds it.
    """

    host: Id
    put_id: Number
    segment: Number = 0


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What makes a request happen once: see `calls.py`. The epoch is that of its first sending."""

    session: Number
    lane: Annotated[int, Meta(ge=0, lt=LANES)]
    number: Number
    epoch: Number
