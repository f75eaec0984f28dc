"""A place beside the target where it is made, and the moment at which it appears.

    1. what killed conversions to the same target have left is removed: nobody locks it
    2. a folder is made beside the target, under a name of its own, and locked
    3. the target is made in it, read back and compared, and synced
    4. it is renamed (a file: linked) to its path: the moment at which it appears, whole
    5. the folder is removed

A kill before 4 leaves the folder, for the next conversion to this target; one after it the whole target too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Generator

import xxhash

from memstore.engine import syscalls
from memstore.errors import AlreadyExistsError
from memstore.formats import sync_all

_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK)


@contextlib.contextmanager
def folder_beside(target: str) -> Generator[str]:
    """Yields a new folder on the target's file system, which is gone afterwards."""
    parent, prefix = os.path.dirname(target), _prefix(target)
    _remove_leftovers(parent, prefix)
    folder, fd = _make(parent, prefix)
    try:
        yield folder
    finally:
        _remove(folder)
        syscalls.close(fd)  # and with it goes the lock
        if os.path.lexists(folder):  # there was no descriptor left to look into it
            _remove(folder)


def _remove(folder: str) -> None:
    """Best effort. An empty one takes no descriptor."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    shutil.rmtree(folder, ignore_errors=True)


def publish(made: str, target: str) -> None:
    """Gives what was made its name. Raises AlreadyExistsError if there is something by now, which stays as it is."""
    try:
        if os.path.isdir(made):
            sync_all(made)
            if os.path.lexists(target):  # an empty folder, which would be replaced
                raise FileExistsError(errno.EEXIST, "it is there", target)
            syscalls.rename(made, target)
        else:
            _link(made, target)
    except OSError as error:
        if error.errno in _THERE:
            raise already_there(target) from None
        raise
    syscalls.sync_folder(os.path.dirname(target))


def already_there(target: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"{target} is there already: convert to another path, or remove it")


def _link(made: str, target: str) -> None:
    """Unlike a rename, a link never takes the place of something."""
    try:
        syscalls.link(made, target)
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.lexists(target):
            raise
        syscalls.rename(made, target)


def _prefix(target: str) -> str:
    """Of the folders beside a target: of fixed length, whatever the target is called."""
    return f".memstore-convert.{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.basename(target)))}."


def _make(parent: str, prefix: str) -> tuple[str, int]:
    while True:
        folder = f"{parent}/{prefix}{uuid.uuid4().hex}"
        syscalls.make_folder(folder, 0o700)
        try:
            fd = syscalls.open_file(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # somebody has taken it for a leftover
        except BaseException:
            os.rmdir(folder)
            raise
        if syscalls.lock_exclusive(fd) and os.path.isdir(folder):
            return folder, fd
        syscalls.close(fd)


def _remove_leftovers(parent: str, prefix: str) -> None:
    """Best effort: what can't be removed harms nobody."""
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{32}")
    for name in os.listdir(parent):
        if not pattern.fullmatch(name):
            continue
        with contextlib.suppress(OSError):
            fd = syscalls.open_file(f"{parent}/{name}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                if syscalls.lock_exclusive(fd):
                    shutil.rmtree(f"{parent}/{name}", ignore_errors=True)
            finally:
                syscalls.close(fd)
