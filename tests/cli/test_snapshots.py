"""The commands about snapshots."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import memstore
from memstore import Snapshot, StateDict
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import call


@pytest.fixture
def path(tmp_path: Path) -> str:
    for number in (1, 2):
        state = StateDict(step=number, x=torch.arange(4.0), y=torch.full((2,), float(number)), name="[bold]\n")
        Snapshot.take(f"{tmp_path}/{number}", {"state": state, "model": torch.nn.Linear(2, 1)})
    return f"{tmp_path}/1"


def test_ls_lists_the_leaves_with_their_files(path: str) -> None:
    text = call("snapshot", "ls", path)
    assert "0/state/x" in text and "float32 [4]" in text and "state.safetensors" in text and r"'[bold]\n'" in text
    assert "0/state" not in call("snapshot", "ls", path, "0/model")
    assert call("snapshot", "ls", path, "7/") == "no leaves whose paths start with '7/'\n"
    found = json.loads(call("snapshot", "ls", path, "0/state", "--json"))
    assert found["0/state/step"] == {"value": 1} and found["0/state/x"]["shape"] == [4]


def test_tables_are_plain_columns(path: str) -> None:
    lines = call("snapshot", "ls", path, "0/model").splitlines()
    assert lines[0].split() == ["path", "value", "size", "files"]
    assert any(line.startswith("0/model/weight  float32 [1, 2]") for line in lines)
    narrow = "\n".join(in_terminal("snapshot", "ls", path, size=(40, 60)).screen)
    assert "state.safetensors" in narrow and "…" not in narrow
    seen = in_terminal("snapshot", "diff", path, path[:-1] + "2", size=(40, 24)).screen
    assert any(line.startswith("path") for line in seen), seen


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_long_paths_have_their_columns_beside_them(tmp_path: Path, size: tuple[int, int]) -> None:
    names = ("layers.0.self_attn.in_projection.weight", "norm.bias")
    model = StateDict(**{name: torch.zeros(192, 64) for name in names}, step=7)
    Snapshot.take(str(tmp_path / "long"), {"model": model})
    title, *rows, total = (line for line in in_terminal("snapshot", "ls", f"{tmp_path}/long", size=size).screen if line)
    has_room = size[0] > 80
    assert title.split() == ["path", "value", "size", *(["files"] if has_room else [])]
    for name, row in zip(names, rows, strict=False):
        assert row.startswith(f"0/model/{name}  ") and "  float32 [192, 64]  48.0 KiB" in row, rows
        assert row.endswith(".safetensors") == has_room
    assert len(rows) == 3 and total == "2 leaves and 1 object in state.safetensors"


def test_info_tells_of_the_whole(path: str) -> None:
    text = call("snapshot", "info", path)
    assert "of 1 rank" in text and "app state: model, state" in text and "model.safetensors" in text
    found = json.loads(call("snapshot", "info", path, "--json"))
    assert found["world_size"] == 1 and found["checksum"] and found["ranks"] == [["model", "state"]]


def test_verify_finds_damage(path: str) -> None:
    assert call("snapshot", "verify", path) == "whole\n"
    os.truncate(f"{path}/state.safetensors", 9)
    assert "state.safetensors" in call("snapshot", "verify", path, code=1)
    assert json.loads(call("snapshot", "verify", path, "--json", code=1))["ok"] is False


def test_verify_tells_that_it_had_nothing_to_compare_bytes_with(path: str) -> None:
    assert json.loads(call("snapshot", "verify", path, "--json")) == {"ok": True, "compared": True}
    Snapshot.take(f"{path}-3", {"state": StateDict(x=torch.zeros(3))}, checksum=False)
    assert "not compared" in call("snapshot", "verify", f"{path}-3").replace("\n", " ")
    assert json.loads(call("snapshot", "verify", f"{path}-3", "--json")) == {"ok": True, "compared": False}


def test_diff_tells_what_differs(path: str) -> None:
    other = path[:-1] + "2"
    assert call("snapshot", "diff", path, path) == "equal\n"
    text = call("snapshot", "diff", path, other, code=1)
    assert "0/state/step" in text and "2 of 2 elements differ, by up to 1" in text and "0/state/x" not in text
    Snapshot.take(f"{path}-3", {"state": StateDict(x=torch.zeros(3), y=1, z=memstore.__version__)})
    found = {
        entry["path"]: entry["what"]
        for entry in json.loads(call("snapshot", "diff", path, f"{path}-3", "--json", code=1))
    }
    assert found["0/state/x"] == "float32[4] and float32[3]" and "object" in found["0/state/y"]
    assert found["0/state/z"] == f"only in {path}-3" and found["0/model/bias"] == f"only in {path}"


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    for left in ("memstore_snapshot.claim", "model.safetensors"):  # of a take that was killed
        (tmp_path / left).write_text("0123456789abcdef")
    for command in ("ls", "info", "verify"):
        assert "is no snapshot" in call("snapshot", command, str(tmp_path), code=3)
