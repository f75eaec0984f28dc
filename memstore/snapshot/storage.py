"""Runs of bytes of a snapshot's files: parts, chunks and sums; several reads or writes at once, and how far they are.

A file has chunks of 16 MiB, each with a sum of its own: `runs_of` says which parts lie in which chunk. This file
imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import xxhash

from memstore._info import Progress
from memstore._wording import size as size_text
from memstore.errors import InvalidKeyError, in_callers_code

# --- Parts of files --------------------------------------------------------------------------------------------------


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
        """Returns some of the bytes; each may be taken once."""
        with self._lock:
            if not self._made:
                self._made = memoryview(self._make()).cast("B")
            found = self._made[start:stop]
            self._left -= len(found)
            if not self._left:
                self._made = memoryview(b"")
            return found


# --- Names of files --------------------------------------------------------------------------------------------------
# Which names files of a snapshot may have: they are read from manifests, which anybody may have written.


_MOST_BYTES = 255  # NAME_MAX of Linux's file systems
_UNFINISHED = re.compile(r"\.memstore_snapshot\.[0-9a-f]{32}\.new")


def new_unfinished_name() -> str:
    """Returns a name for a file that is about to be published under another name."""
    return f".memstore_snapshot.{uuid.uuid4().hex}.new"


def is_unfinished(name: str) -> bool:
    """Returns whether a file of this name is about to be published, or was by a process that died."""
    return _UNFINISHED.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Returns the name, if it is that of a file in the folder itself. Raises InvalidKeyError."""
    problem = ""
    if name in ("", ".", ".."):
        problem = "it names a folder"
    elif "/" in name:
        problem = "it has a '/', and all files of a snapshot lie in one folder"
    elif "\0" in name:
        problem = "it has a NUL"
    else:
        try:
            nbytes = len(name.encode())
            if nbytes > _MOST_BYTES:
                problem = f"it has {nbytes:,} bytes, and {_MOST_BYTES} are the most"
        except UnicodeEncodeError:
            problem = "it can't be written as UTF-8"
    if problem:
        raise InvalidKeyError(f"{name!r:.300} is no name of a file of a snapshot: {problem}")
    return name


# --- Chunks ----------------------------------------------------------------------------------------------------------


class LatePiece:
    """Some bytes of memory that is made when it is written."""

    __slots__ = ("source", "start", "stop")

    def __init__(self, source: LateBytes, start: int, stop: int) -> None:
        self.source, self.start, self.stop = source, start, stop

    def __len__(self) -> int:
        return self.stop - self.start


class ChunkRun(NamedTuple):
    """Bytes that lie one after the other in one chunk of a file, and the memory that they come from or go to.

    Attributes:
        offset, end: in the file.
        pieces: the memory. A number stands for so many bytes that are read, and that nobody wants.
    """

    offset: int
    end: int
    pieces: list[memoryview | LatePiece | int]

    @property
    def nbytes(self) -> int:
        return self.end - self.offset


def runs_of(parts: Iterable[FilePart], *, join: int = 0) -> list[ChunkRun]:
    """Returns the parts, sorted, cut at the ends of chunks, and joined where they adjoin.

    Args:
        parts: none of them may overlap another one in the file.
        join: gaps of up to so many bytes within a chunk are joined too.
    """
    runs: list[ChunkRun] = []
    first, end = 0, 0  # of the run that is being made
    pieces: list[memoryview | LatePiece | int] = []
    for start, piece in sorted(_pieces(parts), key=itemgetter(0)):
        gap = start - end
        if gap < 0:
            raise ValueError(f"parts of the file overlap at byte {start:,}")
        if pieces and start % CHUNK and start // CHUNK == first // CHUNK and gap <= join:
            if gap:
                pieces.append(gap)
        else:
            if pieces:
                runs.append(ChunkRun(first, end, pieces))
            first, pieces = start, []
        pieces.append(piece)
        end = start + len(piece)
    if pieces:
        runs.append(ChunkRun(first, end, pieces))
    return runs


def _pieces(parts: Iterable[FilePart]) -> Iterator[tuple[int, memoryview | LatePiece]]:
    """Yields the parts, cut at the ends of chunks, each with its offset in the file."""
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
    """Returns all of each chunk that a part touches."""
    found: list[ChunkRun] = []
    for offset, end, pieces in runs_of(parts, join=CHUNK):
        start = offset - offset % CHUNK
        stop = max(min(start + CHUNK, size), end)
        found.append(ChunkRun(start, stop, [offset - start, *pieces, stop - end]))
    return found


def by_width(parts: Iterable[FilePart], size: int) -> tuple[list[FilePart], list[FilePart]]:
    """Cuts the parts at the ends of chunks. Returns those of chunks of which at least half is wanted, and the others.

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
    """Returns the sum of a chunk, piece by piece: `update`, then `digest`."""
    return xxhash.xxh3_64()


# --- Several calls at once -------------------------------------------------------------------------------------------
# Large reads, writes and copies, several at once: each is one long call into C, during which other threads run.


_MOST_THREADS = 8  # fewer use up a memory's bandwidth
_BATCH = 16  # items that are handed to a thread at once: it takes as long as to read a page
_FEW = 32  # batches a thread, up to which they are smaller

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(function: Callable[[T], R], items: Sequence[T], each: Callable[[T], None]) -> list[R]:
    """Returns `list(map(function, items))`, computed on all cores. `each` is called here with those done, in order.

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
        futures = [pool.submit(lambda some: list(map(function, some)), some) for some in batches]
        try:
            for some, future in zip(batches, futures, strict=True):
                results += future.result()
                for item in some:
                    each(item)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


# --- How far a snapshot is: a callback, or a bar on the terminal -----------------------------------------------------


_WIDTH = 30  # characters
_BAR_PAUSE = 0.1  # seconds between two looks of a bar


class ProgressMeter:
    """A count of bytes, which is told. Thread-safe.

    Args:
        progress: called with the bytes done and those in all; True: a bar, if standard error is a terminal; None.
        total: bytes in all.
        what: what is done, for the bar: "writing".
        rank: of several, rank 0 alone has a bar; a callback is each rank's own.
        keeps_errors: what the callback raises is kept as `failure`, and it is called no more; else it is raised.

    Attributes:
        failure: what the callback has raised.
    """

    def __init__(
        self, progress: Progress | bool | None, total: int, what: str, *, rank: int = 0, keeps_errors: bool = False
    ) -> None:
        self.total, self._done = total, 0
        self.failure: BaseException | None = None
        self._keeps_errors = keeps_errors
        self._lock = threading.Lock()
        self._tell: Progress | None = None
        if callable(progress):
            self._tell = progress
        elif progress is True and rank == 0 and sys.stderr.isatty():
            self._tell = _bar(what)

    @property
    def done(self) -> Callable[[int], None] | None:
        """Returns what is called with the bytes that were passed; None if nobody wants to know."""
        return None if self._tell is None else self._add

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self._done = min(self._done + nbytes, self.total)
            if self._tell is None or self.failure is not None:
                return
            try:
                with in_callers_code():
                    self._tell(self._done, self.total)
            except BaseException as error:  # SystemExit, too, would end the thread that calls this
                if not self._keeps_errors:
                    raise
                self.failure = error

    def finish(self) -> None:
        """Tells that all is done, whatever was counted."""
        if self._done < self.total or not self.total:
            self._add(self.total - self._done)


def _bar(what: str) -> Progress:
    started, told = time.monotonic(), 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if done < total and now - told < _BAR_PAUSE:
            return
        told = now
        part = done / total if total else 1.0
        rate = size_text(done / max(now - started, 1e-9))
        bar = "█" * round(_WIDTH * part)
        sys.stderr.write(f"\r{what} {bar:<{_WIDTH}} {part:4.0%}  {size_text(done)} of {size_text(total)}  {rate}/s ")
        sys.stderr.write("\n" if done >= total else "")
        sys.stderr.flush()

    return tell


SILENT = ProgressMeter(None, 0, "")  # tells nobody
