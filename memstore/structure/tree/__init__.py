"""The tree of a value: which containers it has, and where its tensors and objects stand in them.

node              the grammar; nodes, which build containers again; the reader, which makes nodes of a tree
compile           trees as bytes; a tree that was just made, as a node
dict_keys         keys of dicts in a tree, and in the names of leaves
late_containers   containers that are known only once their library is imported
"""

from __future__ import annotations

from memstore.structure.tree.compile import compile_tree, from_msgpack, to_msgpack
from memstore.structure.tree.dict_keys import name_of, read_keys, write_key
from memstore.structure.tree.late_containers import load_late_containers, loads_containers
from memstore.structure.tree.node import (
    MAX_DEPTH,
    NODES,
    OBJECT,
    TENSOR,
    Entries,
    Node,
    ObjectNode,
    Parts,
    Reader,
    TensorNode,
    Tree,
    leaf_names,
    register,
    walk_names,
)

__all__ = [
    "MAX_DEPTH",
    "NODES",
    "OBJECT",
    "TENSOR",
    "Entries",
    "Node",
    "ObjectNode",
    "Parts",
    "Reader",
    "TensorNode",
    "Tree",
    "compile_tree",
    "from_msgpack",
    "leaf_names",
    "load_late_containers",
    "loads_containers",
    "name_of",
    "read_keys",
    "register",
    "to_msgpack",
    "walk_names",
    "write_key",
]
