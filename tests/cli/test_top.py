"""`memstore top`: who holds what."""

from __future__ import annotations

import os

import torch

import memstore
from tests.children import Child, hold_key
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import call, call_json


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
