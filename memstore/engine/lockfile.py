"""Files that are opened to be locked. A forked child gives them up: else it kept their locks beyond its parent.

They close themselves when nothing refers to them any more, so that no error path can leave a lock behind.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

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


def lock_holders() -> dict[int, set[int]]:
    """Inode -> pids that hold a flock on it, as /proc/locks tells: the pid that took it, if it is in our namespace."""
    holders: dict[int, set[int]] = defaultdict(set)
    try:
        with open("/proc/locks") as file:
            for line in file:
                fields = line.split()
                if len(fields) > 5 and fields[1] == "FLOCK":
                    holders[int(fields[5].rsplit(":", 1)[1])].add(int(fields[4]))
    except OSError:
        pass
    return holders
