"""The stores of this machine, and who has them open. Nothing is opened: it looks at files and /proc.

Found are the stores on `/dev/shm`, up to three folders deep, and those that running processes have open, wherever they
lie, as far as this user may look. A process that has a store open maps its doorbell.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator

from memstore.engine.root import (
    AGENT_LOCK,
    CATALOG,
    CLUSTER,
    DOORBELL,
    SEGMENTS,
    Settings,
    all_maps,
    folder,
    lock_holders,
)
from memstore.errors import MemstoreError
from memstore.info import StoreSummary

_SHARED_MEMORY = "/dev/shm"
_DEEPEST = 3  # folders
_BLOCK = 512  # bytes, as st_blocks counts
_DOORBELLS = re.compile(rf"^[0-9a-f]+-\S+ \S+ \S+ \S+ ([0-9]+) +(/.*)/{DOORBELL}$".encode(), re.MULTILINE)


def stores_of_machine(within: str = _SHARED_MEMORY) -> tuple[StoreSummary, ...]:
    """The stores below the folder `within`, and those that are open anywhere; sorted by their roots."""
    opened, locks = _opened(), lock_holders()
    found: list[StoreSummary] = []
    for root in sorted({*_below(within, _DEEPEST), *opened}):
        summary = _summary(root, opened.get(root, set()), locks)
        if summary is not None:
            found.append(summary)
    return tuple(found)


def _below(path: str, depth: int) -> Iterator[str]:
    """Folders that say that they are stores; those within a store are its own."""
    try:
        with os.scandir(path) as entries:
            folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # closed to this user, or removed meanwhile
        return
    for name in folders:
        if _is_store(name):
            yield name
        elif depth > 1:
            yield from _below(name, depth - 1)


def _is_store(path: str) -> bool:
    return os.path.lexists(f"{path}/{folder.SETTINGS}") and not folder.is_discarded(path)


def _opened() -> dict[str, set[int]]:
    """The pids that have each store open. In another mount namespace, its path may name another folder."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for pid, maps in all_maps():
        for inode, path in set(_DOORBELLS.findall(maps)):
            root = os.fsdecode(path.replace(rb"\012", b"\n"))  # the only character that the kernel escapes there
            try:
                is_same = os.stat(f"{root}/{DOORBELL}").st_ino == int(inode)
            except OSError:
                continue
            if is_same and _is_store(root):
                found[root].add(pid)
    return found


def _summary(root: str, pids: set[int], locks: Container[tuple[int, int] | None]) -> StoreSummary | None:
    """Returns None for what was removed meanwhile, lacks files, or is a host's state of a store on shared storage."""
    settings: Settings | None = None
    with contextlib.suppress(MemstoreError, OSError):  # damaged, newer, or closed to this user: it takes space as well
        settings = folder.read_settings(root)
    if settings is not None and settings.shared is not None:
        return None
    try:
        nbytes = _size_of(f"{root}/{SEGMENTS}") + _size_of(f"{root}/{CATALOG}")
        created = min(os.stat(f"{root}/{folder.SETTINGS}").st_mtime, os.stat(f"{root}/catalog").st_mtime)
        changed = max(created, _changed(f"{root}/{SEGMENTS}"), _changed(f"{root}/{CATALOG}/data.mdb"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return StoreSummary(
        root=root,
        nbytes=nbytes,
        created=created,
        changed=changed,
        pids=tuple(sorted(pids)),
        is_member=settings is not None and CLUSTER in settings.features,
        is_served=_identity(f"{root}/{AGENT_LOCK}") in locks,
    )


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except PermissionError:
        return 0.0


def _size_of(path: str) -> int:
    """The bytes that the files in a folder take."""
    nbytes = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    nbytes += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                except FileNotFoundError:  # replaced meanwhile
                    continue
    except PermissionError:
        return 0
    return nbytes


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
