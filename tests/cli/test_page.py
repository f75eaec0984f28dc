"""The page on the command line shows what its commands write."""

from __future__ import annotations

import doctest
import os
import shlex
from pathlib import Path

import pytest
import torch

import memstore
from tests.children import in_child
from tests.cli.test_commands import run
from tests.documents.pages import ROOT, Snippet, snippets

PAGE = ROOT / "docs/command-line.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def sessions() -> list[Snippet]:
    return [one for one in snippets(PAGE) if one.language == "console" and one.not_run is not None]


def test_sessions_that_need_torch_show_what_is_written(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with memstore.open(root, checksum=True) as store:
        store.put("run/policy", {"layer": {"w": torch.ones(64, 64), "b": torch.arange(-32.0, 32.0)}, "step": 7})
        store.put("run/reward", torch.tensor(3.0))
    assert len(sessions()) == 2
    for session in sessions():
        for part in session.code.removeprefix("$ ").split("\n$ "):
            command, _, said = part.partition("\n")
            _, *words = shlex.split(command.replace("/dev/shm/looked-into", root))
            _, shown, errors = in_child(run, tuple(words))
            said = said.replace("/dev/shm/looked-into", root)
            assert doctest.OutputChecker().check_output(f"{said.rstrip()}\n", shown, FLAGS), (command, shown, errors)
    assert os.path.exists("biases.npy")
