"""Surveys of a whole catalog, in a child process: a damaged LMDB file can end whoever reads it.

The child is a fresh interpreter that imports only the engine, and opens the catalog read-only. It walks all tables
(`report`), checks each row by itself and with those that it names, and writes what it finds to standard output, in
frames of a length and msgpack. A child that dies by what LMDB does on damaged pages, or hangs in it, is damage too. One
that could not be started, or that somebody else ended (SIGKILL: no memory), says nothing of the catalog. Tables of
later versions are not looked at.

A long read makes the catalog grow, since LMDB keeps the pages that are replaced meanwhile. So on a store in use the
walk takes a new transaction every two milliseconds, and goes on behind the last row. Rows of several tables are
compared within a transaction. Sums and counts are compared if all of it was one moment, since nobody changed anything.

This file imports the catalog and the format, and nothing above them: the child loads it each time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from memstore._arguments import encode_key
from memstore.engine.catalog import tables
from memstore.engine.catalog.catalog import Catalog
from memstore.engine.catalog.tables import NAMES, OPTIONAL, SERVED, PendingPart, Transaction, check_row, read_segment
from memstore.engine.format.records import (
    FILLING,
    LIVE,
    PREPARED,
    RETIRED,
    STATE_NAMES,
    Record,
    SegmentExtent,
    SegmentRow,
    checked,
    decode_record,
)
from memstore.errors import CorruptionError, lack_of

SILENCE = 60.0  # seconds without a word from the child: it hangs
_TIME_TO_END = 5.0  # seconds for the child, after its last word
_SIGNALS_OF_DAMAGE = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
# The child goes in past the engine's door, which would import all of it: as long again as what it needs.
_PROGRAM = """
import json, sys, types
sys.path[:], folder, arguments = map(json.loads, sys.argv[1:])
sys.modules["memstore.engine"] = engine = types.ModuleType("memstore.engine")
engine.__path__ = [folder]
from memstore.engine.repair.survey import report
report(*arguments)
"""

OnRow = Callable[[str, bytes, bytes], None]  # called with table, key, value


class Damage(msgspec.Struct, frozen=True, array_like=True):
    """One finding. `key` is that of the entry, if the row is of one; `segment` is 0 where none is concerned."""

    detail: str
    key: bytes | None = None
    segment: int = 0
    is_record: bool = False  # the entry's own row


@dataclass(slots=True)
class Survey:
    """The findings of a child process.

    Attributes:
        damage: rows that don't fit their checksums, or one another.
        broken: why the tables could not be read to their end; empty if they could.
        refused: why nobody could look, through no fault of the tables; empty if somebody could.
        lack: the errno of what was lacking for it; 0 if it was something else, or isn't known.
        keys, nbytes: of the entries and their values.
    """

    damage: list[Damage] = field(default_factory=list[Damage])
    broken: str = ""
    refused: str = ""
    lack: int = 0
    keys: int = 0
    nbytes: int = 0

    @property
    def is_sound(self) -> bool:
        return not self.broken and not self.refused and not self.damage


def survey(folder: str, *, locked: bool, on_row: OnRow | None = None) -> Survey:
    """Has a child look at the catalog in `folder`. `locked` False: nobody else uses it, and lock.mdb isn't touched.

    `on_row` gets each row that fits its checksum. Raises nothing.
    """
    found = Survey()
    engine = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    arguments = list(map(str, sys.path)), engine, [folder, locked, on_row is not None]
    command = [sys.executable, "-c", _PROGRAM, *map(json.dumps, arguments)]
    quiet = subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
    except (OSError, ValueError) as error:
        found.refused = f"no process could be started to look at it: {error}"
        found.lack = (lack_of(error) or (0, ""))[0]
        return found
    assert child.stdout is not None
    receiver = _Receiver(found, on_row)
    with child, child.stdout as pipe:
        try:
            receiver.listen(pipe.fileno())
            child.wait(_TIME_TO_END)
        except TimeoutError:
            receiver.blame(f"a process that read it said nothing for {SILENCE:.0f} seconds")
        except subprocess.TimeoutExpired:
            pass
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            found.refused = f"a process that read it sent what can't be read: {error}"
        finally:
            child.kill()
        code = child.wait()
    if not receiver.is_done and not found.broken and not found.refused:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        receiver.blame(f"a process that read it was ended by {how}", innocent=-code not in _SIGNALS_OF_DAMAGE)
    return found


class _Receiver:
    """Takes what the child writes, as it comes."""

    def __init__(self, found: Survey, on_row: OnRow | None) -> None:
        self._found, self._on_row = found, on_row
        self._greeted = self.is_done = False

    def listen(self, fd: int) -> None:
        for kind, *words in _frames(fd):
            if kind == "row" and self._on_row is not None:
                self._on_row(*words)
            elif kind == "damage":
                self._found.damage.append(Damage(*words))
            elif kind == "hello":
                self._greeted = True
            elif kind in ("broken", "refused", "end"):
                self.is_done = True
                if kind == "broken":
                    self._found.broken = str(words[0])
                elif kind == "refused":
                    self._found.refused, self._found.lack = str(words[0]), int(words[1])
                else:
                    self._found.keys, self._found.nbytes = map(int, words)
                return

    def blame(self, what: str, *, innocent: bool = False) -> None:
        """Blames the catalog, if the child had come to it, and unless it is `innocent`."""
        if self._greeted and not innocent:
            self._found.broken = what
        else:
            self._found.refused = what


def _frames(fd: int) -> Iterator[list[Any]]:
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    received = bytearray()
    while True:
        if not poll.poll(SILENCE * 1000):
            raise TimeoutError
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return
        received += chunk
        start = 0
        while len(received) >= start + 4:
            end = start + 4 + int.from_bytes(received[start : start + 4], "little")
            if len(received) < end:
                break
            yield msgspec.msgpack.decode(memoryview(received)[start + 4 : end], type=list[Any])
            start = end
        del received[:start]


# --- in the child ----------------------------------------------------------------------------------------------------


_ALIVE_EVERY = 2048  # rows
_TRANSACTION = 0.002  # seconds that a transaction lasts on a store in use: up to 60 puts, of some 20 KiB each
_PAUSE = 0.0005  # seconds between two: a process that has just slept is seldom interrupted within the next transaction
_ROWS_A_TRANSACTION = 64  # at least, in one transaction
_LARGEST_ROW = 1 << 28  # bytes; a header, and what it takes to describe it, has at most 100 MB


def report(folder: str, locked: bool, with_rows: bool) -> None:
    """Looks at the catalog in `folder`, in the child process, and writes what it finds to standard output."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sender = _Sender(sys.stdout.buffer)
    sender.say("hello")  # a signal that ends the child from here on is the work of damaged pages
    sender.flush()
    try:
        catalog = Catalog(folder, durable=False, writable=False, locked=locked)
        inspect(catalog, sender, with_rows=with_rows, longest=_TRANSACTION if locked else math.inf)
    except (OSError, MemoryError) as error:
        is_damage = getattr(error, "errno", None) == errno.EIO
        lack = lack_of(error) or (0, "")
        sender.say("broken" if is_damage else "refused", f"{type(error).__name__}: {error}", lack[0])
    except Exception as error:  # the parent is told of every error
        sender.say("broken", f"{type(error).__name__}: {error}")
    sender.flush()


class _Sender:
    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def say(self, *words: Any) -> None:
        encoded = msgspec.msgpack.encode(words)
        self._pipe.write(len(encoded).to_bytes(4, "little") + encoded)

    def flush(self) -> None:
        self._pipe.flush()


def inspect(catalog: Catalog, sender: _Sender, *, with_rows: bool, longest: float) -> None:
    """Reports all rows, in transactions of `longest` seconds: infinite where nobody else uses the store."""
    look = _CatalogWalk(sender, with_rows=with_rows, longest=longest)
    while not catalog.view(look.go_on):
        time.sleep(_PAUSE)


class _CatalogWalk:
    """The child's walk through the tables."""

    _transaction: Transaction  # the present one

    def __init__(self, sender: _Sender, *, with_rows: bool, longest: float) -> None:
        self._sender, self._with_rows, self._longest = sender, with_rows, longest
        self._moments = set[int]()
        self._left = [*NAMES, *OPTIONAL, *SERVED]
        self._last: bytes | None = None  # key of the first table that is left
        self._began = 0  # the moment when its first row was looked at
        self._seen = self._seen_before = 0  # rows; before that table
        self._keys = self._nbytes = 0
        self._sums = {FILLING: 0, LIVE: 0, RETIRED: 0, PREPARED: 0}
        self._largest_version = self._largest_number = 0
        self._rows = dict.fromkeys(self._sums, 0)
        self._listed = dict.fromkeys(self._sums, 0)  # in `filling`; in `retired` and `held`; in `pending`

    def go_on(self, transaction: Transaction) -> bool:
        """Looks at the next rows. True if these were the last."""
        self._transaction = transaction
        self._moments.add(transaction.moment)
        end = time.monotonic() + self._longest
        while self._left:
            if not self._walk(self._left[0], end):
                return False
            del self._left[0]
            self._last, self._seen_before = None, self._seen
        self._compare_counters()
        self._sender.say("end", self._keys, self._nbytes)
        return True

    def _damage(self, detail: str, key: bytes | None = None, segment: int = 0, *, is_record: bool = False) -> None:
        self._sender.say("damage", detail, key, segment, is_record)

    def _walk(self, table: str, end: float) -> bool:
        """Looks at the next rows of a table. False if the time was up before its end."""
        if self._last is None:
            self._began = self._transaction.moment
        for packed, value in self._transaction.rows(table, self._last):
            key = bytes(packed)
            if self._last is not None and key <= self._last or len(value) > _LARGEST_ROW:
                # perhaps by a page that names an earlier one, so that the walk would not end
                raise CorruptionError(f"table {table!r} is out of order")
            self._last = key
            self._seen += 1
            if self._seen % _ALIVE_EVERY == 0:
                self._sender.say("alive")
                self._sender.flush()
            self._look_at(table, key, bytes(value))
            if self._seen % _ROWS_A_TRANSACTION == 0 and time.monotonic() > end:
                return False
        count, said = self._seen - self._seen_before, self._transaction.count(table)
        if self._began == self._transaction.moment and count != said:
            raise CorruptionError(f"table {table!r} has {count} rows, and says {said}")
        return True

    def _look_at(self, table: str, key: bytes, value: bytes) -> None:
        try:
            if table == "entries":
                encode_key(key.decode())
                self._look_at_entry(key, decode_record(key, value))
            elif table == "segments":
                self._look_at_segment(*read_segment(key, value))
            elif table == tables.PENDING:
                self._look_at_part(tables.read_part(key, value))
            elif table == tables.OUTCOMES:
                tables.read_outcome(key, value)
            elif table == tables.HISTORY:
                self._look_at_version(*tables.read_version(key, value))
            elif table == tables.QUOTAS:
                tables.read_quota(key, value)
            elif table == tables.PINS:
                tables.read_pin(key, value)
            elif table == tables.SPILLED:
                check_row(table, key, value)
                self._look_at_spilled(int.from_bytes(key, "big"))
            elif table in SERVED:
                self._look_at_served(table, key, value)
            elif table != tables.CONTENTS:  # these are read with their parts
                check_row(table, key, value)
                if table in ("filling", "retired", "held"):
                    self._look_at_listed(table, int.from_bytes(key if table == "filling" else value, "big"))
        except (CorruptionError, ValueError) as error:
            detail = getattr(error, "detail", str(error))
            self._damage(detail, key if table == "entries" else None, is_record=table == "entries")
        else:
            if self._with_rows:
                self._sender.say("row", table, key, value)

    def _look_at_entry(self, key: bytes, record: Record) -> None:
        self._keys += 1
        self._nbytes += record.nbytes
        self._largest_version = max(self._largest_version, record.version)
        for extent in self._here(record):
            self._compare_row(key, extent)

    def _look_at_version(self, key: bytes, record: Record) -> None:
        self._nbytes += record.nbytes
        self._largest_version = max(self._largest_version, record.version)
        for extent in self._here(record):
            self._compare_row(key, extent)
        with contextlib.suppress(CorruptionError):  # reported with its own table
            present = self._transaction.record(key)
            if present is not None and present.version <= record.version:
                what = f"version {record.version} is kept as a replaced one, and the present one is {present.version}"
                self._damage(what, key)

    def _here(self, record: Record) -> tuple[SegmentExtent, ...]:
        """Returns the segments of a record that lie on this host: those of others have numbers of their own."""
        if record.hosts is None:
            return record.segments
        return record.here(bytes.fromhex(self._transaction.store_id() or ""))

    def _compare_row(self, key: bytes, extent: SegmentExtent) -> None:
        try:
            row = self._transaction.segment(extent.segment)
        except CorruptionError:
            return  # reported with its own table
        size = 0 if row is None else row.nbytes or tables.spilled_size(self._transaction, extent.segment)
        if row is None or (row.key, row.put_id, row.state, size) != (key, extent.put_id, LIVE, extent.size):
            what = "there is none" if row is None else "is another put's"
            self._damage(f"the row of its segment disagrees with its record: {what}", key, extent.segment)

    def _look_at_segment(self, segment: int, row: SegmentRow) -> None:
        if row.state not in self._sums:
            raise ValueError(f"the row of segment {segment:016x} has no state that it could have")
        self._sums[row.state] += row.nbytes
        self._rows[row.state] += 1
        self._largest_number = max(self._largest_number, segment, row.put_id)
        if row.state == LIVE:
            try:
                record = self._transaction.record(row.key)
                is_named = record is not None and any(extent.segment == segment for extent in self._here(record))
                is_named = is_named or tables.is_kept(self._transaction, segment, row)
                count = tables.count_in_history(self._transaction, segment, row, self._here)
            except CorruptionError:
                return
            if is_named or count:
                others = count + is_named - 1
                if row.shared != others:
                    what = f"{others} other versions name its segment, and its row says {row.shared}"
                    self._damage(what, row.key, segment)
            else:
                self._damage("the catalog calls its segment live, and no entry names it", row.key, segment)

    def _look_at_spilled(self, segment: int) -> None:
        row = self._transaction.segment(segment)
        if row is None or row.state == FILLING or (row.state != RETIRED and row.nbytes):
            self._damage("the catalog says that its file was moved, and its row says otherwise", None, segment)

    def _look_at_served(self, table: str, key: bytes, value: bytes) -> None:
        if table in tables.KEEPING:
            for segment, put_id in tables.read_kept(table, key, value).segments:
                with contextlib.suppress(CorruptionError):  # reported with its own table
                    self._check_named(table, segment, LIVE, put_id)
        elif table == tables.OWED:
            tables.read_owed(key, value)
        else:
            checked(key, value)

    def _check_named(self, table: str, segment: int, state: int, put_id: int | None = None) -> None:
        """Reports a segment that a table names, and whose row says otherwise."""
        row = self._transaction.segment(segment)
        if row is None or row.state != state or put_id not in (None, row.put_id):
            self._damage(f"table {table!r} names it, and its row says otherwise", None, segment)

    def _look_at_part(self, part: PendingPart) -> None:
        self._largest_number = max(self._largest_number, 0 if part.host else part.put_id, part.number)
        if part.segment and not part.host:
            self._look_at_listed("pending", part.segment)
        tables.content_of(self._transaction, part)

    def _look_at_listed(self, table: str, segment: int) -> None:
        state = {"filling": FILLING, "pending": PREPARED}.get(table, RETIRED)
        self._listed[state] += 1
        self._check_named(table, segment, state)

    def _compare_counters(self) -> None:
        try:
            counters = self._transaction.counters()
        except CorruptionError:
            return  # reported with its own table
        if counters.membership and self._transaction.row(tables.CLUSTER, tables.MEMBERS) is None:
            self._damage("the store is a member of a cluster, and the row that says of which is lost")
        if counters.version < self._largest_version or counters.number < self._largest_number:
            self._damage("the counters are behind the rows: numbers would repeat")
        if len(self._moments) > 1:
            return
        filling = self._sums[FILLING] + self._sums[PREPARED]
        rows = {"live": self._sums[LIVE], "filling": filling, "retired": self._sums[RETIRED]}
        sums = {"live": counters.live, "filling": counters.filling, "retired": counters.retired + counters.held}
        for state in (FILLING, PREPARED, RETIRED):
            if self._rows[state] != self._listed[state]:
                name = STATE_NAMES.get(state, "prepared")
                self._damage(f"{self._rows[state]} rows are {name}, and {self._listed[state]} are listed as such")
        for state, nbytes in sums.items():
            if nbytes != rows[state]:
                self._damage(f"the counters have {nbytes:,} {state} bytes, and the rows {rows[state]:,}")
