"""What this process has looked up lately: for gets with `max_age`, which may take it for the present."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from memstore.distributed.rules import Entry

_KEYS = 1024
_LARGEST = 1 << 16  # bytes of an entry that is kept


class Seen:
    """Thread-safe: each step of it is one call into C, or may be lost."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[float, Entry]] = OrderedDict()

    def note(self, key: bytes, entry: Entry, looked: float) -> None:
        """`looked` is when its home was asked, monotonic: the entry is not older."""
        if len(entry.body) <= _LARGEST:
            self._entries[key] = (looked, entry)
            if len(self._entries) > _KEYS:
                self._entries.popitem(last=False)

    def within(self, key: bytes, max_age: float) -> Entry | None:
        """An entry that was the present one less than `max_age` seconds ago."""
        looked, entry = self._entries.get(key, (0.0, None))
        return entry if time.monotonic() - looked < max_age else None

    def forget(self, keys: Sequence[bytes]) -> None:
        """This process has changed them."""
        for key in keys:
            self._entries.pop(key, None)
