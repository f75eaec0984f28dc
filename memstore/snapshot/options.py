"""What a caller may choose of a take, beside what is taken and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memstore.arguments import flag
from memstore.engine import deadline_after
from memstore.snapshot.ranks import TIMEOUT


class Options(NamedTuple):
    """As the arguments of `Snapshot.take`."""

    replicated: Sequence[Any]
    durability: str
    checksum: bool
    allow_pickle: bool
    timeout: float  # seconds for the other ranks in each step

    @classmethod
    def of(cls, replicated: Any, durability: Any, checksum: Any, allow_pickle: Any, storage_options: Any) -> Options:
        """Raises TypeError or ValueError for what can't be meant, and storage options that memstore doesn't have."""
        flag("checksum", checksum)
        flag("allow_pickle", allow_pickle)
        timeout = storage_options_of(storage_options).timeout
        return cls(replicated or (), durability, checksum, allow_pickle, timeout)


class StorageOptions(NamedTuple):
    """As `storage_options` of `Snapshot`."""

    allow_pickle: bool
    timeout: float


def storage_options_of(given: dict[str, Any] | None) -> StorageOptions:
    """Raises TypeError or ValueError for options that memstore doesn't have."""
    options = given or {}
    unknown = set(options) - set(StorageOptions._fields)
    if unknown:
        raise TypeError(f"storage_options has {sorted(unknown)}; memstore knows {sorted(StorageOptions._fields)}")
    timeout = options.get("timeout")
    timeout = TIMEOUT if timeout is None else timeout
    deadline_after(timeout)  # raises for what is no number of seconds
    return StorageOptions(flag("allow_pickle", options.get("allow_pickle") or False), timeout)
