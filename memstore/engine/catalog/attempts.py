"""The rows of sharded puts, typed: the parts that ranks have put, and what became of attempts.

A row's key is made of digests, since a key and the name of an attempt may be longer than LMDB's keys:

    pending    blake2b-128 of the key | blake2b-128 of the attempt's name | rank (4 bytes)
    contents   the same: what a part says of the value, which may be megabytes
    outcomes   blake2b-128 of the key | blake2b-128 of the attempt's name

Times are those of the clock since boot, so each row names its boot: one of another boot is over.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec

from memstore.engine.catalog.tables import Transaction
from memstore.engine.format import checked, with_checksum
from memstore.errors import CorruptionError
from memstore.undecodable import UNDECODABLE

PENDING, CONTENTS, OUTCOMES = "pending", "contents", "outcomes"
_MOST_ROWS = 1 << 20
_DIGEST = 16  # bytes


class Now(NamedTuple):
    """A moment: by the clock since boot, in nanoseconds, and the boot's id."""

    clock: int
    boot: bytes


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has put in an attempt: a prepared segment. What it says of the value is its `content_of`.

    A part of another host is lent to this one. The processes that serve the store alone end attempts that have such.
    """

    key: bytes
    attempt: str
    number: int  # of the attempt: it tells those of one name apart
    rank: int
    world_size: int
    put_id: int
    segment: int  # 0: the rank holds no bytes
    size: int  # of the file
    start: int  # of the data section in it
    expect: int | None  # the version that the key must have when the attempt is published; None: whatever it has
    lease: int  # nanoseconds
    expires: int  # on the clock since boot
    boot: bytes
    host: bytes = b""  # the member of the cluster where the segment lies; empty: this one

    def is_over(self, now: Now) -> bool:
        return self.expires <= now.clock or self.boot != now.boot


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of an attempt: its version, or with version 0 the error that ended it."""

    key: bytes
    attempt: str
    number: int
    version: int
    error: str  # the name of its class
    message: str
    details: dict[str, Any]  # the error's attributes
    expires: int
    boot: bytes

    def is_over(self, now: Now) -> bool:
        return self.expires <= now.clock or self.boot != now.boot


_encode = msgspec.msgpack.Encoder().encode
_decode_part = msgspec.msgpack.Decoder(Part).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def put_part(transaction: Transaction, part: Part, content: bytes) -> None:
    """`content` is opaque here: see memstore/contents/parts.py."""
    name = _name_of(part)
    transaction.put_row(PENDING, name, with_checksum(name, _encode(part)))
    transaction.put_row(CONTENTS, name, with_checksum(name, content))


def renew_part(transaction: Transaction, part: Part) -> None:
    """Writes its row anew, and leaves its content alone."""
    transaction.put_row(PENDING, _name_of(part), with_checksum(_name_of(part), _encode(part)))


def delete_part(transaction: Transaction, part: Part) -> None:
    for table in (PENDING, CONTENTS):
        transaction.delete_row(table, _name_of(part))


def content_of(transaction: Transaction, part: Part) -> bytes:
    """Raises CorruptionError."""
    stored = transaction.row(CONTENTS, _name_of(part))
    if stored is None:
        raise CorruptionError(f"the catalog has lost what rank {part.rank} of attempt {part.attempt!r} has put")
    return checked(_name_of(part), stored)


def parts_of(transaction: Transaction, key: bytes | None = None, attempt: str | None = None) -> list[Part]:
    """The parts of an attempt by rank, those of all attempts of a key, or all. Raises CorruptionError."""
    prefix = b"" if key is None else _digest(key) if attempt is None else _name(key, attempt)
    return [read_part(name, stored) for name, stored in transaction.rows_with(PENDING, prefix, _MOST_ROWS)]


def outcome_of(transaction: Transaction, key: bytes, attempt: str) -> Outcome | None:
    name = _name(key, attempt)
    stored = transaction.row(OUTCOMES, name)
    return None if stored is None else read_outcome(name, stored)


def all_outcomes(transaction: Transaction) -> list[Outcome]:
    return [read_outcome(name, stored) for name, stored in transaction.rows_with(OUTCOMES, b"", _MOST_ROWS)]


def put_outcome(transaction: Transaction, outcome: Outcome) -> None:
    name = _name(outcome.key, outcome.attempt)
    transaction.put_row(OUTCOMES, name, with_checksum(name, _encode(outcome)))


def delete_outcome(transaction: Transaction, outcome: Outcome) -> None:
    transaction.delete_row(OUTCOMES, _name(outcome.key, outcome.attempt))


def drop_outcomes(transaction: Transaction, now: Now, limit: int) -> None:
    """Drops those that are over, of `limit` rows that are chosen by the clock: in time, all rows are looked at."""
    first = now.clock.to_bytes(8, "little")  # as good as random
    rows = transaction.rows_with(OUTCOMES, b"", limit, first) or transaction.rows_with(OUTCOMES, b"", limit)
    for name, stored in rows:
        if read_outcome(name, stored).is_over(now):
            transaction.delete_row(OUTCOMES, name)


def read_part(name: bytes, stored: bytes) -> Part:
    """Raises CorruptionError unless it is what was written under that name."""
    try:
        part = _decode_part(checked(name, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog's pending parts can't be read: {error}") from None
    if name != _name_of(part):
        raise CorruptionError("a row of the catalog's pending parts stands under another's name")
    return part


def read_outcome(name: bytes, stored: bytes) -> Outcome:
    try:
        outcome = _decode_outcome(checked(name, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog's outcomes can't be read: {error}") from None
    if name != _name(outcome.key, outcome.attempt):
        raise CorruptionError("a row of the catalog's outcomes stands under another's name")
    return outcome


def _name_of(part: Part) -> bytes:
    return _name(part.key, part.attempt) + part.rank.to_bytes(4, "big")


def _name(key: bytes, attempt: str) -> bytes:
    return _digest(key) + _digest(attempt.encode())


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST).digest()
