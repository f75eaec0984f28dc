"""What the catalog says of entries: their keys and versions, and the wait for a new version.

Nothing is mapped, and no tensor is read. `Store` says the same in public words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from memstore.engine.catalog import Transaction
from memstore.engine.format import Record
from memstore.engine.root import Root
from memstore.errors import StoreTimeoutError

_KEYS_A_PAGE = 1024
_NET = 1.0  # seconds between looks of a wait, should a wake get lost


def find(root: Root, name: bytes) -> Record | None:
    with root.guard:
        return root.catalog.read(name)


def version_of(root: Root, name: bytes) -> int:
    """0 if there is no such key."""
    record = find(root, name)
    return record.version if record else 0


def keys_from(opened: Callable[[], Root], prefix: bytes) -> Iterator[str]:
    """The keys that start with `prefix`, sorted; each page of them as it is at one moment.

    `opened` gives the root anew for each page: the store may be closed, or the process forked, between two.
    """
    after: bytes | None = None
    while True:
        root = opened()
        with root.guard:
            page = root.catalog.view(Transaction.keys, prefix, after, _KEYS_A_PAGE)
        yield from (key.decode() for key in page)
        if len(page) < _KEYS_A_PAGE:
            return
        after = page[-1]


def wait_for(opened: Callable[[], Root], name: bytes, newer_than: int, deadline: float) -> int:
    """A version that is newer than `newer_than`, as soon as there is one. `opened` as in `keys_from`."""
    doorbell = opened().doorbell
    bell = doorbell.bell(name)
    while True:
        seen = doorbell.load(bell)  # before the catalog: a put in between changes it
        version = version_of(opened(), name)
        if version > newer_than:
            return version
        left = deadline - time.monotonic()
        if left <= 0:
            key, at = name.decode(), f"is at version {version}" if version else "doesn't exist"
            raise StoreTimeoutError(f"{key!r} {at}: waited in vain for a version above {newer_than}", key=key)
        doorbell.wait(bell, seen, min(_NET, left))
