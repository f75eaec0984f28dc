"""History: versions of a key that were replaced, and stay readable; and quotas, which count them.

A put may say how many versions of its key stay readable, the present one among them, and how many bytes the replaced
ones may take. The record of the key has both (`Record.history`), and each later put hands them on, so a put of a key
without them pays nothing: it reads the record that it replaces anyway.

1. The transaction that replaces a record with a history writes it into the table `history` (`keep_replaced`), and takes
   those out that are beyond the limits: these are retired as all that is replaced. So versions and limits are right
   at each moment, whoever is killed.
2. The files of a version that is kept stay as they are: their rows say *live*. But their headers say *retired*, as
   those of all that was replaced (step 4 of `put.py`; after a kill, `recovery.py`). So a repair without a catalog never
   takes a replaced version for the present one.
3. A get of a version (`hold_version_of`) reads its row, and maps its files by the put id in their headers, as a
   reference does. If a file is another put's by then, the version went meanwhile, and the row is gone too.
4. A delete takes all versions of its key out, but for pinned ones. Where there is no room for a put, the oldest
   versions of all keys go (`drop_oldest`), before the put fails.

A *pin* keeps one version, whatever is put, deleted or lacking. It is a row in the table `pins`, and a byte of the
doorbell's file that its process has locked: so the kernel ends it with the process. Who is about to take a version out
looks for its pins, and whether their bytes are still locked (`pinned_versions`). To pin a present version, its record
is given a history of one version, if it has none: so whoever replaces it looks. A pin that is closed takes the version
out that was kept for its sake alone; of a dead one, the next put of the key does, `gc`, or a put that finds no room.

The names of the rows have version and size, so what goes is decided without reading a record.

Quotas: how many bytes the keys with a prefix may take, those of replaced versions that are kept among them.

Each quota has a row in the table `quotas`, with its limit and with what is taken. The counters say how many rows there
are, so a commit in a store without quotas compares one number with 0. In a store that has some:

1. A commit computes, before it changes anything, what each of its keys will take more or less (`charges_of`), and
   adds that to the rows of all prefixes that the key has (`charge`). One that would be over its limit raises
   QuotaExceededError: the transaction is aborted. All commits are made one after the other, under the store's mutex, so
   puts of any number of processes never exceed a quota together.
2. What is taken out otherwise, for lack of room or with a pin, is subtracted there.

Bytes are those of files, with their slack, or of what lies in the catalog: `Record.held_bytes`. A change that takes no
more than before is always made, also above a limit that was lowered since.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import NamedTuple

import msgspec

from memstore import _wording as wording
from memstore._telling import tell
from memstore.engine import syscalls
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import KeptVersion, PinRow, QuotaRow, Transaction
from memstore.engine.files.mapping import LockFile
from memstore.engine.format.records import Record
from memstore.engine.protocols.change import Change, Content, mutable_entry, need_history, need_quotas
from memstore.engine.protocols.elsewhere import MappedEntry, elsewhere_of, is_served
from memstore.engine.protocols.get import damaged_entry, map_entry
from memstore.engine.protocols.reuse import owe_what_lies_elsewhere, retire_live
from memstore.engine.root.folder import DOORBELL
from memstore.engine.root.roots import Root
from memstore.errors import CorruptionError, CrossHostError, QuotaExceededError, StoreFullError

log = logging.getLogger("memstore")

_SHARE = 4  # of the bytes of all kept versions, one part in so many goes at once where there is no room


class Kept(NamedTuple):
    """Outcome of a replacement.

    Attributes:
        gone: the segments that no version names any more.
        has_more: whether the key keeps versions beside the present one.
    """

    gone: list[int]
    has_more: bool


def keep_replaced(
    root: Root, transaction: Transaction, key: bytes, old: Record, limits: tuple[int, int] | None
) -> Kept:
    """Keeps the version that is replaced, as far as limits and pins say so, and takes out what is beyond them.

    Args:
        limits: as of `Record.history`; None: the key is deleted.
    """
    most, most_bytes = limits or (1, 0)
    replaced = KeptVersion(b"", old.version, old.held_bytes)
    versions = [*tables.kept_versions(transaction, key), replaced]
    beyond = _beyond(root, transaction, key, versions, most, most_bytes)
    gone: list[int] = []
    for one in beyond:
        gone += take_out(root, transaction, one) if one.name else owe_what_lies_elsewhere(root, transaction, old)
    if replaced not in beyond:
        tables.put_version(transaction, key, old)
    return Kept(gone, len(beyond) < len(versions))


def freed_by(root: Root, transaction: Transaction, key: bytes, old: Record, change: Change) -> int:
    """Returns the bytes that a change of a key will free. It takes nothing out."""
    limits = change.history if change.content is not None else (1, 0)
    if old.history is None and limits is None:
        return old.held_bytes
    most, most_bytes = limits or old.history or (1, 0)
    versions = [*tables.kept_versions(transaction, key), KeptVersion(b"", old.version, old.held_bytes)]
    return sum(one.nbytes for one in _beyond(root, transaction, key, versions, most, most_bytes))


def trim(root: Root, transaction: Transaction, key: bytes, limits: tuple[int, int]) -> tuple[list[int], int]:
    """Takes out the replaced versions beyond the limits that nobody pins. Returns their segments, and their bytes."""
    beyond = _beyond(root, transaction, key, tables.kept_versions(transaction, key), *limits)
    segments = [segment for one in beyond for segment in take_out(root, transaction, one)]
    return segments, sum(one.nbytes for one in beyond)


def _beyond(
    root: Root, transaction: Transaction, key: bytes, versions: list[KeptVersion], most: int, most_bytes: int
) -> list[KeptVersion]:
    beyond = versions[: len(versions) - count_within(versions, most - 1, most_bytes)]
    pins = tables.pins_of(transaction, key) if beyond else []
    if pins:
        pinned = pinned_versions(root, transaction, pins)
        beyond = [one for one in beyond if one.version not in pinned]
    return beyond


def with_history(record: Record, limits: tuple[int, int], kept: Kept | None) -> Record:
    """Returns the record of a new version, which hands the limits on, if there is anything to keep by them."""
    if limits[0] == 1 and (kept is None or not kept.has_more):
        return record
    return msgspec.structs.replace(record, history=limits)


def count_within(versions: Sequence[KeptVersion], most: int, most_bytes: int) -> int:
    """Returns how many of these versions, from the newest one on, are within the limits. 0 bytes: no such limit."""
    count = nbytes = 0
    for one in reversed(versions):
        nbytes += one.nbytes
        if count == most or (most_bytes and nbytes > most_bytes):
            break
        count += 1
    return count


def take_out(root: Root, transaction: Transaction, kept: KeptVersion) -> list[int]:
    """Deletes the row of a replaced version. Returns its segments on this host, which nothing names any more.

    Other hosts that have bytes of it are told later: they are owed it.
    """
    stored, segments = transaction.row(tables.HISTORY, kept.name), list[int]()
    try:
        if stored is not None:
            segments = owe_what_lies_elsewhere(root, transaction, tables.read_version(kept.name, stored)[1])
    except CorruptionError:
        log.warning("the row of replaced version %d is damaged: its files stay until a repair", kept.version)
    transaction.delete_row(tables.HISTORY, kept.name)
    return segments


# --- gets of a version -----------------------------------------------------------------------------------------------


_TRIES = 3


def hold_version_of(
    root: Root, key: bytes, version: int, deadline: float, *, may_lock: bool, lazily: bool = False
) -> MappedEntry | None:
    """Maps one version of a key, the present one or one that is kept; None if it can't be read any more, or yet.

    Args:
        lazily: what lies on other hosts may be fetched when it is read.

    Raises CorruptionError; NotAStoreError; StoreTimeoutError; HomeUnavailableError.
    """
    if is_served(root):
        return elsewhere_of(root).hold_one(key, version, deadline, may_lock=may_lock, lazily=lazily)

    def find(transaction: Transaction) -> Record | None:
        present = transaction.record(key)
        if present is not None and present.version == version:
            return present
        return tables.kept_record(transaction, key, version)

    def try_once() -> tuple[Record | None, MappedEntry | None]:
        with root.reading():
            record = root.catalog.view(find)
            return record, None if record is None else map_entry(root, key, record)

    root.catalog.open_optional()
    record, held = try_once()
    for number in range(_TRIES):
        if record is None or held is not None:
            return held
        is_last = number == _TRIES - 1  # nobody takes it out under the mutex
        record, held = root.mutex.run(try_once, deadline) if may_lock and is_last else try_once()
    if record is None or held is not None:
        return held
    raise damaged_entry(root, key, record)


# --- pins ------------------------------------------------------------------------------------------------------------


_FIRST_BYTE = 5 << 60  # of the doorbell's file: behind all that processes lock there which fetch from other hosts


class TakenPin(NamedTuple):
    """A pin of this process. It holds as long as the file is open: a forked child closes its copy at once."""

    row: PinRow
    file: LockFile


def take_pin(root: Root, key: bytes, version: int | None, deadline: float) -> TakenPin | None:
    """Pins a version of a key; None: the present one. Returns None if there is no such version.

    Raises CrossHostError, MutableEntryError; StoreTimeoutError, StoreFullError.
    """
    if is_served(root):
        raise CrossHostError(
            f"{root.path} is the store of several hosts, and pins are of one host only: let each reader hold a "
            f"store.ref({key.decode()!r}), which keeps its version, or put with a larger history="
        )
    need_history(root, deadline)
    return root.mutex.run(_take_pin, deadline, root, key, version)


def _take_pin(root: Root, key: bytes, version: int | None) -> TakenPin | None:
    def pin(transaction: Transaction) -> PinRow | None:
        record, counters = transaction.record(key), transaction.counters()
        if record is not None and record.is_mutable:
            raise mutable_entry(key, record.mutable_kind)
        if record is not None and version in (None, record.version):
            if record.history is None:  # so that who replaces it looks for pins
                transaction.put_record(key, msgspec.structs.replace(record, history=(1, 0)))
            found = record.version
        elif version is not None and tables.kept_record(transaction, key, version) is not None:
            found = version
        else:
            return None
        counters.number += 1
        row = PinRow(key, found, counters.number, os.getpid())
        syscalls.lock_byte(file.fd, _FIRST_BYTE + row.number)  # numbers never repeat, so nobody has it
        tables.put_pin(transaction, row)
        transaction.put_counters(counters)
        return row

    root.glance()
    with root.guard:
        file = LockFile(f"{root.state}/{DOORBELL}", os.O_RDWR)
        row = root.catalog.update(pin)
    return None if row is None else TakenPin(row, file)


def end_pin(root: Root, pin: TakenPin, deadline: float) -> None:
    """Ends a pin of this process. A version that is kept for its sake alone goes."""
    if pin.file.fd >= 0:
        root.mutex.run(_end_pins, deadline, root, pin)
        pin.file.close()


def end_dead_pins(root: Root, deadline: float) -> None:
    """Ends the pins of processes that are dead, or have dropped them."""
    if root.catalog.view(lambda transaction: transaction.count(tables.PINS)):
        root.mutex.run(_end_pins, deadline, root, None)


def _end_pins(root: Root, ended: TakenPin | None) -> None:
    """Ends one pin, or all dead ones, and takes out what is kept for their sake alone."""

    def end(transaction: Transaction) -> None:
        counters = transaction.counters()
        before = counters.sequence
        if ended is not None:
            keys = {ended.row.key}
            tables.delete_pin(transaction, ended.row)
        else:
            rows = tables.pins_of(transaction)
            pinned_versions(root, transaction, rows)
            keys = {row.key for row in rows}
        for key in keys:
            record = transaction.record(key)
            limits = record.history if record is not None else None
            segments, nbytes = trim(root, transaction, key, limits or (1, 0))
            for segment in segments:
                retire_live(transaction, counters, segment)
            if counters.quotas:
                tables.free_in_quotas(transaction, key, nbytes)
        if counters.sequence != before:  # something was retired
            transaction.put_counters(counters)

    _open_served(root)
    with root.guard:
        root.catalog.update(end, is_delete=True)


def pinned_versions(root: Root, transaction: Transaction, pins: Sequence[PinRow]) -> frozenset[int]:
    """Returns the versions of these pins whose holders live, and drops the rows of the others.

    A version is that of one key alone. Call it under the mutex: nobody else tries these locks then.
    """
    if not pins:
        return frozenset()
    living: set[int] = set()
    with LockFile(f"{root.state}/{DOORBELL}", os.O_RDWR) as file:
        for pin in pins:
            at = _FIRST_BYTE + pin.number
            if syscalls.lock_byte(file.fd, at):
                syscalls.unlock_byte(file.fd, at)
                tables.delete_pin(transaction, pin)
            else:
                living.add(pin.version)
    return frozenset(living)


# --- no room ---------------------------------------------------------------------------------------------------------


def drop_oldest(root: Root, needed: int, deadline: float, prefix: bytes | None = None) -> bool:
    """Takes out the oldest kept versions, of so many bytes and a part of all.

    Args:
        prefix: take out those of keys that start with it, for a quota; None: those of all keys, for the store.

    Returns:
        Whether some went: none does where all of them would not be enough, as far as that can be told.
    """
    began = perf_counter()
    count, nbytes = root.mutex.run(_drop_oldest, deadline, root, needed, prefix)
    if count:
        tell("evict", root.path, (), nbytes, began, count)
    return count > 0


def _drop_oldest(root: Root, needed: int, prefix: bytes | None) -> tuple[int, int]:
    """Returns how many versions went, and their bytes."""

    def drop(transaction: Transaction) -> tuple[int, int]:
        pinned = pinned_versions(root, transaction, tables.pins_of(transaction))
        kept = [one for one in tables.kept_versions(transaction) if one.version not in pinned]
        if prefix is not None:
            kept = [one for one in kept if (tables.key_of_version(transaction, one) or b"").startswith(prefix)]
        counters = transaction.counters()
        sizes = {one: one.nbytes for one in kept}
        if counters.membership and prefix is None:  # what lies on other hosts makes no room here
            sizes = {one: size for one in kept if (size := _nbytes_here(root, transaction, one))}
        total, dropped = sum(sizes.values()), 0
        wanted = max(needed, total // _SHARE)
        if prefix is not None and total < needed:
            return 0, 0  # without all of them, there would be no room either
        if prefix is None and counters.capacity and counters.allocated - total + needed > counters.capacity:
            return 0, 0
        count = 0
        for one in sorted(sizes, key=lambda one: one.version):
            if dropped >= wanted:
                break
            key = tables.key_of_version(transaction, one) if counters.quotas else None
            for segment in take_out(root, transaction, one):
                retire_live(transaction, counters, segment)
            if key is not None:
                tables.free_in_quotas(transaction, key, one.nbytes)
            dropped += max(sizes[one], 1)
            count += 1
        if kept:
            transaction.put_counters(counters)
        return count, dropped

    _open_served(root)
    with root.guard:
        return root.catalog.update(drop, is_delete=True)


def _nbytes_here(root: Root, transaction: Transaction, kept: KeptVersion) -> int:
    """Returns how many bytes of this host go with a replaced version; 0, too, if its group is being handed over."""
    stored = transaction.row(tables.HISTORY, kept.name)
    try:
        found = None if stored is None else tables.read_version(kept.name, stored)
    except CorruptionError:
        found = None
    if found is None:
        return 0
    key, record = found
    if transaction.row(tables.LEAVING, tables.group_row(key.partition(b"/")[0])) is not None:
        return 0  # its next owner has got it
    if record.hosts is None:
        return record.held_bytes
    return sum(extent.size for extent in record.here(root.member_id()))


def _open_served(root: Root) -> None:
    """Opens the tables by which other hosts are told, if it was served since this process opened it."""
    if root.catalog.has_membership() and not root.catalog.is_served:
        root.catalog.open_served()


# --- Quotas ----------------------------------------------------------------------------------------------------------


MOST_QUOTAS = 1000  # each commit reads all of them


class Charge(NamedTuple):
    """The bytes that a key takes more than before, or less."""

    key: bytes
    nbytes: int


def charge(transaction: Transaction, charges: Sequence[Charge]) -> None:
    """Adds bytes to the quotas of their keys. Raises QuotaExceededError, and then the transaction is to be aborted."""
    for row in tables.quotas(transaction):
        more = sum(one.nbytes for one in charges if one.key.startswith(row.prefix))
        if not more:
            continue
        if more > 0 and row.used + more > row.limit:
            growing = [one for one in charges if one.nbytes > 0 and one.key.startswith(row.prefix)]
            raise _exceeded(row, more, growing)
        tables.put_quota(transaction, msgspec.structs.replace(row, used=max(row.used + more, 0)))


def charges_of(
    root: Root, transaction: Transaction, changes: Iterable[Change], found: Iterable[Record | None]
) -> list[Charge]:
    """Returns what the keys of a commit will take more or less. Nothing is changed.

    Args:
        found: their records.
    """
    charges: list[Charge] = []
    for change, old in zip(changes, found, strict=True):
        nbytes = 0 if change.content is None else _bytes_of(change.content, change)
        if old is not None:
            nbytes -= freed_by(root, transaction, change.key, old, change)
        charges.append(Charge(change.key, nbytes))
    return charges


def _bytes_of(content: Content, change: Change) -> int:
    """Returns the `held_bytes` of the record that will be made."""
    files = sum(one.size for one in (*change.segments, *change.shares))
    return files or len(content.inline or b"") + len(content.objects)


def _exceeded(row: QuotaRow, more: int, growing: Sequence[Charge]) -> QuotaExceededError:
    """Makes the error of a commit that would be over a quota."""
    prefix, name = row.prefix.decode(), growing[0].key.decode() if growing else None
    what = f"{name!r} takes" if len(growing) == 1 else f"{len(growing):,} keys take"
    text = (
        f"{what} {wording.size(more)} more than before, and {wording.size(row.used)} of the quota of "
        f"{wording.size(row.limit)} for keys that start with {prefix!r} are taken: delete some of these, put with a "
        f"smaller history=, or store.set_quota({prefix!r}, ...) with more; nothing was changed"
    )
    return QuotaExceededError(text, key=name, prefix=prefix, quota=row.limit, used=row.used, requested=more)


# --- setting and reading them ----------------------------------------------------------------------------------------


def set_quota(root: Root, prefix: bytes, limit: int | None, deadline: float) -> QuotaRow | None:
    """Sets the quota of a prefix, or with None ends it. Returns it as it is then.

    What the keys take is counted under the mutex, in a transaction: 100,000 keys take some tenths of a second.

    Raises CrossHostError in a store of several hosts; StoreFullError, StoreTimeoutError.
    """
    need_quotas(root, deadline)
    return root.mutex.run(_set_quota, deadline, root, prefix, limit)


def _set_quota(root: Root, prefix: bytes, limit: int | None) -> QuotaRow | None:
    def write(transaction: Transaction) -> QuotaRow | None:
        row = None if limit is None else QuotaRow(prefix, limit, used_by(transaction, prefix))
        if row is None:
            tables.delete_quota(transaction, prefix)
        else:
            tables.put_quota(transaction, row)
        counters = transaction.counters()
        counters.quotas = transaction.count(tables.QUOTAS)
        if counters.quotas > MOST_QUOTAS:
            raise StoreFullError(f"{root.path} has {MOST_QUOTAS:,} quotas, and each commit reads all: end some")
        transaction.put_counters(counters)
        return row

    root.glance()
    with root.guard:
        return root.catalog.update(write, is_delete=limit is None)


def used_by(transaction: Transaction, prefix: bytes) -> int:
    """Counts what the keys with a prefix take. A damaged record counts for nothing: a verify says so."""
    used, after = 0, None
    while keys := transaction.keys(prefix, after, 1024):
        used += sum(_present_bytes(transaction, key) for key in keys)
        after = keys[-1]
    for name, stored in transaction.rows_with(tables.HISTORY, b"", 1 << 20):
        with contextlib.suppress(CorruptionError):
            key, record = tables.read_version(name, stored)
            used += record.held_bytes if key.startswith(prefix) else 0
    return used


def held_bytes(transaction: Transaction, key: bytes) -> int:
    """Returns what a key takes: its present value, and the versions that are kept."""
    return _present_bytes(transaction, key) + sum(one.nbytes for one in tables.kept_versions(transaction, key))


def _present_bytes(transaction: Transaction, key: bytes) -> int:
    with contextlib.suppress(CorruptionError):
        record = transaction.record(key)
        return record.held_bytes if record is not None else 0
    return 0
