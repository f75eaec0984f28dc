"""A small state that shows of which step it is, and what a root has."""

from __future__ import annotations

import os
from typing import Any

import torch

import memstore
from memstore import CheckpointManager, StateDict

MANIFEST = "memstore_snapshot.json"


def state(step: int = -1, rows: int = 3) -> dict[str, Any]:
    model = torch.nn.Linear(rows, 2)
    torch.nn.init.constant_(model.weight, step)
    return {"model": model, "progress": StateDict(step=step)}


def save(manager: CheckpointManager, step: int, metrics: Any = None) -> None:
    assert manager.save(step, state(step), metrics)


def step_in(manager: CheckpointManager, step: int | None = None) -> int:
    """Restores a step, and returns which one the objects say it is."""
    objects = state()
    found = manager.restore(objects, step)
    assert objects["progress"]["step"] == found == objects["model"].weight.unique().item()
    return found


def folders(root: str) -> list[str]:
    return sorted(os.listdir(root))


def whole(root: str) -> set[str]:
    return {name for name in folders(root) if os.path.exists(f"{root}/{name}/{MANIFEST}")}


def check_all(root: str) -> None:
    """Every whole step is what it says, to its last byte."""
    manager = CheckpointManager(root)
    for step in manager.steps():
        assert step_in(manager, step) == step
    for name in whole(root):
        memstore.Snapshot(f"{root}/{name}").verify()
