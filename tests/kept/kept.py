"""The stores of each format version that are kept, and what they hold. `python -m tests.kept.kept` makes the newest.

A store that was kept is never made again: every later version of memstore has to read it as it is.
"""

from __future__ import annotations

import collections
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

import memstore
from memstore.engine.root.folder import FORMAT

FOLDER = Path(__file__).parent


RANKS = 3


def values(number: int = FORMAT) -> dict[str, Any]:
    """What the kept store of a format holds, made anew."""
    return {**plain_values(), **(sharded_values() if number >= 2 else {})}


def plain_values() -> dict[str, Any]:
    """What one process has put."""
    ramp = torch.arange(5000, dtype=torch.float32) % 100
    tied = torch.arange(600.0)
    return {
        "inline": torch.arange(12, dtype=torch.int16).reshape(3, 4),
        "inline/dict": {"a": torch.tensor(7), "b": [1, 2.5, None, "text", (True, b"bytes")]},
        "segment": ramp.reshape(50, 100),
        "large": torch.arange(1 << 19, dtype=torch.int64) % 7,  # beyond 2 MiB, where files are mapped
        "dtypes": {
            str(dtype).removeprefix("torch."): ramp[:300].to(dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.uint8, torch.bool)
        },
        "float8": ramp[:2000].to(torch.float8_e4m3fn).view(torch.uint8),
        "tensordict": TensorDict(
            {"x": ramp.reshape(10, 500), "deep": TensorDict({"y": ramp[:10]}, [10]), "name": NonTensorData("run 7")},
            [10],
        ),
        "tied": {"one": tied, "same": tied, "part": tied[100:200], "column": tied.reshape(20, 30).t()},
        "state": collections.OrderedDict([("layer.weight", ramp[:2000]), ("layer.bias", ramp[:5])]),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": ramp[:1000]}},
            "param_groups": [{"lr": 1e-3}],
        },
        "objects": {"t": ramp, "text": "x" * 5000, "array": np.arange(600), "complex": 1 + 2j, "big": 2**80},
        "key with / and .. and 🐍": torch.ones(1000),
        "empty": [torch.zeros(0, 3), {}, []],
    }


def sharded_values() -> dict[str, Any]:
    """What several ranks have put: as `parts` of all of them make it."""
    grid = torch.arange(6 * 50, dtype=torch.float32).reshape(6, 50)
    tied = grid[0].repeat(20)
    return {
        "sharded": {
            "rows": grid,
            "columns": grid.to(torch.int16),
            "uneven": torch.arange(10.0, dtype=torch.float64),
            "halves": grid.to(torch.bfloat16),
            "plain": torch.arange(700) % 9,
            "column-major": grid.clone().t(),
            "tied": tied,
            "tied too": tied.view(1000),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 4),
            "nested": {"list": [grid[1].clone(), {"step": 7}], "text": "x" * 2000},
            **{f"of rank {rank}": grid[rank].clone() for rank in range(RANKS)},
        },
        "sharded/td": TensorDict({"x": grid.clone(), "y": grid[:, 0].clone()}, [6]),
        "sharded/cast": grid.to(torch.float16),
        "sharded/one has bytes": {"x": torch.ones(2000)},
    }


def parts(rank: int) -> dict[str, Any]:
    """What a rank puts, by key."""

    def rows(tensor: torch.Tensor, start: int, stop: int) -> memstore.TensorShard:
        return memstore.TensorShard(tensor[start:stop], tuple(tensor.shape), (start, *[0] * (tensor.ndim - 1)))

    whole = sharded_values()
    sharded = whole["sharded"]
    first, last = 2 * rank, 2 * rank + 2
    columns = sharded["columns"]
    tied = rows(sharded["tied"], [0, 300, 700][rank], [300, 700, 1000][rank])
    value = {
        **{name: sharded[name] for name in ("plain", "column-major", "scalar", "empty", "nested", f"of rank {rank}")},
        "rows": rows(sharded["rows"], first, last),
        "columns": memstore.TensorShard(columns[:, 17 * rank : 17 * rank + 17], (6, 50), (0, 17 * rank)),
        "uneven": rows(sharded["uneven"], [0, 7, 9][rank], [7, 9, 10][rank]),
        "halves": rows(sharded["halves"], 3 * (rank == 2), 3 + 3 * (rank == 2)),  # two ranks hold the same
        "tied": tied,
        "tied too": tied,
    }
    return {
        "sharded": {name: value[name] for name in sharded if name in value},
        "sharded/td": whole["sharded/td"],
        "sharded/cast": rows(sharded["rows"], first, last),
        "sharded/one has bytes": whole["sharded/one has bytes"] if rank == 1 else {},
    }


def put_parts(store: memstore.Store, attempt: str) -> None:
    for key in sharded_values():
        for rank in range(RANKS):
            value, dtype = parts(rank)[key], torch.float16 if key == "sharded/cast" else None
            store.put_sharded(key, value, attempt=attempt, rank=rank, world_size=RANKS, wait=False, dtype=dtype)


def archive(number: int) -> Path:
    return FOLDER / f"format-{number}.tar.xz"


def unpack(number: int, root: str) -> None:
    os.mkdir(root, 0o700)
    with tarfile.open(archive(number)) as tar:
        tar.extractall(root, filter="data")


def make() -> None:
    if archive(FORMAT).exists():
        raise SystemExit(f"{archive(FORMAT)} is kept: it must not change")
    with tempfile.TemporaryDirectory() as folder:
        root = f"{folder}/store"
        with memstore.open(root, checksum=True) as store:
            store.put("gone", torch.zeros(5000))
            store.put("segment", torch.zeros(5000))
            store.delete("gone")
            store.put_many(plain_values())
            put_parts(store, "replaced")
            put_parts(store, "last")
            store.put_sharded(
                "waits", {"x": torch.ones(2000)}, attempt="1", rank=0, world_size=2, wait=False, lease=0.1
            )
        with tarfile.open(archive(FORMAT), "w:xz") as tar:
            tar.add(root, ".", filter=lambda member: None if member.name.endswith("lock.mdb") else member)


if __name__ == "__main__":
    make()
