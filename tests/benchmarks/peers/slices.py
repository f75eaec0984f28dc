"""Ways to read a box of a stored matrix. Values are dicts of tensors: a matrix is one of them, or several, by rows.

Who knows of shards stores one matrix in several; all others store several tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import memstore
from tests.benchmarks.peers import Peer, needs
from tests.benchmarks.peers.store import Store
from tests.benchmarks.report import Role

KEY = "matrix"


class Piece(NamedTuple):
    """The part of a box that one stored tensor has. `start` is that tensor's first row in the matrix."""

    name: str
    rows: slice
    columns: slice
    start: int = 0

    @property
    def height(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def row(self) -> int:
        """The first of the piece in the matrix."""
        return self.start + self.rows.start


class SlicePeer(Peer):
    def put(self, key: str, value: Any) -> None:
        raise NotImplementedError

    def read(self, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        """Fills `out` with the pieces, one below the other, from a value that is opened for it."""
        self.copy(self.open(), pieces, out)

    def open(self) -> Any:
        """The value as a mapping whose tensors are read when they are sliced."""
        raise NotImplementedError

    def copy(self, value: Any, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        for piece, target in zip(pieces, out.split([piece.height for piece in pieces]), strict=True):
            target.copy_(value[piece.name][piece.rows, piece.columns])


class StoreSlices(Store, SlicePeer):
    """Several tensors are put as the shards of one, each by a rank of its own."""

    settings: ClassVar[str] = "view(key)[rows, columns]; shards: one tensor, put_sharded by as many ranks"

    def put(self, key: str, value: Any) -> None:
        parts = shards_of(value)
        if len(parts) == 1:
            self.store.put(key, {KEY: parts[0].local})
        for rank, part in enumerate(parts if len(parts) > 1 else ()):
            self.store.put_sharded(
                key, {KEY: part}, attempt="all", rank=rank, world_size=len(parts), wait=rank == len(parts) - 1
            )

    def open(self) -> Any:
        return self.store.view(KEY)

    def copy(self, value: Any, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        """However many shards the box meets, it is one slice of one tensor."""
        row = pieces[0].row
        out.copy_(value[KEY][row : row + len(out), pieces[0].columns])


def shards_of(value: dict[str, torch.Tensor]) -> list[memstore.TensorShard]:
    """The tensors, one below the other, as the shards of one matrix."""
    parts = list(value.values())
    shape = (sum(map(len, parts)), parts[0].shape[1])
    starts = accumulate(map(len, parts), initial=0)
    return [memstore.TensorShard(part, shape, (start, 0)) for part, start in zip(parts, starts, strict=False)]


class Kept(SlicePeer):
    """A value that was opened before, and stays open."""

    def read(self, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        if not hasattr(self, "_open"):
            self._open = self.open()
        self.copy(self._open, pieces, out)

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
    """torch.distributed.checkpoint in one process. Its reader loads whole the shards that a box touches."""

    id: ClassVar[str] = "dcp"
    name: ClassVar[str] = "DCP FileSystemReader"
    settings: ClassVar[str] = "no_dist=True, a planner that asks for the box alone"

    def put(self, key: str, value: Any) -> None:
        writer = FileSystemWriter(self.root / KEY)
        dcp.save({}, storage_writer=writer, planner=_ShardsPlanner(shards_of(value)), no_dist=True)

    def read(self, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        start = torch.Size((pieces[0].row, pieces[0].columns.start))
        reader = FileSystemReader(self.root / KEY)
        dcp.load({KEY: out}, storage_reader=reader, planner=_BoxPlanner(start, out), no_dist=True)


class _ShardsPlanner(DefaultSavePlanner):
    """Saves the shards of one tensor as the ranks that have them would."""

    def __init__(self, shards: Sequence[memstore.TensorShard]) -> None:
        super().__init__()
        self._shards = {torch.Size(shard.offsets): shard for shard in shards}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(start, shard) for start, shard in self._shards.items()], planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.index.offset is not None
        return self._shards[write_item.index.offset].local


def _item(start: torch.Size, shard: memstore.TensorShard) -> WriteItem:
    properties = TensorProperties.create_from_tensor(shard.local)
    data = TensorWriteData(ChunkStorageMetadata(start, shard.local.shape), properties, torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(KEY, start), WriteItemType.SHARD, tensor_data=data)


class _BoxPlanner(DefaultLoadPlanner):
    def __init__(self, start: torch.Size, out: torch.Tensor) -> None:
        super().__init__()
        self._start, self._out = start, out

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata[KEY]
        assert isinstance(stored, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(self._start, self._out.shape)
        return LoadPlan(create_read_items_for_chunk_list(KEY, stored, [chunk]))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._out
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
