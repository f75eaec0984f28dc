"""A test on a tmpfs of a few MiB, mounted in a mount namespace of its own, which goes with its process."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

from tests.children import in_child

_CLONE_NEWNS, _CLONE_NEWUSER, _MS_REC, _MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def on_small_tmpfs(mebibytes: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function(folder, *arguments)` in a child process that alone sees the file system; skips if it may not."""
    found = in_child(_mount_and_call, mebibytes, function, arguments)
    if isinstance(found, _Refused):
        pytest.skip(f"this process may not mount a tmpfs: {found.reason}")
    return found


class _Refused:
    def __init__(self, reason: str) -> None:
        self.reason = reason


def _mount_and_call(mebibytes: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    folder = tempfile.mkdtemp(prefix="memstore-tmpfs-")
    try:
        _enter_a_mount_namespace()
        _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
        _check(_libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={mebibytes}m,mode=700".encode()))
    except OSError as error:
        os.rmdir(folder)
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            return _Refused(os.strerror(error.errno))
        raise
    try:
        return function(folder, *arguments)
    finally:
        _libc.umount2(folder.encode(), 2)  # detach: what is mapped stays until it is not
        os.rmdir(folder)


def _enter_a_mount_namespace() -> None:
    """Root may; others need a user namespace around it, which some systems refuse too."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _check(_libc.unshare(_CLONE_NEWNS))
        return
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def fill(folder: str, leave: int = 0) -> str:
    """Writes a file that leaves so many bytes free; returns its path."""
    path = f"{folder}/ballast"
    with open(path, "ab") as file:
        size = free_bytes(folder) - leave
        if size > 0:
            os.posix_fallocate(file.fileno(), file.tell(), size)
    return path
