"""Datasets in a repaired store: kept with header and control page, and set aside without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import memstore

LENGTH_AT = 192


def make(root: str) -> str:
    """A store with a dataset of three rows. Returns the path of its file."""
    with memstore.open(root) as store:
        store.put("other", torch.ones(10_000))
        store.create_dataset("data", {"x": ((1000,), torch.int16)}, capacity=8).extend(
            {"x": torch.ones(3, 1000, dtype=torch.int16)}
        )
        (path,) = store.info("data").files
        return path


@pytest.mark.parametrize("is_lost", [False, True], ids=["sound", "without its catalog"])
def test_a_repair_keeps_a_dataset_and_its_rows(root: str, is_lost: bool) -> None:
    make(root)
    if is_lost:
        with open(f"{root}/catalog/local/data.mdb", "r+b") as file:
            file.write(os.urandom(1 << 14))
    report = memstore.repair(root)
    assert report.recovered == ("data", "other") and not report.lost
    with memstore.open(root) as store:
        data = store.open_dataset("data")
        assert data[:]["x"].sum() == 3000
        assert data.extend({"x": torch.ones(1, 1000, dtype=torch.int16)}) == range(3, 4)
        assert store.info("data").kind == "dataset"


def test_one_without_a_whole_control_page_is_set_aside(scratch: str) -> None:
    path = make(scratch)
    with open(path, "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start + LENGTH_AT)
        file.write(b"\xff" * 8)
    report = memstore.repair(scratch)
    assert (report.recovered, report.lost) == (("other",), ("data",))
    assert os.path.exists(f"{path}.damaged")
    with memstore.open(scratch) as store:
        assert "data" not in store


def test_a_store_with_a_dataset_names_the_feature(root: str) -> None:
    with memstore.open(root) as store:
        before = Path(root, "memstore.json").read_text()
        store.create_dataset("data", ((), torch.int8), capacity=1)
    assert "mutable" not in before
    assert '"mutable"' in Path(root, "memstore.json").read_text()
