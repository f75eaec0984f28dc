"""Quotas: how many bytes the keys with a prefix may take, those of replaced versions that are kept among them.

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
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from memstore import _wording as wording
from memstore.engine.catalog import tables
from memstore.engine.catalog.tables import QuotaRow, Transaction
from memstore.engine.format.records import Record
from memstore.engine.protocols.change import Change, Content, need_quotas
from memstore.engine.protocols.history import freed_by
from memstore.engine.root.roots import Root
from memstore.errors import CorruptionError, QuotaExceededError, StoreFullError

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
