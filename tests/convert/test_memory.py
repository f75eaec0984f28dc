"""Tensors larger than the memory that a conversion takes: what counts is memory of its own, not files that are mapped.

The pages of mapped files are in VmHWM and VmRSS too, though the kernel takes them back when it wants to. RssAnon has
none of them: it is looked at from outside, again and again, while the conversion runs.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from memstore.convert import convert
from memstore.sharding import Box
from tests.children import Child, Wire
from tests.convert.values import FLAT

MIB = 1 << 20


def own_memory(pid: int, kinds: str = "Anon") -> int:
    """In bytes. None is left of a process that is about to be gone."""
    with open(f"/proc/{pid}/status") as file:
        return sum(int(kibibytes) << 10 for kibibytes in re.findall(rf"Rss(?:{kinds}):\s+(\d+) kB", file.read()))


def _convert(wire: Wire, source: str, target: str, format: str) -> None:
    torch.set_num_threads(1)
    gc.collect()  # what the parent has left would be freed meanwhile, and hide as much
    wire.send()
    wire.receive()
    convert(source, target, target_as=format)


def most_memory(source: str, target: str, format: str) -> int:
    """The most bytes of its own that a process takes for a conversion, beside those that it had before."""
    with Child(_convert, source, target, format) as child:
        child.receive()
        before = most = own_memory(child.pid)
        child.send()
        while not child.has_message:
            most = max(most, own_memory(child.pid))
            time.sleep(0.001)  # or the child's work would have to wait
        child.receive()
    return most - before


def _in_columns(path: str, rows: int, columns: int) -> torch.Tensor:
    """A checkpoint of one tensor, in boxes that a piece of a file needs all of."""
    whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)

    class Columns:
        """As a DTensor of several ranks tells torch of its parts."""

        boxes = [Box((0, start), (rows, columns // 4)) for start in range(0, columns, columns // 4)]

        def __create_write_items__(self, name: str, _: object) -> list[object]:
            items: list[object] = []
            for box in self.boxes:
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape))
                data = TensorWriteData(chunk, TensorProperties(dtype=whole.dtype), whole.shape)
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, None, data))
            return items

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            box = next(box for box in self.boxes if box.offsets == tuple(index.offset or ()))
            return whole[box.slices].contiguous()

    class Planner(DefaultSavePlanner):
        """Finds the parts of what is no tensor."""

        def lookup_object(self, index: MetadataIndex) -> Any:
            return self.state_dict[index.fqn].__get_tensor_shard__(index)

    dcp.save({"x": Columns()}, checkpoint_id=path, planner=Planner(), no_dist=True)
    return whole


def test_a_tensor_in_boxes_goes_in_pieces(folder: str) -> None:
    whole = _in_columns(f"{folder}/source", 10240, 4096)  # 160 MiB
    assert most_memory(f"{folder}/source", f"{folder}/target.pt", "torch") < 80 * MIB
    assert torch.equal(torch.load(f"{folder}/target.pt", mmap=True)["x"], whole)


@pytest.mark.full
@pytest.mark.parametrize("format", FLAT)
@pytest.mark.parametrize("source", ["boxes", "transposed", "plain"])
def test_no_format_takes_memory_for_large_tensors(folder: str, format: str, source: str) -> None:
    if source == "boxes":
        _in_columns(f"{folder}/source", 32768, 4096)  # 512 MiB
    else:
        value = torch.arange(128 * MIB, dtype=torch.float32).reshape(32768, 4096)
        torch.save({"x": value.T if source == "transposed" else value}, f"{folder}/source")
        del value
    assert most_memory(f"{folder}/source", f"{folder}/target", format) < 200 * MIB
    assert os.path.exists(Path(folder) / "target")


@pytest.mark.full
def test_all_that_a_process_takes_is_less_than_the_file(tmp_path: Path) -> None:
    """With torch, and all that it brings: on a disk, so that no mapped file is shared memory."""
    value = torch.arange(160 * MIB, dtype=torch.int32).reshape(4096, -1).T  # 640 MiB
    torch.save({"x": value}, tmp_path / "source.pt")
    paths = [f"{tmp_path}/source.pt", f"{tmp_path}/target.safetensors"]
    most = 0
    with subprocess.Popen([sys.executable, "-m", "memstore", "convert", *paths]) as running:
        while running.poll() is None:
            most = max(most, own_memory(running.pid, "Anon|Shmem"))
            time.sleep(0.001)  # or its own work would have to wait
    assert running.returncode == 0 and most < 512 * MIB
    assert torch.equal(load_file(tmp_path / "target.safetensors")["x"], value)
