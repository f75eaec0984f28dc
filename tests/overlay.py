"""A test on an overlay mount, as the folders of a container are, in a mount namespace that goes with its process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

from tests.namespaces import MOUNTS, in_namespaces, mount_overlay, mount_tmpfs, unmount


def on_overlay(function: Callable[..., Any], *arguments: Any, one_file_system: bool = True) -> Any:
    """Calls `function(root, *arguments)`, with a path for a store, in a child process; skips the test if it may not.

    Without `one_file_system`, the layers are on two: overlay then tells another device for files than for folders.
    """
    folder = tempfile.mkdtemp(prefix="memstore-overlay-")
    try:
        return in_namespaces(MOUNTS, _mount_and_call, folder, one_file_system, function, arguments)
    finally:
        os.rmdir(folder)


def _mount_and_call(
    folder: str, one_file_system: bool, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    mount_tmpfs(folder, "size=256m,mode=700")
    lower, upper, work, merged = (f"{folder}/{name}" for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        os.mkdir(path)
    if not one_file_system:
        mount_tmpfs(lower)
    mount_overlay(merged, lower, upper, work, "" if one_file_system else ",xino=off")
    try:
        return function(f"{merged}/store", *arguments)
    finally:
        unmount(folder)
