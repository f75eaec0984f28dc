"""Transactions of this host's catalog for the rules: `run` changes it, under the store's mutex; `look` reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from memstore.distributed.catalog.entries import Checked
from memstore.distributed.catalog.tables import CatalogTables
from memstore.engine import Effects, Root, SealedSegment, Transaction, change_served, need_cluster

Result = TypeVar("Result")


def run(
    root: Root,
    action: Callable[[CatalogTables], Result],
    deadline: float,
    *,
    sealed: Sequence[SealedSegment] = (),
    checked: Checked | None = None,
) -> Result:
    """Calls `action` in one transaction: what it changes is there wholly or not at all, also after a kill.

    It may be called more than once, and only the last call counts. A store that was never served gets its tables.

    Args:
        deadline: monotonic, for the store's mutex.
        sealed: segments of one put that this process has filled, and still has open. Those that `lend`, `own` or
            `put_copy` names are published, and the others stay as they are.
        checked: records of entries that `action` may write, looked at before the store's mutex is taken.

    Raises:
        StoreTimeoutError, StoreFullError.
        NotAStoreError: the store was removed or moved.
        CorruptionError: a row is damaged, or an entry can't be one. Nothing has changed.
    """
    need_cluster(root, deadline)
    member = root.member_id()
    return change_served(
        root,
        lambda transaction, effects: action(CatalogTables(transaction, member, effects, sealed, checked)),
        deadline,
    )


def look(root: Root, action: Callable[[CatalogTables], Result], deadline: float) -> Result:
    """Calls `action` with one moment of the catalog, and without the mutex. It changes nothing.

    Args:
        deadline: monotonic; of the mutex, which is taken once a process if the store was served after it was opened.
            Who may not write the store needs none for that either.
    """
    member = root.member_id()
    if not root.catalog.is_served and root.catalog.view(Transaction.counters).membership:
        if root.lock is None:  # its LMDB reads only: it opens tables as it has opened all, in a read transaction
            root.catalog.open_served()
        else:
            root.mutex.run(root.catalog.open_served, deadline)
    return root.catalog.view(lambda transaction: action(CatalogTables(transaction, member, Effects(transaction))))
