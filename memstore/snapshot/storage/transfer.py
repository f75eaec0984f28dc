"""One run of bytes, from memory to a file or back, with the sum of its chunk; and what makes no whole file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memstore.engine import OwnedFile, SharedMemory, syscalls
from memstore.errors import CorruptionError
from memstore.snapshot.storage.chunks import LatePiece, Run, count_chunks, expected_sum, new_sum, size_of
from memstore.snapshot.storage.interface import CHUNK, SUM_SIZE

_STEP = 1 << 18  # bytes


def check_cover(runs: Sequence[Run], size: int) -> None:
    end = 0
    for run in runs:
        if run.offset != end:
            raise ValueError(f"no part has the bytes from {end:,} to {run.offset:,} of the file")
        end = run.end
    if end != size:
        raise ValueError(f"the parts end at {end:,}, and the file is to have {size:,} bytes")


class NewFile:
    """A file that is being written.

    Args:
        memory: all of it, mapped, if it is a file in memory.

    Attributes:
        durable: whether it is going to be synced.
    """

    def __init__(self, file: OwnedFile, memory: SharedMemory | None, *, durable: bool) -> None:
        self.file, self.durable = file, durable
        self._memory = memory

    def huge_pages(self, start: int, stop: int) -> memoryview:
        """A run of it, as far as the kernel has huge pages that cost no more than small ones."""
        memory = self._memory
        return memoryview(b"") if memory is None else memory.bytes[start : memory.allocate_huge(start, stop)]


def write_run(new: NewFile, run: Run, *, checksum: bool) -> bytes:
    """Writes a chunk. Returns its sum, which is of the bytes that are written even if the memory changes meanwhile.

    For that, what is summed is a copy of each step, which stays in the processor's cache.
    """
    hasher = new_sum() if checksum else None
    memory = new.huge_pages(run.offset, run.end)
    for offset, pieces in _steps(run):
        start, stop = offset - run.offset, offset - run.offset + sum(map(len, pieces))
        if stop <= len(memory):
            _copy_pieces(pieces, memory[start:stop])
            if hasher is not None:
                hasher.update(memory[start:stop])
            continue
        if hasher is not None:
            pieces = [memoryview(b"".join(pieces))]
            hasher.update(pieces[0])
        syscalls.write_parts_at(new.file.fd, pieces, offset)
    if new.durable:
        syscalls.start_sync(new.file.fd, run.offset, run.nbytes)
    return hasher.digest() if hasher is not None else b""


def _copy_pieces(pieces: Sequence[memoryview], target: memoryview) -> None:
    """Other threads run meanwhile, but for memory that is read-only, which is a header as a rule."""
    start = 0
    for piece in pieces:
        place = target[start : start + len(piece)]
        if piece.readonly:
            place[:] = piece
        else:
            syscalls.copy(syscalls.buffer_address(place), syscalls.buffer_address(piece), len(piece))
        start += len(piece)


def read_run(file: OwnedFile, path: str, run: Run, *, sums: bytes | None) -> None:
    """Reads a run; with sums, it is a whole chunk and is compared with its own."""
    hasher = new_sum()
    for offset, pieces in _steps(run):
        _read(file, path, offset, pieces)
        for piece in pieces if sums is not None else ():
            hasher.update(piece)
    if sums is None:
        return
    chunk = run.offset // CHUNK
    if hasher.digest() != expected_sum(sums, chunk):
        raise damaged(path, f"bytes {run.offset:,} to {run.end:,} (chunk {chunk}) don't fit their checksum")


def _read(file: OwnedFile, path: str, offset: int, pieces: Sequence[memoryview]) -> None:
    count = syscalls.read_parts_at(file.fd, pieces, offset)
    if count < sum(map(len, pieces)):
        raise damaged(path, f"it ends at {offset + count:,}, and was longer a moment ago")


def _steps(run: Run) -> Iterator[tuple[int, list[memoryview]]]:
    """A run in pieces that are summed while they are in the processor's cache: where they start in the file.

    What nobody wants goes to memory that all steps share.
    """
    gaps = [piece for piece in run.pieces if isinstance(piece, int)]
    scratch = memoryview(bytearray(min(sum(gaps), 2 * _STEP)))
    offset, pieces, nbytes, used = run.offset, list[memoryview](), 0, 0
    for whole in run.pieces:
        size = size_of(whole)
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


def check_sums(path: str, size: int, sums: bytes) -> None:
    expected = count_chunks(size) * SUM_SIZE
    if len(sums) != expected:
        raise damaged(path, f"it has {size:,} bytes, and {len(sums):,} of checksums instead of {expected:,}")


def damaged(path: str, detail: str) -> CorruptionError:
    """An error that names the file."""
    return CorruptionError(path=path, detail=detail)
