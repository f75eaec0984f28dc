"""What may be no store's folder, and what in it is not trusted: planted links among them."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.engine import syscalls
from memstore.engine.root import filesystem, folder
from tests.children import in_child
from tests.namespaces import MOUNTS, in_namespaces, make_read_only, mount_tmpfs, unmount
from tests.users import OTHER, USER, as_user, needs_root


def open_and_close(root: str, mode: str = "a", **options: Any) -> None:
    memstore.open(root, mode, **{"timeout": 5.0, **options}).close()


def make(root: str, **options: Any) -> None:
    with memstore.open(root, **options) as store:
        store.put("key", torch.arange(1000))


# --- not a place for one ----------------------------------------------------------------------------------------------


def test_a_missing_parent(tmp_path: Path) -> None:
    with pytest.raises(memstore.NotAStoreError, match=r"parent folder .*/missing doesn't exist"):
        memstore.open(tmp_path / "missing" / "store")
    assert os.listdir(tmp_path) == []


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(memstore.NotAStoreError, match=r"parent folder .*/file is not a folder"):
        memstore.open(tmp_path / "file" / "store")
    with pytest.raises(memstore.NotAStoreError):
        memstore.open(tmp_path / "file" / "deeper" / "store")


@pytest.mark.parametrize("mode", ["r", "r+", "a", "x"])
def test_a_file_in_its_place(tmp_path: Path, mode: str) -> None:
    (tmp_path / "store").write_text("text")
    with pytest.raises(memstore.NotAStoreError, match="not a folder"):
        memstore.open(tmp_path / "store", mode)
    assert (tmp_path / "store").read_text() == "text"


@pytest.mark.parametrize("make_it", [
    lambda path: os.mkfifo(path), lambda path: os.symlink("/nowhere", path), lambda path: os.symlink(path, path),
], ids=["fifo", "dangling link", "link to itself"])  # fmt: skip
def test_something_odd_in_its_place(tmp_path: Path, make_it: Callable[[str], None]) -> None:
    make_it(str(tmp_path / "store"))
    with pytest.raises(memstore.MemstoreError):
        in_child(open_and_close, str(tmp_path / "store"), timeout=100)


def test_a_folder_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    for mode in ("r", "r+", "a", "x"):
        with pytest.raises(memstore.NotAStoreError):
            memstore.open(tmp_path, mode)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(memstore.NotAStoreError, match="name too long"):
        memstore.open(tmp_path / ("x" * 300))


# --- whose it is ------------------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_another_users_store(shared: str, mode: str) -> None:
    as_user(USER, [], make, shared)
    with pytest.raises(memstore.PermissionDeniedError, match=f"belongs to user {USER}.*runs as 0"):
        memstore.open(shared, mode)
    with pytest.raises(memstore.PermissionDeniedError) as caught:
        as_user(OTHER, [], open_and_close, shared, mode)
    assert isinstance(caught.value, PermissionError)
    as_user(USER, [], open_and_close, shared, mode)


@needs_root
def test_another_users_empty_folder(shared: str) -> None:
    as_user(USER, [], os.mkdir, shared)
    with pytest.raises(memstore.PermissionDeniedError, match=f"belongs to user {USER}"):
        memstore.open(shared)
    assert os.listdir(shared) == []


@needs_root
def test_a_parent_that_may_not_be_written_to(tmp_path: Path) -> None:
    for path in [tmp_path, *tmp_path.parents]:
        if path.stat().st_mode & 0o077 == 0:  # pytest's own, which nobody else may enter
            os.chmod(path, 0o755)
    with pytest.raises(memstore.PermissionDeniedError, match="can't be created"):
        as_user(USER, [], open_and_close, str(tmp_path / "store"))


@needs_root
def test_a_store_that_somebody_else_planted_for_a_group_of_theirs(shared: str) -> None:
    """It says itself that a group may share it; that is no reason for one who is not in the group to trust it."""
    as_user(USER, [], make, f"{shared}")
    os.chmod(shared, 0o777)
    settings = json.loads(Path(shared, "memstore.json").read_text())
    Path(shared, "memstore.json").write_text(json.dumps({**settings, "unix_group": USER, "file_mode": 0o666}))
    with pytest.raises(memstore.PermissionDeniedError, match=f"belongs to user {USER}"):
        memstore.open(shared)


@needs_root
def test_a_file_of_another_user_in_ones_own_store(scratch: str) -> None:
    make(scratch)
    for name in (
        folder.SETTINGS,
        folder.LOCK,
        folder.DOORBELL,
        "catalog",
        f"{folder.CATALOG}/data.mdb",
        folder.SEGMENTS,
    ):
        os.chown(f"{scratch}/{name}", USER, -1)
        with pytest.raises(memstore.PermissionDeniedError, match=f"{name} belongs to user {USER}"):
            memstore.open(scratch)
        os.chown(f"{scratch}/{name}", 0, -1)
    open_and_close(scratch)


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770, 0o750, 0o702])
def test_a_store_that_is_open_to_others(scratch: str, mode: int) -> None:
    make(scratch)
    os.chmod(scratch, mode)
    for how in ("r", "r+", "a"):
        with pytest.raises(memstore.PermissionDeniedError, match=f"mode {mode:04o}.*chmod 700"):
            memstore.open(scratch, how)
    os.chmod(scratch, 0o700)
    open_and_close(scratch)


def test_a_folder_that_all_may_write_to_is_not_made_a_store(scratch: str) -> None:
    os.mkdir(scratch)
    os.chmod(scratch, 0o777)
    with pytest.raises(memstore.PermissionDeniedError, match="mode 0777.*open a folder below it"):
        memstore.open(scratch)
    assert os.listdir(scratch) == []
    os.chmod(scratch, 0o755)
    make(scratch)
    assert stat.S_IMODE(os.stat(scratch).st_mode) == 0o700


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_folder_that_people_share_is_left_as_it_is(scratch: str, is_planted: bool) -> None:
    """With another mode of its /tmp the host breaks, and who plants a memstore.json there could have it said."""
    if is_planted:
        make(scratch)
    else:
        os.mkdir(scratch)
    os.chmod(scratch, 0o1777)
    Path(scratch, "of others").touch()
    for how in ("a", "r+") if is_planted else ("a", "x"):
        with pytest.raises(memstore.PermissionDeniedError) as caught:
            memstore.open(scratch, how)
        assert "chmod" not in str(caught.value)
    with pytest.raises(memstore.NotAStoreError if not is_planted else memstore.PermissionDeniedError):
        memstore.open(scratch, "r")
    assert stat.S_IMODE(os.stat(scratch).st_mode) == 0o1777
    advised = re.search(r"below it, such as (\S+),", str(caught.value))
    assert advised
    with memstore.open(advised[1]):
        assert stat.S_IMODE(os.stat(advised[1]).st_mode) == 0o700


@needs_root
def test_another_users_folder_that_all_share(shared: str) -> None:
    os.mkdir(shared)
    os.chmod(shared, 0o1777)
    with pytest.raises(memstore.PermissionDeniedError, match=f"belongs to user 0.*below it, such as {shared}/store"):
        as_user(USER, [], open_and_close, shared)
    as_user(USER, [], open_and_close, f"{shared}/store")


def test_nobody_is_told_to_remove_what_is_theirs(scratch: str) -> None:
    os.mkdir(scratch)
    Path(scratch, "lock").mkdir()
    Path(scratch, "lock", "of mine").touch()
    with pytest.raises(memstore.PermissionDeniedError, match="choose another folder") as caught:
        memstore.open(scratch)
    assert "remove" not in str(caught.value)
    with pytest.raises(memstore.NotAStoreError, match="is no store"):
        memstore.repair(scratch)
    assert os.listdir(scratch) == ["lock"]


# --- what its files say -----------------------------------------------------------------------------------------------


def test_a_newer_format(scratch: str) -> None:
    make(scratch)
    path = Path(scratch, folder.SETTINGS)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3, "durability": "in stone"}))
    for mode in ("r", "r+", "a"):
        with pytest.raises(memstore.FormatVersionError, match="format 3.*reads up to 2.*upgrade"):
            memstore.open(scratch, mode)
    with pytest.raises((memstore.AlreadyExistsError, memstore.FormatVersionError)):
        memstore.open(scratch, "x")


GARBAGE = [
    b"",
    b"\0" * 100,
    b"{",
    b"[]",
    b"null",
    b"{}",
    b'{"format": 1}',
    b"\xff\xfe{}",
    b'{"format": "1"}',
    os.urandom(500),
]


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_a_damaged_memstore_json(scratch: str, content: bytes) -> None:
    make(scratch)
    Path(scratch, folder.SETTINGS).write_bytes(content)
    for mode in ("r", "r+", "a"):
        with pytest.raises(memstore.NotAStoreError, match=r"memstore\.json is foreign or damaged"):
            memstore.open(scratch, mode)


def test_another_stores_catalog(scratch: str) -> None:
    make(scratch)
    make(f"{scratch}2")
    shutil.rmtree(f"{scratch}/catalog")
    shutil.copytree(f"{scratch}2/catalog", f"{scratch}/catalog")
    for mode in ("r", "r+", "a"):
        with pytest.raises(memstore.CorruptionError, match="catalog belongs to store") as caught:
            memstore.open(scratch, mode)
        assert caught.value.path == f"{scratch}/catalog/local"
    open_and_close(f"{scratch}2")


@pytest.mark.parametrize(
    "name", [folder.LOCK, folder.DOORBELL, f"{folder.CATALOG}/data.mdb", "catalog", folder.SEGMENTS]
)
def test_a_missing_part(scratch: str, name: str) -> None:
    make(scratch)
    path = f"{scratch}/{name}"
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    with pytest.raises(memstore.CorruptionError, match="missing") as caught:
        memstore.open(scratch)
    assert caught.value.path is not None and caught.value.path.startswith(scratch)
    assert not os.path.exists(path)  # nothing is made in its place


def test_a_store_without_its_memstore_json_is_not_made_up(scratch: str) -> None:
    """Its settings (durability, checksums) would be others, and nobody would notice."""
    with memstore.open(scratch, checksum=True) as store:
        store.put("key", torch.arange(1000))
    os.rename(f"{scratch}/memstore.json", f"{scratch}.aside")
    for mode in ("r", "r+", "a", "x"):
        with pytest.raises(memstore.NotAStoreError, match=r"memstore\.json"):
            memstore.open(scratch, mode)
    os.rename(f"{scratch}.aside", f"{scratch}/memstore.json")
    with memstore.open(scratch, checksum=True) as store:
        assert store.get("key").sum() == 499_500


def test_a_refused_creation_leaves_no_folder(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "filesystem_type", lambda path: NETWORK["NFS"])
    with pytest.raises(memstore.UnsupportedFilesystemError):
        memstore.open(scratch)
    assert not os.path.exists(scratch)


def test_a_file_where_a_folder_should_be_and_the_reverse(scratch: str) -> None:
    for name in (
        folder.LOCK,
        folder.DOORBELL,
        f"{folder.CATALOG}/data.mdb",
        "catalog",
        folder.SEGMENTS,
        folder.SETTINGS,
    ):
        make(scratch)
        path = f"{scratch}/{name}"
        if os.path.isdir(path):
            shutil.rmtree(path)
            Path(path).write_bytes(b"")
        else:
            os.unlink(path)
            os.mkdir(path)
        with pytest.raises(memstore.MemstoreError, match=name.rsplit("/", maxsplit=1)[-1]):
            memstore.open(scratch)
        shutil.rmtree(scratch)


@pytest.mark.parametrize("name", [folder.LOCK, folder.DOORBELL, folder.SETTINGS, f"{folder.CATALOG}/data.mdb"])
def test_a_fifo_in_place_of_a_file_hangs_nobody(scratch: str, name: str) -> None:
    make(scratch)
    os.unlink(f"{scratch}/{name}")
    os.mkfifo(f"{scratch}/{name}", 0o600)
    with pytest.raises(memstore.MemstoreError):
        in_child(open_and_close, scratch, timeout=100)


# --- file systems -----------------------------------------------------------------------------------------------------

NETWORK = {
    "NFS": 0x6969, "SMB": 0x517B, "CIFS": 0xFF534D42, "SMB2": 0xFE534D42, "Lustre": 0x0BD00BD0, "CephFS": 0x00C36400,
    "GPFS": 0x47504653, "9p": 0x01021997, "FUSE": 0x65735546, "AFS": 0x5346414F, "GFS2": 0x01161970,
    "OCFS2": 0x7461636F, "BeeGFS": 0x19830326,
}  # fmt: skip
LOCAL = {
    "tmpfs": 0x01021994, "ext4": 0xEF53, "xfs": 0x58465342, "btrfs": 0x9123683E, "f2fs": 0xF2F52010, "zfs": 0x2FC12FC1,
    "overlay": 0x794C7630,
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORK)
def test_a_network_file_system(scratch: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(syscalls, "filesystem_type", lambda path: NETWORK[name])
    with pytest.raises(memstore.UnsupportedFilesystemError, match=f"is on {name},.*local disk.*--shared"):
        memstore.open(scratch)
    assert not os.path.exists(scratch) or os.listdir(scratch) == []


def test_a_store_that_was_moved_to_a_network_file_system(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(scratch)
    monkeypatch.setattr(syscalls, "filesystem_type", lambda path: NETWORK["NFS"])
    for mode in ("r", "r+", "a"):
        with pytest.raises(memstore.UnsupportedFilesystemError, match="NFS"):
            memstore.open(scratch, mode)


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_file_system(
    scratch: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(syscalls, "filesystem_type", lambda path: LOCAL[name])
    make(scratch)
    assert not caplog.records


def test_an_unknown_file_system_is_warned_of(
    scratch: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(syscalls, "filesystem_type", lambda path: 0x12345678)
    with caplog.at_level(logging.WARNING, "memstore"):
        make(scratch)
    assert "unknown file system (type 0x12345678)" in caplog.text


def test_disk_on_tmpfs(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "filesystem_type", lambda path: filesystem.TMPFS)
    with pytest.raises(memstore.UnsupportedFilesystemError, match='durability="disk"'):
        memstore.open(scratch, durability="disk")


def test_a_disk_store_that_was_copied_to_tmpfs(disk_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(disk_root, durability="disk")
    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "filesystem_type", lambda path: filesystem.TMPFS)
        with pytest.raises(memstore.UnsupportedFilesystemError, match="tmpfs"):
            memstore.open(disk_root)
    open_and_close(disk_root)


def test_a_machine_without_proc_is_not_served(scratch: str) -> None:
    """Not Linux, or a container that has it not mounted: nothing would tell a reboot, or a dead owner's name."""
    make(f"{scratch}2")
    in_namespaces(MOUNTS, _open_without_proc, scratch, f"{scratch}2")


def _open_without_proc(new: str, existing: str) -> None:
    mount_tmpfs("/proc")
    for root in (new, existing):
        with pytest.raises(memstore.UnsupportedFilesystemError, match="needs Linux, with /proc mounted"):
            memstore.open(root)
    assert not os.path.exists(new)
    unmount("/proc")
    open_and_close(new)


def test_a_file_system_that_fails(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(syscalls, "filesystem_type", failing)
    with pytest.raises(OSError, match="Input/output error"):
        memstore.open(scratch)


def test_a_file_system_that_is_mounted_read_only_is_named(tmp_path: Path) -> None:
    in_namespaces(MOUNTS, _on_a_read_only_mount, str(tmp_path))


def _on_a_read_only_mount(folder: str) -> None:
    mount_tmpfs(folder)
    try:
        make(f"{folder}/store")
        make_read_only(folder)
        for mode in ("r", "r+", "a"):
            with pytest.raises(memstore.ReadOnlyError, match="mounted read-only, and readers too write"):
                open_and_close(f"{folder}/store", mode)
        with pytest.raises(memstore.NotAStoreError, match="can't be created: Read-only file system"):
            open_and_close(f"{folder}/new")
    finally:
        unmount(folder)


# --- planted links: none is followed, none of their targets is read, written or cut short -----------------------------


PARTS = [
    folder.SETTINGS,
    folder.LOCK,
    folder.DOORBELL,
    "catalog",
    folder.CATALOG,
    f"{folder.CATALOG}/data.mdb",
    f"{folder.CATALOG}/lock.mdb",
    folder.SEGMENTS,
]


def make_plain(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", torch.arange(1000))


def use(root: str) -> None:
    with memstore.open(root, timeout=5.0) as store:
        store.put("key", torch.zeros(1000))
        store.put("other", torch.zeros(1000))


@pytest.mark.parametrize("target", ["a copy", "nothing"])
@pytest.mark.parametrize("name", PARTS)
def test_a_link_in_a_store_is_refused(scratch: str, name: str, target: str) -> None:
    make_plain(scratch)
    path, aside = f"{scratch}/{name}", f"{scratch}.aside"
    os.rename(path, aside)
    before = contents(aside)
    os.symlink(aside if target == "a copy" else "/nowhere/at/all", path)
    for mode in ("r", "r+", "a"):
        with pytest.raises(
            memstore.PermissionDeniedError, match=rf"{name} should be a (file|folder) and is l"
        ) as caught:
            memstore.open(scratch, mode, timeout=5.0)
        assert isinstance(caught.value, PermissionError)
    assert contents(aside) == before
    os.unlink(path)
    os.rename(aside, path)
    use(scratch)


@pytest.mark.parametrize("name", PARTS)
def test_a_link_that_waits_for_a_creator_is_refused(scratch: str, name: str) -> None:
    victim = f"{scratch}.victim"
    if name in ("catalog", folder.CATALOG, folder.SEGMENTS):
        os.mkdir(victim)
    else:
        Path(victim).write_bytes(b"precious" * 512)
    before = contents(victim)
    path = f"{scratch}/{name}"
    os.makedirs(os.path.dirname(path), mode=0o700)
    os.chmod(scratch, 0o700)
    os.symlink(victim, path)
    with pytest.raises(memstore.MemstoreError):
        memstore.open(scratch, timeout=5.0)
    assert contents(victim) == before


@pytest.mark.parametrize("name", [folder.SETTINGS, folder.LOCK, folder.DOORBELL])
def test_a_link_in_place_of_a_temporary_file_is_not_written_through(scratch: str, name: str) -> None:
    victim = f"{scratch}.victim"
    Path(victim).write_bytes(b"precious")
    os.mkdir(scratch, 0o700)
    os.symlink(victim, f"{scratch}/.{name}.new")
    make_plain(scratch)
    assert Path(victim).read_bytes() == b"precious"
    assert not [found for found in os.listdir(scratch) if found.endswith(".new")]


@pytest.mark.parametrize("kind", ["a copy", "nothing", "a folder", "itself"])
def test_a_link_in_place_of_a_segment_is_not_followed(scratch: str, kind: str) -> None:
    make_plain(scratch)
    with memstore.open(scratch, timeout=5.0) as store:
        (path,) = store.info("key").files
        aside = f"{scratch}.aside"
        os.rename(path, aside)
        os.symlink({"a copy": aside, "nothing": "/nowhere", "a folder": "/tmp", "itself": path}[kind], path)
        with pytest.raises(memstore.CorruptionError, match="'key'") as caught:
            store.get("key")
        assert (caught.value.key, caught.value.path) == ("key", path)
        store.put("key", torch.ones(1000))
        assert store.get("key").sum() == 1000
        store.put("key", torch.ones(1000))
        store.gc()
    assert os.path.getsize(aside) > 8000


@pytest.mark.parametrize("kind", ["link", "file", "folder", "fifo"])
def test_what_lies_where_the_next_segment_goes_is_not_written_over(scratch: str, kind: str) -> None:
    victim = f"{scratch}.victim"
    Path(victim).write_bytes(b"precious")
    make_plain(scratch)
    with memstore.open(scratch, timeout=5.0) as store:
        planted = f"{scratch}/segments/{3:016x}.safetensors"  # numbers 1 and 2 were the first put's
        {
            "link": lambda: os.symlink(victim, planted),
            "file": lambda: shutil.copy(victim, planted),
            "folder": lambda: os.mkdir(planted),
            "fifo": lambda: os.mkfifo(planted),
        }[kind]()
        try:
            store.put("key", torch.ones(1000))
        except memstore.MemstoreError as error:
            assert planted in str(error)
        store.put("key", torch.ones(1000))  # the next one goes elsewhere
        store.put("key", torch.ones(1000))
        assert store.get("key").sum() == 1000
        store.gc()
        store.put("key", torch.zeros(1000))
    assert Path(victim).read_bytes() == b"precious"


def test_a_fifo_in_place_of_a_segment_hangs_nobody(scratch: str) -> None:
    make_plain(scratch)
    with memstore.open(scratch) as store:
        (path,) = store.info("key").files
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(memstore.CorruptionError):
        in_child(_get, scratch, timeout=100)


def _get(root: str) -> None:
    with memstore.open(root, timeout=5.0) as store:
        store.get("key")


def contents(path: str) -> object:
    if os.path.isdir(path):
        return {str(found): found.read_bytes() for found in Path(path).rglob("*") if found.is_file()}
    return Path(path).read_bytes()
