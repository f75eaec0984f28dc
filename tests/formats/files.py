"""Files of other libraries, written by these libraries, for the tests to adopt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict


def weights() -> dict[str, torch.Tensor]:
    return {
        "a.w": torch.arange(3000.0).reshape(50, 60),
        "a.b": torch.arange(60, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
    }


def write_safetensors(folder: Path) -> tuple[Path, Any]:
    path = folder / "model.safetensors"
    save_file(weights(), path, metadata={"format": "pt"})
    return path, {name: tensor.clone() for name, tensor in load_file(path).items()}


def write_checkpoint(folder: Path, name: str = "checkpoint") -> tuple[Path, Any]:
    """As transformers writes it: each tensor in a file of its own."""
    (folder / name).mkdir()
    listed: dict[str, str] = {}
    for i, (tensor, value) in enumerate(weights().items(), 1):
        listed[tensor] = f"model-{i:05}-of-{len(weights()):05}.safetensors"
        save_file({tensor: value}, folder / name / listed[tensor], metadata={"format": "pt"})
    index = folder / name / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))
    return index, weights()


def write_memmap(folder: Path) -> tuple[Path, Any]:
    value = TensorDict(
        a=torch.arange(3000.0).reshape(3, 1000),
        n=TensorDict(b=torch.arange(3, dtype=torch.bfloat16), batch_size=[3]),
        text="hello",
        batch_size=[3],
    )
    value.memmap(folder / "memmap")
    return folder / "memmap", TensorDict.load_memmap(folder / "memmap", mode="r").clone()


def write_torch(folder: Path) -> tuple[Path, Any]:
    w = torch.arange(3000.0).reshape(50, 60)
    value = {"w": w, "same": w, "p": torch.nn.Parameter(torch.ones(3)), "lr": 0.5, "b": [1, (None, "x")]}
    torch.save(value, folder / "model.pt")
    return folder / "model.pt", value


def write_npy(folder: Path) -> tuple[Path, Any]:
    np.save(folder / "array.npy", np.arange(3000.0).reshape(50, 60))
    return folder / "array.npy", torch.arange(3000.0, dtype=torch.float64).reshape(50, 60)


WRITERS: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "safetensors": write_safetensors,
    "checkpoint": write_checkpoint,
    "memmap": write_memmap,
    "torch": write_torch,
    "npy": write_npy,
}


def data_files(path: Path) -> list[Path]:
    """The files that hold tensors, of what a writer wrote."""
    if path.name.endswith(".json"):
        return sorted(path.parent.glob("*.safetensors"))
    return sorted(path.rglob("*.memmap")) if path.is_dir() else [path]


def contents(path: Path) -> dict[str, bytes]:
    top = path.parent if path.is_file() else path
    return {os.fspath(file): file.read_bytes() for file in sorted(top.rglob("*")) if file.is_file()}
