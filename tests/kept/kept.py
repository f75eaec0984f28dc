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
from memstore.engine.root.settings import FORMAT

FOLDER = Path(__file__).parent


def values() -> dict[str, Any]:
    """What each kept store holds, made anew."""
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
            store.put_many(values())
        with tarfile.open(archive(FORMAT), "w:xz") as tar:
            tar.add(root, ".", filter=lambda member: None if member.name.endswith("lock.mdb") else member)


if __name__ == "__main__":
    make()
