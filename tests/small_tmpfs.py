"""A test on a tmpfs of a few MiB, mounted in a mount namespace of its own, which goes with its process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

from tests.namespaces import MOUNTS, in_namespaces, mount_tmpfs, unmount


def on_small_tmpfs(mebibytes: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function(folder, *arguments)` in a child process that alone sees the file system; skips if it may not."""
    folder = tempfile.mkdtemp(prefix="memstore-tmpfs-")
    try:
        return in_namespaces(MOUNTS, _mount_and_call, folder, mebibytes, function, arguments)
    finally:
        os.rmdir(folder)


def _mount_and_call(folder: str, mebibytes: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    mount_tmpfs(folder, f"size={mebibytes}m,mode=700")
    try:
        return function(folder, *arguments)
    finally:
        unmount(folder)


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
