"""What the rules write into a catalog, as bytes. The engine puts checksums before them: engine/catalog/tables.py."""

from __future__ import annotations

import functools
from typing import TypeVar

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.distributed.rules import Entry, Joining, LastCall, Lent, Place, Standing
from memstore.engine import Record, boot_id
from memstore.errors import CorruptionError

_NEVER = 1 << 62  # nanoseconds on no clock since boot: what is lent until then no audit asks after

Row = TypeVar("Row")


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """A value of other hosts that was fetched.

    Attributes:
        places: that it came from.
        record: of its version, in segments of this host.
    """

    places: tuple[Place, ...]
    record: Record


class _Lent(msgspec.Struct, frozen=True, array_like=True):
    boot: bytes  # that the clock of `lent.until` is of
    lent: Lent


encode = msgspec.msgpack.Encoder().encode
_decode_standing = msgspec.msgpack.Decoder(Standing)
_decode_call = msgspec.msgpack.Decoder(LastCall)
_decode_lent = msgspec.msgpack.Decoder(_Lent)
_decode_joining = msgspec.msgpack.Decoder(Joining)
_decode_copy = msgspec.msgpack.Decoder(Copy)


@functools.lru_cache(maxsize=8)
def standing_of(said: bytes) -> Standing:
    """The same object for the same bytes: each transaction for other hosts reads it, and it changes seldom."""
    return _decoded(_decode_standing, said)


def last_call_of(said: bytes) -> LastCall:
    return _decoded(_decode_call, said)


def joining_of(said: bytes) -> Joining:
    return _decoded(_decode_joining, said)


def copy_of(said: bytes) -> Copy:
    return _decoded(_decode_copy, said)


def encode_lent(lent: Lent) -> bytes:
    return encode(_Lent(boot_id(), lent))


def lent_of(said: bytes, key: bytes) -> Lent:
    """What was lent before this boot is asked after at once. A row that a repair has made says no more than the key."""
    if not said:
        return Lent(key, b"")
    row = _decoded(_decode_lent, said)
    if row.boot == boot_id() or row.lent.until >= _NEVER:
        return row.lent
    return msgspec.structs.replace(row.lent, until=0)


def places_on(member: bytes, entry: Entry) -> tuple[tuple[int, int], ...]:
    """The segments of this host that an entry names, as (segment, put id)."""
    return tuple((place.segment, place.put_id) for place in entry.places if place.host == member and place.segment)


def _decoded(decoder: msgspec.msgpack.Decoder[Row], said: bytes) -> Row:
    try:
        return decoder.decode(said)
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog of a served store can't be read: {error}") from None
