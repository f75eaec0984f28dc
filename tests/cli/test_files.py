"""Commands about files: a store is only created for a value that can be read; `convert`; `snapshot`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import memstore
from memstore import Snapshot, StateDict
from memstore.cli import render
from memstore.cli.files import FORMATS, TARGETS
from memstore.convert import FORMATS as KNOWN
from memstore.convert import WRITTEN
from tests.children import in_child
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import call, call_json, run


@pytest.mark.parametrize("command", [("put",), ("attach",), ("attach", "--copy")], ids=" ".join)
def test_a_file_that_can_not_be_read_makes_no_store(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    (tmp_path / "x.dat").write_bytes(b"what is this")
    np.save(tmp_path / "x.npy", np.ones(3))
    for key, file, code, says in (
        ("key", "none.npy", 3, "there is no such file or folder"),
        ("key", "x.dat", 3, "is of no known format"),
        ("", "x.npy", 2, "a key has at least one character"),
    ):
        said = " ".join(call(name, f"{tmp_path}/new", key, f"{tmp_path}/{file}", *options, code=code).split())
        assert says in said
    assert not (tmp_path / "new").exists()


def test_a_version_can_only_be_expected_where_there_is_a_store(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    put = ("put", f"{tmp_path}/new", "key", f"{tmp_path}/x.npy", "--expect-version")
    assert "there is no store at" in call(*put, "1", code=3) and not (tmp_path / "new").exists()
    assert call_json(*put, "0")["version"] == 1


@pytest.mark.parametrize(("command", "says"), [("put", "24 B put"), ("attach", "24 B in place")])
def test_a_new_store_is_named_once(tmp_path: Path, command: str, says: str) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    arguments = (command, f"{tmp_path}/new", "key", f"{tmp_path}/x.npy")
    assert call(*arguments) == f"version 1, {says}; {tmp_path}/new is a new store\n"
    assert call(*arguments) == f"version 2, {says}\n"


@pytest.fixture
def filled(root: str) -> str:
    with memstore.open(root, allow_pickle=True) as store:
        store.put("policy", torch.ones(3))
        store.put("pickled", {"w": torch.ones(3), "o": object})
    return root


def test_a_copy_says_where_it_is(filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("cp", filled, "policy", filled, "other") == f"1 copied, 12 B, into {filled}\n"
    code, output, errors = in_child(run, ("cp", filled, "policy", "backup"))
    assert (code, output) == (0, f"1 copied, 12 B; {tmp_path}/backup is a new store\n")
    assert f"`memstore cp {filled} policy {filled} backup`" in " ".join(errors.split())  # a key may have been meant
    assert in_child(run, ("cp", filled, "other", "backup")) == (0, f"1 copied, 12 B, into {tmp_path}/backup\n", "")
    code, _, errors = in_child(run, ("cp", filled, "policy", f"{tmp_path}/third"))
    assert (code, errors) == (0, "")


def test_what_is_not_copied_makes_no_store(filled: str, tmp_path: Path) -> None:
    target = str(tmp_path / "new")
    assert call("cp", filled, "none", target, "--prefix") == "no keys that start with 'none': nothing was copied\n"
    assert call_json("cp", filled, "none", target, "--prefix") == {}
    assert "say --allow-pickle" in " ".join(call("cp", filled, "pickled", target, code=3).split())
    assert "a key" in call("cp", filled, "policy", target, "k" * 600, code=2)
    assert not os.path.exists(target)


# --- convert ----------------------------------------------------------------------------------------------------------


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


# --- snapshot ---------------------------------------------------------------------------------------------------------


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
