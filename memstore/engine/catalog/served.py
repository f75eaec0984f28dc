"""The rows of a store that is served to other hosts, as far as the engine has to know them.

    cluster    "cluster" -> who the members are, and where this host stands among them
    sessions   session (8 bytes) -> nothing
    calls      session | lane (1 byte) -> the last call of the lane, with its answer
    owed       host (16 bytes) | put id (8) -> segment (8): nobody needs it any more, and its host is to be told
    lent       put id (8) -> `Kept`: a segment that records of other hosts name, or may name soon
    joining    key -> `Kept`: a record from before the store was served, on its way to its home
    copies     key -> `Kept`: a value of other hosts, fetched

All are behind a checksum. What they say beyond that is opaque here: see memstore/distributed/catalog. A segment that a
row of the last three names is live, as one that an entry names.
"""

from __future__ import annotations

import contextlib

import msgspec

from memstore.engine.catalog.tables import Transaction
from memstore.engine.format import SegmentRow, checked, with_checksum
from memstore.errors import CorruptionError
from memstore.undecodable import UNDECODABLE

CLUSTER, SESSIONS, CALLS, LENT, OWED, COPIES, JOINING = (
    *("cluster", "sessions", "calls", "lent", "owed", "copies", "joining"),
)
KEEPING = (LENT, JOINING, COPIES)  # tables whose rows keep segments
MEMBERS = b"cluster"  # the key of the only row of `cluster`
_HOST, _NUMBER = 16, 8  # bytes


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A row that keeps segments of this host: (segment, put id) of each, and what the layer above says."""

    segments: tuple[tuple[int, int], ...]
    said: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_kept = msgspec.msgpack.Decoder(Kept).decode


def body_of(stored: bytes) -> bytes:
    """What the row `cluster` says. Raises CorruptionError."""
    return checked(MEMBERS, stored)


def said(transaction: Transaction, table: str, key: bytes) -> bytes | None:
    """What a row of `cluster`, `sessions`, `calls` or `owed` says. Raises CorruptionError."""
    stored = transaction.row(table, key)
    return None if stored is None else checked(key, stored)


def say(transaction: Transaction, table: str, key: bytes, body: bytes) -> None:
    transaction.put_row(table, key, with_checksum(key, body))


def kept(transaction: Transaction, table: str, key: bytes) -> Kept | None:
    """A row of `lent`, `joining` or `copies`. Raises CorruptionError."""
    stored = transaction.row(table, key)
    return None if stored is None else read_kept(table, key, stored)


def keep(transaction: Transaction, table: str, key: bytes, row: Kept) -> None:
    transaction.put_row(table, key, encode_kept(key, row))


def encode_kept(key: bytes, row: Kept) -> bytes:
    return with_checksum(key, _encode(row))


def read_kept(table: str, key: bytes, stored: bytes) -> Kept:
    """Raises CorruptionError unless it is what was written under that key."""
    try:
        return _decode_kept(checked(key, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"row {key!r} of table {table!r} in the catalog can't be read: {error}") from None


def is_kept(transaction: Transaction, segment: int, row: SegmentRow) -> bool:
    """Whether a row of these tables names a segment that no entry names. Raises CorruptionError."""
    names = {LENT: number(row.put_id), JOINING: row.key, COPIES: row.key}
    found = (kept(transaction, table, name) for table, name in names.items())
    return any((segment, row.put_id) in one.segments for one in found if one is not None)


# --- what is owed -----------------------------------------------------------------------------------------------------


def owe(transaction: Transaction, host: bytes, put_id: int, segment: int) -> None:
    say(transaction, OWED, host + number(put_id), number(segment))


def settle(transaction: Transaction, host: bytes, put_id: int) -> None:
    transaction.delete_row(OWED, host + number(put_id))


def owed(transaction: Transaction, limit: int) -> list[tuple[bytes, int, int]]:
    """Hosts with put ids and segments: of each host the first ones, so that none that is away keeps the others out."""
    hosts: list[bytes] = []
    while rows := transaction.rows_with(OWED, b"", 1, hosts[-1] + b"\xff" * _NUMBER if hosts else b""):
        hosts.append(rows[0][0][:_HOST])
    share = limit // max(len(hosts), 1) or 1
    found: list[tuple[bytes, int, int]] = []
    for key, stored in (row for host in hosts for row in transaction.rows_with(OWED, host, share)):
        with contextlib.suppress(CorruptionError):  # verify reports it; the others are to be paid
            found.append(read_owed(key, stored))
    return found[:limit]


def read_owed(key: bytes, stored: bytes) -> tuple[bytes, int, int]:
    """Raises CorruptionError."""
    body = checked(key, stored, _NUMBER)
    if len(key) != _HOST + _NUMBER:
        raise CorruptionError(f"a row of table {OWED!r} in the catalog has a key of {len(key)} bytes")
    return key[:_HOST], int.from_bytes(key[_HOST:], "big"), int.from_bytes(body, "big")


def number(value: int) -> bytes:
    """As keys have it, so that they are in order."""
    return value.to_bytes(_NUMBER, "big")
