"""Commands about whole stores, and what the others don't replace or suggest unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import memstore
from memstore.cli.commands import cli
from tests.children import Child, hold_key
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import call, call_json
from tests.namespaces import MOUNTS, PIDS, in_namespaces, mount_tmpfs


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def filled(scratch: str) -> str:
    with memstore.open(scratch) as store:
        store.put_many({"a/1": torch.ones(3), "a/2": 2, "b": 3})
    return scratch


def test_stores_removes_only_what_nobody_has_open(filled: str) -> None:
    other = f"{filled}-open"
    with memstore.open(other):
        rows = {one["root"]: one for one in json.loads(run("stores", "--json")[1])}
        assert rows[other]["pids"] == [os.getpid()] and rows[filled]["pids"] == []
        code, said = run("stores", "--remove")
        assert code == 2 and "--yes" in said and os.path.isdir(filled)
        assert run("stores", "--yes")[0] == 2


def test_a_store_at_a_path_of_odd_bytes_is_listed_as_json(filled: str) -> None:
    odd = os.fsdecode(os.fsencode(filled) + b"-\xff")
    with memstore.open(odd):
        assert odd in {one["root"] for one in json.loads(run("stores", "--json")[1])}
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


def test_what_may_go(filled: str) -> None:
    from memstore.cli.stores import may_go

    with memstore.open(filled):
        (opened,) = [one for one in memstore.stores() if one.root == filled]
    (closed,) = [one for one in memstore.stores() if one.root == filled]
    assert may_go(closed, force=False) and not may_go(opened, force=False) and may_go(opened, force=True)


def test_clear_and_destroy_ask_first(filled: str) -> None:
    assert run("clear", filled, "a/")[0] == 2 and run("destroy", filled)[0] == 2
    assert run("clear", filled, "a/", "--yes") == (0, "2 deleted\n")
    assert run("clear", filled, "-y", "--json") == (0, '{"deleted": 1}\n')
    assert run("destroy", filled, "-y")[0] == 0 and not os.path.exists(filled)
    with pytest.raises(memstore.NotAStoreError):
        run("destroy", filled, "-y")


def test_clear_says_of_a_pattern_that_a_prefix_is_plain_text(filled: str) -> None:
    command = [sys.executable, "-m", "memstore", "clear", filled, "a/*", "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "0 deleted\n"
    assert done.stderr == "memstore: a prefix is plain text, and not a pattern: 'a/' means all keys that start so\n"


def test_tree_draws_the_keys(filled: str) -> None:
    code, drawn = run("tree", filled)
    assert code == 0 and "a/" in drawn and drawn.count("──") == 4
    assert run("tree", filled, "c") == (0, "no keys that start with 'c'\n")


@pytest.mark.parametrize("word", ["removee", "rn", "repare", "destroyy", "cleer", "abortt", "gcc"])
def test_no_word_leads_to_a_command_that_removes(word: str) -> None:
    code, said = run(word)
    assert code == 2 and "Did you mean" not in said


def test_a_word_like_another_command_leads_there() -> None:
    assert "Did you mean 'tree'?" in run("tre")[1]


def test_cp_get_and_export_replace_only_with_force(filled: str, tmp_path: Path) -> None:
    with pytest.raises(memstore.AlreadyExistsError, match="--force"):
        run("cp", filled, "a/1", filled, "b")
    with memstore.open(filled, "r") as store:
        assert store.get("b") == 3
    assert run("cp", filled, "a/1", filled, "b", "--force")[0] == 0
    file = tmp_path / "one.npy"
    file.write_text("mine")
    with pytest.raises(memstore.AlreadyExistsError, match="--force"):
        run("get", filled, "a/1", "-o", str(file))
    assert file.read_text() == "mine"
    assert run("get", filled, "a/1", "-o", str(file), "-f")[0] == 0 and file.read_bytes()[:6] == b"\x93NUMPY"
    torch_file = tmp_path / "one.pt"
    torch_file.write_text("mine")
    with pytest.raises(memstore.AlreadyExistsError, match="--force"):
        run("export", filled, "a/1", str(torch_file))
    assert torch_file.read_text() == "mine"
    assert run("export", filled, "a/1", str(torch_file), "--force")[0] == 0 and torch_file.read_bytes()[:2] == b"PK"


# --- top: who holds what ----------------------------------------------------------------------------------------------


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
