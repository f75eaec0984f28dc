"""Rows that the rules write into a catalog, as bytes, and damaged ones.

The engine puts checksums before the rows: engine/catalog/tables.py. A damaged row is passed over where all are looked
at: it keeps no other from being handed over, listed or looked at. Each is told once a process, since what looks at all
rows does so again and again. Who asks for such a key by itself hears CorruptionError, from the owner of the key.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.distributed.rules import (
    Entry,
    Grant,
    KeptGroup,
    LastCall,
    LeavingGroup,
    Lent,
    Ownership,
    Place,
    Standing,
)
from memstore.engine import Record, Transaction, boot_id
from memstore.errors import CorruptionError

_MOST_TOLD = 1000  # damaged rows

Row = TypeVar("Row")

log = logging.getLogger("memstore")
_told: set[tuple[bytes, bytes, str]] = set()


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
_decode_copy = msgspec.msgpack.Decoder(Copy)
_decode_grant = msgspec.msgpack.Decoder(Grant)
_decode_leaving = msgspec.msgpack.Decoder(LeavingGroup)
_decode_kept = msgspec.msgpack.Decoder(KeptGroup)
_decode_entry = msgspec.msgpack.Decoder(Entry)
_decode_ownership = msgspec.msgpack.Decoder(Ownership)


@functools.lru_cache(maxsize=8)
def standing_of(said: bytes) -> Standing:
    """Returns the same object for the same bytes: each transaction for other hosts reads it, and it changes seldom."""
    return _decoded(_decode_standing, said)


def last_call_of(said: bytes) -> LastCall:
    return _decoded(_decode_call, said)


def copy_of(said: bytes) -> Copy:
    return _decoded(_decode_copy, said)


def grant_of(said: bytes) -> Grant:
    return _decoded(_decode_grant, said)


def leaving_of(said: bytes) -> LeavingGroup:
    return _decoded(_decode_leaving, said)


def kept_group_of(said: bytes) -> KeptGroup:
    return _decoded(_decode_kept, said)


def kept_entry_of(said: bytes) -> Entry:
    return _decoded(_decode_entry, said)


def ownership_of(said: bytes) -> Ownership:
    return _decoded(_decode_ownership, said)


def encode_lent(lent: Lent) -> bytes:
    return encode(_Lent(boot_id(), lent))


def lent_of(said: bytes, key: bytes) -> Lent:
    """Reads a row of `lent`. What was lent before this boot is asked after at once.

    Args:
        said: empty in a row that a repair has made, which says no more than the key.
    """
    if not said:
        return Lent(key, b"")
    row = _decoded(_decode_lent, said)
    return row.lent if row.boot == boot_id() else msgspec.structs.replace(row.lent, until=0)


def _decoded(decoder: msgspec.msgpack.Decoder[Row], said: bytes) -> Row:
    try:
        return decoder.decode(said)
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog of a served store can't be read: {error}") from None


# --- damaged ones -----------------------------------------------------------------------------------------------------


def tell(member: bytes, key: bytes, why: CorruptionError) -> None:
    """Says in the log that something of a key was passed over, unless this process has said it.

    Args:
        member: the id of this host.
    """
    said = (member, key, str(why))
    if said not in _told and len(_told) < _MOST_TOLD:
        _told.add(said)
        more = "" if len(_told) < _MOST_TOLD else " (others are not named any more)"
        log.warning(
            "%r is passed over, since it is damaged: %s. memstore verify finds such rows, and memstore repair drops "
            "them%s",
            *(key.decode(errors="backslashreplace"), str(why), more),
        )


def readable(
    transaction: Transaction,
    member: bytes,
    table: str,
    read: Callable[[bytes, bytes], Row],
    limit: int,
    after: bytes = b"",
) -> list[tuple[bytes, Row]]:
    """Returns up to `limit` rows of a table, in order, beyond `after`: those that `read` doesn't call damaged."""
    found: list[tuple[bytes, Row]] = []
    while len(found) < limit and (rows := transaction.rows_with(table, b"", limit, after)):
        after = rows[-1][0]
        for key, stored in rows:
            try:
                found.append((key, read(key, stored)))
            except CorruptionError as error:
                tell(member, key, error)
    return found[:limit]
