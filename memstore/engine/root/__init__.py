"""A store's folder, opened: its settings, its files, who uses it, and what a fork does to it."""

from __future__ import annotations

from memstore.engine.root import folder, registry
from memstore.engine.root.filesystem import (
    TMPFS,
    Durability,
    check_filesystem,
    filesystem_name,
    is_in_memory,
    mappings_keep_locks,
)
from memstore.engine.root.folder import (
    CATALOG,
    DOORBELL,
    LOCK,
    SEGMENTS,
    SETTINGS,
    absolute_path,
    create_file,
    give_to_group,
)
from memstore.engine.root.holders import holders_of, lock_holders
from memstore.engine.root.registry import RootUse, close_root, close_unused, reopen_root, use_root
from memstore.engine.root.root import KeptFile, Root
from memstore.engine.root.settings import CLUSTER, MUTABLE, SHARDED, Feature, Settings, new_settings

__all__ = [
    "CATALOG",
    "CLUSTER",
    "DOORBELL",
    "LOCK",
    "MUTABLE",
    "SEGMENTS",
    "SETTINGS",
    "SHARDED",
    "TMPFS",
    "Durability",
    "Feature",
    "KeptFile",
    "Root",
    "Settings",
    "absolute_path",
    "check_filesystem",
    "RootUse",
    "close_root",
    "close_unused",
    "create_file",
    "filesystem_name",
    "is_in_memory",
    "folder",
    "give_to_group",
    "holders_of",
    "lock_holders",
    "mappings_keep_locks",
    "new_settings",
    "registry",
    "reopen_root",
    "use_root",
]
