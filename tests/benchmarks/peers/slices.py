"""Ways to read a box of a stored matrix. Values are dicts of tensors: a matrix is one of them, or some, by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tests.benchmarks.peers import Peer, needs
from tests.benchmarks.peers.store import Store
from tests.benchmarks.report import Role

KEY = "matrix"


class Piece(NamedTuple):
    """The part of a box that one stored tensor has."""

    name: str
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


class SlicePeer(Peer):
    def put(self, key: str, value: Any) -> None:
        raise NotImplementedError

    def read(self, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        """Fills `out` with the pieces, one below the other, from a value that is opened for it."""
        fill(self.open(), pieces, out)

    def open(self) -> Any:
        """The value as a mapping whose tensors are read when they are sliced."""
        raise NotImplementedError


def fill(value: Any, pieces: Sequence[Piece], out: torch.Tensor) -> None:
    for (name, rows, columns), target in zip(pieces, parts(pieces, out), strict=True):
        target.copy_(value[name][rows, columns])


def parts(pieces: Sequence[Piece], out: torch.Tensor) -> Sequence[torch.Tensor]:
    return out.split([piece.shape[0] for piece in pieces])


class StoreSlices(Store, SlicePeer):
    def open(self) -> Any:
        return self.store.view(KEY)


class Kept(SlicePeer):
    """A value that was opened before, and stays open."""

    def read(self, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        if not hasattr(self, "_open"):
            self._open = self.open()
        fill(self._open, pieces, out)

    def close(self) -> None:
        self.__dict__.pop("_open", None)
        super().close()


class StoreViewKept(Kept, StoreSlices):
    id: ClassVar[str] = "memstore-kept"
    name: ClassVar[str] = "memstore, view kept"


class TorchLoad(SlicePeer):
    id: ClassVar[str] = "torch.load"
    name: ClassVar[str] = "torch.load(mmap=True)"
    settings: ClassVar[str] = "weights_only=True"

    def put(self, key: str, value: Any) -> None:
        torch.save(value, self.root / KEY)

    def open(self) -> Any:
        return torch.load(self.root / KEY, mmap=True, weights_only=True)


class TorchLoadKept(Kept, TorchLoad):
    id: ClassVar[str] = "torch.load-kept"
    name: ClassVar[str] = "torch.load(mmap=True), kept"


class SafetensorsSlices(SlicePeer):
    id: ClassVar[str] = "safetensors"
    name: ClassVar[str] = "safetensors get_slice"

    @classmethod
    def missing(cls) -> str | None:
        return needs("safetensors")

    def put(self, key: str, value: Any) -> None:
        from safetensors.torch import save_file

        save_file(value, self.root / KEY)

    def open(self) -> Any:
        from safetensors import safe_open

        return _Slices(safe_open(self.root / KEY, "pt"))


class _Slices:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Any:
        return self._file.get_slice(name)


class Dcp(SlicePeer):
    """torch.distributed.checkpoint in one process. Its reader loads whole the stored tensors that a box touches."""

    id: ClassVar[str] = "dcp"
    name: ClassVar[str] = "DCP FileSystemReader"
    settings: ClassVar[str] = "no_dist=True, a planner that asks for the box alone"

    def put(self, key: str, value: Any) -> None:
        dcp.save(dict(value), storage_writer=FileSystemWriter(self.root / KEY), no_dist=True)

    def read(self, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        targets = dict(zip([piece.name for piece in pieces], parts(pieces, out), strict=True))
        reader = FileSystemReader(self.root / KEY)
        dcp.load(targets, storage_reader=reader, planner=_BoxPlanner(pieces, targets), no_dist=True)


class _BoxPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: Sequence[Piece], targets: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._pieces, self._targets = pieces, targets

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for piece in self._pieces:
            stored = self.metadata.state_dict_metadata[piece.name]
            assert isinstance(stored, TensorStorageMetadata)
            start = torch.Size((piece.rows.start, piece.columns.start))
            items += create_read_items_for_chunk_list(
                piece.name, stored, [ChunkStorageMetadata(start, torch.Size(piece.shape))]
            )
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index.fqn]
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target


class Resident(Kept):
    """A copy out of the process's own memory."""

    id: ClassVar[str] = "resident"
    name: ClassVar[str] = "a tensor of the process's own"
    role: ClassVar[Role] = "limit"

    def put(self, key: str, value: Any) -> None:
        self._open = value
