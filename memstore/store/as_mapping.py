"""A store as a mapping: `store[key]`, `items`, `pop` and the like, which are get, put and delete by other names."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from memstore.engine import index
from memstore.errors import (
    ContentionError,
    InvalidKeyError,
    KeyNotFoundError,
    MemstoreError,
    PartialCommitError,
    VersionConflictError,
)
from memstore.keys import as_row_index
from memstore.listing import KeyTree, WhileRead, key_tree
from memstore.store.gets import NO_DEFAULT, Gets
from memstore.store.mistakes import as_items
from memstore.store.puts import Puts

_ABSENT = object()
_COMPLETED = 1000  # keys that a notebook offers
_COMPLETED_WITHIN = 1.0  # seconds that it waits for other hosts


class AsMapping(Puts, Gets):
    """What `Store` inherits. No MutableMapping: its `get` never raises, and it compares by contents."""

    def __iter__(self) -> Iterator[str]:
        """As `keys()`: iterates over all keys, sorted by their UTF-8 bytes."""
        return iter(self.keys())

    def __getitem__(self, key: str) -> Any:
        """As `get(key)`."""
        try:
            return self.get(key)
        except InvalidKeyError as error:
            raise as_row_index(error, key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        """As `put(key, value)`."""
        self.put(key, value)

    def __delitem__(self, key: str) -> None:
        """As `delete(key)`."""
        self.delete(key)

    def _ipython_key_completions_(self) -> list[str]:
        """Lists what notebooks offer behind `store["`: the first keys, or none of a store that can't be read now."""
        try:
            keys = index.keys_from(self._opened, b"", _COMPLETED_WITHIN)
            return [key.decode() for key in itertools.islice(keys, _COMPLETED)]
        except (MemstoreError, OSError):
            return []

    def items(self) -> Iterator[tuple[str, Any]]:
        """Iterates over keys and values; keys that are deleted meanwhile are left out. Errors as `keys` and `get`."""
        return WhileRead(self._items(), "items()", self.root, "dict")

    def _items(self) -> Iterator[tuple[str, Any]]:
        for key in self.keys():
            value = self.get(key, _ABSENT)
            if value is not _ABSENT:
                yield key, value

    def values(self) -> Iterator[Any]:
        """Iterates over the values, as `items`."""
        return WhileRead((value for _, value in self._items()), "values()", self.root)

    def update(self, items: Mapping[str, Any]) -> dict[str, int]:
        """As `put_many`."""
        return self.put_many(as_items(items, "update"))

    def pop(self, key: str, default: Any = NO_DEFAULT) -> Any:
        """Deletes a key, and returns its value. If several processes pop one version, only one of them gets it.

        Args:
            key: the key.
            default: returned unchanged if there is no such key; without it, a missing key is an error.

        Raises:
            KeyNotFoundError: no such key, and no default.
            MutableEntryError: the key is that of a dataset or replay buffer, which `delete` frees.
            ContentionError: others replaced the key again and again, until the store's timeout.
            ReadOnlyError: the store was opened with mode "r".
            HomeUnavailableError, UnknownOutcomeError: as in `get` and `delete`.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.put("job", "train")
            ...     store.pop("job"), store.pop("job", None)
            ('train', None)
        """
        self._writable()
        deadline = self._deadline(None)
        while True:
            try:
                ref = self.ref(key)
            except (KeyNotFoundError, PartialCommitError):
                if default is NO_DEFAULT or default is ...:
                    raise
                return default
            value = ref.get()
            try:
                self.delete(key, expect_version=ref.version)
            except VersionConflictError:
                if time.monotonic() > deadline:
                    _changed_too_fast(key)
            else:
                return value

    def setdefault(self, key: str, value: Any) -> Any:
        """Returns the value of `key`. If there is no such key, puts `value` first; of several processes only one does.

        Args:
            key: the key.
            value: as for `put`. The result is what a `get` of the key returns.

        Raises:
            ContentionError: others put and delete the key again and again, until the store's timeout.
            MemstoreError: those of `put` and `get`.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     store.setdefault("seed", 1), store.setdefault("seed", 2)
            (1, 1)
        """
        self._writable()
        deadline = self._deadline(None)
        while True:
            found = self.get(key, _ABSENT)
            if found is not _ABSENT:
                return found
            try:
                self.put(key, value, expect_version=0)
            except VersionConflictError:
                if time.monotonic() > deadline:
                    _changed_too_fast(key)

    def tree(self, prefix: str = "") -> KeyTree:
        """Draws the keys that start with `prefix` as a tree, split at each "/"; print it, or show it in a notebook.

        Args:
            prefix: as for `keys`.

        Returns:
            A `KeyTree`. Its text is the drawing.

        Raises:
            HomeUnavailableError: in a store on several hosts, one didn't answer.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     versions = store.put_many({"runs/1": 1.0, "runs/2": 2.0, "seed": 7})
            ...     len(store.tree("runs/"))
            2
        """
        return key_tree(self, prefix)


def _changed_too_fast(key: str) -> NoReturn:
    raise ContentionError(
        f"{key!r}: others change it faster than this call could follow, for as long as the store's timeout: "
        "let one process at a time change it",
        key=key,
    )
