"""The catalog's answers beside `get` and `put`: records, versions, keys, and waits for new versions.

Nothing is mapped, and no tensor is read. In a store on several hosts, what isn't found here is asked for elsewhere.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import Transaction
from memstore.engine.format.records import Record
from memstore.engine.protocols.change import mutable_entry
from memstore.engine.protocols.elsewhere import elsewhere_of, find_record, is_served, owned_now
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import CorruptionError, StoreTimeoutError

_KEYS_A_PAGE = 1024
DEFAULT_TIMEOUT = 30.0  # seconds
LOOK_EVERY = 1.0  # seconds: a waiter looks again by itself, should its wake get lost
ASK_EVERY = 0.05  # seconds, where other hosts are asked, for more keys than they keep one wait of
MOST_KEPT = 1024  # keys of one wait, each a question that is open at its owner: of 4,000, to ask takes 0.6 s
_BETWEEN_LOOKS = 0.0005  # seconds at least, where many others change keys that nobody waits for here
_WILDCARDS = frozenset("*?[")
_BETWEEN_GLANCES = 0.002  # seconds, in a store that may only be read: nobody wakes its processes


def find(root: Root, name: bytes, timeout: float = DEFAULT_TIMEOUT) -> Record | None:
    """Returns the record of a key. `timeout` is for other hosts."""
    record = root.catalog.read(name)
    return find_record(root, name, deadline_after(timeout)) if record is None else record


def version_of(root: Root, name: bytes, timeout: float) -> int:
    """Returns the version of a key, 0 if there is no such key. `timeout` is for other hosts."""
    record = root.catalog.read(name)
    if record is None:
        record = find_record(root, name, deadline_after(timeout))
    return record.version if record else 0


def versions_of(root: Root, name: bytes, timeout: float) -> tuple[int, ...]:
    """Returns the versions of a key that can be read, the present one last; none if there is no such key.

    `timeout` is for other hosts.
    """

    def read(transaction: Transaction) -> tuple[int, ...]:
        record = transaction.record(name)
        kept = tuple([one.version for one in tables.kept_versions(transaction, name)])
        return kept if record is None else (*kept, record.version)

    if is_served(root):
        return tuple(elsewhere_of(root).versions(name, deadline_after(timeout)))
    root.catalog.open_optional()
    return root.catalog.view(read)


def version_records(root: Root, name: bytes, timeout: float) -> list[Record]:
    """Returns the records of the versions that `versions_of` gives. Raises CorruptionError."""

    def read(transaction: Transaction) -> list[Record]:
        kept = [tables.kept_record(transaction, name, one.version) for one in tables.kept_versions(transaction, name)]
        return [record for record in (*kept, transaction.record(name)) if record is not None]

    if is_served(root):
        return elsewhere_of(root).version_records(name, deadline_after(timeout))
    root.catalog.open_optional()
    return root.catalog.view(read)


def is_spilled(root: Root, record: Record) -> bool:
    """Returns whether files of a version that lie on this host are in the spill folder."""
    if root.storage.spill_folder() is None or record.adopted is not None:
        return False
    here = record.here(root.member_id()) if record.hosts else record.segments
    return root.catalog.view(
        lambda transaction: any(tables.spilled_size(transaction, one.segment) is not None for one in here)
    )


def quotas_here(root: Root) -> list[tables.QuotaRow]:
    """Returns the quotas whose keys this host owns, by prefix."""
    root.catalog.open_optional()
    rows = root.catalog.view(tables.quotas)
    return [row for row in rows if not is_served(root) or owned_now(root, row.prefix) is not None]


def quotas(root: Root, timeout: float) -> list[tables.QuotaRow]:
    """Returns all quotas, by prefix. What keys of other owners take is counted by the versions that they have.

    Raises HomeUnavailableError, StoreTimeoutError.
    """
    found = {row.prefix: row for row in quotas_here(root)}
    for row in root.catalog.view(tables.quotas):
        if row.prefix not in found:
            names, used = keys_from(lambda: root, row.prefix, timeout), 0
            while keys := list(itertools.islice(names, _KEYS_A_PAGE)):
                records = elsewhere_of(root).records(keys, deadline_after(timeout))
                for name, record in zip(keys, records, strict=True):
                    versions = [] if record is None else [record]
                    if record is not None and record.history is not None:
                        versions = version_records(root, name, timeout)
                    used += sum(one.held_bytes for one in versions)
            found[row.prefix] = msgspec.structs.replace(row, used=used)
    return [found[prefix] for prefix in sorted(found)]


def known_version(root: Root, name: bytes) -> int | None:
    """Returns the version of a key, or None where other hosts would have to be asked."""
    record = root.catalog.read(name)
    if record is None and owned_now(root, name) is None:
        return None
    return record.version if record else 0


# --- keys -------------------------------------------------------------------------------------------------------------


def keys_from(
    opened: Callable[[], Root], prefix: bytes, timeout: float, silent: dict[bytes, str] | None = None
) -> Iterator[bytes]:
    """Yields the keys that start with `prefix`, sorted; each page of 1,024 as it is at one moment.

    `opened` gives the root anew for each page: the store may be closed, or the process forked, between two. `timeout`
    is that of each page, where other hosts are asked. `silent` as in `Elsewhere.keys`.
    """
    for _, keys in _pages(opened, prefix, timeout, silent):
        yield from keys


def keys_here(root: Root) -> Iterator[bytes]:
    """Yields the keys that this host's catalog has."""
    after: bytes | None = None
    while keys := root.catalog.view(Transaction.keys, b"", after, _KEYS_A_PAGE):
        yield from keys
        after = keys[-1]


def keys_around(root: Root, name: bytes, most: int) -> list[bytes]:
    """Returns keys of this host's catalog among which one like `name` may be, up to `most` of each kind.

    They are the first ones of all, those of its group, those that start as it does, and those that follow it.
    """
    group, start = name[: name.rfind(b"/") + 1], name[: (len(name) + 1) // 2]

    def read(transaction: Transaction) -> list[bytes]:
        places = ((b"", None), (group, None), (start, None), (b"", name))
        return [key for prefix, after in places for key in transaction.keys(prefix, after, most)]

    return list(dict.fromkeys(root.catalog.view(read)))


def record_here(root: Root, name: bytes) -> Record | None:
    """Returns the record of a key, if this host's catalog has it."""
    return root.catalog.read(name)


def lost_with(root: Root, name: bytes) -> str:
    """Returns the host with which a key was lost, or what that had put under its group, for people; empty: none."""

    def read(transaction: Transaction) -> str:
        for one in (name, name.partition(b"/")[0]):
            said = tables.read_body(transaction, tables.LOST, one) if one else None
            if said is not None:
                return said.decode(errors="replace")
        return ""

    return root.catalog.view(read)


def keys_of_bytes_here(root: Root) -> Iterator[bytes]:
    """Yields the keys whose bytes lie on this host, sorted; other hosts may own them."""
    try:
        is_of_cluster = is_served(root)
    except CorruptionError:  # the row that says so is damaged, and reported as such
        is_of_cluster = False
    if not is_of_cluster:
        yield from keys_here(root)
        return
    elsewhere_of(root).take_in()
    yield from heapq.merge(
        (key for key in keys_here(root) if _lies_here(root, key)), sorted(root.catalog.view(_lent_keys))
    )


def _lies_here(root: Root, key: bytes) -> bool:
    with contextlib.suppress(CorruptionError):  # its reader will say so
        record = root.catalog.read(key)
        return record is not None and (record.hosts is None or root.member_id() in record.hosts)
    return True


def _lent_keys(transaction: Transaction) -> list[bytes]:
    """Returns the keys whose records are elsewhere, and name segments of this host."""
    found: set[bytes] = set()
    for key, stored in transaction.rows(tables.LENT):
        with contextlib.suppress(CorruptionError):  # reported with its own table
            kept = tables.read_kept(tables.LENT, bytes(key), bytes(stored))
            rows = [transaction.segment(segment) for segment, _ in kept.segments]
            found |= {row.key for row in rows if row is not None}
    return list(found)


def records_from(opened: Callable[[], Root], prefix: bytes, timeout: float) -> Iterator[tuple[bytes, Record]]:
    """Yields keys as `keys_from` does, each with its record."""
    for root, keys in _pages(opened, prefix, timeout):
        rows = zip(keys, _records(root, keys, timeout), strict=True)
        yield from [(key, record) for key, record in rows if record is not None]


def count(root: Root, timeout: float) -> int:
    """Returns how many keys there are."""
    if is_served(root):
        return sum(len(keys) for _, keys in _pages(lambda: root, b"", timeout))
    return root.catalog.view(lambda transaction: transaction.count("entries"))


def _records(root: Root, keys: list[bytes], timeout: float) -> list[Record | None]:
    if is_served(root):
        return elsewhere_of(root).records(keys, deadline_after(timeout))
    return root.catalog.view(lambda transaction: [transaction.record(key) for key in keys])


def _pages(
    opened: Callable[[], Root], prefix: bytes, timeout: float, silent: dict[bytes, str] | None = None
) -> Iterator[tuple[Root, list[bytes]]]:
    """Yields the keys in pages, since a long transaction makes the catalog grow."""
    after: bytes | None = None
    while True:
        root = opened()
        keys, is_last = _page(root, prefix, after, _KEYS_A_PAGE, timeout, silent)
        yield root, keys
        if is_last:
            return
        after = keys[-1]


def _page(
    root: Root, prefix: bytes, after: bytes | None, limit: int, timeout: float, silent: dict[bytes, str] | None = None
) -> tuple[list[bytes], bool]:
    """Returns up to `limit` keys beyond `after`, and whether they are sure to be the last ones."""
    if is_served(root):
        rows = elsewhere_of(root).keys(prefix, after or b"", limit, deadline_after(timeout), silent)
        return [key for key, _ in rows], not rows  # a page of several owners may be a short one
    keys = root.catalog.view(Transaction.keys, prefix, after, limit)
    return keys, len(keys) < limit


def records_after(
    root: Root, prefix: bytes, after: bytes | None, limit: int, timeout: float
) -> list[tuple[bytes, Record]]:
    """Returns up to `limit` keys with `prefix` beyond `after`, each with its record. `timeout` is for other hosts."""
    keys, _ = _page(root, prefix, after, limit, timeout)
    rows = zip(keys, _records(root, keys, timeout), strict=True)
    return [(key, record) for key, record in rows if record is not None]


# --- wait -------------------------------------------------------------------------------------------------------------


def wait_for(opened: Callable[[], Root], name: bytes, newer_than: int, timeout: float, *, mutable: bool = False) -> int:
    """Returns a version that is newer than `newer_than`, as soon as there is one. `opened` as in `keys_from`.

    Raises MutableEntryError where the key is that of a mutable entry, unless `mutable`.
    """
    deadline = deadline_after(timeout)
    doorbell = opened().doorbell
    bell = doorbell.bell(name)
    while True:
        seen = doorbell.load(bell)  # before the catalog: a put in between changes it
        root = opened()
        record = root.catalog.read(name)
        version = record.version if record else 0
        is_here = version > newer_than or owned_now(root, name) is not None  # it may have moved
        if not is_here:
            (record,) = elsewhere_of(root).records([name], deadline)
            version = record.version if record else 0
        if record is not None and record.is_mutable and not mutable:
            raise mutable_entry(name, record.mutable_kind)
        if version > newer_than:
            return version
        left = deadline - time.monotonic()
        if left <= 0:
            raise not_newer(name, version, newer_than, timeout)
        if is_here:
            doorbell.wait(bell, seen, min(LOOK_EVERY, left))
        elif version := elsewhere_of(root).wait(name, newer_than, deadline):
            return version


@dataclass(frozen=True, slots=True)
class AwaitedKeys:
    """Keys of which one is waited for.

    Attributes:
        keys: which; None: all that start with `prefix`, but those of mutable entries.
        newer_than: versions, by key; 0 for others. Or one for all.
    """

    keys: tuple[bytes, ...] | None
    prefix: bytes
    newer_than: Mapping[bytes, int] | int

    def is_newer(self, name: bytes, version: int) -> bool:
        given = self.newer_than
        return version > (given if isinstance(given, int) else given.get(name, 0))


def newer_versions(opened: Callable[[], Root], wanted: AwaitedKeys, timeout: float) -> dict[bytes, int]:
    """Returns the keys that have newer versions by now, with these. `opened` and `timeout` as in `keys_from`.

    Raises MutableEntryError where one of `wanted.keys` is that of a mutable entry.
    """
    records: Iterator[tuple[bytes, Record | None]]
    if wanted.keys is None:
        records = ((name, one) for name, one in records_from(opened, wanted.prefix, timeout) if not one.is_mutable)
    else:
        records = zip(wanted.keys, _records(opened(), list(wanted.keys), timeout), strict=True)
    found: dict[bytes, int] = {}
    for name, record in records:
        if record is not None and record.is_mutable:
            raise mutable_entry(name, record.mutable_kind)
        if record is not None and wanted.is_newer(name, record.version):
            found[name] = record.version
    return found


def hears_of_all(root: Root, wanted: AwaitedKeys) -> bool:
    """Returns whether each put that is waited for changes a doorbell of this host, which owns all keys."""
    if not is_served(root):
        return True
    names = wanted.keys
    if names is None:  # a key's owner depends on what stands before its first "/"
        names = (wanted.prefix,) if b"/" in wanted.prefix else None
    return names is not None and all(owned_now(root, name) is not None for name in names)


@dataclass(frozen=True, slots=True)
class LookForAny:
    """One look for newer versions of several keys.

    Attributes:
        seen: the doorbell's state before the look; while it is that, there is nothing new on this host.
        found: the keys that have newer versions, with these.
        began, until: monotonic times: of the look, and of the next one if nothing changes.
    """

    seen: int
    found: dict[bytes, int]
    began: float
    until: float


def look_for_any(opened: Callable[[], Root], wanted: AwaitedKeys, deadline: float, timeout: float) -> LookForAny:
    """Looks once. Raises StoreTimeoutError if there is nothing, and the timeout of so many seconds is over."""
    seen, began = opened().doorbell.state(), time.monotonic()  # before the catalog
    found = newer_versions(opened, wanted, max(deadline - began, 0.0))
    if not found and time.monotonic() >= deadline:
        raise none_newer(wanted, timeout)
    again = LOOK_EVERY if found or hears_of_all(opened(), wanted) else ASK_EVERY
    return LookForAny(seen, found, began, min(deadline, began + again))


def wait_for_any(opened: Callable[[], Root], wanted: AwaitedKeys, timeout: float) -> dict[bytes, int]:
    """Waits until there are `newer_versions`, and returns them. Raises StoreTimeoutError."""
    deadline = deadline_after(timeout)
    if waits_at_owners(opened(), wanted):
        return _wait_at_owners(opened, wanted, deadline, timeout)
    doorbell = opened().doorbell
    watch = None if doorbell.watch is None else doorbell.watch.another()
    while True:
        if watch is not None:
            watch.mark()
        look = look_for_any(opened, wanted, deadline, timeout)
        if look.found:
            return look.found
        if watch is not None:
            watch.sleep(max(look.until - time.monotonic(), 0.0))
        while watch is None and doorbell.state() == look.seen and (left := look.until - time.monotonic()) > 0:
            time.sleep(min(left, _BETWEEN_GLANCES))
        time.sleep(max(look.began + _BETWEEN_LOOKS - time.monotonic(), 0.0))


def waits_at_owners(root: Root, wanted: AwaitedKeys) -> bool:
    """Returns whether other hosts may own keys that are waited for: these hosts keep the wait."""
    return (wanted.keys is None or len(wanted.keys) <= MOST_KEPT) and not hears_of_all(root, wanted)


class _Known(dict[bytes, int]):
    """Versions that are no news, by key; and one for all other keys."""

    def __init__(self, newer_than: Mapping[bytes, int] | int) -> None:
        super().__init__({} if isinstance(newer_than, int) else newer_than)
        self._others = newer_than if isinstance(newer_than, int) else 0

    def get(self, key: bytes, default: object = None) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().get(key, self._others)


def _wait_at_owners(
    opened: Callable[[], Root], wanted: AwaitedKeys, deadline: float, timeout: float
) -> dict[bytes, int]:
    """Waits at all owners for keys, or those with a prefix, until there are newer ones that are of no mutable entry."""
    known = _Known(wanted.newer_than)
    while wanted.keys is not None:
        found = newer_versions(opened, wanted, max(deadline - time.monotonic(), 0.0))
        if found:
            return found
        if time.monotonic() >= deadline:
            raise none_newer(wanted, timeout)
        elsewhere_of(opened()).wait_any_of(wanted.keys, wanted.newer_than, deadline)
    while True:
        root = opened()
        try:
            new = elsewhere_of(root).wait_any(wanted.prefix, known, deadline)
        except StoreTimeoutError:
            raise none_newer(wanted, timeout) from None
        found: dict[bytes, int] = {}
        for name, record in zip(new, elsewhere_of(root).records(list(new), deadline), strict=True):
            if record is not None and not record.is_mutable and record.version > known.get(name):
                found[name] = record.version
        if found:
            return found
        known.update(new)


def none_newer(wanted: AwaitedKeys, timeout: float) -> StoreTimeoutError:
    """Makes the error of a wait for any of several keys whose time is over."""
    if wanted.keys is None:
        prefix = wanted.prefix.decode()
        hint = "; a prefix is plain text, and not a pattern" if _WILDCARDS.intersection(prefix) else ""
        return StoreTimeoutError(f"no key that starts with {prefix!r} got a newer version within {timeout:g} s{hint}")
    if len(wanted.keys) == 1:
        return StoreTimeoutError(f"{wanted.keys[0].decode()!r} got no newer version within {timeout:g} s")
    names = ", ".join(repr(name.decode()) for name in wanted.keys[:3]) + ", ..." * (len(wanted.keys) > 3)
    return StoreTimeoutError(f"none of {len(wanted.keys):,} keys ({names}) got a newer version within {timeout:g} s")


def not_newer(name: bytes, version: int, newer_than: int, timeout: float) -> StoreTimeoutError:
    """Makes the error of a wait whose time is over. `version`: of the key by then, 0 if there is none."""
    key, at = name.decode(), f"is at version {version}" if version else "doesn't exist"
    return StoreTimeoutError(f"{key!r} {at}: no version newer than {newer_than} within {timeout:g} s", key=key)
