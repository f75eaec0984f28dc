"""A store that an earlier version wrote is read, verified, repaired and written by this one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors
import torch

import memstore
from memstore.engine.root.settings import FORMAT
from memstore.testing.equality import assert_same
from tests.kept.kept import archive, unpack, values

FORMATS = range(1, FORMAT + 1)
DIGESTS = {1: "9b00443d88e82615aa3742d029c8522adabe596e982d6a99196a5772fa843621"}  # SHA-256 of the archives


@pytest.fixture(params=FORMATS)
def kept(request: pytest.FixtureRequest, root: str) -> str:
    unpack(request.param, root)
    return root


@pytest.mark.parametrize("number", FORMATS)
def test_every_format_is_kept(number: int) -> None:
    assert archive(number).exists(), "python -m tests.kept.kept makes it; then it is kept for ever"


@pytest.mark.parametrize("number", FORMATS)
def test_what_is_kept_never_changes(number: int) -> None:
    """A store that was made again would show only that this version reads what this version writes."""
    assert hashlib.sha256(archive(number).read_bytes()).hexdigest() == DIGESTS[number]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_it_is_read(kept: str, mode: str) -> None:
    with memstore.open(kept, mode, verify=True) as store:  # type: ignore[arg-type]
        assert sorted(store) == sorted(values())
        for key, value in values().items():
            assert_same(value, store.get(key))
            assert store.info(key).key == key


def test_it_is_whole(kept: str) -> None:
    with memstore.open(kept) as store:
        report = store.verify()
        assert report.ok and report.checked == len(values()) and not report.damaged


def test_it_is_written(kept: str) -> None:
    with memstore.open(kept) as store:
        before = store.version("segment")
        assert store.put("segment", torch.ones(5000)) > before
        store.delete("large")
        store.put("new", torch.ones(1 << 19))
        assert store.gc() >= 0
        assert (store.get("segment") == 1).all() and "large" not in store


def test_it_is_repaired_from_its_files(kept: str) -> None:
    (Path(kept) / "catalog" / "local" / "data.mdb").write_bytes(b"\xff" * 8192)
    report = memstore.repair(kept)
    with memstore.open(kept, verify=True) as store:
        assert sorted(store) == sorted(report.recovered)
        assert len(store) >= 9
        for key in store:
            assert_same(values()[key], store.get(key))


def test_its_files_are_read_without_memstore(kept: str) -> None:
    found = {}
    for path in (Path(kept) / "segments").iterdir():
        with safetensors.safe_open(path, "pt") as file:
            if " state=live " in file.metadata()["memstore"]:
                found[file.metadata()["key"]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(found["tensordict"]["x"], values()["tensordict"]["x"])
    assert torch.equal(found["state"]["layer.weight"], values()["state"]["layer.weight"])
