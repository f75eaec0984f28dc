"""Stores of a group: who shares them, and what one member's death leaves to the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import memstore
from memstore.engine.root import folder
from tests.abuse.test_roots import make, open_and_close
from tests.support import faults
from tests.users import GROUP, OTHER, USER, as_user, needs_root


@needs_root
def test_a_group_shares_a_store(shared: str) -> None:
    as_user(USER, [GROUP], make_for_group, shared)
    assert os.stat(shared).st_gid == GROUP
    as_user(OTHER, [GROUP], put_and_get, shared)
    as_user(USER, [GROUP], put_and_get, shared)
    as_user(OTHER, [GROUP], open_and_close, shared, "r")
    for path in Path(shared).rglob("*"):
        assert path.lstat().st_gid == GROUP, path
    with pytest.raises(memstore.PermissionDeniedError):
        as_user(54399, [], open_and_close, shared)


def make_for_group(root: str) -> None:
    make(root, unix_group=GROUP, file_mode=0o660)


def put_and_get(root: str) -> None:
    with memstore.open(root) as store:
        assert store.get("key").sum() == 499_500
        held = store.get("key")
        store.put("key", torch.arange(1000))
        store.put("other", 1)
        store.delete("other")
        ref = store.ref("key")
        assert ref.get().sum() == held.sum()
        store.gc()


@needs_root
def test_a_reader_who_may_not_write(shared: str) -> None:
    """Readers need to write LMDB's table of readers, so a store for readers says so at once."""
    as_user(USER, [GROUP], make_readable, shared)
    with pytest.raises(memstore.PermissionDeniedError, match=r"lock\.mdb.*0o660"):
        as_user(OTHER, [GROUP], open_and_close, shared, "r")


def make_readable(root: str) -> None:
    make(root, unix_group=GROUP, file_mode=0o640)


@needs_root
@pytest.mark.parametrize("group", ["no-such-group", GROUP])
def test_a_group_that_cant_be_given_leaves_no_folder_behind(shared: str, group: int | str) -> None:
    with pytest.raises(memstore.PermissionDeniedError):
        as_user(USER, [], open_with_group, shared, group)
    assert not os.path.exists(f"{shared}/memstore.json")


def open_with_group(root: str, group: int | str) -> None:
    open_and_close(root, unix_group=group)


# --- a file that one member can't open --------------------------------------------------------------------------------


@needs_root
def test_a_file_that_its_dead_owner_never_gave_to_the_group(shared: str) -> None:
    """Killed between the file's creation and its adoption: it has the owner's own group, and others can't open it."""
    as_user(USER, [GROUP], make_for_group, shared)
    path = _dies(shared, frozenset({"lock_exclusive"}), 1)
    assert os.stat(path).st_gid == USER
    _others_go_on(shared, path)


@needs_root
def test_a_file_of_an_unfinished_publication_that_others_cant_open(shared: str) -> None:
    """Killed before the commit: recovery is to put the header back, and has to leave it."""
    as_user(USER, [GROUP], make_for_group, shared)
    path = _dies(shared, frozenset({faults.COMMIT}), 2)
    os.chmod(path, 0o600)
    assert b" state=live " in Path(path).read_bytes()[:128]
    _others_go_on(shared, path)


def _dies(root: str, names: frozenset[str], step: int) -> str:
    """A member dies at a step of a put; returns the path of the file that it leaves."""
    before = set(os.listdir(f"{root}/{folder.SEGMENTS}"))
    with pytest.raises(RuntimeError, match="exit code -9"):
        as_user(USER, [GROUP], _put_and_die, root, names, step)
    (left,) = set(os.listdir(f"{root}/{folder.SEGMENTS}")) - before
    return f"{root}/{folder.SEGMENTS}/{left}"


def _put_and_die(root: str, names: frozenset[str], step: int) -> None:
    with memstore.open(root) as store, faults.at_step(step, faults.die, names=names):
        store.put("key", torch.zeros(1000))


def _others_go_on(root: str, path: str) -> None:
    """Another member opens, puts, sweeps and measures; the file is left to its owner, whose next opening sweeps it."""
    for _ in range(2):
        as_user(OTHER, [GROUP], put_and_get, root)
    assert os.path.exists(path)
    as_user(OTHER, [GROUP], _sweeps_its_own, root)
    as_user(USER, [GROUP], open_and_close, root)
    assert not os.path.exists(path)
    as_user(USER, [GROUP], _collect, root)
    assert len(os.listdir(f"{root}/{folder.SEGMENTS}")) == 1


def _collect(root: str) -> None:
    with memstore.open(root) as store:
        store.gc()


def _sweeps_its_own(root: str) -> None:
    with memstore.open(root, "r+") as store:
        store.put("key", torch.arange(1000))
        store.gc()
        assert len(os.listdir(f"{root}/{folder.SEGMENTS}")) == 2
        assert store.stats().filling_bytes > 0
