"""What commands say where there is no store, and what a repair says while it waits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import memstore
from memstore.cli.messages import message_without_store
from tests.cli.test_commands import call, call_json


def test_a_mistyped_root_names_the_store_beside_it(tmp_path: Path) -> None:
    memstore.open(tmp_path / "weights").close()
    said = " ".join(call("gc", f"{tmp_path}/wieghts", code=3).split())
    assert said == (
        f"memstore: there is no store at {tmp_path}/wieghts: the folder doesn't exist; did you mean {tmp_path}/weights?"
    )
    assert not (tmp_path / "wieghts").exists()


def test_a_folder_of_stores_names_them(tmp_path: Path) -> None:
    memstore.open(tmp_path / "store").close()
    text = f"{tmp_path} is no store: it has no memstore.json; mode 'a' creates one in an empty folder"
    assert message_without_store(text, "ls") == (
        f"there is no store at {tmp_path}: the folder has 'store', and no memstore.json; did you mean {tmp_path}/store?"
    )


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("ls", "`memstore put`, or a program that opens it, makes one"),
        ("status", "`memstore serve` makes one, and serves it"),
        *((command, f"`memstore {command}` needs one: check the path") for command in ("repair", "verify", "gc", "rm")),
    ],
)
def test_the_advice_fits_the_command(tmp_path: Path, command: str, advice: str) -> None:
    (tmp_path / "empty").mkdir()
    found = " ".join(call(command, f"{tmp_path}/empty", *(["key"] if command == "rm" else []), code=3).split())
    assert found == f"memstore: there is no store at {tmp_path}/empty: the folder is empty; {advice}"


@pytest.mark.parametrize(
    ("command", "arguments", "advice"),
    [
        ("ls", (), "check the path"),
        ("verify", (), "check the path"),
        ("put", ("key", "FILE"), "check the path, or create ROOT/at first"),
    ],
)
def test_a_missing_parent_is_named(tmp_path: Path, command: str, arguments: tuple[str, ...], advice: str) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    words = [f"{tmp_path}/x.npy" if word == "FILE" else word for word in arguments]
    found = " ".join(call(command, f"{tmp_path}/none/at/all", *words, code=3).split())
    what = f"there is no store at {tmp_path}/none/at/all: the folder {tmp_path}/none doesn't exist"
    assert found == f"memstore: {what}; {advice.replace('ROOT', f'{tmp_path}/none')}"


def test_a_mistyped_parent_names_the_store(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    memstore.open(tmp_path / "runs/first").close()
    text = f"{tmp_path}/rusn/first: the parent folder {tmp_path}/rusn doesn't exist: create it first"
    assert (message_without_store(text, "ls") or "").endswith(f"; did you mean {tmp_path}/runs/first?")


@pytest.mark.parametrize("arguments", [("get", "policy", "STORE"), ("rm", "policy", "STORE")])
def test_a_store_that_is_not_said_first_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    memstore.open(tmp_path / "runs").close()
    words = [word.replace("STORE", f"{tmp_path}/runs") for word in arguments]
    said = " ".join(call(*words, code=3).split())
    assert said.endswith(f"; '{tmp_path}/runs' is a store: say it first, as ROOT")


@pytest.mark.parametrize("arguments", [("STORE", "FILE", "key"), ("FILE", "key", "STORE"), ("FILE", "STORE", "key")])
@pytest.mark.parametrize("command", ["put", "attach"])
def test_a_file_in_the_place_of_another_argument_is_named(
    tmp_path: Path, command: str, arguments: tuple[str, ...]
) -> None:
    memstore.open(tmp_path / "runs").close()
    np.save(tmp_path / "x.npy", np.ones(3))
    places = {"STORE": f"{tmp_path}/runs", "FILE": f"{tmp_path}/x.npy"}
    said = " ".join(call(command, *(places.get(word, word) for word in arguments), code=2).split())
    assert said.endswith("say ROOT, KEY, and then the file") and f"{tmp_path}/x.npy" in said


def test_a_path_within_a_store_names_it(tmp_path: Path) -> None:
    root = f"{tmp_path}/runs"
    memstore.open(root).close()
    said = " ".join(call("ls", f"{root}/segments", code=3).split())
    assert said == f"memstore: there is no store at {root}/segments: it lies within the store {root}: say that as ROOT"
    said = " ".join(call("get", f"{root}/model/w", "b", code=3).split())
    assert said.endswith(f"it lies within the store {root}: say that as ROOT, and 'model/w' as the KEY")


def test_a_snapshot_in_the_place_of_a_store_and_a_store_in_that_of_a_snapshot(tmp_path: Path) -> None:
    memstore.open(tmp_path / "runs").close()
    memstore.Snapshot.take(str(tmp_path / "step-1"), {"progress": memstore.StateDict(step=1)})
    said = " ".join(call("ls", f"{tmp_path}/step-1", code=3).split())
    assert said.endswith("is a snapshot, and no store: `memstore snapshot` looks into it, `memstore attach` serves it")
    said = " ".join(call("snapshot", "ls", f"{tmp_path}/runs", code=3).split())
    assert said.endswith("is a store, and no snapshot: `memstore ls` lists its keys")


def test_a_home_folder_in_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert 'takes "~" as your home folder only outside of quotes' in " ".join(call("ls", "~/run", code=3).split())


def test_other_messages_are_left_as_they_are() -> None:
    assert message_without_store("/a is not a folder", "ls") is None
    assert message_without_store("a: the parent folder b doesn't exist: create it first", "ls") is not None


def test_a_repair_says_for_whom_it_waits(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.cli.stores._PATIENCE", 0.01)
    with memstore.open(root):
        said = " ".join(call("repair", root, "--timeout", "0.11", code=3).split())
    assert said.count("to close the store") == 2 and "It waits up to 0.1 s more" in said


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_store_without_its_settings_is_damaged(tmp_path: Path, is_gone: bool) -> None:
    (tmp_path / "one").mkdir()
    memstore.open(tmp_path / "two").close()
    root, settings = f"{tmp_path}/one", tmp_path / "one/memstore.json"
    with memstore.open(root) as store:
        store.put("key", np.ones(3))
    if is_gone:
        settings.unlink()
    else:
        settings.write_bytes(b"")
    what = f"{settings}: missing: put it back, or" if is_gone else f"{settings} is foreign or damaged: "
    assert what in " ".join(call("verify", root, code=1).split())
    assert call_json("verify", root, code=1)["damaged"][0].startswith(what)
    said = " ".join(call("ls", root, code=3).split())
    assert f"{settings} is " in said and "put" in said and "did you mean" not in said
    assert ("run `memstore repair`" in said) is is_gone
    call("verify", f"{tmp_path}/none", code=3)
