"""An opened store without its values, and what is told of them from records alone. Imports no torch.

keyspace    an opened store as keys and versions; `Store` adds the values
pending     sharded puts that wait for other ranks
outline     the leaves of a value, by the tree of its description
objects     the types of objects
absent      what an error says of a key that isn't there
keys        what keys(), items() and values() return
entries     what the catalog says of each entry
tree        keys drawn as a tree
globs       prefixes that look like patterns
"""

from __future__ import annotations

from memstore.listing.absent import absent, absent_many, near, no_value, no_values
from memstore.listing.entries import COLUMNS, Listed, cells, entries, value_bytes
from memstore.listing.globs import GLOB, no_match
from memstore.listing.keys import WhileRead
from memstore.listing.keyspace import Keyspace, Mode, has_keys, open_keyspace, opened, tell_of_wait, wanted_of
from memstore.listing.outline import Leaf, UnknownKindError, outline
from memstore.listing.tree import KeyTree, key_tree

__all__ = [
    "COLUMNS",
    "GLOB",
    "KeyTree",
    "Keyspace",
    "Leaf",
    "Listed",
    "Mode",
    "UnknownKindError",
    "WhileRead",
    "absent",
    "absent_many",
    "cells",
    "entries",
    "has_keys",
    "key_tree",
    "near",
    "no_match",
    "no_value",
    "no_values",
    "open_keyspace",
    "opened",
    "outline",
    "tell_of_wait",
    "value_bytes",
    "wanted_of",
]
