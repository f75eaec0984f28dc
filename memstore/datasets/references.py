"""A mutable entry in a pickle: a reference, which any process of the host may open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Literal

from memstore.engine import (
    Creation,
    MutableEntry,
    Record,
    close_root,
    deadline_after,
    elsewhere_of,
    is_fellow,
    open_mutable,
    open_root,
    resource_errors,
)
from memstore.errors import CrossHostError, VersionGoneError
from memstore.late_imports import call_late

Reference = tuple[str, str, str, int, str]  # path, store id, key, put id, mode


def reduce(module: str, restore: str, entry: MutableEntry, *arguments: Any) -> tuple[Any, ...]:
    """For `__reduce__`: the function `restore` of a module is called with a Reference, and with the arguments."""
    mode = "r+" if entry.writable else "r"
    reference = (entry.root.path, entry.root.settings.store, entry.key, entry.record.put_id, mode)
    return call_late, (module, restore, reference, *arguments)


@contextlib.contextmanager
def opened(
    reference: Reference, kind: Literal["dataset", "buffer"], capacity_of: Callable[[Record], int], timeout: float
) -> Generator[MutableEntry]:
    """The entry that a reference names, opened.

    Raises:
        NotAStoreError: there is no such store here.
        VersionGoneError: it was deleted or sealed, or another store is there.
        CrossHostError: this is another host of its store.
    """
    path, store, key, put_id, mode = reference
    with resource_errors(path):
        use = open_root(path, "r" if mode == "r" else "r+", Creation(), timeout)
    root = use.root
    try:
        if is_fellow(root, store):
            host = elsewhere_of(root).name_of(bytes.fromhex(store))
            raise CrossHostError(
                f"the {kind} {key!r} is on {host}, and its rows are written in place: use it there; rows that other "
                "hosts are to have must be put, or the dataset sealed",
                key=key,
            )
        if root.settings.store != store:
            raise VersionGoneError(f"the {kind} {key!r} is gone: {path} is another store now", key=key)
        with resource_errors(path, key, root):
            deadline, writable = deadline_after(timeout), mode != "r"
            yield open_mutable(root, key, kind, capacity_of, deadline, writable=writable, put_id=put_id)
    finally:
        close_root(use)
