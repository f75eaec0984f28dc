"""An opened store without its values, and what is told of them from records alone. Imports no torch.

keyspace    an opened store as keys and versions; `Store` adds the values
outline     the leaves of a value, by the tree of its description; the types of objects
absent      what an error says of a key that isn't there
entries     what the catalog says of each entry; keys drawn as a tree
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.listing.absent import absent, near, no_value, no_values, version_gone
from memstore.listing.entries import (
    COLUMNS,
    KeyTree,
    ListedEntry,
    cells,
    entries,
    entries_after,
    key_tree,
    value_bytes,
    version_entries,
)
from memstore.listing.keyspace import (
    GLOB,
    Keyspace,
    Mode,
    WhileRead,
    abort_attempt,
    check_store,
    has_keys,
    may_write,
    open_elsewhere,
    open_keyspace,
    opened,
    tell_of_wait,
    timeout_of,
    wanted_of,
)
from memstore.listing.outline import OutlineLeaf, UnknownKindError, outline
