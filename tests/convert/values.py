"""Values for conversions, and what other libraries write and read of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from memstore import Snapshot, StateDict
from memstore.convert import convert
from memstore.integrations import dcp as own_dcp

FLAT = ("dcp", "huggingface", "memmap", "memstore-dcp", "safetensors", "snapshot", "torch")  # tensors by name
NESTED = ("dcp", "memstore-dcp", "snapshot", "torch")  # and dicts of them, and objects


def weights() -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and shapes, one without elements, none of them tied."""
    return {
        "w": torch.arange(3000.0).reshape(50, 60),
        "b": torch.arange(60).to(torch.bfloat16),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
    }


def training() -> dict[str, Any]:
    """As a trainer saves it: a model, an optimizer with lists, numbers and texts."""
    return {
        "model": {"layer.w": torch.arange(12.0).reshape(3, 4), "layer.b": torch.ones(3)},
        "optimizer": {
            "state": [{"step": torch.tensor(3.0), "avg": torch.full((3, 4), 0.5)}],
            "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "name": "all", "foreach": None}],
        },
        "epoch": 7,
        "note": "späte Epoche",
    }


def write(path: str, format: str, value: Any) -> None:
    """By the library whose format it is, not by a conversion."""
    WRITERS[format](path, value)


def read(path: str, format: str) -> Any:
    """By the library whose format it is; as plain dicts, for flat ones."""
    return READERS[format](path)


def _write_huggingface(path: str, value: dict[str, torch.Tensor]) -> None:
    os.mkdir(path)
    save_file(value, f"{path}/model.safetensors", metadata={"format": "pt"})


def _write_dcp(path: str, value: Any) -> None:
    dcp.save(value, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def _write_snapshot(path: str, value: dict[str, Any]) -> None:
    Snapshot.take(path, {"state": StateDict(value)})


WRITERS: dict[str, Callable[[str, Any], Any]] = {
    "dcp": _write_dcp,
    "huggingface": _write_huggingface,
    "memmap": lambda path, value: TensorDict(value, []).memmap(path),
    "memstore-dcp": lambda path, value: own_dcp.save(value, checkpoint_id=path),
    "safetensors": lambda path, value: save_file(value, path),
    "snapshot": _write_snapshot,
    "torch": lambda path, value: torch.save(value, path),
}


def _read_dcp(path: str) -> Any:
    found: dict[str, Any] = {}
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(
        found, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return found


def _read_by_torch_save(path: str) -> Any:
    """memstore's own formats of nested values: as a conversion reads them, and torch then."""
    convert(path, f"{path}.pt")
    return torch.load(f"{path}.pt", weights_only=True)


READERS: dict[str, Callable[[str], Any]] = {
    "dcp": _read_dcp,
    "huggingface": lambda path: load_file(f"{path}/model.safetensors"),
    "memmap": lambda path: TensorDict.load_memmap(path).clone().to_dict(),
    "memstore-dcp": _read_by_torch_save,
    "safetensors": load_file,
    "snapshot": lambda path: Snapshot(path).get_state_dict_for_key("state"),
    "torch": lambda path: torch.load(path, weights_only=True),
}
