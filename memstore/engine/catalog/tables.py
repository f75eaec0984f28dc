"""The catalog's tables, typed: what can be read and written in one transaction.

`entries` (key -> record), `segments` (id -> row), `filling` (id -> batch), `retired` ((size, sequence) -> id: files
kept for reuse), `held` (sequence -> id: retired files that somebody held when they were last looked at), `leases` (id
-> until), `counters`; `pending`, `contents` and `outcomes` (of sharded puts: see `attempts.py`); and those of a
store that is served to other hosts: see `served.py`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from memstore.engine.format import (
    DAMAGED_BEFORE,
    LARGE_ROW,
    Record,
    Replaced,
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
OPTIONAL: tuple[str, ...] = ("pending", "contents", "outcomes")
# Those of SERVED come when the store is first served to other hosts, and most stores never get them.
SERVED: tuple[str, ...] = ("cluster", "sessions", "calls", "lent", "owed", "copies", "joining")
NAMES = ("entries", "segments", "filling", "retired", "held", "leases", "counters")
_U64 = struct.Struct(">Q")
_PAIR = struct.Struct(">QQ")
_LARGEST = 2**64 - 1
_COUNTERS, _SERVED_COUNTERS = struct.Struct("<10Q"), struct.Struct("<11Q")
UNSERVED = 8 + _COUNTERS.size  # bytes of the counters of a store that was never served: they have no `membership`


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
    membership: int = 0  # how often the row `cluster` was written; 0: never, and the store has no such number

    @property
    def allocated(self) -> int:
        return self.live + self.retired + self.held + self.filling


class Transaction:
    """The tables, typed. What it returns are copies."""

    __slots__ = ("_handle", "_tables")

    def __init__(self, handle: Any, tables: dict[str, Any]) -> None:
        self._handle: Any = handle
        self._tables = tables

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
                yield _number(key), decode_row(bytes(key), stored)

    def delete_segment(self, segment: int) -> None:
        self._handle.delete(_U64.pack(segment), db=self._tables["segments"])

    def put_number(self, table: str, key: int, value: int) -> None:
        self._handle.put(_U64.pack(key), _U64.pack(value), db=self._tables[table])

    def number(self, table: str, key: int) -> int | None:
        stored = self._handle.get(_U64.pack(key), None, self._tables[table])
        return None if stored is None else _number(stored)

    def delete_number(self, table: str, key: int) -> None:
        self._handle.delete(_U64.pack(key), db=self._tables[table])

    def numbers(self, table: str, limit: int, after: int = 0) -> list[tuple[int, int]]:
        """The first rows of `filling`, `held` or `leases` whose key is beyond `after`."""
        found: list[tuple[int, int]] = []
        with self._handle.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(_U64.pack(after + 1))
            while more and len(found) < limit:
                found.append((_number(cursor.key()), _number(cursor.value())))
                more = cursor.next()
        return found

    def counters(self) -> Counters:
        stored = self._handle.get(b"counters", None, self._tables["counters"])
        if stored is None:
            return Counters()
        return read_counters(bytes(stored))

    def put_counters(self, counters: Counters) -> None:
        numbers = msgspec.structs.astuple(counters)
        layout, numbers = (_SERVED_COUNTERS, numbers) if counters.membership else (_COUNTERS, numbers[:-1])
        try:
            packed = layout.pack(*numbers)
        except struct.error:  # a damaged row has made a sum negative
            packed = layout.pack(*(max(number, 0) for number in numbers))
        self._handle.put(b"counters", with_checksum(b"counters", packed), db=self._tables["counters"])

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
                size, sequence = _pair(cursor.key())
                if size > most:
                    break
                found.append((size, sequence, _number(cursor.value())))
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
        return [(bytes(key), _number(value)) for key, value in itertools.islice(self.rows(table, after), limit)]

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

    def rows_with(self, table: str, prefix: bytes, limit: int, after: bytes = b"") -> list[tuple[bytes, bytes]]:
        """Up to `limit` rows of an optional table whose keys start with `prefix`, in order, beyond `after`."""
        found: list[tuple[bytes, bytes]] = []
        if table not in self._tables:
            return found
        with self._handle.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(max(prefix, after)) if prefix or after else cursor.first()
            while more and len(found) < limit and bytes(cursor.key()).startswith(prefix):
                if bytes(cursor.key()) != after:
                    found.append((bytes(cursor.key()), bytes(cursor.value())))
                more = cursor.next()
        return found

    def create(self, database: Any, names: Sequence[str]) -> dict[str, Any]:
        """LMDB's handles of tables, which are made where they aren't there; they are good once this is committed."""
        return {name: database.open_db(name.encode(), self._handle, create=True) for name in names}

    @property
    def is_served(self) -> bool:
        """Whether this process knows the tables of a store that is served."""
        return SERVED[0] in self._tables

    def clear(self, table: str) -> None:
        self._handle.drop(self._tables[table], delete=False)

    def store_id(self) -> str | None:
        stored = self._handle.get(b"store", None, self._tables["counters"])
        return None if stored is None else bytes(stored).decode(errors="replace")

    def put_store_id(self, store: str) -> None:
        self._handle.put(b"store", store.encode(), db=self._tables["counters"])


def check_row(table: str, key: bytes, value: bytes) -> None:
    """Of the tables of numbers. Raises CorruptionError unless the row is one that could have been written."""
    if table != "counters":
        (_pair if table == "retired" else _number)(key)
        _number(value)
    elif key == b"counters":
        read_counters(value)


def read_segment(key: bytes, value: bytes) -> tuple[int, SegmentRow]:
    return _number(key), decode_row(key, value)


def read_counters(value: bytes) -> Counters:
    layout = _COUNTERS if len(value) <= UNSERVED else _SERVED_COUNTERS
    return Counters(*layout.unpack(checked(b"counters", value, layout.size)))


def _pair(packed: bytes | memoryview) -> tuple[int, int]:
    if len(packed) != _PAIR.size:
        raise CorruptionError(f"a row of the catalog has a key of {len(packed)} bytes")
    return _PAIR.unpack(packed)


def _number(packed: bytes | memoryview) -> int:
    if len(packed) != _U64.size:
        raise CorruptionError(f"a row of the catalog has a number of {len(packed)} bytes")
    return int(_U64.unpack(packed)[0])
