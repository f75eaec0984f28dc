"""The rows of sharded puts in one transaction, as the rules have them. The engine's own ranks write the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from memstore import engine
from memstore._arguments import check_encoded
from memstore._parsing import UNDECODABLE
from memstore.distributed.catalog.damage import readable
from memstore.distributed.catalog.segments import Segments
from memstore.distributed.rules import LARGEST_DETAILS, LONGEST_TEXT, Failure, Outcome, Part, Place
from memstore.engine import Effects, Now, Transaction, boot_clock, boot_id, tables

Row = TypeVar("Row")

_MOST_ROWS = 1 << 20
_DETAILS = ("expected", "found", "missing_ranks", "missing_boxes")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Attempts:
    """Of one transaction. `CatalogTables` is one."""

    _transaction: Transaction
    _member: bytes
    _effects: Effects
    _segments: Segments

    def now(self) -> int:
        return boot_clock()

    def new_number(self) -> int:
        self._effects.counters.number += 1
        self._effects.is_change = True
        return self._effects.counters.number

    def parts(self, key: bytes | None = None, attempt: str | None = None) -> list[Part]:
        if key is None:
            return [part_of(part, self._member) for part in self._whole(tables.PENDING, tables.read_part)]
        return [part_of(part, self._member) for part in tables.parts_of(self._transaction, key, attempt)]

    def _whole(self, table: str, read: Callable[[bytes, bytes], Row]) -> list[Row]:
        return [row for _, row in readable(self._transaction, self._member, table, read, _MOST_ROWS)]

    def content(self, part: Part) -> bytes:
        return tables.content_of(self._transaction, self._row(part))

    def put_part(self, part: Part, content: bytes | None) -> None:
        """A segment of this host is kept by it from now on. Raises InvalidKeyError of what another host has sent."""
        check_encoded(part.key)
        row = self._row(part)
        if content is None:
            tables.renew_part(self._transaction, row)
        else:
            tables.put_part(self._transaction, row, content)
            self._effects.adds = True
            for place in part.places:
                if place.host == self._member:
                    self._segments.prepare(place, part.key)
        self._ring(part.key)

    def delete_part(self, part: Part) -> None:
        tables.delete_part(self._transaction, self._row(part))
        self._effects.is_change = True

    def _row(self, part: Part) -> engine.PendingPart:
        return part_row(part, self._member)

    def outcome(self, key: bytes, attempt: str) -> Outcome | None:
        row = tables.outcome_of(self._transaction, key, attempt)
        return None if row is None else outcome_of(row)

    def outcomes(self) -> list[Outcome]:
        return [outcome_of(row) for row in self._whole(tables.OUTCOMES, tables.read_outcome)]

    def put_outcome(self, outcome: Outcome) -> None:
        """Raises InvalidKeyError of what another host has sent."""
        check_encoded(outcome.key)
        tables.put_outcome(self._transaction, outcome_row(outcome))
        self._ring(outcome.key)

    def drop_outcomes(self, limit: int) -> None:
        tables.drop_outcomes(self._transaction, Now(boot_clock(), boot_id()), limit)

    def _ring(self, key: bytes) -> None:
        self._effects.is_change = True
        self._effects.keys.add(key)


def part_row(part: Part, member: bytes) -> engine.PendingPart:
    """As the engine has it, on the host of that member."""
    return engine.PendingPart(
        part.key,
        part.attempt,
        part.number,
        part.rank,
        part.world_size,
        part.place.put_id,
        part.place.segment,
        part.size,
        part.start,
        part.expect,
        part.lease,
        part.expires,
        boot_id(),
        b"" if part.place.host == member else part.place.host,
    )


def part_of(part: engine.PendingPart, member: bytes) -> Part:
    """A row as the rules have it. One of another boot is over."""
    return Part(
        part.key,
        part.attempt,
        part.number,
        part.rank,
        part.world_size,
        Place(part.host or member, part.put_id, part.segment),
        part.size,
        part.start,
        part.expect,
        part.lease,
        part.expires if part.boot == boot_id() else 0,
    )


def outcome_of(row: engine.AttemptOutcome) -> Outcome:
    failure = None if row.version else Failure(row.error, row.message, _encode(row.details))
    expires = row.expires if row.boot == boot_id() else 0
    return Outcome(row.key, row.attempt, row.number, row.version, failure, expires)


def outcome_row(outcome: Outcome) -> engine.AttemptOutcome:
    """As the engine has it. What another host says of an error's attributes is checked."""
    failure = outcome.failure or Failure("", "")
    try:
        details = {name: value for name, value in _decode(failure.details).items() if name in _DETAILS}
    except UNDECODABLE:
        details = {}
    return engine.AttemptOutcome(
        outcome.key,
        outcome.attempt,
        outcome.number,
        outcome.version,
        failure.error,
        failure.text,
        details,
        outcome.expires,
        boot_id(),
    )


def failure_of(error: engine.AttemptFailure) -> Failure:
    """An error as other hosts are told of it: what it lists may be too long for a message."""
    details = {name: value for name, value in vars(error).items() if name in _DETAILS}
    encoded = _encode(details)
    if len(encoded) > LARGEST_DETAILS:
        encoded = _encode({name: value for name, value in details.items() if name != "missing_boxes"})
    return Failure(type(error).__name__, str(error)[:LONGEST_TEXT], encoded[:LARGEST_DETAILS])
