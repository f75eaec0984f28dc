"""Files in chunks of 16 MiB: which parts lie in which chunk, and the sums of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import xxhash

from memstore.snapshot.storage.interface import CHUNK, SUM_SIZE, FilePart


class Run(NamedTuple):
    """Bytes that lie one after the other in one chunk of a file, and the memory that they come from or go to.

    A piece that is a number stands for so many bytes that are read, and that nobody wants.
    """

    offset: int  # in the file
    pieces: list[memoryview | int]

    @property
    def nbytes(self) -> int:
        return sum(piece if isinstance(piece, int) else len(piece) for piece in self.pieces)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def runs_of(parts: Iterable[FilePart], *, join: int = 0) -> list[Run]:
    """The parts, sorted, cut at the ends of chunks, and joined where they adjoin.

    Args:
        parts: none of them may overlap another one in the file.
        join: gaps of up to so many bytes within a chunk are joined too.
    """
    runs: list[Run] = []
    end = 0
    for start, piece in sorted(_pieces(parts), key=lambda found: found[0]):
        gap = start - end
        if gap < 0:
            raise ValueError(f"parts of the file overlap at byte {start:,}")
        if runs and start % CHUNK and start // CHUNK == runs[-1].offset // CHUNK and gap <= join:
            runs[-1].pieces.extend([gap, piece] if gap else [piece])
        else:
            runs.append(Run(start, [piece]))
        end = start + len(piece)
    return runs


def _pieces(parts: Iterable[FilePart]) -> Iterator[tuple[int, memoryview]]:
    for offset, memory in parts:
        view = memoryview(memory)
        if not view.nbytes:
            continue
        view = view.cast("B")
        first = CHUNK - offset % CHUNK  # bytes up to the end of the chunk that it starts in
        yield offset, view[:first]
        for start in range(first, len(view), CHUNK):
            yield offset + start, view[start : start + CHUNK]


def whole_chunks(parts: Iterable[FilePart], size: int) -> list[Run]:
    """All of each chunk that a part touches."""
    found: list[Run] = []
    for run in runs_of(parts, join=CHUNK):
        before = run.offset % CHUNK
        after = max(min(run.offset - before + CHUNK, size) - run.end, 0)
        found.append(Run(run.offset - before, [before, *run.pieces, after]))
    return found


def new_sum() -> Any:
    """The sum of a chunk, piece by piece: `update`, then `digest`."""
    return xxhash.xxh3_64()


def count_chunks(size: int) -> int:
    """How many chunks a file of so many bytes has."""
    return -(-size // CHUNK)


def expected_sum(sums: bytes, chunk: int) -> bytes:
    """Of a chunk, by its number."""
    return sums[chunk * SUM_SIZE : (chunk + 1) * SUM_SIZE]
