"""Rows that the rules write into a catalog: records and changes as the engine has them; all else as bytes."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from memstore import engine
from memstore._parsing import UNDECODABLE
from memstore.distributed.rules import (
    Backup,
    Change,
    Entry,
    Grant,
    KeptGroup,
    LastCall,
    LeavingGroup,
    Lent,
    NoSession,
    Ownership,
    Place,
    Remembered,
    Standing,
)
from memstore.engine import (
    HEADER_LIMIT,
    Record,
    SegmentExtent,
    base_after,
    boot_id,
    decode_external,
    decode_origins,
    decode_segments,
    end_of,
)
from memstore.errors import CorruptionError

# --- Records, changes and parts --------------------------------------------------------------------------------------
# Converts the engine's records, changes and parts to what the rules call them: entries, whose bytes lie at places.
#
# The body of an entry is a `Record` in msgpack, under version 0 and without a host. Its segments stand in `parts`, also
# if it is one, which keeps its `start`; the places say on which hosts they are. External files are a place too, of
# segment 0, which names their host.
#
# A body may have come from another host. So all that is said of lengths, numbers and ranges is checked here.

Row = TypeVar("Row")

_LARGEST = (1 << 63) - 1
_INLINE_LIMIT = 1 << 16  # bytes: no store has a larger one
_CHECKSUM = 8  # bytes
_LARGEST_START = HEADER_LIMIT + 8  # bytes: a header's length stands before it

encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode


def entry_of(record: Record, member: bytes) -> Entry:
    """Returns a record as an entry of this host's catalog.

    Args:
        member: the id of this host, where all lies for which the record names no other.
    """
    extents = record.segments
    places = _places_of(record, extents, member)
    return Entry(record.version, _body_of(record, extents), places, record.is_mutable, record.history)


def head_of(record: Record, member: bytes) -> Entry:
    """Returns what `entry_of` does, without the body: in a fifth of the time."""
    places = _places_of(record, record.segments, member)
    return Entry(record.version, b"", places, record.is_mutable, record.history)


def change_of(change: engine.Change, member: bytes) -> Change:
    """Returns a change whose segments this host has filled."""
    if change.content is None:
        return Change(change.key, None, (), change.expect, change.missing_ok)
    record = engine.record_of(change.content, change.segments, 0, 0)
    extents = _extents_of(record)
    places = _places_of(record, extents, member)
    body, is_mutable = _body_of(record, extents), record.is_mutable
    said = body, places, change.expect, change.missing_ok, is_mutable, change.sealed_put_id
    return Change(change.key, *said, history=change.history)


def _extents_of(record: Record) -> tuple[SegmentExtent, ...]:
    """Returns the segments of a record of which it isn't said on which hosts they lie."""
    if record.parts is None:
        return record.segments
    return decode_segments(record.parts, of_one_host=False)


def _body_of(record: Record, extents: Sequence[SegmentExtent]) -> bytes:
    named = msgspec.structs.replace(
        record,
        version=0,
        put_id=extents[0].put_id if extents else record.put_id,
        segment=0,
        size=len(extents),
        parts=engine.encode_extents(extents) if extents else record.parts,
        hosts=None,
        history=None,
    )
    return encode(named)


def _places_of(record: Record, extents: Sequence[SegmentExtent], member: bytes) -> tuple[Place, ...]:
    if record.adopted is not None:
        return (Place(record.hosts[0] if record.hosts else member, record.put_id),)
    hosts = record.hosts or (member,) * len(extents)
    return tuple(Place(host, one.put_id, one.segment) for host, one in zip(hosts, extents, strict=True))


def record_of(entry: Entry, member: bytes) -> Record:
    """Returns the record as this host's catalog has it. Raises CorruptionError unless the entry can be one."""
    record = _read(entry.body)
    extents = _extents_of(record)
    _check(_is_consistent(record, extents), "its numbers don't fit one another")
    if record.origins is not None:
        decode_origins(record.origins, record.nbytes)
    if not extents and not entry.places and record.adopted is None:  # it is in the body
        return msgspec.structs.replace(record, version=entry.version, history=entry.history)
    hosts = tuple(place.host for place in entry.places)
    if record.adopted is None:
        found = [(place.put_id, place.segment) for place in entry.places]
        _check(found == [(one.put_id, one.segment) for one in extents], "its places are not those of its segments")
        _check(len(set(entry.places)) == len(entry.places), "it names a segment twice")
    else:
        decode_external(record.adopted)
        _check(len(hosts) == 1 and not entry.places[0].segment, "files of others lie on one host, in no segment")
    if all(host == member for host in hosts):
        return _lying_here(record, extents, entry)
    return msgspec.structs.replace(record, version=entry.version, hosts=hosts, history=entry.history)


Checked = Mapping[tuple[bytes, tuple[Place, ...]], Record]
"""Records, of whatever version and history, by what an entry says, and where its bytes lie."""


def checked(entries: Iterable[Entry], member: bytes) -> Checked:
    """Returns the records of entries that another host has sent: looked at before anybody would have to wait for it.

    Raises CorruptionError unless each can be one.
    """
    return {(entry.body, entry.places): record_of(entry, member) for entry in entries}


def _read(body: bytes) -> Record:
    try:
        return _decode_record(body)
    except UNDECODABLE as error:
        raise CorruptionError(f"what another host says of an entry can't be read: {error}") from None


def _lying_here(record: Record, extents: Sequence[SegmentExtent], entry: Entry) -> Record:
    if not record.start:
        return msgspec.structs.replace(record, version=entry.version, history=entry.history)
    one = extents[0]
    return msgspec.structs.replace(
        record,
        version=entry.version,
        segment=one.segment,
        put_id=one.put_id,
        size=one.size,
        parts=None,
        history=entry.history,
    )


def _is_consistent(record: Record, extents: Sequence[SegmentExtent]) -> bool:
    # Written out: an heir looks at a million records, and a loop over three numbers takes as long as all the rest.
    return (
        record.version == record.segment == 0
        and record.size == len(extents)
        and record.hosts is None
        and record.history is None
        and 0 <= record.put_id <= _LARGEST
        and 0 <= record.nbytes <= _LARGEST
        and 0 <= record.start <= _LARGEST
        and math.isfinite(record.created)
        and (record.inline is not None) + (record.parts is not None) + (record.adopted is not None) <= 1
        and (record.inline is None or record.nbytes == len(record.inline) <= _INLINE_LIMIT)
        and (record.objects_checksum is None or len(record.objects_checksum) in (0, _CHECKSUM))
        and len(record.checksums or b"") % _CHECKSUM == 0
        and _has_room(record, extents)
    )


def _has_room(record: Record, extents: Sequence[SegmentExtent]) -> bool:
    """Whether the segments can have the bytes that the record says."""
    if any(max(one.segment, one.put_id) > _LARGEST for one in extents):
        return False
    if record.start:
        one = extents[0] if len(extents) == 1 else None
        if one is None or record.start > _LARGEST_START:  # a reader makes room for all of the header
            return False
        return one.start == record.start <= one.size - record.nbytes
    return not extents or record.nbytes <= base_after(end_of(extents), 0) * (1 + len(extents))


def _check(is_so: bool, detail: str) -> None:
    if not is_so:
        raise CorruptionError(f"what another host says of an entry can't be: {detail}")


# --- All other rows --------------------------------------------------------------------------------------------------


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


class _KeptCall(msgspec.Struct, frozen=True, array_like=True):
    """A `LastCall` whose answer isn't read."""

    number: int
    answer: msgspec.Raw


Keepers = tuple[tuple[bytes, int], ...]
_kinds = (
    Backup,
    Copy,
    Entry,
    Grant,
    KeptGroup,
    LastCall,
    LeavingGroup,
    Ownership,
    Remembered,
    Standing,
    _KeptCall,
    _Lent,
)
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {kind: msgspec.msgpack.Decoder(kind) for kind in _kinds}


def decode(kind: type[Row], said: bytes) -> Row:
    """Reads a row that is nothing but a struct of this kind, as `encode` has written it. Raises CorruptionError."""
    try:
        return _decoders[kind].decode(said)
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog of a served store can't be read: {error}") from None


_decode_batch = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


def batch_of(said: bytes) -> tuple[bytes, ...]:
    """Reads a row of `batches`. Raises CorruptionError."""
    try:
        return _decode_batch(said)
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog of a served store can't be read: {error}") from None


_decode_keepers = msgspec.msgpack.Decoder(Keepers).decode


def keepers_of(said: bytes) -> Keepers:
    """Reads a row of `keepers`. Raises CorruptionError."""
    try:
        return _decode_keepers(said)
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog of a served store can't be read: {error}") from None


@functools.lru_cache(maxsize=8)
def standing_of(said: bytes) -> Standing:
    """Returns the same object for the same bytes: each transaction for other hosts reads it, and it changes seldom."""
    return decode(Standing, said)


def last_call_of(said: bytes) -> LastCall:
    """Reads a row of `calls`. An answer that another version has written otherwise counts as forgotten."""
    try:
        return decode(LastCall, said)
    except CorruptionError:
        return LastCall(decode(_KeptCall, said).number, NoSession())


def encode_lent(lent: Lent) -> bytes:
    return encode(_Lent(boot_id(), lent))


def lent_of(said: bytes) -> Lent:
    """Reads a row of `lent`. What was lent before this boot is asked after at once."""
    row = decode(_Lent, said)
    return row.lent if row.boot == boot_id() else msgspec.structs.replace(row.lent, until=0)


# --- Damaged rows ----------------------------------------------------------------------------------------------------
# The engine puts checksums before the rows: engine/catalog/tables.py. A damaged row is passed over where all are looked
# at: it keeps no other from being handed over, listed or looked at. Who asks for such a key by itself hears
# CorruptionError, from the owner of the key.

_MOST_TOLD = 1000

log = logging.getLogger("memstore")
_told: set[tuple[bytes, bytes, str]] = set()


def tell(member: bytes, key: bytes, why: CorruptionError) -> None:
    """Says in the log that something of a key was passed over: once a process, which looks again and again.

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
