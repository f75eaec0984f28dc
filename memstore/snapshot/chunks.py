"""Parts of a snapshot's files, and the chunks that they lie in: how bytes come from memory into a file, and back.

A file has chunks of 16 MiB, each with a sum of its own. `runs_of` sorts parts, cuts them at the ends of chunks, and
joins those that adjoin; `write_run` and `read_run` move one run; `in_parallel` does so with several at once. Imports no
torch.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import xxhash

from memstore.engine import SharedMemory, syscalls
from memstore.errors import (
    CorruptionError,
)

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


def by_width(parts: Iterable[FilePart], size: int, slack: int | None = None) -> tuple[list[FilePart], list[FilePart]]:
    """Cuts the parts at the ends of chunks. Returns those of chunks of which at least half is wanted, and the others.

    Args:
        size: of the file, in bytes.
        slack: instead of half, all but so many bytes.
    """
    found: dict[int, list[FilePart]] = defaultdict(list)
    for start, piece in _pieces(parts):
        found[start // CHUNK].append(FilePart(start, piece))
    wide: list[FilePart] = []
    narrow: list[FilePart] = []
    for chunk, pieces in found.items():
        wanted = sum(len(piece.memory) for piece in pieces)
        nbytes = min(CHUNK, size - chunk * CHUNK)
        is_wide = 2 * wanted >= nbytes if slack is None else nbytes - wanted <= slack
        (wide if is_wide else narrow).extend(pieces)
    return wide, narrow


def size_of_sums(size: int) -> int:
    """Returns how many bytes the sums of a file take that has `size` bytes."""
    return -(-size // CHUNK) * SUM_SIZE


PieceSums = dict[int, bytes]  # of each piece of a file that lies in one chunk: its offset -> its sum


def pieces_between(start: int, stop: int) -> list[tuple[int, int]]:
    """Returns the pieces into which the ends of chunks cut a part of a file."""
    if start // CHUNK == (stop - 1) // CHUNK:  # as of most
        return [(start, stop)]
    return list(pairwise([start, *range(start - start % CHUNK + CHUNK, stop, CHUNK), stop]))


def new_sum() -> Any:
    """Returns the sum of a chunk, piece by piece: `update`, then `digest`."""
    return xxhash.xxh3_64()


_LONG = 64 << 10  # bytes, from which on xxhash lets other threads run: 4.0 in all of its calls, 3 in `update` only


def sum_of(data: Any) -> bytes:
    """Returns the sum of contiguous bytes."""
    if len(data) <= _LONG:
        return xxhash.xxh3_64_digest(data)
    hasher = xxhash.xxh3_64()
    hasher.update(data)
    return hasher.digest()


# --- Runs of bytes, from memory to a file or back --------------------------------------------------------------------


_STEP = 1 << 18  # bytes


def write_run(
    fd: int,
    mapped: SharedMemory | None,
    run: ChunkRun,
    *,
    durable: bool,
    checksum: bool,
    pieces_sums: PieceSums | None = None,
) -> bytes:
    """Writes a chunk. Returns its sum, which is of the bytes that are written even if the memory changes meanwhile.

    For that, what is summed is a copy of each step, which stays in the processor's cache.

    Args:
        mapped: all of the file, if it is a large one in memory.
        durable: it is going to be synced.
        pieces_sums: gets the sums of the chunk's pieces, too.
    """
    hasher = new_sum() if checksum else None
    each = _EachPiece(run, pieces_sums) if pieces_sums is not None and len(run.pieces) > 1 else None
    memory = memoryview(b"")  # of the run, as far as the kernel has huge pages that cost no more than small ones
    if mapped is not None:
        memory = mapped.bytes[run.offset : mapped.allocate_huge(run.offset, run.end)]
    for offset, pieces in _steps(run):
        start, stop = offset - run.offset, offset - run.offset + sum(map(len, pieces))
        if stop <= len(memory):
            _copy_pieces(pieces, memory[start:stop])
            if hasher is not None:
                hasher.update(memory[start:stop])
            if each is not None:
                each.update(memory[start:stop])
            continue
        if hasher is not None:
            pieces = [memoryview(b"".join(pieces))]
            hasher.update(pieces[0])
            if each is not None:
                each.update(pieces[0])
        syscalls.write_parts_at(fd, pieces, offset)
    if durable:
        syscalls.start_sync(fd, run.offset, run.nbytes)
    digest = hasher.digest() if hasher is not None else b""
    if pieces_sums is not None and each is None:
        pieces_sums[run.offset] = digest
    return digest


class _EachPiece:
    """The sums of the pieces of a run, whose bytes are passed one after the other in any portions."""

    def __init__(self, run: ChunkRun, found: PieceSums) -> None:
        self._found = found
        self._sizes = iter([piece if isinstance(piece, int) else len(piece) for piece in run.pieces])
        self._start, self._left = run.offset, next(self._sizes)
        self._size, self._hasher = self._left, new_sum()

    def update(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            part = data[at : at + self._left]
            at += len(part)
            self._left -= len(part)
            if not self._left and len(part) == self._size:  # which small pieces are
                digest = sum_of(part)
            else:
                self._hasher.update(part)
                if self._left:
                    return
                digest, self._hasher = self._hasher.digest(), new_sum()
            self._found[self._start] = digest
            self._start += self._size
            self._size = self._left = next(self._sizes, 0)


def _copy_pieces(pieces: Sequence[memoryview], target: memoryview) -> None:
    """Copies the pieces. Other threads run meanwhile, but for read-only memory, which is a header as a rule."""
    start = 0
    for piece in pieces:
        place = target[start : start + len(piece)]
        if piece.readonly:
            place[:] = piece
        else:
            syscalls.copy(syscalls.buffer_address(place), syscalls.buffer_address(piece), len(piece))
        start += len(piece)


def read_run(fd: int, path: str, run: ChunkRun, *, sums: bytes | None) -> None:
    """Reads a run; with sums, it is a whole chunk and is compared with its own."""
    hasher = new_sum()
    for offset, pieces in _steps(run):
        count = syscalls.read_parts_at(fd, pieces, offset)
        if count < sum(map(len, pieces)):
            raise damaged(path, f"it ends at {offset + count:,}, and was longer a moment ago")
        for piece in pieces if sums is not None else ():
            hasher.update(piece)
    if sums is None:
        return
    chunk = run.offset // CHUNK
    if hasher.digest() != sums[chunk * SUM_SIZE : (chunk + 1) * SUM_SIZE]:
        raise damaged(path, f"bytes {run.offset:,} to {run.end:,} (chunk {chunk}) don't fit their checksum")


def _steps(run: ChunkRun) -> Iterator[tuple[int, list[memoryview]]]:
    """Yields a run in pieces that are summed while they are in the processor's cache, with their offset in the file.

    Bytes that nobody wants go to memory that all steps share.
    """
    gaps = [piece for piece in run.pieces if isinstance(piece, int)]
    scratch = memoryview(bytearray(min(sum(gaps), 2 * _STEP)))
    offset, pieces, nbytes, used = run.offset, list[memoryview](), 0, 0
    for whole in run.pieces:
        size = whole if isinstance(whole, int) else len(whole)
        if isinstance(whole, LatePiece):
            whole = whole.source.take(whole.start, whole.stop)
        for start in range(0, size, _STEP):
            length = min(_STEP, size - start)
            if isinstance(whole, int):
                pieces.append(scratch[used : used + length])
                used += length
            else:
                pieces.append(whole[start : start + length])
            nbytes += length
            if nbytes >= _STEP:
                yield offset, pieces
                offset, pieces, nbytes, used = offset + nbytes, [], 0, 0
    if pieces:
        yield offset, pieces


def damaged(path: str, detail: str) -> CorruptionError:
    """Returns an error that names the file."""
    return CorruptionError(path=path, detail=detail)


# --- Large reads, writes and copies, several at once: each is one call into C, during which other threads run --------


_MOST_THREADS = 8  # fewer use up a memory's bandwidth
_BATCH = 16  # items that are handed to a thread at once: it takes as long as to read a page
_FEW = 32  # batches a thread, up to which they are smaller

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(
    function: Callable[[T], R], items: Sequence[T], each: Callable[[T], None], *, threads: int | None = None
) -> list[R]:
    """Returns `list(map(function, items))`, computed on all cores. `each` is called here with those done, in order.

    When it returns, or raises, no call runs any more. A single item is worked on in the caller's thread.

    Args:
        threads: how many there may be, where they wait for a network and not for cores.
    """
    results: list[R] = []
    most = min(len(os.sched_getaffinity(0)), _MOST_THREADS) if threads is None else threads
    count = min(most, len(items))
    if count <= 1:
        for item in items:
            results.append(function(item))
            each(item)
        return results
    with ThreadPoolExecutor(count, "memstore: snapshot") as pool:
        batch = min(-(-len(items) // (count * _FEW)), _BATCH) if threads is None else 1
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
