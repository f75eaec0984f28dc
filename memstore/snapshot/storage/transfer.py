"""One run of bytes, from memory to a file or back, with the sum of its chunk; and what makes no whole file."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.engine import OwnedFile, syscalls
from memstore.errors import CorruptionError
from memstore.snapshot.storage.chunks import Run, count_chunks, expected_sum, new_sum, sum_of
from memstore.snapshot.storage.interface import CHUNK, SUM_SIZE

_STEP = 1 << 20  # bytes that are summed and then written: they are still in the cache then


def check_cover(runs: Sequence[Run], size: int) -> None:
    end = 0
    for run in runs:
        if run.offset != end:
            raise ValueError(f"no part has the bytes from {end:,} to {run.offset:,} of the file")
        end = run.end
    if end != size:
        raise ValueError(f"the parts end at {end:,}, and the file is to have {size:,} bytes")


def write_run(file: OwnedFile, run: Run, *, checksum: bool) -> bytes:
    """Writes a chunk. Returns its sum."""
    offset, batch, nbytes = run.offset, list[memoryview](), 0
    hasher = new_sum() if checksum else None
    for piece in run.pieces:
        for start in range(0, len(piece), _STEP):
            part = piece[start : start + _STEP]
            if hasher is not None:
                hasher.update(part)
            batch.append(part)
            nbytes += len(part)
            if nbytes >= _STEP:
                syscalls.write_parts_at(file.fd, batch, offset)
                offset, batch, nbytes = offset + nbytes, [], 0
    if batch:
        syscalls.write_parts_at(file.fd, batch, offset)
    return hasher.digest() if hasher is not None else b""


def read_run(file: OwnedFile, path: str, run: Run, *, sums: bytes | None) -> None:
    """Reads a run; with sums, it is a whole chunk and is compared with its own."""
    count = syscalls.read_parts_at(file.fd, run.pieces, run.offset)
    if count < run.nbytes:
        raise damaged(path, f"it ends at {run.offset + count:,}, and was longer a moment ago")
    if sums is None:
        return
    chunk = run.offset // CHUNK
    if sum_of(run.pieces) != expected_sum(sums, chunk):
        raise damaged(path, f"bytes {run.offset:,} to {run.end:,} (chunk {chunk}) don't fit their checksum")


def check_sums(path: str, size: int, sums: bytes) -> None:
    expected = count_chunks(size) * SUM_SIZE
    if len(sums) != expected:
        raise damaged(path, f"it has {size:,} bytes, and {len(sums):,} of checksums instead of {expected:,}")


def damaged(path: str, detail: str) -> CorruptionError:
    """An error that names the file."""
    return CorruptionError(path=path, detail=detail)
