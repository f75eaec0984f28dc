"""The root folder: settings come back or are refused with a reason; files are whole or not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.engine import syscalls
from memstore.engine.root import folder
from memstore.engine.root.filesystem import Durability
from memstore.engine.root.folder import FORMAT, Settings, new_settings
from memstore.errors import FormatVersionError, MemstoreError, NotAStoreError, PermissionDeniedError, StoreClosedError
from tests.children import in_child
from tests.engine.bytes_store import get, opened, put

SETTINGS = new_settings(durability=None, checksum=None, inline_limit=None, file_mode=0o600, group=None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings")


@given(
    durability=st.sampled_from(["process", "disk", None]),
    checksum=st.sampled_from([True, False, None]),
    inline_limit=st.none() | st.integers(0, 65536),
    file_mode=st.sampled_from([0o600, 0o640, 0o660, 0o666]),
    group=st.none() | st.just(os.getegid()),
)
def test_settings_come_back(
    place: Path,
    durability: Durability | None,
    checksum: bool | None,
    inline_limit: int | None,
    file_mode: int,
    group: int | None,
) -> None:
    settings = new_settings(
        durability=durability, checksum=checksum, inline_limit=inline_limit, file_mode=file_mode, group=group
    )
    folder.write_settings(str(place), settings)
    assert folder.read_settings(str(place)) == settings
    assert settings.checksum is (checksum if checksum is not None else durability == "disk")
    assert stat.S_IMODE(os.stat(place / folder.SETTINGS).st_mode) == file_mode
    json.loads((place / folder.SETTINGS).read_text())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


numbers = st.integers(-2, 2) | st.sampled_from([1 << 16, 1 << 17, 0o777, 0o1000, 1 << 40, 1 << 70])


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_no_settings(place: Path, content: bytes) -> None:
    (place / folder.SETTINGS).write_bytes(content)
    with pytest.raises((NotAStoreError, FormatVersionError), match="memstore"):
        folder.read_settings(str(place))


@given(st.sampled_from([field.name for field in msgspec.structs.fields(Settings)]), numbers | json_values)
def test_a_field_of_another_kind_is_refused(place: Path, name: str, value: object) -> None:
    fields = msgspec.to_builtins(SETTINGS)
    (place / folder.SETTINGS).write_text(json.dumps({**fields, name: value}))
    try:
        settings = folder.read_settings(str(place))
    except (NotAStoreError, FormatVersionError):
        return
    assert settings is not None  # what was not refused makes sense
    assert 0 <= settings.inline_limit <= 1 << 16
    assert 0 <= settings.file_mode <= 0o777
    assert settings.unix_group is None or settings.unix_group >= 0


@pytest.mark.parametrize("content", [b"[" * 60_000, b'{"a":' * 10_000, b'{"format":1,"store":"' + b"x" * 70_000])
def test_deep_or_endless_settings_are_refused(place: Path, content: bytes) -> None:
    (place / folder.SETTINGS).write_bytes(content)
    with pytest.raises(NotAStoreError):
        folder.read_settings(str(place))


def test_a_field_of_a_later_version_of_the_same_format_is_ignored(place: Path) -> None:
    fields = msgspec.to_builtins(SETTINGS)
    (place / folder.SETTINGS).write_text(json.dumps({**fields, "colour": "blue"}))
    assert folder.read_settings(str(place)) == SETTINGS


@pytest.mark.parametrize("version", [FORMAT + 1, 1000, 10**30])
def test_a_newer_format_is_refused_whatever_else_it_says(place: Path, version: int) -> None:
    (place / folder.SETTINGS).write_text(json.dumps({"format": version, "store": ["a list"]}))
    with pytest.raises(FormatVersionError, match=f"format {version}.*up to {FORMAT}.*upgrade"):
        folder.read_settings(str(place))


def test_no_settings_is_no_store_yet(tmp_path: Path) -> None:
    assert folder.read_settings(str(tmp_path)) is None


def test_a_file_is_created_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: str, target: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(syscalls, "rename", interrupted)
        folder.create_file(str(tmp_path), "lock", b"half", SETTINGS)
    assert not (tmp_path / "lock").exists()
    folder.create_file(str(tmp_path), "lock", b"whole", SETTINGS)
    assert (tmp_path / "lock").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["lock"]


def test_a_creation_that_fails_anywhere_can_be_repeated(scratch: str) -> None:
    """One system call after another fails; then the same process creates the store."""
    number = 0
    while number < 100:
        number += 1
        path = f"{scratch}{number}"
        if not _create_with_a_failing_call(path, number):
            break
        with opened(path) as root:
            put(root, b"key", b"x" * 5000)
            assert get(root, b"key") == b"x" * 5000
        assert not [name for name in os.listdir(path) if name.endswith(".new")]
    assert 20 < number < 100  # it came to the end


SYSTEM_CALLS = ("make_folder", "open_file", "write_at", "rename", "allocate", "map_shared", "filesystem_type", "unlink")


def _create_with_a_failing_call(path: str, number: int) -> bool:
    count = 0

    def failing(name: str) -> Callable[..., object]:
        original = getattr(syscalls, name)

        def call(*arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                raise OSError(errno.EIO, f"{name} failed on purpose")
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(syscalls, name, failing(name))
        try:
            with opened(path):
                return False
        except (OSError, MemstoreError) as error:
            assert "on purpose" in str(error)
            return True


@pytest.mark.parametrize(
    ("umask", "asked", "files", "folders"), [(0o077, 0o660, 0o660, 0o770), (0, None, 0o600, 0o700)]
)
def test_modes_are_as_asked_or_private_whatever_the_umask(
    scratch: str, umask: int, asked: int | None, files: int, folders: int
) -> None:
    before = os.umask(umask)
    try:
        with opened(scratch, **({} if asked is None else {"file_mode": asked})) as root:
            put(root, b"key", b"x" * 5000)
    finally:
        os.umask(before)
    for path in [scratch, *map(str, Path(scratch).rglob("*"))]:
        assert stat.S_IMODE(os.lstat(path).st_mode) == (folders if os.path.isdir(path) else files), path


def test_somebody_elses_folder_is_not_made_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(NotAStoreError, match=r"not empty.*thesis\.tex"), opened(str(tmp_path)):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_unknown_group_is_refused_and_no_folder_is_made(scratch: str) -> None:
    with (
        pytest.raises(PermissionDeniedError, match="no group 'no-such-group'"),
        opened(scratch, unix_group="no-such-group"),
    ):
        pass
    assert not os.path.lexists(scratch)


def test_a_store_that_was_replaced_is_not_taken_for_the_old_one(scratch: str) -> None:
    """Somebody empties the folder while it is open here: same folder, same inode, another store."""
    with opened(scratch) as old:
        put(old, b"key", b"old")
        for name in os.listdir(scratch):
            path = f"{scratch}/{name}"
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        with opened(scratch) as new:
            with pytest.raises(StoreClosedError):
                get(old, b"key")
            assert get(new, b"key") is None
            put(new, b"key", b"new")
        assert in_child(_read, scratch) == b"new"


def _read(path: str) -> bytes | None:
    with opened(path) as root:
        return get(root, b"key")


def test_errors_are_memstores_own(scratch: str) -> None:
    for path in (f"{scratch}/missing/parent", f"{scratch}/{'x' * 300}", "/proc/memstore-test"):
        with pytest.raises(MemstoreError), opened(path):
            pass
