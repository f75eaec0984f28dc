"""What is the same store still, though its path, or what it is looked up by, has changed."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch

import memstore
from tests.abuse.replacing import INLINE, SEGMENT, look_again, make, make_anew
from tests.children import in_child
from tests.namespaces import MOUNTS, bind_mount, in_namespaces, mount_overlay, mount_tmpfs, unmount
from tests.overlay import on_overlay
from tests.users import USER, as_user, needs_root


def use(store: memstore.Store) -> None:
    """For long enough that it looks what its path names."""
    for number in range(3):
        look_again(store)
        store.put("key", number)
        store.put("segment", SEGMENT + number)
        look_again(store)
        assert store.get("key") == number and int(store.get("segment")[0]) == number
        assert store.wait("key") > 0
        store.delete("segment")


def test_a_relative_path_and_another_working_directory(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.path.dirname(scratch))
    with memstore.open("store") as store:
        monkeypatch.chdir("/")
        use(store)


def test_a_link_that_names_another_folder_by_now(scratch: str) -> None:
    """The store is where it was, and `store.root` says where."""
    for name in ("one", "other"):
        make(f"{scratch}.{name}")
    os.symlink(f"{scratch}.one", scratch)
    with memstore.open(scratch) as store:
        os.unlink(scratch)
        os.symlink(f"{scratch}.other", scratch)
        use(store)
        assert store.root == f"{scratch}.one"
        with memstore.open(scratch) as other:
            assert torch.equal(other.get("key"), INLINE)


def test_a_store_that_was_moved_and_opened_where_it_is(scratch: str) -> None:
    with memstore.open(scratch) as old:
        old.put("key", INLINE)
        os.rename(scratch, f"{scratch}.aside")
        with memstore.open(f"{scratch}.aside") as store:
            assert store.root == f"{scratch}.aside" and torch.equal(store.get("key"), INLINE)
            use(store)
            with pytest.raises(memstore.NotAStoreError):
                old.get("key")


def test_a_bind_mount(scratch: str) -> None:
    in_namespaces(MOUNTS, _in_a_bind_mount, scratch)


def _in_a_bind_mount(scratch: str) -> None:
    make(scratch)
    for path in (f"{scratch}.mounted", f"{scratch}.too"):
        os.mkdir(path)
        bind_mount(path, scratch)
    with memstore.open(f"{scratch}.mounted") as store, memstore.open(scratch) as same, memstore.open(f"{scratch}.too"):
        use(store)
        use(same)
        unmount(f"{scratch}.mounted")
        with pytest.raises(memstore.NotAStoreError):
            use(store)
    with memstore.open(scratch) as again:
        use(again)
    unmount(f"{scratch}.too")


@pytest.mark.parametrize("one_file_system", [True, False])
def test_an_overlay(one_file_system: bool) -> None:
    on_overlay(_on_overlay, one_file_system=one_file_system)


def _on_overlay(root: str) -> None:
    with memstore.open(root) as store:
        use(store)
        in_child(make_anew, root)
        with pytest.raises(memstore.NotAStoreError):
            store.put("key", 1)


@pytest.mark.parametrize("options", ["", ",xino=off"])
def test_an_overlay_whose_lower_layer_has_the_store(options: str) -> None:
    """As in an image of a container. A folder that is written to is copied up, and the same still."""
    folder = tempfile.mkdtemp(prefix="memstore-overlay-")
    try:
        in_namespaces(MOUNTS, _above_a_lower_layer, folder, options)
    finally:
        os.rmdir(folder)


def _above_a_lower_layer(folder: str, options: str) -> None:
    mount_tmpfs(folder, "size=256m,mode=700")
    lower, upper, work, merged = (f"{folder}/{name}" for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        os.mkdir(path)
    if options:
        mount_tmpfs(lower)
    make(f"{lower}/store")
    mount_overlay(merged, lower, upper, work, options)
    with memstore.open(f"{merged}/store") as store:
        use(store)
        in_child(_reopen_and_use, f"{merged}/store")
        use(store)
    unmount(folder)


def _reopen_and_use(root: str) -> None:
    with memstore.open(root) as store:
        use(store)


@needs_root
def test_a_parent_that_may_not_be_entered_any_more(shared: str) -> None:
    """That says nothing of the store, and isn't said of it."""
    as_user(USER, [], _forbid_the_parent, f"{shared}.parent")


def _forbid_the_parent(parent: str) -> None:
    os.mkdir(parent)
    with memstore.open(f"{parent}/store") as store:
        use(store)
        os.chmod(parent, 0)
        for call in (lambda: store.put("key", 1), lambda: store.version("key"), lambda: store.wait("key")):
            look_again(store)
            with pytest.raises(memstore.PermissionDeniedError, match="may not look.*x bits"):
                call()
        os.chmod(parent, 0o700)
        use(store)
