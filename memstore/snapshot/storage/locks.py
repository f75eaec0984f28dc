"""Locks of a folder and of files in it (flock). Those of a process that has died are gone with it."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Generator

from memstore.engine import LockFile, OwnedFile, syscalls
from memstore.errors import StoreTimeoutError
from memstore.snapshot.storage.failures import file_errors

_PATIENCE, _PAUSE = 60.0, 0.01  # seconds for a lock, and between two looks
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


@contextlib.contextmanager
def alone(path: str) -> Generator[None]:
    """As `FileStorage.alone`."""
    with file_errors(path):
        folder = OwnedFile(os.path.join(path, "."), os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _locked(folder):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"{path} is locked by another process for {_PATIENCE:g} s")
            time.sleep(_PAUSE)
        yield
    finally:
        folder.close()


def _locked(folder: OwnedFile) -> bool:
    try:
        return syscalls.lock_exclusive(folder.fd)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True  # the file system has no such locks; over NFS they want a file that is open for writing
        raise


def keep(path: str, folder: int) -> LockFile | None:
    """As `FileStorage.keep`."""
    try:
        file = LockFile(path, os.O_RDWR, dir_fd=folder)  # a forked child closes its copy
    except FileNotFoundError:
        return None
    try:
        is_kept = syscalls.lock_shared(file.fd)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        is_kept = True  # as far as that goes: `is_kept` takes every file for one that somebody keeps
    if is_kept and _is_there(file, path, folder):
        return file
    file.close()
    return None


@contextlib.contextmanager
def unless_kept(path: str, folder: int) -> Generator[bool]:
    """As `FileStorage.unless_kept`."""
    try:
        file = LockFile(path, os.O_RDWR, dir_fd=folder)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _is_free(file)
    finally:
        file.close()


def _is_free(file: LockFile) -> bool:
    try:
        return file.lock()
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise


def _is_there(file: OwnedFile, path: str, folder: int) -> bool:
    """Whether this is still what the path names: who removes a file does so under its lock."""
    try:
        found = os.stat(os.path.basename(path), dir_fd=folder, follow_symlinks=False)
        return os.path.samestat(found, os.fstat(file.fd))
    except FileNotFoundError:
        return False
