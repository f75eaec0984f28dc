"""Folders that torchsnapshot has written: those of torchsnapshot-0.1.0.tar.xz by that version."""

from __future__ import annotations

import collections
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.convert import convert
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from tests.support.equality import assert_same

KEPT = Path(__file__).parent / "torchsnapshot-0.1.0.tar.xz"


@pytest.fixture
def kept(folder: str) -> str:
    with tarfile.open(KEPT) as archive:
        archive.extractall(folder, filter="data")
    return folder


def of_one_rank() -> dict[str, Any]:
    return {
        "model": {
            "w": torch.arange(200.0).reshape(20, 10),
            "b": torch.arange(5).to(torch.float16),
            "scalar": torch.tensor(3),
            "c": torch.ones(2, dtype=torch.complex64),
            "flags": torch.tensor([True, False]),
        },
        "progress": {
            "epoch": 7,
            "lr": 0.1,
            "name": "späte / 100%",
            "raw": b"\0\1",
            "done": False,
            "none": None,
            "nested": {"a/b%": [torch.ones(3), 2], 5: collections.OrderedDict(x=torch.zeros(2, 2))},
            "tuple": (1, 2),
        },
    }


def of_two_ranks() -> dict[str, Any]:
    return {
        "same": {"w": torch.ones(6), "n": 3},
        "sharded": {"t": torch.arange(40.0).reshape(10, 4)},
    }


def converted(path: str, **options: Any) -> Any:
    convert(path, f"{path}.pt", **options)
    return torch.load(f"{path}.pt", weights_only=True)


def test_all_that_one_rank_had(kept: str) -> None:
    assert_same(of_one_rank(), converted(f"{kept}/one"))


def test_parts_of_two_ranks_are_put_together(kept: str) -> None:
    assert_same(of_two_ranks(), converted(f"{kept}/two-alike"))
    convert(f"{kept}/two-alike", f"{kept}/snapshot")
    assert_same(of_two_ranks(), converted(f"{kept}/snapshot"))


def test_values_that_differ_by_rank_are_named(kept: str) -> None:
    with pytest.raises(UnsupportedValueError, match="ranks 0 and 1 have different values at own/rank"):
        convert(f"{kept}/two", f"{kept}/target.pt")


def test_metadata_in_yaml_is_read_too(kept: str) -> None:
    """As versions before 0.1 wrote it."""
    yaml = pytest.importorskip("yaml")
    path = f"{kept}/one/.snapshot_metadata"
    with open(path) as file:
        found = json.load(file)
    with open(path, "w") as file:
        yaml.dump(found, file, sort_keys=False)
    assert_same(of_one_rank(), converted(f"{kept}/one"))


Change = Callable[[dict[str, Any]], Any]


def _shards(manifest: dict[str, Any], rank: int = 1) -> list[dict[str, Any]]:
    return manifest[f"{rank}/sharded/t"]["shards"]


CHANGES: dict[str, tuple[str, Change, str]] = {
    "out of the folder": ("one", lambda m: m["0/model/b"].update(location="../x"), "no file"),
    "missing": ("one", lambda m: m["0/model/b"].update(location="x"), "missing"),
    "beyond the end": ("one", lambda m: m["0/model/b"].update(byte_range=[0, 1 << 40]), "bytes"),
    "backwards": ("one", lambda m: m["0/model/b"].update(byte_range=[10, 0]), "part from"),
    "too large": ("one", lambda m: m["0/model/b"].update(shape=[500]), "bytes for"),
    "negative": ("one", lambda m: m["0/model/b"].update(shape=[-5]), "shape"),
    "quantized": ("one", lambda m: m["0/model/b"].update(dtype="torch.qint8"), "qint8"),
    "another way": ("one", lambda m: m["0/model/b"].update(serializer="zstd"), "zstd"),
    "no number": ("one", lambda m: m["0/progress/epoch"].update(serialized_value="many"), "no int"),
    "no type": ("one", lambda m: m["0/progress/epoch"].update(type="Custom"), "Custom"),
    "no rank": ("one", lambda m: m.update({"x/y": {"type": "int"}}), "no rank"),
    "a part missing": ("two-alike", lambda m: _shards(m, 0).clear(), "lack the elements"),
    "all parts missing": ("two-alike", lambda m: (_shards(m, 0).clear(), _shards(m, 1).clear()), "no shards"),
    "a rank's part missing": ("two-alike", lambda m: m.pop("1/sharded/t"), "rank 1 had a part of sharded/t"),
    "a part elsewhere": ("two-alike", lambda m: _shards(m)[0].update(offsets=[1, 0]), "overlap"),
    "other dimensions": ("two-alike", lambda m: _shards(m)[0].update(offsets=[1]), "dimensions"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_lies(kept: str, name: str) -> None:
    snapshot, change, match = CHANGES[name]
    path = f"{kept}/{snapshot}/.snapshot_metadata"
    with open(path) as file:
        found = json.load(file)
    change(found["manifest"])
    with open(path, "w") as file:
        json.dump(found, file)
    with pytest.raises(MemstoreError, match=match):
        convert(f"{kept}/{snapshot}", f"{kept}/target.pt")
    assert not os.path.exists(f"{kept}/target.pt")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', "a: [", '{"version":"0","world_size":1,"manifest":[]}']
)
def test_metadata_that_is_none(kept: str, text: str) -> None:
    with open(f"{kept}/one/.snapshot_metadata", "w") as file:
        file.write(text)
    with pytest.raises(CorruptionError, match="snapshot_metadata"):
        convert(f"{kept}/one", f"{kept}/target.pt")
