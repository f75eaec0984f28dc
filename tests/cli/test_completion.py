"""Shells complete keys: what they are offered, and in a shell what stands on the line then."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memstore
from memstore.cli.group import keys_of, quoted, starts_of, words_of
from tests.children import in_child
from tests.cli.test_commands import call, run

KEYS = ["count", "policy/td", "policy/weights", "with space", "a:b", "it's", "line\nbreak", "über"]


@pytest.fixture
def filled(root: str) -> Iterator[str]:
    with memstore.open(root) as store:
        store.put_many({key: {"layer": {"w": torch.ones(3), "b": torch.ones(2)}} for key in KEYS})
    yield root


def offered(line: str) -> list[str]:
    code, output, errors = in_child(_ask, line)
    assert (code, errors) == (0, "")
    return [line for line in output.splitlines() if line]


def _ask(line: str) -> tuple[object, str, str]:
    """In a child: the environment is its own."""
    os.environ.update({"_MEMSTORE_COMPLETE": "bash_complete", "COMP_LINE": line})
    return run(())


def test_commands_keys_and_leaves_are_offered(filled: str) -> None:
    assert {"plain,get", "plain,gc"} <= set(offered("memstore g"))
    assert offered(f"memstore info {filled} pol") == ["plain,policy/td", "plain,policy/weights"]
    assert offered(f"memstore get {filled} count layer/") == ["plain,layer/w", "plain,layer/b"]
    assert offered(f"memstore rm {filled} count wi") == ["plain,with\\ space"]
    assert offered(f'memstore info {filled} "with s') == ["plain,with space"]
    assert offered(f"memstore diff {filled} count pol") == ["plain,policy/td", "plain,policy/weights"]
    assert offered("memstore info /nowhere/at/all x") == []
    assert offered("memstore info /no") == ["file,/no"]


def test_what_waits_is_offered_to_be_given_up(filled: str) -> None:
    part = memstore.TensorShard(torch.ones(3), (6,), (0,))
    with memstore.open(filled) as store:
        for key, attempt in (("model", "one"), ("model", "other"), ("next", "two")):
            store.put_sharded(key, {"w": part}, attempt=attempt, rank=0, world_size=2, wait=False)
    assert offered(f"memstore abort {filled} ") == ["plain,model", "plain,next"]
    assert offered(f"memstore abort {filled} model o") == ["plain,one", "plain,other"]


def test_keys_that_no_shell_can_be_sent_are_left_out(filled: str) -> None:
    assert keys_of(filled, "") == sorted(set(KEYS) - {"line\nbreak"}, key=str.encode)
    assert keys_of(filled, "line") == [] and keys_of("/nowhere", "") == [] and keys_of("", "") == []


def test_of_many_keys_their_starts_are_offered() -> None:
    keys = [f"run/{kind}/{i}" for kind in ("eval", "train") for i in range(200)]
    assert starts_of(keys, 0) == ["run/"] and starts_of(keys, 4) == ["run/eval/", "run/train/"]
    found = starts_of([f"frame-{i:04}" for i in range(5000)], 0)
    assert 10 <= len(found) <= 100 and all(one.startswith("frame-") for one in found)
    assert all(any(key.startswith(one) for one in found) for key in (f"frame-{i:04}" for i in range(5000)))


@pytest.mark.parametrize(
    ("line", "words", "last"),
    [
        ("memstore ls /a ", ["ls", "/a"], ""),
        ("memstore ls /a b", ["ls", "/a"], "b"),
        (r"memstore ls /a b\ c", ["ls", "/a"], "b c"),
        ("memstore ls '/a b' \"c d", ["ls", "/a b"], "c d"),
        ("memstore ls /a x:y", ["ls", "/a"], "x:y"),
        ("memstore ", [], ""),
    ],
)
def test_lines_are_split_as_shells_do(line: str, words: list[str], last: str) -> None:
    assert words_of(line) == (words, last)


def test_bash_gets_what_stands_behind_a_colon_and_quotes() -> None:
    assert quoted("a:b c", "memstore ls /a a:") == r"b\ c"
    assert quoted("it's", "memstore ls /a it") == r"it\'s"
    assert quoted("with space", 'memstore ls /a "wi') == "with space"
    assert quoted("key with", r"memstore rm /a it\'s key") == r"key\ with", "no quote is open"
    assert quoted("it's", "memstore ls /a 'it") == r"it'\''s"
    assert quoted('$5 "x"', 'memstore ls /a "') == r"\$5 \"x\""


class Shell:
    """An interactive shell in a terminal, with a `memstore` that runs this checkout."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            home, path = str(folder), f"{folder}:{os.environ['PATH']}"
            os.environ.update(
                TERM="dumb", PS1="$ ", HOME=home, INPUTRC="/dev/null", ZDOTDIR=home, XDG_CONFIG_HOME=home, PATH=path
            )
            os.execvp(command[0], command)

    def type(self, text: str, until: str, within: float = 240.0) -> str:
        os.write(self.fd, text.encode())
        seen, deadline = "", time.monotonic() + within
        while until not in seen and time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.2)[0]:
                seen += os.read(self.fd, 1 << 16).decode(errors="replace")
        assert until in seen, seen
        return seen

    def close(self) -> None:
        os.close(self.fd)
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


@pytest.fixture
def bash(tmp_path: Path) -> Iterator[Shell]:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    script = tmp_path / "memstore"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m memstore "$@"\n')
    script.chmod(0o700)
    shell = Shell(["bash", "--norc", "--noprofile", "-i"], tmp_path)
    shell.type('eval "$(memstore completion bash)"; echo re""ady\n', "ready")
    yield shell
    shell.close()


COMPLETED = [("a:", "a:b "), ("with", r"with\ space "), ("policy/w", "policy/weights "), ("it", r"it\'s ")]


@pytest.mark.parametrize(
    "lines", [COMPLETED[:2], pytest.param([*COMPLETED[2:], ("'with s", "with space' ")], marks=pytest.mark.full)]
)
def test_bash_completes_keys_on_its_line(filled: str, bash: Shell, lines: list[tuple[str, str]]) -> None:
    for typed, becomes in lines:
        bash.type(f"memstore info {filled} {typed}\t", becomes)
        bash.type("\x15", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_of_their_shells(shell: str) -> None:
    script = call("completion", shell)
    assert f"_MEMSTORE_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
