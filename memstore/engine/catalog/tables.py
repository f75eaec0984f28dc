"""The catalog's tables, typed: what can be read and written in one transaction.

A `Transaction` has the tables of every store: `entries` (key -> record), `segments` (id -> row), `filling` (id ->
batch), `retired` ((size, sequence) -> id: files kept for reuse), `held` (sequence -> id: retired files that somebody
held when they were last looked at), `leases` (id -> until), `counters`. The functions below it read and write the
others. All rows of those are behind a checksum.

Of sharded puts: the parts that ranks have put, and what became of attempts. A row's key is made of digests, since a key
and the name of an attempt may be longer than LMDB's keys. Times are those of the clock since boot, so each row names
its boot: one of another boot is over.

    pending    blake2b-128 of the key | blake2b-128 of the attempt's name | rank (4 bytes)
    contents   the same: what a part says of the value, which may be megabytes
    outcomes   blake2b-128 of the key | blake2b-128 of the attempt's name

Of keys with a history, and of pins (`protocols/history.py`). Their names begin with a digest, as above.

    history    blake2b-128 of the key | version (8 bytes) | bytes that it takes (8) -> key and record: a version that
               was replaced, and stays readable
    quotas     "=" and a prefix of keys -> how many bytes they may take, and how many they do (`protocols/history.py`)
    spilled    segment (8 bytes) -> bytes of its file (8): it lies in the spill folder (`protocols/spill.py`)
    pins       blake2b-128 of the key | version (8 bytes) | number of the pin (8) -> key, and who holds the pin

Of a store that is served to other hosts, as far as the engine has to know them: what they say beyond this is opaque
here, see memstore/distributed/catalog. A segment that a row of `lent` or `copies` names is live, as one that an entry
names. A group is the text of a key before its first "/", which may be empty; its row's key is "=" and the group.

    cluster    "cluster" -> the members, and where this host stands among them; "granted", "mirrored", "promised"
    sessions   session (8 bytes) -> nothing
    calls      session | lane (1 byte) -> the last call of the lane, with its answer
    owed       host (16 bytes) | put id (8) -> segment (8): nobody needs it any more, and its host is to be told
    lent       put id (8) -> `KeptRow`: a segment that records of other hosts name, or may name soon
    copies     key -> `KeptRow`: a value of other hosts, fetched
    owned      group -> the grant by which this host owns it
    leaving    group -> it is being handed over to another host
    kept       group -> it is being handed over to this host
    given      key -> a record of such a group, or nothing if it was damaged
    directory  group -> its owner and grant; at the seed and its deputies
    grants     number of the grant (8 bytes) | group, as above -> nothing
    backups    key -> what this host has put and another one owns: its version and record
    voids      key -> a version (8 bytes), since when (8): up to it nothing is to be written into `backups`
    keepers    key -> hosts that may have a row of `backups` for what this one owns or owned, each with the version
    unnoted    key -> nothing: one of these hosts is to be told that its version is replaced
    lost       key, or group, as above -> the host with which it was lost, for people
    remembered key -> it was deleted, or lost, while removed hosts may come back; 0xFF -> deletions are remembered
    lacking    key -> a byte: it is to have a replica on a second host, and has none; 1: its put waits for that. Then,
               perhaps, the number of the call that put it with others (8)
    replicas   key -> a version (8 bytes), host (16): that host has said that it has a replica of it
    batches    number of a call (8 bytes) -> keys that it put, of which some lack a replica: they get theirs together
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from memstore._arguments import KEY_LIMIT
from memstore._parsing import UNDECODABLE
from memstore.engine.format.records import (
    DAMAGED_BEFORE,
    LARGE_ROW,
    Record,
    Replaced,
    SegmentExtent,
    SegmentRow,
    checked,
    decode_record,
    decode_row,
    encode_record,
    encode_row,
    replaced_by,
    with_checksum,
)
from memstore.errors import CorruptionError

# Every store has had what is in NAMES from its first day. A table that a later version adds goes into OPTIONAL: a store
# that was made before gets it when somebody opens it to write; who only reads may find none, and takes it for empty.
OPTIONAL: tuple[str, ...] = ("pending", "contents", "outcomes", "history", "pins", "quotas", "spilled")
# Those of SERVED come when the store is first served to other hosts, and most stores never get them.
SERVED: tuple[str, ...] = (
    *("cluster", "sessions", "calls", "lent", "owed", "copies"),
    *("owned", "leaving", "kept", "given", "directory", "grants"),
    *("backups", "voids", "keepers", "unnoted", "lost", "remembered", "lacking", "replicas", "batches"),
)
NAMES = ("entries", "segments", "filling", "retired", "held", "leases", "counters")
_digest = xxhash.xxh3_64_digest
_U64 = struct.Struct(">Q")
_PAIR = struct.Struct(">QQ")
_LARGEST = 2**64 - 1
_BEHIND_SLASH = b"0"  # the next byte after "/"
_COUNTERS, _SERVED_COUNTERS, _QUOTA_COUNTERS = struct.Struct("<10Q"), struct.Struct("<11Q"), struct.Struct("<12Q")
_LAYOUTS = {8 + layout.size: layout for layout in (_COUNTERS, _SERVED_COUNTERS, _QUOTA_COUNTERS)}
SERVED_COUNTERS = 8 + _SERVED_COUNTERS.size  # bytes of the counters of a store that was served: only they have a number


class Counters(msgspec.Struct):
    """Numbers of the whole store. The first four never repeat."""

    version: int = 0
    number: int = 0  # the last segment or put id
    sequence: int = 0  # the last one in `retired` and `held`
    publications: int = 0
    live: int = 0  # bytes of files, by the state of their rows; `retired` are those in the table of that name
    retired: int = 0
    held: int = 0
    filling: int = 0
    recent: int = 0  # bytes of the largest batch lately put
    capacity: int = 0  # bytes that files may have in all; 0: no limit
    membership: int = 0  # how often this host began or ended to be a member, or a group left it; 0: it never was one
    quotas: int = 0  # rows of the table of that name

    @property
    def allocated(self) -> int:
        return self.live + self.retired + self.held + self.filling


class Transaction(msgspec.Struct, eq=False):
    """The tables, typed. What it returns are copies."""

    _handle: Any  # LMDB's transaction
    _tables: dict[str, Any]

    def forget(self) -> None:
        """Lets go of LMDB's transaction."""
        self._handle = None

    @property
    def moment(self) -> int:
        """The number of the transaction that was committed last."""
        return int(self._handle.id())

    def record(self, key: bytes) -> Record | None:
        stored = self._handle.get(key, None, self._tables["entries"])
        return None if stored is None else decode_record(key, stored)

    def put_record(self, key: bytes, record: Record) -> None:
        self._handle.put(key, encode_record(key, record), db=self._tables["entries"])

    def put_records(self, records: Sequence[tuple[bytes, Record]]) -> None:
        self.put_rows("entries", [(key, encode_record(key, record)) for key, record in records])

    def put_damaged(self, key: bytes) -> None:
        """Its record was damaged on another host, and couldn't come with the others."""
        self._handle.put(key, DAMAGED_BEFORE, db=self._tables["entries"])

    def replace_record(self, key: bytes, record: Record) -> Replaced:
        """Returns what is to be known of the record that was there, if there was one."""
        row, entries = encode_record(key, record), self._tables["entries"]
        if len(row) < LARGE_ROW:
            stored = self._handle.replace(key, row, entries)
            return Replaced((), None) if stored is None else replaced_by(key, bytes(stored))
        stored = self._handle.get(key, None, entries)  # LMDB's `replace` would copy what was there
        replaced = Replaced((), None) if stored is None else replaced_by(key, stored)
        self._handle.put(key, row, db=entries)
        return replaced

    def delete_record(self, key: bytes) -> bool:
        """Returns whether there was one."""
        return bool(self._handle.delete(key, db=self._tables["entries"]))

    def keys(self, prefix: bytes, after: bytes | None, limit: int) -> list[bytes]:
        """Up to `limit` keys with the prefix, in order, beyond `after`."""
        found: list[bytes] = []
        with self._handle.cursor(db=self._tables["entries"]) as cursor:
            more = cursor.set_range(after if after is not None else prefix) if after or prefix else cursor.first()
            while more and len(found) < limit:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    break
                if key != after:
                    found.append(key)
                more = cursor.next()
        return found

    def groups(self, start: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """Up to `limit` groups of keys from `start` on, and where the next ones begin; None: there are none.

        A key that is a group by itself, and those with its text before their "/", need not lie side by side: so a group
        may come twice.
        """
        found: list[bytes] = []
        with self._handle.cursor(db=self._tables["entries"]) as cursor:
            more = cursor.set_range(start) if start else cursor.first()
            while more and len(found) < limit:
                group, slash, _ = bytes(cursor.key()).partition(b"/")
                found.append(group)
                more = cursor.set_range(group + _BEHIND_SLASH) if slash else cursor.next()
            return found, bytes(cursor.key()) if more else None

    def count(self, table: str) -> int:
        if table not in self._tables:
            return 0
        return int(self._handle.stat(self._tables[table])["entries"])

    def pages(self) -> int:
        """How many of LMDB's pages are in use."""
        stats = [self._handle.stat(table) for table in self._tables.values()]
        return sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)

    def pages_of_values(self) -> int:
        """How many pages records have that are too large to share one."""
        return int(self._handle.stat(self._tables["entries"])["overflow_pages"])

    def segment(self, segment: int) -> SegmentRow | None:
        key = _U64.pack(segment)
        stored = self._handle.get(key, None, self._tables["segments"])
        return None if stored is None else decode_row(key, stored)

    def put_segment(self, segment: int, row: SegmentRow) -> None:
        key = _U64.pack(segment)
        self._handle.put(key, encode_row(key, row), db=self._tables["segments"])

    def segments(self) -> Iterator[tuple[int, SegmentRow]]:
        with self._handle.cursor(db=self._tables["segments"]) as cursor:
            for key, stored in cursor:
                yield _unpack_number(key), decode_row(bytes(key), stored)

    def delete_segment(self, segment: int) -> None:
        self._handle.delete(_U64.pack(segment), db=self._tables["segments"])

    def put_number(self, table: str, key: int, value: int) -> None:
        self._handle.put(_U64.pack(key), _U64.pack(value), db=self._tables[table])

    def number(self, table: str, key: int) -> int | None:
        stored = self._handle.get(_U64.pack(key), None, self._tables[table])
        return None if stored is None else _unpack_number(stored)

    def delete_number(self, table: str, key: int) -> None:
        self._handle.delete(_U64.pack(key), db=self._tables[table])

    def numbers(self, table: str, limit: int, after: int = 0) -> list[tuple[int, int]]:
        """The first rows of `filling`, `held` or `leases` whose key is beyond `after`."""
        found: list[tuple[int, int]] = []
        with self._handle.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(_U64.pack(after + 1))
            while more and len(found) < limit:
                found.append((_unpack_number(cursor.key()), _unpack_number(cursor.value())))
                more = cursor.next()
        return found

    def counters(self) -> Counters:
        stored = self._handle.get(b"counters", None, self._tables["counters"])
        return Counters() if stored is None else read_counters(bytes(stored))

    def put_counters(self, counters: Counters) -> None:
        numbers = msgspec.structs.astuple(counters)
        if counters.quotas:
            layout = _QUOTA_COUNTERS
        elif counters.membership:
            layout, numbers = _SERVED_COUNTERS, numbers[:-1]
        else:
            layout, numbers = _COUNTERS, numbers[:-2]
        try:
            packed = layout.pack(*numbers)
        except struct.error:  # a damaged row has made a sum negative
            packed = layout.pack(*(max(number, 0) for number in numbers))
        row, table = _digest(b"counters" + packed) + packed, self._tables["counters"]
        self._handle.put(b"counters", row, True, True, False, table)  # by place: each commit comes here

    # --- retired segments ---------------------------------------------------------------------------------------------

    def put_retired(self, size: int, sequence: int, segment: int) -> None:
        self._handle.put(_PAIR.pack(size, sequence), _U64.pack(segment), db=self._tables["retired"])

    def delete_retired(self, size: int, sequence: int) -> None:
        self._handle.delete(_PAIR.pack(size, sequence), db=self._tables["retired"])

    def retired(self, least: int, most: int, limit: int) -> list[tuple[int, int, int]]:
        """(size, sequence, id) of files of these sizes, by size, then oldest first."""
        found: list[tuple[int, int, int]] = []
        with self._handle.cursor(db=self._tables["retired"]) as cursor:
            more = cursor.set_range(_PAIR.pack(least, 0))
            while more and len(found) < limit:
                size, sequence = _unpack_pair(cursor.key())
                if size > most:
                    break
                found.append((size, sequence, _unpack_number(cursor.value())))
                more = cursor.next()
        return found

    def oldest_retired(self, limit: int) -> list[tuple[int, int, int]]:
        """Up to `limit` rows of each size, oldest first over all sizes."""
        found: list[tuple[int, int, int]] = []
        least = 0
        while rows := self.retired(least, _LARGEST, limit):
            size = rows[0][0]
            found += [row for row in rows if row[0] == size]
            least = size + 1
        return sorted(found, key=lambda row: row[1])[:limit]

    def rows(self, table: str, after: bytes | None = None) -> Iterator[tuple[memoryview, memoryview]]:
        """Keys and values beyond `after`, as they lie there, unchecked; no longer valid than the transaction."""
        if table not in self._tables:
            return
        with self._handle.cursor(db=self._tables[table]) as cursor:
            if after is None or (cursor.set_range(after) and (bytes(cursor.key()) != after or cursor.next())):
                yield from cursor

    def listed(self, table: str, after: bytes | None, limit: int) -> list[tuple[bytes, int]]:
        """The first rows of `retired` or `held` beyond `after`: keys, and segments."""
        return [(bytes(key), _unpack_number(value)) for key, value in itertools.islice(self.rows(table, after), limit)]

    # --- tables of any bytes ------------------------------------------------------------------------------------------

    def row(self, table: str, key: bytes) -> bytes | None:
        """The value of a row of an optional table, which a store that was made before may not have."""
        if table not in self._tables:
            return None
        stored = self._handle.get(key, None, self._tables[table])
        return None if stored is None else bytes(stored)

    def put_row(self, table: str, key: bytes, value: bytes) -> None:
        self._handle.put(key, value, db=self._tables[table])

    def delete_row(self, table: str, key: bytes) -> None:
        self._handle.delete(key, db=self._tables[table])

    def rows_of(self, table: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns the rows of an optional table that are there, of many keys: LMDB is asked once."""
        if table not in self._tables:
            return {}
        with self._handle.cursor(db=self._tables[table]) as cursor:
            return {bytes(key): bytes(value) for key, value in cursor.getmulti(keys)}

    def put_rows(self, table: str, rows: Sequence[tuple[bytes, bytes | bytearray]]) -> None:
        """Puts many rows: in their order they cost least."""
        with self._handle.cursor(db=self._tables[table]) as cursor:
            cursor.putmulti(rows)

    def take_rows(self, table: str, prefix: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Deletes up to `limit` rows of an optional table whose keys start with `prefix`, in order. Returns them."""
        taken: list[tuple[bytes, bytes]] = []
        if table not in self._tables:
            return taken
        with self._handle.cursor(db=self._tables[table]) as cursor:
            while len(taken) < limit and (cursor.key() or cursor.set_range(prefix)):
                key, value = cursor.item()
                if not bytes(key).startswith(prefix):
                    break
                taken.append((bytes(key), bytes(value)))
                cursor.delete()  # and stands at the next one
            return taken

    def rows_with(self, table: str, prefix: bytes, limit: int, after: bytes = b"") -> list[tuple[bytes, bytes]]:
        """Up to `limit` rows of an optional table whose keys start with `prefix`, in order, beyond `after`."""
        found: list[tuple[bytes, bytes]] = []
        if table not in self._tables:
            return found
        with self._handle.cursor(db=self._tables[table]) as cursor:
            if not (cursor.set_range(max(prefix, after)) if prefix or after else cursor.first()):
                return found
            for stored_key, value in cursor.iternext():
                key = bytes(stored_key)
                if len(found) == limit or not key.startswith(prefix):
                    break
                if key != after:
                    found.append((key, bytes(value)))
        return found

    def names_with(self, table: str, prefix: bytes, limit: int) -> list[bytes]:
        """Returns up to `limit` keys of an optional table that start with `prefix`, in order. Reads no values."""
        found: list[bytes] = []
        if table not in self._tables:
            return found
        with self._handle.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(prefix) if prefix else cursor.first()
            while more and len(found) < limit and bytes(cursor.key()).startswith(prefix):
                found.append(bytes(cursor.key()))
                more = cursor.next()
        return found

    def create(self, database: Any, names: Sequence[str]) -> dict[str, Any]:
        """LMDB's handles of tables, which are made where they aren't there; they are good once this is committed."""
        return {name: database.open_db(name.encode(), self._handle, create=True) for name in names}

    @property
    def is_served(self) -> bool:
        """Whether this process knows the tables of a store that is served."""
        return SERVED[-1] in self._tables

    def has_keepers(self, key: bytes) -> bool:
        """Whether other hosts may keep a version of this key: they are told before a change of it is acknowledged."""
        table = self._tables.get(KEEPERS)
        return table is not None and self._handle.get(key, None, table) is not None

    def is_remembered(self, key: bytes, *, is_delete: bool) -> bool:
        """Whether a change of this key is to be noted, or what is noted of it dropped, while hosts may come back."""
        table = self._tables.get(REMEMBERED)
        if table is None:
            return False
        return self._handle.get(REMEMBERS if is_delete else key, None, table) is not None

    def clear(self, table: str) -> None:
        self._handle.drop(self._tables[table], delete=False)

    def store_id(self) -> str | None:
        stored = self._handle.get(b"store", None, self._tables["counters"])
        return None if stored is None else bytes(stored).decode(errors="replace")

    def put_store_id(self, store: str) -> None:
        self._handle.put(b"store", store.encode(), db=self._tables["counters"])


def check_row(table: str, key: bytes, value: bytes) -> None:
    """Checks a row of a table of numbers. Raises CorruptionError unless it is one that could have been written."""
    if table != "counters":
        (_unpack_pair if table == "retired" else _unpack_number)(key)
        _unpack_number(value)
    elif key == b"counters":
        read_counters(value)


def read_segment(key: bytes, value: bytes) -> tuple[int, SegmentRow]:
    return _unpack_number(key), decode_row(key, value)


def read_counters(value: bytes) -> Counters:
    """Decodes the counters. Raises CorruptionError."""
    layout, body = _LAYOUTS.get(len(value)), value[8:]
    if layout is None or value[:8] != _digest(b"counters" + body):
        raise CorruptionError(f"the checksum of row {b'counters'!r} in the catalog doesn't fit")
    return Counters(*layout.unpack(body))


def _unpack_pair(packed: bytes | memoryview) -> tuple[int, int]:
    if len(packed) != _PAIR.size:
        raise CorruptionError(f"a row of the catalog has a key of {len(packed)} bytes")
    return _PAIR.unpack(packed)


def _unpack_number(packed: bytes | memoryview) -> int:
    if len(packed) != _U64.size:
        raise CorruptionError(f"a row of the catalog has a number of {len(packed)} bytes")
    return int(_U64.unpack(packed)[0])


# --- sharded puts ----------------------------------------------------------------------------------------------------


PENDING, CONTENTS, OUTCOMES = "pending", "contents", "outcomes"
_MOST_ROWS = 1 << 20
_NAME_DIGEST = 16  # bytes
MOST_RANKS = 1 << 16


class Now(NamedTuple):
    """A moment: by the clock since boot, in nanoseconds, and the boot's id."""

    clock: int
    boot: bytes


Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Duration = Annotated[int, Meta(ge=0, le=10**18)]  # 30 years: a moment that lies so far ahead is a number still
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where bytes lie: a segment of a host, known by the put that filled it. Put ids of a host never repeat.

    Attributes:
        segment: the number of the file, by which its host finds it.
    """

    host: Id
    put_id: Number
    segment: Number = 0


class PendingPart(msgspec.Struct, frozen=True, array_like=True):
    """Part of an attempt: the segment that one rank has prepared. What it says of the value is its content.

    Hosts send parts to each other. So each field has its bounds.

    Attributes:
        number: of the attempt: it tells those of one name apart. Who takes the part in gives it, and `expires`.
        segment: with 0 the rank holds no bytes, and who takes the part in has made up the put id.
        size, start: of the segment's file, and of the data section in it.
        expect: the version that the key must have when the attempt is published; None: whatever it has.
        waits_ns: nanoseconds that it waits for the others.
        expires: on the clock since boot of the host that has the row.
        boot: of that host.
        host: the member of the cluster where the segment lies. In the catalog's rows it is empty for this one.
    """

    key: Annotated[bytes, Meta(min_length=1, max_length=KEY_LIMIT)]
    attempt: Annotated[str, Meta(min_length=1)]
    number: Number
    rank: Rank
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    put_id: Number
    segment: Number
    size: Number = 0
    start: Number = 0
    expect: Number | None = None
    waits_ns: Duration = 0
    expires: Number = 0
    boot: Annotated[bytes, Meta(max_length=16)] = b""
    host: Annotated[bytes, Meta(max_length=16)] = b""

    @property
    def place(self) -> Place:
        return Place(self.host, self.put_id, self.segment)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its bytes lie, if it has any."""
        return (self.place,) if self.segment else ()


class FailureDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """Attributes of the error that ended an attempt: those of VersionConflictError and PartialCommitError."""

    expected: int = 0
    found: int = 0
    missing_ranks: tuple[int, ...] = ()
    missing_boxes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The error that every rank of an attempt gets: the name of its class, its text, its attributes."""

    error: str
    text: str
    details: FailureDetails = FailureDetails()


class AttemptOutcome(msgspec.Struct, frozen=True, array_like=True):
    """End of an attempt: its version, or with version 0 the error that ended it.

    Attributes:
        number: 0: it never began.
        error, message, details: as of `Failure`.
        expires: when it may be forgotten, on the clock since boot of the host that has the row.
        boot: of that host.
    """

    key: Annotated[bytes, Meta(min_length=1, max_length=KEY_LIMIT)]
    attempt: Annotated[str, Meta(min_length=1)]
    number: Number
    version: Number
    error: str
    message: str
    details: FailureDetails
    expires: Number
    boot: Annotated[bytes, Meta(max_length=16)] = b""

    @property
    def failure(self) -> Failure | None:
        return None if self.version else Failure(self.error, self.message, self.details)

    def is_over(self, now: Now) -> bool:
        return self.expires <= now.clock or self.boot != now.boot


_encode = msgspec.msgpack.Encoder().encode
_decode_part = msgspec.msgpack.Decoder(PendingPart).decode
_decode_outcome = msgspec.msgpack.Decoder(AttemptOutcome).decode


def put_part(transaction: Transaction, part: PendingPart, content: bytes) -> None:
    """`content` is opaque here: see memstore/contents/reading.py."""
    name = _row_name_of(part)
    transaction.put_row(PENDING, name, with_checksum(name, _encode(part)))
    transaction.put_row(CONTENTS, name, with_checksum(name, content))


def renew_part(transaction: Transaction, part: PendingPart) -> None:
    """Writes its row anew, and leaves its content alone."""
    transaction.put_row(PENDING, _row_name_of(part), with_checksum(_row_name_of(part), _encode(part)))


def delete_part(transaction: Transaction, part: PendingPart) -> None:
    for table in (PENDING, CONTENTS):
        transaction.delete_row(table, _row_name_of(part))


def content_of(transaction: Transaction, part: PendingPart) -> bytes:
    """Returns what the part's rank says of the value. Raises CorruptionError."""
    stored = transaction.row(CONTENTS, _row_name_of(part))
    if stored is None:
        raise CorruptionError(f"the catalog has lost what rank {part.rank} of attempt {part.attempt!r} has put")
    return checked(_row_name_of(part), stored)


def parts_of(transaction: Transaction, key: bytes | None = None, attempt: str | None = None) -> list[PendingPart]:
    """The parts of an attempt by rank, those of all attempts of a key, or all. Raises CorruptionError."""
    prefix = b"" if key is None else _name_digest(key) if attempt is None else _row_name(key, attempt)
    return [read_part(name, stored) for name, stored in transaction.rows_with(PENDING, prefix, _MOST_ROWS)]


def outcome_of(transaction: Transaction, key: bytes, attempt: str) -> AttemptOutcome | None:
    name = _row_name(key, attempt)
    stored = transaction.row(OUTCOMES, name)
    return None if stored is None else read_outcome(name, stored)


def all_outcomes(transaction: Transaction) -> list[AttemptOutcome]:
    return [read_outcome(name, stored) for name, stored in transaction.rows_with(OUTCOMES, b"", _MOST_ROWS)]


def put_outcome(transaction: Transaction, outcome: AttemptOutcome) -> None:
    name = _row_name(outcome.key, outcome.attempt)
    transaction.put_row(OUTCOMES, name, with_checksum(name, _encode(outcome)))


def delete_outcome(transaction: Transaction, outcome: AttemptOutcome) -> None:
    transaction.delete_row(OUTCOMES, _row_name(outcome.key, outcome.attempt))


def drop_outcomes(transaction: Transaction, now: Now, limit: int) -> None:
    """Drops those that are over, of `limit` rows that are chosen by the clock: in time, all rows are looked at."""
    first = now.clock.to_bytes(8, "little")  # as good as random
    rows = transaction.rows_with(OUTCOMES, b"", limit, first) or transaction.rows_with(OUTCOMES, b"", limit)
    for name, stored in rows:
        outcome = _outcome_in(name, stored)  # whose name isn't compared: a prepare looks at 16, and each takes 2 µs
        if outcome.expires <= now.clock or outcome.boot != now.boot:
            transaction.delete_row(OUTCOMES, name)


def read_part(name: bytes, stored: bytes) -> PendingPart:
    """Raises CorruptionError unless it is what was written under that name."""
    try:
        part = _decode_part(checked(name, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog's pending parts can't be read: {error}") from None
    if name != _row_name_of(part):
        raise CorruptionError("a row of the catalog's pending parts stands under another's name")
    return part


def read_outcome(name: bytes, stored: bytes) -> AttemptOutcome:
    """Raises CorruptionError unless it is what was written under that name."""
    outcome = _outcome_in(name, stored)
    if name != _row_name(outcome.key, outcome.attempt):
        raise CorruptionError("a row of the catalog's outcomes stands under another's name")
    return outcome


def _outcome_in(name: bytes, stored: bytes) -> AttemptOutcome:
    try:
        return _decode_outcome(checked(name, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog's outcomes can't be read: {error}") from None


def _row_name_of(part: PendingPart) -> bytes:
    return _row_name(part.key, part.attempt) + part.rank.to_bytes(4, "big")


@functools.lru_cache(256)  # a publication by four ranks asks 48 times for one name, which takes 2 µs to make
def _row_name(key: bytes, attempt: str) -> bytes:
    """Returns the beginning of the names of an attempt's rows."""
    return _name_digest(key) + _name_digest(attempt.encode())


def _name_digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_NAME_DIGEST).digest()


# --- versions that were replaced, and stay readable ------------------------------------------------------------------


HISTORY, PINS, QUOTAS, SPILLED = "history", "pins", "quotas", "spilled"


class KeptVersion(NamedTuple):
    """The name of a replaced version's row, and what it says: the version, and the bytes that this takes."""

    name: bytes
    version: int
    nbytes: int


class _KeptRecord(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    record: bytes  # as in `entries`


_decode_kept_record = msgspec.msgpack.Decoder(_KeptRecord).decode


def put_version(transaction: Transaction, key: bytes, record: Record) -> None:
    name = _name_of_version(key, record)
    row = _encode(_KeptRecord(key, bytes(encode_record(key, record))))
    transaction.put_row(HISTORY, name, with_checksum(name, row))


def kept_versions(transaction: Transaction, key: bytes | None = None) -> list[KeptVersion]:
    """Returns the replaced versions of a key that are kept, the oldest first; or those of all keys, by key."""
    prefix = b"" if key is None else _name_digest(key)
    return [_version_of(name) for name in transaction.names_with(HISTORY, prefix, _MOST_ROWS)]


def kept_record(transaction: Transaction, key: bytes, version: int) -> Record | None:
    """Returns the record of a replaced version that is kept. Raises CorruptionError."""
    for name, stored in transaction.rows_with(HISTORY, _name_digest(key) + pack_number(version), 1):
        return read_version(name, stored)[1]
    return None


def take_version(transaction: Transaction, key: bytes, version: int) -> Record | None:
    """Deletes the row of a replaced version, and returns its record. Raises CorruptionError, then, of a damaged one."""
    for name, stored in transaction.rows_with(HISTORY, _name_digest(key) + pack_number(version), 1):
        transaction.delete_row(HISTORY, name)
        return read_version(name, stored)[1]
    return None


def read_version(name: bytes, stored: bytes) -> tuple[bytes, Record]:
    """Returns key and record of a row. Raises CorruptionError unless it is what was written under that name."""
    try:
        row = _decode_kept_record(checked(name, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog's replaced versions can't be read: {error}") from None
    record = decode_record(row.key, row.record)
    if name != _name_of_version(row.key, record):
        raise CorruptionError("a row of the catalog's replaced versions stands under another's name")
    return row.key, record


def key_of_version(transaction: Transaction, kept: KeptVersion) -> bytes | None:
    """Returns the key of a replaced version; None if its row is damaged."""
    stored = transaction.row(HISTORY, kept.name)
    with contextlib.suppress(CorruptionError):
        return None if stored is None else read_version(kept.name, stored)[0]
    return None


def count_in_history(
    transaction: Transaction, segment: int, row: SegmentRow, here: Callable[[Record], Sequence[SegmentExtent]]
) -> int:
    """Returns how many replaced versions that are kept name a segment. Raises CorruptionError.

    Args:
        here: gives the segments of a record that lie on this host.
    """
    records = [kept_record(transaction, row.key, one.version) for one in kept_versions(transaction, row.key)]
    named = [{(one.segment, one.put_id) for one in here(record)} for record in records if record is not None]
    return sum((segment, row.put_id) in one for one in named)


def spilled_size(transaction: Transaction, segment: int) -> int | None:
    """Returns the bytes of a segment's file in the spill folder; None if it doesn't lie there."""
    stored = transaction.row(SPILLED, pack_number(segment))
    return None if stored is None else _unpack_number(stored)


def spilled_segments(transaction: Transaction) -> dict[int, int]:
    """Returns the segments whose files lie in the spill folder, with the bytes of these."""
    return {
        _unpack_number(key): _unpack_number(value) for key, value in transaction.rows_with(SPILLED, b"", _MOST_ROWS)
    }


class QuotaRow(msgspec.Struct, frozen=True, array_like=True):
    """A quota: the keys that start with the prefix may take `limit` bytes, and take `used`."""

    prefix: bytes
    limit: int
    used: int


_decode_quota = msgspec.msgpack.Decoder(QuotaRow).decode


def put_quota(transaction: Transaction, quota: QuotaRow) -> None:
    name = group_row(quota.prefix)
    transaction.put_row(QUOTAS, name, with_checksum(name, _encode(quota)))


def delete_quota(transaction: Transaction, prefix: bytes) -> None:
    transaction.delete_row(QUOTAS, group_row(prefix))


def quotas(transaction: Transaction) -> list[QuotaRow]:
    """Returns all quotas, by prefix. Raises CorruptionError."""
    return [read_quota(name, stored) for name, stored in transaction.rows_with(QUOTAS, b"", _MOST_ROWS)]


def free_in_quotas(transaction: Transaction, key: bytes, nbytes: int) -> None:
    """Subtracts bytes from the quotas of a key."""
    for row in quotas(transaction):
        if nbytes and key.startswith(row.prefix):
            put_quota(transaction, QuotaRow(row.prefix, row.limit, max(row.used - nbytes, 0)))


def read_quota(name: bytes, stored: bytes) -> QuotaRow:
    """Raises CorruptionError unless it is what was written under that name."""
    try:
        quota = _decode_quota(checked(name, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog's quotas can't be read: {error}") from None
    if name != group_row(quota.prefix):
        raise CorruptionError("a row of the catalog's quotas stands under another's name")
    return quota


class PinRow(msgspec.Struct, frozen=True, array_like=True):
    """A pin of a version, as its row says it. The number, which the row's name has too, is that of a byte to lock."""

    key: bytes
    version: int
    number: int
    pid: int


_decode_pin = msgspec.msgpack.Decoder(PinRow).decode


def put_pin(transaction: Transaction, pin: PinRow) -> None:
    name = _name_of_pin(pin)
    transaction.put_row(PINS, name, with_checksum(name, _encode(pin)))


def delete_pin(transaction: Transaction, pin: PinRow) -> None:
    transaction.delete_row(PINS, _name_of_pin(pin))


def pins_of(transaction: Transaction, key: bytes | None = None) -> list[PinRow]:
    """Returns the pins of a key, or all, whether their processes live or not. A verify reports damaged rows."""
    found: list[PinRow] = []
    for name, stored in transaction.rows_with(PINS, b"" if key is None else _name_digest(key), _MOST_ROWS):
        with contextlib.suppress(CorruptionError):
            found.append(read_pin(name, stored))
    return found


def read_pin(name: bytes, stored: bytes) -> PinRow:
    """Raises CorruptionError unless it is what was written under that name."""
    try:
        pin = _decode_pin(checked(name, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"a row of the catalog's pins can't be read: {error}") from None
    if name != _name_of_pin(pin):
        raise CorruptionError("a row of the catalog's pins stands under another's name")
    return pin


def _name_of_pin(pin: PinRow) -> bytes:
    return _name_digest(pin.key) + pack_number(pin.version) + pack_number(pin.number)


def _name_of_version(key: bytes, record: Record) -> bytes:
    return _name_digest(key) + pack_number(record.version) + pack_number(record.held_bytes)


def _version_of(name: bytes) -> KeptVersion:
    if len(name) != _NAME_DIGEST + 2 * NUMBER_SIZE:
        raise CorruptionError(f"a row of table {HISTORY!r} in the catalog has a key of {len(name)} bytes")
    version, nbytes = name[_NAME_DIGEST:-NUMBER_SIZE], name[-NUMBER_SIZE:]
    return KeptVersion(name, int.from_bytes(version, "big"), int.from_bytes(nbytes, "big"))


# --- a store that is served to other hosts ---------------------------------------------------------------------------


CLUSTER, SESSIONS, CALLS, LENT, OWED, COPIES, OWNED, LEAVING, KEPT, GIVEN, DIRECTORY, GRANTS = SERVED[:12]
BACKUPS, VOIDS, KEEPERS, UNNOTED, LOST, REMEMBERED, LACKING, REPLICAS, BATCHES = SERVED[12:]
REMEMBERS = b"\xff"  # the key of the row that says so: keys are text, so it is none
KEEPING = (LENT, COPIES)  # tables whose rows keep segments
MEMBERS, GRANTED, MIRRORED, PROMISED = b"cluster", b"granted", b"mirrored", b"promised"  # the rows of `cluster`
_HOST_SIZE, NUMBER_SIZE = 16, 8  # bytes


class KeptRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that keeps segments of this host: (segment, put id) of each, and what the layer above says."""

    segments: tuple[tuple[int, int], ...]
    said: bytes


_decode_kept = msgspec.msgpack.Decoder(KeptRow).decode


def members_body(stored: bytes) -> bytes:
    """Returns the body of the row `cluster`. Raises CorruptionError."""
    return checked(MEMBERS, stored)


def body_of(key: bytes, stored: bytes) -> bytes:
    """Returns the body of a row that was read as one of many. Raises CorruptionError."""
    return checked(key, stored)


def read_body(transaction: Transaction, table: str, key: bytes) -> bytes | None:
    """Returns the body of a row of a table whose rows keep no segments. Raises CorruptionError."""
    stored = transaction.row(table, key)
    return None if stored is None else checked(key, stored)


def put_body(transaction: Transaction, table: str, key: bytes, body: bytes) -> None:
    transaction.put_row(table, key, with_checksum(key, body))


def put_bodies(transaction: Transaction, table: str, bodies: Mapping[bytes, bytes]) -> None:
    transaction.put_rows(table, [(key, with_checksum(key, body)) for key, body in bodies.items()])


def kept_row(transaction: Transaction, table: str, key: bytes) -> KeptRow | None:
    """A row of `lent` or `copies`. Raises CorruptionError."""
    stored = transaction.row(table, key)
    return None if stored is None else read_kept(table, key, stored)


def put_kept(transaction: Transaction, table: str, key: bytes, row: KeptRow) -> None:
    transaction.put_row(table, key, encode_kept(key, row))


def encode_kept(key: bytes, row: KeptRow) -> bytes:
    return with_checksum(key, _encode(row))


def read_kept(table: str, key: bytes, stored: bytes) -> KeptRow:
    """Raises CorruptionError unless it is what was written under that key."""
    try:
        return _decode_kept(checked(key, stored))
    except UNDECODABLE as error:
        raise CorruptionError(f"row {key!r} of table {table!r} in the catalog can't be read: {error}") from None


def is_kept(transaction: Transaction, segment: int, row: SegmentRow) -> bool:
    """Whether a row of these tables names a segment that no entry names. Raises CorruptionError."""
    names = {LENT: pack_number(row.put_id), COPIES: row.key}
    found = (kept_row(transaction, table, name) for table, name in names.items())
    return any((segment, row.put_id) in one.segments for one in found if one is not None)


# --- what is owed -----------------------------------------------------------------------------------------------------


def put_owed(transaction: Transaction, host: bytes, put_id: int, segment: int) -> None:
    put_body(transaction, OWED, host + pack_number(put_id), pack_number(segment))


def delete_owed(transaction: Transaction, host: bytes, put_id: int) -> None:
    transaction.delete_row(OWED, host + pack_number(put_id))


def owed_rows(transaction: Transaction, limit: int) -> list[tuple[bytes, int, int]]:
    """Hosts with put ids and segments: of each host the first ones, so that none that is away keeps the others out."""
    hosts: list[bytes] = []
    while rows := transaction.rows_with(OWED, b"", 1, hosts[-1] + b"\xff" * NUMBER_SIZE if hosts else b""):
        hosts.append(rows[0][0][:_HOST_SIZE])
    share = limit // max(len(hosts), 1) or 1
    found: list[tuple[bytes, int, int]] = []
    for key, stored in (row for host in hosts for row in transaction.rows_with(OWED, host, share)):
        with contextlib.suppress(CorruptionError):  # verify reports it; the others are to be paid
            found.append(read_owed(key, stored))
    return found[:limit]


def read_owed(key: bytes, stored: bytes) -> tuple[bytes, int, int]:
    """Returns the host, put id and segment of a row of `owed`. Raises CorruptionError."""
    body = checked(key, stored, NUMBER_SIZE)
    if len(key) != _HOST_SIZE + NUMBER_SIZE:
        raise CorruptionError(f"a row of table {OWED!r} in the catalog has a key of {len(key)} bytes")
    return key[:_HOST_SIZE], int.from_bytes(key[_HOST_SIZE:], "big"), int.from_bytes(body, "big")


def group_row(group: bytes) -> bytes:
    """Returns the key of a group's row: LMDB has no empty ones."""
    return b"=" + group


def pack_number(value: int) -> bytes:
    """As keys have it, so that they are in order."""
    return value.to_bytes(NUMBER_SIZE, "big")
