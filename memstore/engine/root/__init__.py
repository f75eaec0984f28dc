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
    give_to_group,
)
from memstore.engine.root.holders import holders_of, lock_holders
from memstore.engine.root.registry import abandon_root, close_abandoned, close_root, reopen_root, retain_root
from memstore.engine.root.root import KeptFile, Root
from memstore.engine.root.settings import MUTABLE, SHARDED, Feature, Settings, new_settings

__all__ = [
    "CATALOG",
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
    "abandon_root",
    "absolute_path",
    "check_filesystem",
    "close_abandoned",
    "close_root",
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
    "retain_root",
]
