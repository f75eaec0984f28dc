"""256 KiB out of a matrix of 1 GiB: only what is asked for may be read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import torch

import memstore
from tests.benchmarks.measure import WARM_UP_CALLS, Contestant, compare
from tests.benchmarks.peers.slices import (
    KEY,
    Dcp,
    Piece,
    Resident,
    SafetensorsSlices,
    SlicePeer,
    StoreSlices,
    StoreViewKept,
    TorchLoad,
    TorchLoadKept,
)
from tests.benchmarks.report import Goal, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import times_faster, within

SHARDS = (1, 16)
PAGE, KIB = 4096, 1 << 10
SIDE_OF_BOX = 256  # of float32: 256 KiB
MOST_ROUNDS = 7  # DCP takes a second a call


class Boxes(NamedTuple):
    """Boxes of 256 KiB in a square matrix of float32. Stored as shards, each crosses the edge between two of them."""

    side: int
    shards: int
    shape: tuple[int, int]

    @property
    def title(self) -> str:
        rows, columns = self.shape
        what = f"{rows} whole rows" if columns == self.side else f"a box of {rows} x {columns}"
        return f"{what}, stored as {self.shards} shard{'s' if self.shards > 1 else ''}"

    def all(self) -> list[tuple[int, int]]:
        """The first row and column of each."""
        rows, columns = self.shape
        column = 0 if columns == self.side else self.side // 3 + 1
        return [(edge * self.side // 16 - rows // 2, column) for edge in range(1, 16)]

    def pieces(self, row: int, column: int) -> list[Piece]:
        height = self.side // self.shards
        rows, columns = self.shape
        return [
            Piece(
                _name(shard),
                slice(max(row - start, 0), min(row + rows - start, height)),
                slice(column, column + columns),
                start,
            )
            for shard, start in enumerate(range(0, self.side, height))
            if start < row + rows and row < start + height
        ]

    def runs(self, pieces: Sequence[Piece]) -> int:
        """Of contiguous bytes."""
        rows, columns = self.shape
        return len(pieces) if columns == self.side else rows


def measure(session: Session) -> Workload:
    side = (4 if session.quick else 16) * KIB
    kinds = (StoreSlices, StoreViewKept, TorchLoad, TorchLoadKept, SafetensorsSlices, Dcp, Resident)
    matrix = torch.randn(side, side)
    series: list[Series] = []
    goals: list[Goal] = []
    for shards in SHARDS:
        shapes = ((SIDE_OF_BOX**2 // side, side), (SIDE_OF_BOX, SIDE_OF_BOX))
        every = [Boxes(side, shards, shape) for shape in shapes]
        with session.started(kinds) as (peers, absent):
            _put(peers, matrix, shards)
            store = next(peer for peer in peers if isinstance(peer, StoreSlices))
            for boxes in every:
                # DCP takes as long for either
                taking_part = [peer for peer in peers if boxes is every[0] or not isinstance(peer, Dcp)]
                _check(taking_part, boxes, matrix)
                series.append(_compare(session, taking_part, boxes))
                goals += _goals(series[-1], boxes, store)
                _check(taking_part, boxes, matrix)
    return Workload(
        id="slice",
        title=f"A slice of 256 KiB out of {matrix.nbytes >> 20} MiB",
        text=f"A matrix of {side:,} x {side:,} float32, stored whole, and by rows as {SHARDS[-1]} shards, where each "
        "slice has rows of two of them: memstore and DCP store one tensor that so many ranks hold, the others so many "
        "tensors. Whole rows are one run of bytes in a shard; a box is a run a row. "
        "Each call copies its slice into memory that is there, from a value that it opens for that or, where it says "
        "kept, that stays open.",
        series=series,
        goals=goals,
        absent=absent,
    )


def _put(peers: Sequence[SlicePeer], matrix: torch.Tensor, shards: int) -> None:
    """Each shard in a storage of its own: torch.save writes a whole one."""
    parts = [matrix] if shards == 1 else [part.clone() for part in matrix.split(len(matrix) // shards)]
    for peer in peers:
        peer.put(KEY, {_name(shard): part for shard, part in enumerate(parts)})


def _name(shard: int) -> str:
    return f"rows-{shard}"


def _compare(session: Session, peers: Sequence[SlicePeer], boxes: Boxes) -> Series:
    rounds = min(session.rounds, MOST_ROUNDS)
    id = f"{'rows' if boxes.shape[1] == boxes.side else 'box'}-{boxes.shards}"
    contestants = [_contestant(peer, boxes, rounds) for peer in peers]
    return compare(id, f"slice: {boxes.title}", contestants, rounds=rounds, reference="memstore")


def _contestant(peer: SlicePeer, boxes: Boxes, rounds: int) -> Contestant:
    every, out = cycle([boxes.pieces(*box) for box in boxes.all()]), torch.empty(boxes.shape)
    chosen: list[Sequence[Piece]] = [()]

    def before() -> None:
        chosen[0] = next(every)

    most = rounds + WARM_UP_CALLS if isinstance(peer, Dcp) else 100_000
    return Contestant(
        peer.name, peer.role, lambda: peer.read(chosen[0], out), before=before, most=most, note=peer.settings
    )


def _check(peers: Sequence[SlicePeer], boxes: Boxes, matrix: torch.Tensor) -> None:
    row, column = boxes.all()[7]
    for peer in peers:
        out = torch.empty(boxes.shape)
        peer.read(boxes.pieces(row, column), out)
        if not torch.equal(out, matrix[row : row + boxes.shape[0], column : column + boxes.shape[1]]):
            raise SystemExit(f"{peer.name}: what was read differs from what was put")


def _goals(series: Series, boxes: Boxes, store: SlicePeer) -> list[Goal]:
    pieces = boxes.pieces(*boxes.all()[7])
    out, runs = torch.empty(boxes.shape), boxes.runs(pieces)
    before = memstore.bytes_read()
    store.read(pieces, out)
    beyond = memstore.bytes_read() - before - out.nbytes
    return [
        within(f"{series.title}, view kept", series, 100e-6, name=StoreViewKept.name),
        within(f"{series.title}, view made for it", series, 100e-6),
        *times_faster(series.title, series, 100, [Dcp.name]),
        Goal(f"{series.title}: bytes read beyond the slice", exactly(beyond), "<=", PAGE * runs, "B"),
    ]
