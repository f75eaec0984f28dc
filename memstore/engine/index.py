"""What a Store asks of the catalog beside `get` and `put`: records, versions, keys, and the wait for a new version.

Nothing is mapped, and no tensor is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from memstore.engine.catalog import Transaction
from memstore.engine.format import Record
from memstore.engine.protocols import mutable_entry
from memstore.engine.root import Root
from memstore.engine.sync import deadline_after
from memstore.errors import StoreTimeoutError

Row = TypeVar("Row")

_KEYS_A_PAGE = 1024
LOOK_EVERY = 1.0  # seconds: a waiter looks again by itself, should its wake get lost


def find(root: Root, name: bytes) -> Record | None:
    return root.catalog.read(name)


def version_of(root: Root, name: bytes) -> int:
    """0 if there is no such key."""
    record = root.catalog.read(name)
    return record.version if record else 0


def keys_from(opened: Callable[[], Root], prefix: bytes) -> Iterator[bytes]:
    """The keys that start with `prefix`, sorted; each page of 1,024 as it is at one moment.

    `opened` gives the root anew for each page: the store may be closed, or the process forked, between two.
    """
    return _in_pages(opened, prefix, lambda _, keys: keys)


def records_from(opened: Callable[[], Root], prefix: bytes) -> Iterator[tuple[bytes, Record]]:
    """As `keys_from`, each key with its record."""

    def look(transaction: Transaction, keys: list[bytes]) -> list[tuple[bytes, Record]]:
        found = [(key, transaction.record(key)) for key in keys]
        return [(key, record) for key, record in found if record is not None]

    return _in_pages(opened, prefix, look)


def _in_pages(
    opened: Callable[[], Root], prefix: bytes, look: Callable[[Transaction, list[bytes]], list[Row]]
) -> Iterator[Row]:
    """What `look` finds for the keys of each page. In pages, since a long transaction makes the catalog grow."""
    after: bytes | None = None

    def page(transaction: Transaction) -> tuple[list[bytes], list[Row]]:
        keys = transaction.keys(prefix, after, _KEYS_A_PAGE)
        return keys, look(transaction, keys)

    while True:
        keys, rows = opened().catalog.view(page)
        yield from rows
        if len(keys) < _KEYS_A_PAGE:
            return
        after = keys[-1]


def wait_for(opened: Callable[[], Root], name: bytes, newer_than: int, timeout: float, *, mutable: bool = False) -> int:
    """A version that is newer than `newer_than`, as soon as there is one. `opened` as in `keys_from`.

    Raises MutableEntryError where the key is that of a mutable entry, unless `mutable`.
    """
    deadline = deadline_after(timeout)
    doorbell = opened().doorbell
    bell = doorbell.bell(name)
    while True:
        seen = doorbell.load(bell)  # before the catalog: a put in between changes it
        record = opened().catalog.read(name)
        version = record.version if record else 0
        if record is not None and record.is_mutable and not mutable:
            raise mutable_entry(name, record.mutable_kind)
        if version > newer_than:
            return version
        left = deadline - time.monotonic()
        if left <= 0:
            key, at = name.decode(), f"is at version {version}" if version else "doesn't exist"
            raise StoreTimeoutError(f"{key!r} {at}: no version newer than {newer_than} within {timeout:g} s", key=key)
        doorbell.wait(bell, seen, min(LOOK_EVERY, left))
