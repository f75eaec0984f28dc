"""`memstore put`, `attach` and `cp` create a store only for a value that can be read, and say so."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import memstore
from tests.children import in_child
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
