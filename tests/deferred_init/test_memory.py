"""What materializing takes of memory, at its peak and with the files' pages; and who shares these."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memstore
from memstore.deferred_init import deferred_init, materialize_module
from tests.children import in_child
from tests.sharding.fake_world import as_rank

MIB = 1 << 20
PEAK = Path("/proc/self/clear_refs")  # by "5" the kernel forgets the peak
needs_peak = pytest.mark.skipif(not os.access(PEAK, os.W_OK), reason="the kernel doesn't forget peaks")


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that a call takes at its peak, beyond those that there were: also pages of files that it has touched."""
    PEAK.write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> str:
    """A safetensors file of zeros, none of which takes room."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    return str(path)


def write_folder(path: Path, layers: int, width: int) -> str:
    """A folder in Hugging Face's format, with two layers in a file."""
    path.mkdir()
    files = {f"{layer}.weight": f"model-{layer // 2}.safetensors" for layer in range(layers)}
    for file in set(files.values()):
        write_sparse(path / file, {name: (width, width) for name in files if files[name] == file})
    index = {"metadata": {"total_size": layers * 4 * width * width}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(path)


def stack(layers: int, width: int) -> nn.Module:
    return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))


# --- a rank -----------------------------------------------------------------------------------------------------------

LAYERS, WIDTH, RANKS = 4, 2048, 4
WHOLE = LAYERS * 4 * WIDTH * WIDTH  # 64 MiB


@needs_peak
@pytest.mark.parametrize("kind", ["a folder", pytest.param("a snapshot", marks=pytest.mark.full)])
def test_a_rank_reads_its_part_and_never_has_the_whole_model(kind: str, tmp_path: Path) -> None:
    if kind == "a folder":
        source = write_folder(tmp_path / "hub", LAYERS, WIDTH)
    else:
        source = str(tmp_path / "snapshot")
        memstore.Snapshot.take(source, {"model": stack(LAYERS, WIDTH)}, durability="process")
    small = write_folder(tmp_path / "small", LAYERS, 8)
    in_child(check_rank, source, small, RANKS - 1, timeout=200.0)


def check_rank(source: str, small: str, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    with as_rank(rank, RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))

        def build(source: str, width: int) -> None:
            made = deferred_init(stack, LAYERS, width)
            done = materialize_module(made, source=source, mesh=mesh, placements=[Shard(0)])
            assert len(done.found) == LAYERS and sum(one.to_local().nbytes for one in made.parameters()) == (
                LAYERS * 4 * width * width // RANKS
            )

        build(small, 8)  # what is imported and set up once doesn't count
        taken = peak_of(lambda: build(source, WIDTH))
    assert taken < 3 * WHOLE // 4, "its shards, and the pages that they lie on: half of it"
    read = peak_of(lambda: [one.clone() for one in read_whole(source)])
    assert read > WHOLE, "the measure sees a rank that reads all"


def read_whole(source: str) -> list[torch.Tensor]:
    made: Any = deferred_init(stack, LAYERS, WIDTH)
    materialize_module(made, source=source)
    return list(made.parameters())


# --- mapped -----------------------------------------------------------------------------------------------------------


@needs_peak
def test_four_gigabytes_are_mapped_and_not_read(tmp_path: Path) -> None:
    source = write_sparse(tmp_path / "large.safetensors", {f"{layer}.weight": (8192, 8192) for layer in range(16)})
    assert os.path.getsize(source) > 4 << 30
    in_child(check_mapped, source, timeout=100.0)


def check_mapped(source: str) -> None:
    made: list[Any] = []

    def build() -> None:
        made.append(deferred_init(stack, 16, 8192))
        materialize_module(made[0], source=source)

    assert peak_of(build) < 64 * MIB
    assert sum(one.nbytes for one in made[0].parameters()) == 4 << 30
    assert made[0][15].weight[-1, -1].item() == 0


def test_processes_share_the_pages_of_a_source(tmp_path: Path) -> None:
    source = write_sparse(tmp_path / "shared.safetensors", {"weight": (1024, 2048)})
    ours = touched(source)
    theirs = in_child(pages_of_own_module, source, timeout=100.0)
    for pages in (pages_at(ours.weight), theirs):
        assert pages["Rss"] >= 8 * MIB, "all of it is there"
        assert pages["Anonymous"] == 0, "and it was not copied"
    assert theirs["Pss"] <= theirs["Rss"] * 3 // 4, "each counts for both processes"
    with torch.no_grad():
        ours.weight.fill_(1)
    assert pages_at(ours.weight)["Anonymous"] >= 8 * MIB, "the measure sees a copy"


def pages_of_own_module(source: str) -> dict[str, int]:
    return pages_at(touched(source).weight)


def touched(source: str) -> nn.Linear:
    made = deferred_init(nn.Linear, 2048, 1024, bias=False)
    materialize_module(made, source=source)
    assert made.weight.sum().item() == 0
    return made


def pages_at(tensor: torch.Tensor) -> dict[str, int]:
    """Bytes of the pages of a tensor's mapping: see smaps in man 5 proc."""
    found: dict[str, int] = {}
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start, _, end = words[0].partition("-")
            is_there = int(start, 16) <= tensor.data_ptr() < int(end, 16)
        elif is_there and words[-1] == "kB":
            found[words[0][:-1]] = int(words[1]) * 1024
    return found
