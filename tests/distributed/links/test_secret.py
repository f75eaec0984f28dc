"""The file of the secret: whose it is, who may read it, how long it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memstore.distributed.links import read_secret
from memstore.errors import SecretError


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(bytes(range(32)))
    monkeypatch.setenv("MEMSTORE_SECRET_FILE", str(path))
    return path


def test_all_bytes_of_the_file_are_the_secret(secret: Path) -> None:
    assert read_secret() == bytes(range(32))
    secret.write_bytes(b"x" * 100 + b"\n")
    assert read_secret() == read_secret(str(secret)) == b"x" * 100 + b"\n"
    secret.chmod(0o400)
    assert read_secret() is not None


def test_no_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMSTORE_SECRET_FILE", raising=False)
    assert read_secret() is None
    monkeypatch.setenv("MEMSTORE_SECRET_FILE", "")
    assert read_secret() is None


def test_a_link_to_it_will_do(secret: Path) -> None:
    link = secret.with_name("link")
    link.symlink_to(secret)
    assert read_secret(str(link)) == read_secret()


@pytest.mark.parametrize("size", [0, 1, 31, 4097, 1 << 20])
def test_a_secret_of_another_length_is_refused(secret: Path, size: int) -> None:
    secret.write_bytes(bytes(size))
    with pytest.raises(SecretError, match="needs 32 to 4096"):
        read_secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777])
def test_a_secret_that_others_may_see_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(SecretError, match=f"mode {mode:04o}.*expected 0600") as caught:
        read_secret()
    assert str(secret) in str(caught.value)


def test_a_secret_of_somebody_else_is_refused(secret: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(secret, 12_345, -1)
    with pytest.raises(SecretError, match="user 12345"):
        read_secret()


def test_what_is_no_file_is_refused_without_waiting(secret: Path) -> None:
    fifo = secret.with_name("fifo")
    os.mkfifo(fifo, 0o600)
    for path in (fifo, secret.parent):
        with pytest.raises(SecretError, match="no regular file"):
            read_secret(str(path))
    with pytest.raises(SecretError, match="can't be read: No such file"):
        read_secret(str(secret.with_name("none")))
