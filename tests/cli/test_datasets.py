"""The command line at a dataset: it is listed, told, looked at, kept and deleted as any entry, and not exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memstore
from tests.cli.test_commands import call


@pytest.fixture
def filled(root: str) -> Iterator[str]:
    with memstore.open(root, checksum=True) as store:
        data = store.create_dataset("frames", {"x": ((100,), torch.float32), "y": ((), torch.int64)}, capacity=1000)
        data.extend({"x": torch.ones(5, 100), "y": torch.arange(5)})
        store.put("weights", torch.ones(2000))
        del data  # which keeps the store open
    yield root


def test_it_is_told_as_what_it_is(filled: str) -> None:
    (listed, _) = json.loads(call("ls", filled, "--json"))
    assert (listed["key"], listed["kind"], listed["leaves"]) == ("frames", "dataset", 2)
    assert listed["nbytes"] >= 1000 * 408
    assert "dataset" in call("ls", filled)
    told = call("info", filled, "frames")
    assert "a dataset with 5 of 1,000 rows, version" in told and "[1000, 100]" in told
    assert json.loads(call("info", filled, "frames", "--json"))["kind"] == "dataset"
    assert call("stats", filled).split()[:2] == ["keys", "2"]


def test_it_is_looked_at_repaired_and_deleted(filled: str) -> None:
    assert call("verify", filled).startswith("1 checked, 1 without checksums, 0 damaged")
    assert call("repair", filled).startswith("2 keys recovered, 0 lost")
    with memstore.open(filled) as store:
        assert store.open_dataset("frames")[:]["y"].tolist() == [0, 1, 2, 3, 4]
    assert "1 deleted" in call("rm", filled, "frames")
    assert [entry["key"] for entry in json.loads(call("ls", filled, "--json"))] == ["weights"]


def test_what_needs_a_value_is_refused_by_name(filled: str, tmp_path: Path) -> None:
    for arguments in (("export", filled, "frames", str(tmp_path / "out")), ("cp", filled, "frames", filled, "copy")):
        assert "'frames' is a dataset" in call(*arguments, code=3)
    torch.save({"w": torch.ones(10)}, tmp_path / "w.pt")
    assert "'frames' is a dataset" in call("attach", filled, "frames", str(tmp_path / "w.pt"), code=3)
    assert not (tmp_path / "out").exists()
    with memstore.open(filled) as store:
        assert store.info("frames").kind == "dataset" and "copy" not in store
