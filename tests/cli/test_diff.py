"""`memstore diff`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import memstore
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import call, call_json


@pytest.fixture
def filled(root: str) -> Iterator[str]:
    with memstore.open(root) as store:
        value = {"w": torch.zeros(4, 4), "b": torch.ones(3), "n": 7, "same": torch.tensor([float("nan")])}
        store.put("one", value)
        changed = {**value, "w": torch.zeros(4, 4).index_fill(1, torch.tensor(2), 0.5), "b": torch.ones(2), "n": 8}
        store.put("two", {**changed, "more": torch.ones(1)})
    yield root


def test_keys_that_are_equal(filled: str) -> None:
    assert call("diff", filled, "one", "one") == "equal: 3 leaves and 1 object\n"
    assert call_json("diff", filled, "one", "one") == []


def test_each_leaf_that_differs_is_told_by_how_much(filled: str) -> None:
    found = {one["leaf"][0]: one["what"] for one in call_json("diff", filled, "one", "two", code=1)}
    assert found == {
        "w": "4 of 16 elements differ, by up to 0.5",
        "b": "float32 [3] and float32 [2]",
        "n": "7 and 8",
        "more": f"only in 'two' of {filled}",
    }
    lines = call("diff", filled, "one", "two", code=1).splitlines()
    assert lines[0].split() == ["leaf", "difference"] and len(lines) == 5


def test_what_differs_is_told_within_its_column(filled: str) -> None:
    lines = in_terminal("diff", filled, "one", "two", size=(40, 24)).screen
    assert lines[1:3] == ["w     4 of 16 elements differ, by up to", "      0.5"]


def test_a_key_and_a_file_two_files_and_two_stores(filled: str, tmp_path: Path) -> None:
    path, other, store = str(tmp_path / "a.npy"), str(tmp_path / "b.pt"), str(tmp_path / "store")
    np.save(path, np.arange(5.0))
    torch.save(torch.arange(5.0).double(), other)
    call("put", filled, "array", path)
    assert call("diff", filled, "array", path) == call("diff", path, other) == "equal: 1 leaf\n"
    call("cp", filled, "one", store)
    said = "equal: 3 leaves and 1 object\n"
    assert call("diff", filled, "one", store) == call("diff", filled, "one", store, "one") == said
    assert "w" in call("diff", filled, "two", store, "one", code=1)


def test_snapshots_are_files_too(filled: str, tmp_path: Path) -> None:
    state = memstore.StateDict(x=torch.ones(3), step=2)
    memstore.Snapshot.take(f"{tmp_path}/a", {"state": state})
    memstore.Snapshot.take(f"{tmp_path}/b", {"state": memstore.StateDict(x=torch.zeros(3), step=2)})
    text = call("diff", f"{tmp_path}/a", f"{tmp_path}/b", code=1)
    assert "state/x" in text and "3 of 3 elements differ, by up to 1" in text and "step" not in text
    with memstore.open(filled) as store:
        store.attach("attached", f"{tmp_path}/a")
    assert call("diff", filled, "attached", f"{tmp_path}/a").startswith("equal")


@pytest.mark.parametrize(
    ("names", "code", "says"),
    [
        (("ROOT",), 2, "say ROOT KEY OTHER"),
        (("ROOT", "one", "nothing"), 4, "no key 'nothing'"),
        (("ROOT", "nothing", "one"), 4, "no key 'nothing'"),
        (("ROOT", "/dev/null"), 2, "is a store: say its KEY, and then the key or file to compare with"),
        (("/nowhere", "/dev/null"), 3, "there is no such file"),
        (("/nowhere", "one", "two"), 3, "exist"),
    ],
)
def test_what_can_not_be_compared(filled: str, names: tuple[str, ...], code: int, says: str) -> None:
    found = call("diff", *(filled if name == "ROOT" else name for name in names), code=code)
    assert says in " ".join(found.split())


def test_a_file_and_a_store_without_its_key(filled: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    said = " ".join(call("diff", f"{tmp_path}/x.npy", filled, code=3).split())
    assert said == f"memstore: {filled} is a store: say which KEY of it is meant"


def test_long_objects_are_told_where_they_differ(root: str) -> None:
    with memstore.open(root) as store:
        store.put("one", {"text": "a" * 100 + "b"})
        store.put("two", {"text": "a" * 100 + "c" + "d" * 100})
    (found,) = call_json("diff", root, "one", "two", code=1)
    assert found["what"] == f"from character 101 on: ...b' and ...c{'d' * 59}..."


def test_a_key_that_is_in_one_store_only_is_told_with_the_other(root: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    with memstore.open(root) as store, memstore.open(tmp_path / "other") as other:
        store.put("key", torch.ones(3))
        other.put("another", torch.ones(3))
    said = " ".join(call("diff", root, "key", f"{tmp_path}/other", code=4).split())
    assert said.startswith(f"memstore: {tmp_path}/other: no key 'key': ")
    said = " ".join(call("diff", root, f"{tmp_path}/x.npy", "key", code=2).split())
    assert said.endswith(f"x.npy' is a file, and 'key' a key of {root}: say ROOT, KEY, and then the file")
