"""What commands about keys say where a key can't be found, or can't be copied."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import memstore
from tests.children import in_child
from tests.cli.test_commands import call, call_json, run


@pytest.fixture
def filled(root: str) -> Iterator[str]:
    with memstore.open(root, allow_pickle=True) as store:
        store.put("a/plain", torch.ones(3))
        store.put("a/pickled", {"w": torch.ones(3), "o": object})
        store.put("b/1", torch.ones(3))
        store.put("b/2", torch.ones(3))
        store.create_dataset("b/rows", {"x": ((2,), torch.float32)}, capacity=10)
        part = memstore.TensorShard(torch.ones(3), (6,), (0,))
        store.put_sharded("waiting", {"w": part}, attempt="step 12", rank=0, world_size=2, wait=False)
    yield root


@pytest.mark.parametrize(
    ("prefix", "says"),
    [("b/", "'b/rows' is a dataset, "), ("a/", "'a/pickled': the value has leaves that were stored")],
)
def test_of_keys_that_cannot_be_copied_none_is(filled: str, tmp_path: Path, prefix: str, says: str) -> None:
    assert says in " ".join(call("cp", filled, prefix, f"{tmp_path}/new", "--prefix", code=3).split())
    assert not os.path.exists(f"{tmp_path}/new")


def test_a_copy_that_fails_says_how_much_it_has_copied(filled: str, tmp_path: Path) -> None:
    with memstore.open(filled) as store:
        store.put("c/1", torch.ones(3))
        store.put("c/2", torch.ones(1 << 20))
    memstore.open(tmp_path / "small", capacity="1MiB").close()
    said = " ".join(call("cp", filled, "c/", f"{tmp_path}/small", "--prefix", code=3).split())
    assert "memstore: it ended after 1 of 2 keys had been copied" in said and "'c/2'" in said


@pytest.mark.parametrize(
    ("command", "others", "advice"),
    [("get", (), ""), ("info", (), ""), ("rm", (), "--prefix"), ("cp", ("TARGET",), "--prefix")],
)
def test_the_start_of_keys_is_told_as_such(
    filled: str, tmp_path: Path, command: str, others: tuple[str, ...], advice: str
) -> None:
    words = [word.replace("TARGET", f"{tmp_path}/new") for word in others]
    said = " ".join(call(command, filled, "b/", *words, code=4).split())
    assert "`memstore ls ROOT 'b/'` lists the 3 that start so" in said and advice in said
    assert not os.path.exists(f"{tmp_path}/new") and len(call_json("ls", filled, "b/")) == 3


def test_a_pattern_is_told_to_be_none(filled: str, tmp_path: Path) -> None:
    for arguments in (("rm", filled, "b/*", "--prefix"), ("cp", filled, "b/*", f"{tmp_path}/new", "--prefix")):
        code, output, errors = in_child(run, arguments)
        assert code == 0 and ("0 deleted" in output or "nothing was copied" in output)
        assert "not a pattern: 'b/' means all keys that start so" in " ".join(errors.split())
    assert "not a pattern" in " ".join(call("verify", filled, "b/*", code=4).split())


def test_an_attempt_that_does_not_wait_is_an_error_that_names_those_that_do(filled: str) -> None:
    code, output, errors = in_child(run, ("abort", filled, "waiting", "step 1"))
    assert (code, output) == (4, "")
    assert " ".join(errors.split()) == (
        "memstore: no attempt 'step 1' of 'waiting' waits for parts: of this key 'step 12' does"
    )
    assert "`memstore ls ROOT --pending` lists what does" in " ".join(call("abort", filled, "x", "y", code=4).split())


def test_a_new_store_that_a_failed_put_leaves_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    full = memstore.errors.StoreFullError("no space left: nothing was changed", code=errno.ENOSPC)
    monkeypatch.setattr(memstore.Store, "put", lambda *_, **__: (_ for _ in ()).throw(full))
    said = " ".join(call("put", f"{tmp_path}/new", "key", f"{tmp_path}/x.npy", code=3).split())
    assert said.startswith(f"memstore: {tmp_path}/new is a new store, and stays, although this failed memstore: no ")
    assert "a new store" not in call("put", f"{tmp_path}/new", "key", f"{tmp_path}/x.npy", code=3)
