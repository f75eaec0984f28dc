"""Which place a user means: a folder, or a key of a store that is open, or that is opened when it is first used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from memstore.engine import has_settings
from memstore.integrations.dcp.entry import Entry
from memstore.integrations.dcp.folder import Folder
from memstore.integrations.dcp.places import Place, WriteOptions, folder_of, text_of
from memstore.keys import encode_key
from memstore.late_imports import between_forks
from memstore.listing import opened
from memstore.wording import an

if TYPE_CHECKING:
    from memstore.store.store import Store


class Where:
    """What a writer or a reader was given. It can be pickled.

    Args:
        path_or_store, key: as for StorageWriter.
        mode: in which a store is opened.
    """

    def __init__(self, path_or_store: str | os.PathLike[str] | Store, key: str | None, mode: Literal["a", "r"]) -> None:
        self._store: Store | None = None
        self._path: str | None = None
        self._mode: Literal["a", "r"] = mode
        if isinstance(path_or_store, str | os.PathLike):
            self._path = folder_of(path_or_store)
        elif hasattr(path_or_store, "put_sharded"):
            self._store = path_or_store
            opened(self._store)  # torch would tell of a closed one, or of a bad key, late and in an error of its own
        else:
            raise TypeError(f"path_or_store is a path or an open store, and not {an(type(path_or_store))}")
        if key is not None:
            encode_key(key)
        self._key = key
        self._in_store = self._path is None or key is not None

    def __str__(self) -> str:
        if not self._in_store:
            return repr(self.id)
        store = self._path if self._store is None else self._store.root
        return f"{self._key!r} in {store}" if self._key is not None else f"in {store}"

    def move(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """To another checkpoint: a key, where there is a store."""
        if self._in_store:
            key = text_of(checkpoint_id)
            encode_key(key)
            self._key = key
        else:
            self._path = folder_of(checkpoint_id)

    @property
    def id(self) -> str:
        return (self._key or "") if self._in_store else (self._path or "")

    def place(self, options: WriteOptions) -> Place:
        """Raises ValueError if there is a store, and no key."""
        if not self._in_store:
            assert self._path is not None
            if has_settings(self._path):
                raise ValueError(f"{self._path} is a store: give key=, that of the checkpoint in it, or another path")
            return Folder(self._path, options)
        if self._key is None:
            raise ValueError("which key of the store? Give key=, or the checkpoint_id of the save or the load")
        return Entry(self._opened(), self._key, options)

    def _opened(self) -> Store:
        if self._store is None:
            with between_forks():
                from memstore.store.opening import open as open_store
            assert self._path is not None
            self._store = open_store(self._path, self._mode)
        return self._store

    def __getstate__(self) -> dict[str, Any]:
        """Without a store that this has opened: who unpickles it opens it again."""
        return self.__dict__ | ({} if self._path is None else {"_store": None})


def is_possible(checkpoint_id: str | os.PathLike[str]) -> bool:
    """As torch asks it of a storage: whether a checkpoint id is for it."""
    try:
        path = folder_of(checkpoint_id)
    except (TypeError, ValueError):
        return False
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK)
