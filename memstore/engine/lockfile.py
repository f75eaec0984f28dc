"""Files that are opened to be locked. A forked child gives them up: it would keep their locks beyond the parent's death.

They close themselves when nothing refers to them any more, so that no error path can leave a lock behind.
"""

from __future__ import annotations

import weakref

from memstore.engine import syscalls

_opened: weakref.WeakSet[LockFile] = weakref.WeakSet()


class LockFile:
    """An open file that may be locked. Open it under a lock that a fork takes too."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, path: str, flags: int) -> None:
        self.fd = -1
        self.fd = syscalls.open_file(path, flags)
        _opened.add(self)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            syscalls.close(fd)

    def __del__(self) -> None:
        self.close()


def close_all() -> None:
    """In a forked child."""
    for file in list(_opened):
        file.close()
