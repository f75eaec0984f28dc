"""Storages of torch.distributed.checkpoint, each by torch's own save, async_save and load."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from memstore.integrations.dcp import Stager, StorageReader, StorageWriter
from tests.benchmarks.peers import Role
from tests.benchmarks.peers.checkpoints import Checkpointer, DcpCheckpoint, State


class RowsPlanner(DefaultLoadPlanner):
    """Loads some rows of each tensor, into a tensor of that many rows."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def create_local_plan(self) -> LoadPlan:
        found: Any = self.metadata
        items: list[Any] = []
        for name, target in self.state_dict.items():
            tensor: Any = target
            chunk = ChunkStorageMetadata(torch.Size([self._start, 0]), tensor.size())
            items += create_read_items_for_chunk_list(name, found.state_dict_metadata[name], [chunk])
        return LoadPlan([dataclasses.replace(item, dest_index=item.dest_index) for item in items])

    def lookup_tensor(self, index: Any) -> Any:
        return self.state_dict[index.fqn]


class DcpStorage(Checkpointer):
    """Its `reader` is given a path."""

    does: ClassVar[frozenset[str]] = frozenset({"save", "save_durably", "restore", "rows"})

    def reader(self, path: Path) -> Any:
        raise NotImplementedError

    def restore(self, path: Path, state: State) -> Any:
        dcp.load(dict(state), storage_reader=self.reader(path), no_dist=True)

    def rows(self, path: Path, start: int, target: State) -> None:
        dcp.load(dict(target), storage_reader=self.reader(path), planner=RowsPlanner(start), no_dist=True)


class MemstoreStorage(DcpStorage):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    settings: ClassVar[str] = "StorageWriter with checksums, StorageReader, Stager; torch's save and load"
    role: ClassVar[Role] = "memstore"
    does: ClassVar[frozenset[str]] = DcpStorage.does | {"save_async"}

    def setup(self) -> None:
        self._stager = Stager()

    def save(self, path: Path, state: State) -> Any:
        dcp.save(dict(state), storage_writer=StorageWriter(path, durability="process"), no_dist=True)

    def save_durably(self, path: Path, state: State) -> Any:
        dcp.save(dict(state), storage_writer=StorageWriter(path), no_dist=True)

    def save_async(self, path: Path, state: State) -> Callable[[], object]:
        writer = StorageWriter(path, durability="process")
        done: Any = dcp.async_save(dict(state), storage_writer=writer, async_stager=self._stager, no_dist=True)
        return done.result

    def reader(self, path: Path) -> Any:
        return StorageReader(path)


class FileSystemStorage(DcpCheckpoint, DcpStorage):
    does: ClassVar[frozenset[str]] = DcpStorage.does | {"save_async"}
    name: ClassVar[str] = "FileSystemWriter"

    def reader(self, path: Path) -> Any:
        return dcp.FileSystemReader(path)


class HuggingFaceStorage(DcpStorage):
    id: ClassVar[str] = "dcp-hf"
    name: ClassVar[str] = "HuggingFaceStorageWriter"
    settings: ClassVar[str] = "its defaults; one file; it syncs nothing"
    does: ClassVar[frozenset[str]] = DcpStorage.does - {"save_durably"}

    def save(self, path: Path, state: State) -> Any:
        dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(path)), no_dist=True)

    def reader(self, path: Path) -> Any:
        return HuggingFaceStorageReader(str(path))
