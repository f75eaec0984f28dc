"""Who shares a store: members of a group, and no two pid namespaces."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
import torch

import memstore
from memstore.engine import syscalls
from memstore.engine.root import folder
from tests.abuse.test_roots import make, open_and_close
from tests.children import Child, Wire
from tests.namespaces import MOUNTS, PIDS, in_namespaces
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


# --- containers: two pid namespaces don't share a store, since mutex and LMDB tell owners by their numbers ------------


VALUE = torch.arange(1000)
NAMESPACE_AT = syscalls.MUTEX_SIZE + 5 * 8  # in the lock page, behind magic, boot id, device and inode


def in_a_container(root: str, mode: str = "a", number: int = 0) -> int:
    """As process 1 of another pid namespace: puts `number` if the mode allows, returns the number that was there."""
    return in_namespaces(PIDS | MOUNTS, _put_and_get, root, mode, number)


def _put_and_get(root: str, mode: str, number: int) -> int:
    with memstore.open(root, mode, timeout=5.0) as store:
        found = int(store.get("key")[0])
        if mode != "r":
            store.put("key", VALUE + number)
            assert _written_for(root) == syscalls.pid_namespace()
        return found


def _written_for(root: str) -> int:
    """The pid namespace whose processes may use the lock page."""
    with open(f"{root}/lock", "rb") as file:
        return struct.unpack_from("<Q", file.read(), NAMESPACE_AT)[0]


def _hold(wire: Wire, root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", VALUE)
        wire.send("open")
        wire.receive()


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_a_store_that_others_have_open_is_refused_with_the_reason(root: str, mode: str) -> None:
    with Child(_hold, root) as holder:
        holder.receive()
        with pytest.raises(memstore.ResourceLimitError, match=r"lock: .*another pid namespace.*--pid=") as caught:
            in_a_container(root, mode)
        assert caught.value.errno == errno.EAGAIN
        with memstore.open(root, timeout=5.0) as store:  # of one namespace with the holder: not disturbed
            assert (store.get("key") == VALUE).all()


@pytest.mark.parametrize("death", ["close", "kill"])
def test_a_store_that_others_had_open_changes_hands(root: str, death: str) -> None:
    with Child(_hold, root) as holder:
        holder.receive()
        if death == "close":
            holder.send()
            holder.receive()
    assert in_a_container(root, "r") == 0
    assert in_a_container(root, number=7) == 0
    assert in_a_container(root, number=8) == 7  # each time another namespace
    with memstore.open(root, timeout=5.0) as store:
        assert (store.get("key") == VALUE + 8).all()
        store.put("key", VALUE)
