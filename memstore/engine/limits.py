"""The kernel's refusals, as memstore's errors."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

from memstore.errors import MemstoreError, ResourceLimitError, StoreFullError

if TYPE_CHECKING:
    from memstore.engine.root import Root


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class resource_errors:
    """Turns "disk full" and "too many" into StoreFullError and ResourceLimitError, naming store and key.

    With the opened root, and without its guard held, a StoreFullError says in full who takes what, and a missing file
    is a NotAStoreError if the whole store has gone.
    """

    __slots__ = ("_key", "_opened", "_root")

    def __init__(self, root: str, key: str | None = None, opened: Root | None = None) -> None:
        self._root, self._key, self._opened = root, key, opened

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, MemoryError):
            raise self._exhausted(errno.ENOMEM, "not enough memory") from error
        if self._opened is not None and isinstance(error, FileNotFoundError):
            self._opened.check_in_place()
        if self._opened is not None and isinstance(error, OSError) and is_full(error):
            from memstore.engine.room import explain_full  # it measures the store, and imports all that this takes

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
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise self._exhausted(error.errno, error.strerror or "") from error

    def _exhausted(self, code: int, text: str) -> ResourceLimitError:
        what = f" at {self._key!r}" if self._key is not None else ""
        return ResourceLimitError(
            f"{self._root}: {text}{what}: "
            "raise `ulimit -n` for files or vm.max_map_count for mappings, or drop held values",
            key=self._key,
            code=code,
        )


_UNITS = {
    "": 1,
    "B": 1,
    "kB": 1000,
    **{letter: 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
}


def parse_size(size: int | str) -> int:
    """Bytes: a number, or text such as "8GiB" (2**33), "500MB" (5 * 10**8), "2G" (2**31)."""
    found = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2] in _UNITS:
            found = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 1 << 63:
        raise ValueError(f"a size is a positive number of bytes, or text such as '8GiB' or '500MB', and not {size!r}")
    return found
