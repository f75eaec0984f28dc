"""What a snapshot needs of the place where its files lie. File systems have it; an object store can."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

CHUNK = 16 << 20  # bytes of a file that have a sum of their own
SUM_SIZE = 8  # bytes of a sum, which is xxh3-64, the most significant byte first

Done = Callable[[int], None]  # called, in the thread of the caller, with how many bytes were passed since its last call


class FilePart(NamedTuple):
    """A run of bytes of a file, and the memory that it comes from or goes to.

    Attributes:
        offset: of its first byte in the file.
        memory: contiguous bytes, writable where they are read into: bytes, a memoryview, an array of numpy; for a write
            also LateBytes.
    """

    offset: int
    memory: Any  # a buffer; typing has no name for it before Python 3.12


class LateBytes:
    """Memory of a part that is made when it is written, in any thread, and given back as soon as all of it was taken.

    Args:
        nbytes: how many there are.
        make: makes a buffer of them.
    """

    def __init__(self, nbytes: int, make: Callable[[], Any]) -> None:
        self.nbytes = self._left = nbytes
        self._make, self._made = make, memoryview(b"")
        self._lock = threading.Lock()

    def take(self, start: int, stop: int) -> memoryview:
        """Some of the bytes; each may be taken once."""
        with self._lock:
            if not self._made:
                self._made = memoryview(self._make()).cast("B")
            found = self._made[start:stop]
            self._left -= len(found)
            if not self._left:
                self._made = memoryview(b"")
            return found


class Storage(Protocol):
    """Files by name, in one place. Thread-safe.

    A name is one component of a path, as text: no "/", no "." or "..", no NUL, at most 255 bytes. InvalidKeyError says
    what is wrong with any other.

    The *sums* of a file are the xxh3-64 of each of its chunks of 16 MiB (`CHUNK`; the last one is what is left), from
    the file's first byte on: 8 bytes (`SUM_SIZE`) each, one after the other.
    """

    def write(
        self,
        name: str,
        size: int,
        parts: Sequence[FilePart],
        *,
        durable: bool,
        checksum: bool = False,
        done: Done | None = None,
    ) -> bytes:
        """Makes a new file of the parts, in large writes, several at once. If it fails, nothing is left.

        Args:
            name: of a file that doesn't exist.
            size: of the file, in bytes. The parts cover it without gap and overlap, in any order.
            parts: what the file consists of. Where their memory changes meanwhile, the file has some of both; the sums
                are of the bytes that it has.
            durable: when it returns, the bytes are on the disk. (The file's name is there when a later durable
                `publish` returns.)
            checksum: whether to compute the sums, of each piece right before it is written.
            done: told the bytes written.

        Returns:
            The sums, or b"".

        Raises:
            AlreadyExistsError: there is such a file, which is left as it is.
            StoreFullError: no room, or the file would be larger than the process, or the file system, may write.
            OSError: any other failure of the file system.
        """
        ...

    def read(
        self, name: str, parts: Sequence[FilePart], *, sums: bytes | None = None, done: Done | None = None
    ) -> None:
        """Reads runs of a file straight into their memory, sorted and joined, several at once.

        Args:
            name: of the file.
            parts: which runs, in any order, and where they go. They must not overlap in memory.
            sums: of the whole file, to check every chunk that a part touches (what else the chunk has is read too).
            done: told the bytes read, those that only the sums need among them.

        Raises:
            CorruptionError: the file is missing, shorter than a part, or of another size than the sums are for; or
                a chunk doesn't fit its sum. The error names the file; the parts' memory then has any content.
        """
        ...

    def read_bytes(self, name: str, limit: int) -> bytes:
        """A small file, whole.

        Raises:
            KeyNotFoundError: there is no such file.
            CorruptionError: it has more than `limit` bytes (none was read), or is no regular file.
        """
        ...

    def publish(self, name: str, data: bytes, *, durable: bool) -> None:
        """Makes a small file that appears whole or not at all, and never in the place of another one.

        With `durable`, the order is: the data is on the disk, then the names of all files that were written before;
        then the file appears; when the call returns, its name is on the disk too.

        Raises:
            AlreadyExistsError: there is such a file. Of several that publish one name at once, one gets no error.
            StoreFullError: no room.
        """
        ...

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """As `publish`, in the place of an earlier file of this name: readers find the one or the other, whole.

        Raises:
            StoreFullError: no room. The earlier file is as it was.
        """
        ...

    def size(self, name: str) -> int | None:
        """Of a file, in bytes; None if there is no such file."""
        ...

    def names(self) -> list[str]:
        """Of all files, sorted, whoever made them."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file; nothing happens if there is none."""
        ...
