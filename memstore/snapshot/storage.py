"""Storage: what a snapshot needs of the place where its files lie. File systems have it; an object store can.

`Storage` is the interface: files by name, written and read in runs of bytes. A file has chunks of 16 MiB, each with a
sum of its own: `runs_of` says which parts lie in which chunk. This file imports no torch.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import xxhash

from memstore.errors import InvalidKeyError

# --- The interface ---------------------------------------------------------------------------------------------------


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


# --- A file, compared with its sums ----------------------------------------------------------------------------------


_AT_ONCE = 4 * CHUNK  # bytes, read in parallel


def verify_file(storage: Storage, name: str, size: int, sums: bytes, done: Done | None = None) -> None:
    """Reads all of a file that should have `size` bytes. Raises CorruptionError, which says where it is damaged."""
    memory = memoryview(bytearray(min(size, _AT_ONCE)))
    if not size:
        storage.read(name, [], sums=sums)
    for start in range(0, size, _AT_ONCE):
        storage.read(name, [FilePart(start, memory[: size - start])], sums=sums, done=done)


# --- Names of files --------------------------------------------------------------------------------------------------
# Which names files of a snapshot may have: they are read from manifests, which anybody may have written.


_MOST_BYTES = 255  # NAME_MAX of Linux's file systems
_UNFINISHED = re.compile(r"\.memstore_snapshot\.[0-9a-f]{32}\.new")


def new_unfinished_name() -> str:
    """Of a file that is about to be published under another name."""
    return f".memstore_snapshot.{uuid.uuid4().hex}.new"


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is about to be published, or was by a process that died."""
    return _UNFINISHED.fullmatch(name) is not None


def check_name(name: str) -> str:
    """The name, if it is that of a file in the folder itself. Raises InvalidKeyError."""
    problem = _problem(name)
    if problem:
        raise InvalidKeyError(f"{name!r:.300} is no name of a file of a snapshot: {problem}")
    return name


def _problem(name: str) -> str | None:
    if name in ("", ".", ".."):
        return "it names a folder"
    if "/" in name:
        return "it has a '/', and all files of a snapshot lie in one folder"
    if "\0" in name:
        return "it has a NUL"
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        return "it can't be written as UTF-8"
    return None if nbytes <= _MOST_BYTES else f"it has {nbytes:,} bytes, and {_MOST_BYTES} are the most"


# --- Chunks ----------------------------------------------------------------------------------------------------------


class LatePiece(NamedTuple):
    """Some bytes of memory that is made when it is written."""

    source: LateBytes
    start: int
    stop: int


class ChunkRun(NamedTuple):
    """Bytes that lie one after the other in one chunk of a file, and the memory that they come from or go to.

    A piece that is a number stands for so many bytes that are read, and that nobody wants.
    """

    offset: int  # in the file
    pieces: list[memoryview | LatePiece | int]

    @property
    def nbytes(self) -> int:
        return sum(map(size_of, self.pieces))

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def size_of(piece: memoryview | LatePiece | int) -> int:
    if isinstance(piece, LatePiece):
        return piece.stop - piece.start
    return piece if isinstance(piece, int) else len(piece)


def runs_of(parts: Iterable[FilePart], *, join: int = 0) -> list[ChunkRun]:
    """The parts, sorted, cut at the ends of chunks, and joined where they adjoin.

    Args:
        parts: none of them may overlap another one in the file.
        join: gaps of up to so many bytes within a chunk are joined too.
    """
    runs: list[ChunkRun] = []
    end = 0
    for start, piece in sorted(_pieces(parts), key=lambda found: found[0]):
        gap = start - end
        if gap < 0:
            raise ValueError(f"parts of the file overlap at byte {start:,}")
        if runs and start % CHUNK and start // CHUNK == runs[-1].offset // CHUNK and gap <= join:
            runs[-1].pieces.extend([gap, piece] if gap else [piece])
        else:
            runs.append(ChunkRun(start, [piece]))
        end = start + size_of(piece)
    return runs


def _pieces(parts: Iterable[FilePart]) -> Iterator[tuple[int, memoryview | LatePiece]]:
    for offset, memory in parts:
        late: LateBytes | None = memory if isinstance(memory, LateBytes) else None
        view = memoryview(b"") if late else memoryview(cast("Any", memory))
        size = late.nbytes if late else view.nbytes
        if not size:
            continue
        view = view.cast("B")
        first = CHUNK - offset % CHUNK  # bytes up to the end of the chunk that it starts in
        for start, stop in pairwise([0, *range(first, size, CHUNK), size]):
            yield offset + start, LatePiece(late, start, stop) if late else view[start:stop]


def whole_chunks(parts: Iterable[FilePart], size: int) -> list[ChunkRun]:
    """All of each chunk that a part touches."""
    found: list[ChunkRun] = []
    for run in runs_of(parts, join=CHUNK):
        before = run.offset % CHUNK
        after = max(min(run.offset - before + CHUNK, size) - run.end, 0)
        found.append(ChunkRun(run.offset - before, [before, *run.pieces, after]))
    return found


def by_width(parts: Iterable[FilePart], size: int) -> tuple[list[FilePart], list[FilePart]]:
    """The parts, cut at the ends of chunks: of those of which at least half is wanted, and of the others.

    Args:
        size: of the file, in bytes.
    """
    found: dict[int, list[FilePart]] = defaultdict(list)
    for start, piece in _pieces(parts):
        found[start // CHUNK].append(FilePart(start, piece))
    wide: list[FilePart] = []
    narrow: list[FilePart] = []
    for chunk, pieces in found.items():
        wanted = sum(len(piece.memory) for piece in pieces)
        is_wide = 2 * wanted >= min(CHUNK, size - chunk * CHUNK)
        (wide if is_wide else narrow).extend(pieces)
    return wide, narrow


def new_sum() -> Any:
    """The sum of a chunk, piece by piece: `update`, then `digest`."""
    return xxhash.xxh3_64()


def count_chunks(size: int) -> int:
    """How many chunks a file of so many bytes has."""
    return -(-size // CHUNK)


def expected_sum(sums: bytes, chunk: int) -> bytes:
    """Of a chunk, by its number."""
    return sums[chunk * SUM_SIZE : (chunk + 1) * SUM_SIZE]


# --- Several calls at once -------------------------------------------------------------------------------------------
# Large reads, writes and copies, several at once: each is one long call into C, during which other threads run.


_MOST_THREADS = 8  # fewer use up a memory's bandwidth
_BATCH = 16  # items that are handed to a thread at once: it takes as long as to read a page
_FEW = 32  # batches a thread, up to which they are smaller

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(function: Callable[[T], R], items: Sequence[T], each: Callable[[T], None]) -> list[R]:
    """`list(map(function, items))`, on all cores; `each` is called in this thread with those that are done, in order.

    When it returns, or raises, no call runs any more. A single item is worked on in the caller's thread.
    """
    results: list[R] = []
    count = min(len(os.sched_getaffinity(0)), len(items), _MOST_THREADS)
    if count <= 1:
        for item in items:
            results.append(function(item))
            each(item)
        return results
    with ThreadPoolExecutor(count, "memstore: snapshot") as pool:
        batch = min(-(-len(items) // (count * _FEW)), _BATCH)
        batches = [items[start : start + batch] for start in range(0, len(items), batch)]
        futures = [pool.submit(_all, function, some) for some in batches]
        try:
            for some, future in zip(batches, futures, strict=True):
                results += future.result()
                for item in some:
                    each(item)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def _all(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return list(map(function, items))
