"""A read of a part reads that part; and what is compared with checksums."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import memstore
from memstore.errors import CorruptionError
from memstore.integrations.dcp import StorageReader, StorageWriter
from memstore.snapshot import storage
from tests.integrations.dcp.states import load, save

ROWS, COLUMNS = 12 << 10, 1024  # 48 MiB: three chunks


class BoxPlanner(DefaultLoadPlanner):
    """Loads one box of each tensor, into a tensor of its shape."""

    def __init__(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self._chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self.committed: list[str] = []

    def create_local_plan(self) -> Any:
        metadata: Any = self.metadata
        plan = super().create_local_plan() if not self.state_dict else None
        items = [
            item
            for name in self.state_dict
            for item in create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], [self._chunk])
        ]
        return dataclasses.replace(plan, items=items) if plan is not None else _plan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self.state_dict[index.fqn]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)


def _plan(items: Any) -> Any:
    from torch.distributed.checkpoint.planner import LoadPlan

    return LoadPlan(items)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each run that is read of a file of tensors."""
    found: list[int] = []
    real = storage.read_run

    def read_run(file: Any, path: str, run: Any, *, sums: Any) -> None:
        found.append(run.nbytes)
        real(file, path, run, sums=sums)

    monkeypatch.setattr(storage, "read_run", read_run)
    return found


@pytest.mark.parametrize("box", [((3000, 0), (16, COLUMNS)), ((3000, 64), (200, 32)), ((0, 0), (0, 5))], ids=str)
def test_a_narrow_read_reads_the_narrow_box(scratch: str, box: Any, counted: list[int]) -> None:
    whole = torch.randn(ROWS, COLUMNS)
    save({"w": whole}, StorageWriter(scratch, durability="process"))
    target, planner = {"w": torch.zeros(box[1])}, BoxPlanner(*box)
    load(target, StorageReader(scratch), planner=planner)
    (row, column), (rows, columns) = box
    assert torch.equal(target["w"], whole[row : row + rows, column : column + columns])
    assert sum(counted) <= rows * COLUMNS * 4, "the rows, with what lies between two of them"


def test_and_of_a_stores_entry(scratch: str) -> None:
    whole = torch.randn(2048, 1024)
    with memstore.open(scratch) as store:
        save({"w": whole}, StorageWriter(store, key="w"))
        before = memstore.bytes_read()
        target = {"w": torch.zeros(4, 16)}
        load(target, StorageReader(store, key="w"), planner=BoxPlanner((100, 32), (4, 16)))
        assert torch.equal(target["w"], whole[100:104, 32:48])
        assert memstore.bytes_read() - before <= 4 * 1024 * 4


def test_a_planner_is_told_when_its_tensor_is_there(scratch: str) -> None:
    save({"w": torch.ones(6, 4)}, StorageWriter(scratch))
    planner = BoxPlanner((2, 0), (2, 4))
    load({"w": torch.zeros(2, 4)}, StorageReader(scratch), planner=planner)
    assert planner.committed == ["w"]


def test_damage_is_found_where_most_of_a_chunk_is_read(scratch: str) -> None:
    whole = torch.randn(ROWS, COLUMNS)
    save({"w": whole}, StorageWriter(scratch, durability="process"))
    (path,) = Path(scratch).glob("*.safetensors")
    with open(path, "r+b") as file:
        file.seek(20 << 20)
        file.write(b"\xff\xff")
    with pytest.raises(CheckpointException, match="don't fit their checksum") as raised:
        load({"w": torch.zeros(ROWS, COLUMNS)}, StorageReader(scratch))
    assert any(isinstance(error, CorruptionError) for error, _ in raised.value.failures.values())
    target = {"w": torch.zeros(16, COLUMNS)}
    load(target, StorageReader(scratch), planner=BoxPlanner((0, 0), (16, COLUMNS)))
    assert torch.equal(target["w"], whole[:16])


def test_without_checksums_none_are_written(scratch: str) -> None:
    save({"w": torch.ones(5)}, StorageWriter(scratch, checksum=False))
    target = {"w": torch.zeros(5)}
    load(target, StorageReader(scratch))
    assert torch.equal(target["w"], torch.ones(5))
    assert '"sums":""' in Path(scratch, "memstore_snapshot.json").read_text()
