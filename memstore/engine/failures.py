""" "Disk full" and "too many files or mappings", as memstore's errors."""

from __future__ import annotations

import errno

from memstore.engine.root import Root, storage_error
from memstore.engine.usage import measure
from memstore.errors import MemstoreError, ResourceLimitError, StoreFullError, is_of_caller, lack_of, way_out
from memstore.wording import size


def is_full(error: OSError) -> bool:
    """Whether this host has no room."""
    is_elsewhere = isinstance(error, StoreFullError) and error.host is not None
    return error.errno in (errno.ENOSPC, errno.EDQUOT) and not is_elsewhere


class OneOfMany(StoreFullError):
    """There is no room for one value of a put of several. `explain_full` makes of it what users see.

    Attributes:
        value: the key. `key` is None: the message doesn't say all yet.
    """

    value: str = ""


def one_of_many(reason: OSError, key: bytes, nbytes: int, count: int, total: int) -> OneOfMany:
    """For a value whose file takes `nbytes`, in a put of `count` values whose files take `total` together."""
    takes = f"it takes {size(nbytes)}, all {count:,} values of the call take {size(total)}"
    of_capacity = isinstance(reason, StoreFullError) and reason.needed is not None
    error = OneOfMany(takes if of_capacity else f"{reason.strerror}; {takes}")
    error.value, error.needed = key.decode(), total if of_capacity else None
    return error


class resource_errors:
    """Turns "disk full" and "too many" into StoreFullError and ResourceLimitError, naming store and key.

    If it is given the opened root, a StoreFullError says in full who takes what, and a missing file is a NotAStoreError
    if the whole store has gone; on storage that hosts share, other errors are StorageErrors. The root's guard must not
    be held then.
    """

    __slots__ = ("_key", "_opened", "_root")

    def __init__(self, root: str, key: str | None = None, opened: Root | None = None) -> None:
        self._root, self._key, self._opened = root, key, opened

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or is_of_caller(error):
            return
        lack = None if isinstance(error, MemstoreError) else lack_of(error)
        if lack is not None:
            raise self._exhausted(*lack) from error
        if self._opened is not None and isinstance(error, FileNotFoundError):
            self._opened.check_in_place()
        if isinstance(error, StoreFullError) and (error.key is not None or isinstance(error.__cause__, OSError)):
            return  # it says all already
        if self._opened is not None and isinstance(error, OSError) and is_full(error):
            raise explain_full(self._opened, error, self._key) from error
        if not isinstance(error, OSError) or isinstance(error, MemstoreError):
            return
        if is_full(error):
            what = f" for {self._key!r}" if self._key is not None else ""
            raise StoreFullError(
                f"{self._root} has no room{what}: delete keys, drop held values, or enlarge the file system; "
                "nothing was changed",
                key=self._key,
            ) from error
        if self._opened is not None and self._opened.shared is not None:
            raise storage_error(self._root, error, self._key) from error

    def _exhausted(self, code: int, text: str) -> ResourceLimitError:
        what = f" at {self._key!r}" if self._key is not None else ""
        return ResourceLimitError(f"{self._root}: {text}{what}: {way_out(code)}", key=self._key, code=code)


def explain_full(root: Root, reason: OSError, key: str | None) -> StoreFullError:
    """What has no room, for what, and who could make some."""
    usage = measure(root)
    takes = ""
    if isinstance(reason, OneOfMany):
        key, takes = reason.value, f"{reason.message},"
    what = f" for {key!r}" if key is not None else ""
    if isinstance(reason, StoreFullError) and reason.needed is not None and reason.needed > (usage.capacity or 0):
        return StoreFullError(
            f"{root.path} has no room{what}: {takes or f'it takes {size(reason.needed)},'} and the capacity of the "
            f"whole store is {size(usage.capacity or 0)}: open the store once with a larger capacity=, which all "
            "processes then have; nothing was changed",
            key=key,
        )
    limit = f"capacity {size(usage.capacity)}" if usage.capacity else "no capacity set"
    pinned = f"{size(usage.pinned_bytes)} replaced but held"
    if usage.pinned_by:
        pinned += f" by pid {', '.join(map(str, usage.pinned_by))}"
    waiting = f"{size(usage.pending_bytes)} in sharded puts that wait for ranks, " if usage.pending_bytes else ""
    catalog = f"{size(usage.catalog_bytes)} of catalog"
    if usage.capacity:  # which counts its growth alone
        catalog += ", of which the first 8 MiB don't count"
    detail = reason if isinstance(reason, StoreFullError) else reason.strerror
    return StoreFullError(
        f"{root.path} has no room{what} ({detail}): {limit}, {size(usage.live_bytes)} live, {pinned}, "
        f"{size(usage.filling_bytes)} being written, {waiting}{catalog}: delete keys, "
        "drop held values, or enlarge the file system or the capacity; nothing was changed",
        key=key,
    )
