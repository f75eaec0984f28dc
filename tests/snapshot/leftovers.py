"""A small state, and what a take that died may leave of it: a whole snapshot, or none and files that harm nobody."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict

MANIFEST = "memstore_snapshot.json"


def app_state(number: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, number)
    return {"model": model, "state": StateDict(number=number, x=torch.full((5,), number))}


def number_in(path: str) -> float:
    state = app_state(-1.0)
    snapshot = Snapshot(path)
    snapshot.restore(state)
    snapshot.verify()
    number = state["state"]["number"]
    assert state["model"].weight.unique().tolist() == state["state"]["x"].unique().tolist() == [number]
    return number


def take(path: str, number: float) -> None:
    Snapshot.take(path, app_state(number))


def check_whats_left(path: str) -> None:
    """A whole snapshot, or none; then the next take works, and removes what is left."""
    if os.path.exists(f"{path}/{MANIFEST}"):
        assert number_in(path) == 1.0
        with pytest.raises(memstore.AlreadyExistsError):
            take(path, 2.0)
        assert number_in(path) == 1.0
        return
    with pytest.raises(memstore.NotAStoreError):
        number_in(path)
    mine = f"{path}/notes.safetensors.txt"
    os.makedirs(path, exist_ok=True)
    with open(mine, "w") as file:
        file.write("of somebody else")
    take(path, 2.0)
    assert number_in(path) == 2.0
    os.remove(mine)
    with open(f"{path}/{MANIFEST}", "rb") as file:
        manifest = json.loads(file.read())
    named = {entry["name"] for entry in manifest["files"]} | {f"memstore_snapshot.{manifest['id']}.sums"}
    index = {name for name in os.listdir(path) if name.endswith("index.json")}
    assert set(os.listdir(path)) == named | {MANIFEST} | index
