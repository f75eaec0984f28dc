"""A dataset in a pickle: a reference, which any process of the host may open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memstore.datasets.rows import capacity_of
from memstore.engine import Creation, MutableEntry, close_root, deadline_after, open_mutable, open_root, resource_errors
from memstore.errors import VersionGoneError
from memstore.structure import modes

D = TypeVar("D")
Restore = Callable[[MutableEntry, float], D]


def reduce(restore: Restore[Any], entry: MutableEntry, timeout: float) -> tuple[Any, ...]:
    """For `__reduce__`. `restore` is called with the entry, opened, and the timeout."""
    root, mode = entry.root, "r+" if entry.writable else "r"
    return receive, (restore, root.path, root.settings.store, entry.key, entry.record.put_id, mode, timeout)


@modes.unaffected
def receive(restore: Restore[D], path: str, store: str, key: str, put_id: int, mode: str, timeout: float) -> D:
    """Unpickles a dataset.

    Raises:
        NotAStoreError: there is no such store here.
        VersionGoneError: it was deleted or sealed, or another store is there.
    """
    with resource_errors(path):
        root = open_root(path, mode, Creation(), timeout)
    try:
        if root.settings.store != store:
            raise VersionGoneError(f"the dataset {key!r} is gone: {path} is another store now", key=key)
        with resource_errors(path, key, root):
            deadline, writable = deadline_after(timeout), mode != "r"
            entry = open_mutable(root, key, "dataset", capacity_of, deadline, writable=writable, put_id=put_id)
        return restore(entry, timeout)
    finally:
        close_root(root)
