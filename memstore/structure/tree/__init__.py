"""The tree of a value: which containers it has, and where its tensors and objects stand in them.

node              the grammar; nodes, which build containers again; the reader, which makes nodes of a tree
compile           trees as bytes; a tree that was just made, as a node
merge             trees of one value that several processes hold in part
dict_keys         keys of dicts in a tree, and in the names of leaves
late_containers   containers that are known only once their library is imported
"""

from __future__ import annotations

from memstore.structure.tree.compile import compile_tree, from_msgpack, to_msgpack
from memstore.structure.tree.dict_keys import name_of, read_keys, write_key
from memstore.structure.tree.late_containers import load_late_containers, loads_containers
from memstore.structure.tree.merge import LeafNames, TreesDifferError, merge_trees, tree_names
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
    "LeafNames",
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
    "TreesDifferError",
    "compile_tree",
    "from_msgpack",
    "leaf_names",
    "load_late_containers",
    "loads_containers",
    "merge_trees",
    "name_of",
    "read_keys",
    "register",
    "to_msgpack",
    "tree_names",
    "walk_names",
    "write_key",
]
