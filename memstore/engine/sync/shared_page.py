"""One page of a file that processes share: for words that they change, and that futexes and mutexes wait on."""

from __future__ import annotations

import os
from typing import NoReturn

from memstore.engine import syscalls
from memstore.engine.syscalls import Cleanup
from memstore.errors import CorruptionError


class SharedPage:
    """The page is mapped until nothing refers to this object: a thread may still wait on it after a close.

    Its file is open until `close_file`, or as long as the object lives.

    Attributes:
        address: where the page is mapped.
        fd: of the file; -1 after `close_file`.
        status: the file's, as fstat(2) gives it.
    """

    __slots__ = ("_closing", "_mapping", "address", "fd", "status")

    def __init__(self, path: str, *, writable: bool = True) -> None:
        fds: list[int] = []
        self._closing: Cleanup | None = Cleanup(syscalls.drain, (map(os.close, fds),))
        syscalls.open_into(fds, path, os.O_RDWR if writable else os.O_RDONLY)
        self.fd = fds[0]
        self.status = syscalls.status(self.fd)
        if self.status.st_size != syscalls.PAGE:
            detail = f"{self.status.st_size} bytes instead of {syscalls.PAGE}"
            raise CorruptionError(path=path, detail=detail)
        self._mapping, self.address, _ = syscalls.reserve(syscalls.PAGE)
        syscalls.map_shared(self.address, self.fd, syscalls.PAGE, writable=writable)

    def close_file(self) -> None:
        """The mapping stays; and so do the file's locks, but for file systems where `mappings_keep_locks` is False."""
        self.fd, self._closing = -1, None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a mapped page can't be pickled or copied: send the path of its file, and map that there")
