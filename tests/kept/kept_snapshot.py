"""The snapshots of each format version that are kept, and what they hold.

`python -m tests.kept.kept_snapshot` makes the newest, by two ranks. One that was kept is never made again: every later
version of memstore has to read it as it is.
"""

from __future__ import annotations

import collections
import random
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from memstore import RNGState, Snapshot, StateDict, TensorShard
from memstore.snapshot.manifest import VERSION
from tests.snapshot.ranks import all_right, on_ranks

RANKS = 2
SEED = 11
FOLDER = Path(__file__).parent


class Model(torch.nn.Module):
    """Two layers with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6, dtype=torch.bfloat16)
        self.third = torch.nn.Linear(6, 6)
        self.third.weight = self.first.weight
        self.register_buffer("count", torch.tensor(5))
        with torch.no_grad():
            for number, tensor in enumerate(self.parameters()):
                tensor.copy_(ramp(*tensor.shape) + number)


def ramp(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) % 100


def whole() -> dict[str, Any]:
    """What is spread over the ranks."""
    return {"rows": ramp(5, 4), "columns": ramp(3, 8).to(torch.int16), "uneven": ramp(7).double(), "same": ramp(3, 3)}


def of_rank(rank: int) -> dict[str, Any]:
    """What each rank has for itself."""
    rows = [ramp(n, 2) for n in (2, 1, 3)]
    return {
        "step": 7 + rank,
        "own": ramp(4, 3) * (rank + 1),
        "half": ramp(9).to(torch.bfloat16),
        "byte": ramp(9).to(torch.float8_e4m3fn),
        "wide": ramp(4).to(torch.complex128),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(True),
        "quantized": torch.quantize_per_tensor(ramp(4, 4), 0.5, 3, torch.qint8),
        "channels": torch.quantize_per_channel(
            ramp(2, 4), torch.tensor([0.5, 0.25]), torch.tensor([1, 0]), 0, torch.qint8
        ),
        "rows": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "parameter": torch.nn.Parameter(ramp(2, 2)),
        "nested": collections.OrderedDict([("a/b", [1, 2.5, None, ("text", b"bytes")]), ("🐍", {3: 1 + 2j})]),
    }


def _take(rank: int, path: str) -> None:
    mesh, tensors = init_device_mesh("cpu", (RANKS,)), whole()
    spread = {
        "rows": distribute_tensor(tensors["rows"], mesh, [Shard(0)]),
        "columns": TensorShard(tensors["columns"][:, 4 * rank : 4 * rank + 4], (3, 8), (0, 4 * rank)),
        "uneven": TensorShard(tensors["uneven"][3 * rank : 3 + 4 * rank], (7,), (3 * rank,)),
        "same": distribute_tensor(tensors["same"], mesh, [Replicate()]),
    }
    state = {"model": Model(), "spread": StateDict(spread), "own": StateDict(of_rank(rank)), "random": RNGState()}
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(SEED)
    Snapshot.take(path, state, replicated=["model/*"])


def archive(number: int) -> Path:
    return FOLDER / f"snapshot-{number}.tar.xz"


def unpack(number: int, path: str) -> None:
    with tarfile.open(archive(number)) as tar:
        tar.extractall(path, filter="data")


def make() -> None:
    if archive(VERSION).exists():
        raise SystemExit(f"{archive(VERSION)} is kept: it must not change")
    with tempfile.TemporaryDirectory() as folder:
        all_right(on_ranks(RANKS, _take, f"{folder}/snapshot"))
        with tarfile.open(archive(VERSION), "w:xz") as tar:
            tar.add(f"{folder}/snapshot", ".")


if __name__ == "__main__":
    make()
