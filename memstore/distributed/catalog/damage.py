"""Rows that are damaged, and are passed over: one of them keeps no other from being moved, listed or looked at.

Each is told once a process, since what looks at all rows does so again and again. Who asks for such a key by itself
hears CorruptionError, from the home of the key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from memstore.engine import Transaction
from memstore.errors import CorruptionError

Row = TypeVar("Row")

_MOST = 1000  # that are told

log = logging.getLogger("memstore")
_told: set[tuple[bytes, bytes, str]] = set()


def tell(member: bytes, key: bytes, why: CorruptionError) -> None:
    """Says in the log that something of a key was passed over, unless this process has said it.

    Args:
        member: the id of this host.
    """
    said = (member, key, str(why))
    if said not in _told and len(_told) < _MOST:
        _told.add(said)
        more = "" if len(_told) < _MOST else " (others are not named any more)"
        log.warning(
            "%r is passed over, since it is damaged: %s. memstore verify finds such rows, and memstore repair drops "
            "them%s",
            *(key.decode(errors="backslashreplace"), str(why), more),
        )


def readable(
    transaction: Transaction,
    member: bytes,
    table: str,
    read: Callable[[bytes, bytes], Row],
    limit: int,
    after: bytes = b"",
) -> list[tuple[bytes, Row]]:
    """Up to `limit` rows of a table, in order, beyond `after`: those that `read` doesn't call damaged."""
    found: list[tuple[bytes, Row]] = []
    while len(found) < limit and (rows := transaction.rows_with(table, b"", limit, after)):
        after = rows[-1][0]
        for key, stored in rows:
            try:
                found.append((key, read(key, stored)))
            except CorruptionError as error:
                tell(member, key, error)
    return found[:limit]
