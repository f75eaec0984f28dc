"""The command `memstore convert`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memstore.cli import render
from memstore.cli.files import FORMATS, TARGETS
from memstore.convert import FORMATS as KNOWN
from memstore.convert import WRITTEN
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import call


@pytest.fixture
def source(tmp_path: Path) -> str:
    torch.save({"w": torch.ones(3, 4), "b": torch.zeros(4)}, tmp_path / "model.pt")
    return f"{tmp_path}/model.pt"


def test_it_converts_and_says_what_it_did(source: str, tmp_path: Path) -> None:
    text = call("convert", source, f"{tmp_path}/model.safetensors")
    assert text == "torch to safetensors: 2 tensors, 64 B, compared\n"
    assert sorted(load_file(f"{tmp_path}/model.safetensors")) == ["b", "w"]
    found = json.loads(call("convert", source, f"{tmp_path}/checkpoint", "--to", "dcp", "--json"))
    assert found["target_format"] == "dcp" and found["nbytes"] == 64 and found["target"] == f"{tmp_path}/checkpoint"


def test_refusals_have_their_exit_code(source: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "[bold]": 7}, source)
    said = call("convert", source, f"{tmp_path}/model.safetensors", code=3)
    assert "'[bold]': int, and no tensor" in said.replace("\n", " ").replace("  ", " ")
    assert "is there already" in call("convert", source, source, code=3)
    call("put", f"{tmp_path}/store", "key", source)
    assert "is a store" in call("convert", f"{tmp_path}/store", f"{tmp_path}/x", code=3)
    said = " ".join(call("convert", source, f"{tmp_path}/x.npy", code=3).split())
    assert "for others say --to FORMAT (dcp, huggingface," in said
    assert "for a folder of this name say --to dcp" in call("convert", source, f"{tmp_path}/x.dcp", code=3)
    assert "so leave --from out" in " ".join(call("convert", source, f"{tmp_path}/y", "--from", "dcp", code=3).split())
    assert "--to" in call("convert", source, f"{tmp_path}/x", "--to", "torchsnapshot", code=2)
    assert not list(tmp_path.glob("model.safetensors*")) and not list(tmp_path.glob(".memstore*"))


@pytest.mark.full
def test_progress_is_shown_in_a_terminal(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_PATIENCE", -1.0)  # the bar is shown at once
    seen = in_terminal("convert", source, f"{tmp_path}/model.safetensors")
    assert seen.code == 0 and "converting" in seen.text and "128/128 bytes" in seen.text, seen.text
    assert any(line.endswith("torch to safetensors: 2 tensors, 64 B, compared") for line in seen.screen)


def test_the_command_knows_all_formats_without_importing_torch() -> None:
    assert sorted(FORMATS) == sorted(KNOWN) and sorted(TARGETS) == sorted(WRITTEN)
