"""Files that are opened to be locked. A forked child closes its copies: else the locks would outlive its parent.

They close themselves when nothing refers to them any more, so that no error path can leave a lock behind.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import NoReturn

from memstore.engine import syscalls


class OwnedFile:
    """A file descriptor that is closed when nothing refers to it any more.

    It is never copied: the copy would close it too, when the number may be that of another file already.
    """

    __slots__ = ("__weakref__", "_fds")

    def __init__(self, path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> None:
        self._fds: list[int] = []
        syscalls.open_into(self._fds, path, flags, mode, dir_fd)

    @property
    def fd(self) -> int:
        """-1 once it is closed."""
        return self._fds[0] if self._fds else -1

    def close(self) -> None:
        syscalls.close_all(self._fds)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an open file can't be pickled or copied, because its descriptor is this process's own: send the path, and "
            "open that"
        )

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Not at the interpreter's end, where modules may have lost their names: the file goes with the process."""
        if not is_ending() and hasattr(self, "_fds"):  # an interrupt may have left it half-made
            self.close()


class LockFile(OwnedFile):
    """An open file that may be locked. Open it under a lock that a fork takes too."""

    __slots__ = ()

    def __init__(self, path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> None:
        super().__init__(path, flags, mode, dir_fd)
        _opened.add(self)

    def lock(self) -> bool:
        """Tries to lock it for oneself, never waits."""
        return syscalls.lock_exclusive(self.fd)

    def leave_to_parent(self) -> None:
        """In a forked child: closes the file, and the parent keeps its lock."""
        self.close()


_opened: weakref.WeakSet[LockFile] = weakref.WeakSet()


def close_all() -> None:
    """In a forked child."""
    for file in list(_opened):
        file.leave_to_parent()
