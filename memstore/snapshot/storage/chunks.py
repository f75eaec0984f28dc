"""Files in chunks of 16 MiB: which parts lie in which chunk, and the sums of chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, cast

import xxhash

from memstore.snapshot.storage.interface import CHUNK, SUM_SIZE, FilePart, LateBytes


class LatePiece(NamedTuple):
    """Some bytes of memory that is made when it is written."""

    source: LateBytes
    start: int
    stop: int


class Run(NamedTuple):
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


def whole_chunks(parts: Iterable[FilePart], size: int) -> list[Run]:
    """All of each chunk that a part touches."""
    found: list[Run] = []
    for run in runs_of(parts, join=CHUNK):
        before = run.offset % CHUNK
        after = max(min(run.offset - before + CHUNK, size) - run.end, 0)
        found.append(Run(run.offset - before, [before, *run.pieces, after]))
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
