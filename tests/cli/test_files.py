"""Commands about files and whole stores, and what the others don't replace or suggest unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import memstore
from memstore import Snapshot, StateDict
from memstore.cli import render
from memstore.cli.commands import cli
from memstore.cli.files import FORMATS, TARGETS
from memstore.convert import FORMATS as KNOWN
from memstore.convert import WRITTEN
from tests.children import Child, hold_key, in_child
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import call, call_json, run
from tests.namespaces import MOUNTS, PIDS, in_namespaces, mount_tmpfs


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


def test_what_an_increment_shares_is_told_and_a_copy_shares_nothing(tmp_path: Path) -> None:
    state = memstore.StateDict({f"w{i}": torch.full((1000,), float(i)) for i in range(9)})
    memstore.Snapshot.take(f"{tmp_path}/a", {"state": state})
    state["w3"] += 1
    memstore.Snapshot.take(f"{tmp_path}/b", {"state": state}, base=f"{tmp_path}/a")
    assert "in files that other snapshots have, too; 3.9 KiB in them are earlier values" in call(
        "snapshot", "info", f"{tmp_path}/b"
    ).replace("\n", " ")
    found = json.loads(call("snapshot", "info", f"{tmp_path}/b", "--json"))
    assert found["unused"] == 4000 and 36_000 < found["shared"] < 38_000
    assert "copied to" in call("snapshot", "copy", f"{tmp_path}/b", f"{tmp_path}/c").replace("\n", " ")
    told = json.loads(call("snapshot", "copy", f"{tmp_path}/b", f"{tmp_path}/d", "--json"))
    assert told == {"path": f"{tmp_path}/d", "nbytes": memstore.Snapshot(f"{tmp_path}/d").metadata.nbytes}
    copied = json.loads(call("snapshot", "info", f"{tmp_path}/c", "--json"))
    assert (copied["shared"], copied["unused"]) == (0, 0) and list(copied["files"]) == ["state.safetensors"]
    assert call("snapshot", "diff", f"{tmp_path}/b", f"{tmp_path}/c") == "equal\n"
    assert "has a snapshot" in call("snapshot", "copy", f"{tmp_path}/b", f"{tmp_path}/c", code=3).replace("\n", " ")


def test_progress_is_told_in_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    memstore.Snapshot.take(f"{tmp_path}/a", {"state": memstore.StateDict(x=torch.zeros(9))})
    for command in (
        ("snapshot", "verify", f"{tmp_path}/a"),
        ("snapshot", "copy", f"{tmp_path}/a", f"{tmp_path}/b"),
        ("convert", f"{tmp_path}/a", f"{tmp_path}/c"),
    ):
        code, _, told = in_child(run, (*command, "--progress"))
        assert code == 0 and "100%" in told and "/s in 0 s" in told, told


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    for left in ("memstore_snapshot.claim", "model.safetensors"):  # of a take that was killed
        (tmp_path / left).write_text("0123456789abcdef")
    for command in ("ls", "info", "verify"):
        assert "is no snapshot" in call("snapshot", command, str(tmp_path), code=3)


# --- whole stores -----------------------------------------------------------------------------------------------------


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def small(scratch: str) -> str:
    with memstore.open(scratch) as store:
        store.put_many({"a/1": torch.ones(3), "a/2": 2, "b": 3})
    return scratch


def test_stores_removes_only_what_nobody_has_open(small: str) -> None:
    other = f"{small}-open"
    with memstore.open(other):
        rows = {one["root"]: one for one in json.loads(invoke("stores", "--json")[1])}
        assert rows[other]["pids"] == [os.getpid()] and rows[small]["pids"] == []
        code, said = invoke("stores", "--remove")
        assert code == 2 and "--yes" in said and os.path.isdir(small)
        assert invoke("stores", "--yes")[0] == 2


def test_a_store_at_a_path_of_odd_bytes_is_listed_as_json(small: str) -> None:
    odd = os.fsdecode(os.fsencode(small) + b"-\xff")
    with memstore.open(odd):
        assert odd in {one["root"] for one in json.loads(invoke("stores", "--json")[1])}
    memstore.destroy(odd)


def test_stores_removes_to_its_end_what_nobody_has_open() -> None:
    """On a `/dev/shm` of its own, among processes of its own: the machine's stores are not this test's.

    A process opens one of them, and puts something, while the question waits for its answer.
    """
    listed, said, left, removed, kept = in_namespaces(MOUNTS | PIDS, _remove_in_a_process)
    assert sorted(one["root"] for one in listed) == [
        f"/dev/shm/{name}" for name in ("deep/er/c", "idle", "late", "open")
    ]
    assert sorted(removed["removed"]) == ["/dev/shm/deep/er/c", "/dev/shm/idle"] and removed["nbytes"] > 5000
    assert said.count("/dev/shm") == 1 and "/dev/shm/late stays: a process has it open by now" in said
    assert left == ["deep", "late", "open", "other"] and kept == 7


def _remove_in_a_process() -> tuple[Any, ...]:
    mount_tmpfs("/dev/shm")
    os.makedirs("/dev/shm/deep/er")
    Path("/dev/shm/other").write_text("no store")
    for name in ("idle", "deep/er/c", "late"):
        with memstore.open(f"/dev/shm/{name}") as store:
            store.put("key", torch.zeros(5000))
    with memstore.open("/dev/shm/open"):
        command = [sys.executable, "-m", "memstore", "stores", "--json"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        terminal, its_end = os.openpty()
        with subprocess.Popen([*command, "--remove"], stdin=its_end, stdout=PIPE, stderr=PIPE, text=True) as asking:
            assert asking.stdout is not None and asking.stderr is not None
            asked = asking.stderr.read(len("Remove 3 stores"))
            with memstore.open("/dev/shm/late") as late:
                late.put("key", 7)
                os.write(terminal, b"y\n")
                removed, said = asking.communicate()
                left, kept = sorted(os.listdir("/dev/shm")), late.get("key")
    return json.loads(listed.stdout), asked + said, left, json.loads(removed), kept


def test_what_may_go(small: str) -> None:
    from memstore.cli.stores import may_go

    with memstore.open(small):
        (opened,) = [one for one in memstore.stores() if one.root == small]
    (closed,) = [one for one in memstore.stores() if one.root == small]
    assert may_go(closed, force=False) and not may_go(opened, force=False) and may_go(opened, force=True)


def test_clear_and_destroy_ask_first(small: str) -> None:
    assert invoke("clear", small, "a/")[0] == 2 and invoke("destroy", small)[0] == 2
    assert invoke("clear", small, "a/", "--yes") == (0, "2 deleted\n")
    assert invoke("clear", small, "-y", "--json") == (0, '{"deleted": 1}\n')
    assert invoke("destroy", small, "-y")[0] == 0 and not os.path.exists(small)
    with pytest.raises(memstore.NotAStoreError):
        invoke("destroy", small, "-y")


def test_tree_draws_the_keys(small: str) -> None:
    code, drawn = invoke("tree", small)
    assert code == 0 and "a/" in drawn and drawn.count("──") == 4
    assert invoke("tree", small, "c") == (0, "no keys that start with 'c'\n")


@pytest.mark.parametrize("word", ["removee", "rn", "repare", "destroyy", "cleer", "abortt", "gcc"])
def test_no_word_leads_to_a_command_that_removes(word: str) -> None:
    code, said = invoke(word)
    assert code == 2 and "Did you mean" not in said


def test_a_word_like_another_command_leads_there() -> None:
    assert "Did you mean 'tree'?" in invoke("tre")[1]


def test_cp_get_and_export_replace_only_with_force(small: str, tmp_path: Path) -> None:
    with pytest.raises(memstore.AlreadyExistsError, match="--force"):
        invoke("cp", small, "a/1", small, "b")
    with memstore.open(small, "r") as store:
        assert store.get("b") == 3
    assert invoke("cp", small, "a/1", small, "b", "--force")[0] == 0
    file = tmp_path / "one.npy"
    file.write_text("mine")
    with pytest.raises(memstore.AlreadyExistsError, match="--force"):
        invoke("get", small, "a/1", "-o", str(file))
    assert file.read_text() == "mine"
    assert invoke("get", small, "a/1", "-o", str(file), "-f")[0] == 0 and file.read_bytes()[:6] == b"\x93NUMPY"
    torch_file = tmp_path / "one.pt"
    torch_file.write_text("mine")
    with pytest.raises(memstore.AlreadyExistsError, match="--force"):
        invoke("export", small, "a/1", str(torch_file))
    assert torch_file.read_text() == "mine"
    assert invoke("export", small, "a/1", str(torch_file), "--force")[0] == 0 and torch_file.read_bytes()[:2] == b"PK"


# -- top: who holds what -----------------------------------------------------------------------------------------------


def test_who_holds_what(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.ones(10_000))
        store.put("other", torch.ones(10))
    with Child(hold_key, root) as child:
        child.receive()
        (found,) = [one for one in call_json("top", root) if one["pid"] == child.pid]
        assert found["keys"] == ["key"] and found["live_bytes"] > 40_000 and found["is_open"]
        assert (found["replaced"], found["replaced_bytes"]) == ([], 0) and "python" in found["command"]
        with memstore.open(root) as store:
            store.put("key", torch.ones(10_000))
        (found,) = [one for one in call_json("top", root) if one["pid"] == child.pid]
        assert (found["keys"], found["live_bytes"], found["replaced"]) == ([], 0, ["key"])
        assert found["replaced_bytes"] > 40_000
        lines = call("top", root).splitlines()
        assert lines[0].split() == ["pid", "held", "replaced", "command", "keys"]
        (line,) = [line for line in lines if line.split()[0] == str(child.pid)]
        assert "KiB" in line and line.endswith("  key (replaced)")
        screen = in_terminal("top", root).screen  # of 80 columns: each process still has one line
        assert screen[0].split() == lines[0].split()
        assert [line.split()[0] for line in screen[1:] if line.endswith("  key (replaced)")] == [str(child.pid)]
        assert all(len(line) <= 80 for line in screen)
        (line,) = [line for line in in_terminal("top", root, size=(400, 50)).screen if line.startswith(str(child.pid))]
        assert " ".join(child_command(child.pid)) in line
        child.send()
        child.receive()


def child_command(pid: int) -> list[str]:
    with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
        program, *words = file.read().rstrip("\0").split("\0")
    return [os.path.basename(program), *words]


def test_this_process_has_it_open_and_holds_nothing(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.ones(10_000))
        (found,) = [one for one in call_json("top", root) if one["pid"] == os.getpid()]
        assert found["is_open"] and found["keys"] == [] and found["live_bytes"] == 0
        assert "(open)" in call("top", root)


def test_nobody_is_there(root: str) -> None:
    memstore.open(root).close()
    assert call_json("top", root) == [] and call("top", root).startswith("no process has the store open")
    assert in_terminal("top", f"{root}/none").code == 3
