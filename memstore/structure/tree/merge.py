"""The trees of one value that several processes hold in part, merged into the tree of the whole value.

Dicts, and TensorDicts, merge by key: a key that some lack is taken from those that have it, in the order in which it is
first seen. All else must agree: which containers there are, how long lists and tuples are, batch sizes. The devices of
TensorDicts are left out: each process has its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from memstore.engine import Path
from memstore.structure.checks import MalformedError, as_list, require
from memstore.structure.tree.compile import compile_tree, to_msgpack
from memstore.structure.tree.dict_keys import read_key
from memstore.structure.tree.node import TensorNode, Tree, leaf_names

# Where keys and entries stand in the trees of containers that merge by key, and where a device does.
_KEYED = {"dict": (1, 2), "ordered": (1, 2), "defaultdict": (2, 3), "td": (5, 6), "wrapped_shards": (3, 4)}
_TENSORDICT_DEVICE = 2


class TreesDifferError(Exception):
    """Two trees that can't be merged.

    Attributes:
        path: where, from the outermost key on.
        found: the two sides, in words.
    """

    def __init__(self, found: tuple[str, str]) -> None:
        super().__init__(found)
        self.path: list[Any] = []
        self.found = found


class LeafNames(NamedTuple):
    """The names of a value's leaves, in their order."""

    tensors: tuple[Path, ...]
    objects: tuple[Path, ...]


def tree_names(tree: Tree) -> LeafNames:
    """Raises MalformedError."""
    root, _ = compile_tree(tree)
    tensors: list[Path] = []
    objects: list[Path] = []
    for name, node in leaf_names(root):
        (tensors if isinstance(node, TensorNode) else objects).append(name)
    return LeafNames(tuple(tensors), tuple(objects))


def merge_trees(first: Tree, second: Tree) -> Tree:
    """The tree of both. Trees are as msgpack gives them. Raises TreesDifferError, and MalformedError."""
    if first == second:
        return _without_devices(first)
    if type(first) is int or type(second) is int:
        raise TreesDifferError((_shown(first), _shown(second)))
    first, second = _checked(first), _checked(second)
    kind = first[0]
    if kind != second[0]:
        raise TreesDifferError((_shown(first), _shown(second)))
    if kind in _KEYED:
        return _merge_keyed(kind, first, second)
    if kind in ("list", "tuple") and len(first[1]) == len(second[1]):
        pairs = zip(first[1], second[1], strict=True)
        return [kind, [_merge_entry(i, one, other) for i, (one, other) in enumerate(pairs)]]
    raise TreesDifferError((_shown(first), _shown(second)))


def _merge_keyed(kind: str, first: list[Any], second: list[Any]) -> Tree:
    keys_at, entries_at = _KEYED[kind]
    merged = list(first)
    if kind == "td":
        merged[_TENSORDICT_DEVICE] = None
    for i, (one, other) in enumerate(zip(first, second, strict=True)):
        if kind == "ordered" and i > entries_at:  # the attributes
            merged[i] = other if one is None else one if other is None else _merge_entry("__dict__", one, other)
        elif i not in (keys_at, entries_at) and (kind, i) != ("td", _TENSORDICT_DEVICE) and one != other:
            raise TreesDifferError((_shown(first), _shown(second)))
    entries = {to_msgpack(key): (key, tree) for key, tree in _entries(first, keys_at, entries_at)}
    for key, tree in _entries(second, keys_at, entries_at):
        name = to_msgpack(key)
        entries[name] = (key, _merge_entry(read_key(key), entries[name][1], tree) if name in entries else tree)
    merged[keys_at] = [key for key, _ in entries.values()]
    merged[entries_at] = [_without_devices(tree) for _, tree in entries.values()]
    return merged


def _entries(tree: list[Any], keys_at: int, entries_at: int) -> Iterable[tuple[Any, Tree]]:
    keys, entries = as_list(tree[keys_at]), as_list(tree[entries_at])
    require(len(keys) == len(entries), "other keys than entries")
    return zip(keys, entries, strict=True)


def _merge_entry(key: Any, first: Tree, second: Tree) -> Tree:
    try:
        return merge_trees(first, second)
    except TreesDifferError as error:
        error.path.insert(0, key)
        raise


def _without_devices(tree: Tree) -> Tree:
    """Of TensorDicts that lie in containers that merge."""
    if type(tree) is int:
        return tree
    tree = _checked(tree)
    kind = tree[0]
    if kind in _KEYED:
        _, entries_at = _KEYED[kind]
        tree = [*tree[:entries_at], [_without_devices(entry) for entry in tree[entries_at]], *tree[entries_at + 1 :]]
        if kind == "td":
            tree[_TENSORDICT_DEVICE] = None
    elif kind in ("list", "tuple"):
        tree = [kind, [_without_devices(entry) for entry in tree[1]]]
    return tree


def _checked(tree: Tree) -> list[Any]:
    """A container whose keys and entries stand where they belong."""
    tree = as_list(tree)
    require(len(tree) > 0 and type(tree[0]) is str, "a node that is not [kind, ...]")
    if tree[0] in _KEYED:
        keys_at, entries_at = _KEYED[tree[0]]
        require(len(tree) > entries_at, "a node whose fields are not those of its kind")
        as_list(tree[keys_at])
        as_list(tree[entries_at])
    elif tree[0] in ("list", "tuple"):
        require(len(tree) == 2, "a node whose fields are not those of its kind")
        as_list(tree[1])
    return tree


def _shown(tree: Tree) -> str:
    if type(tree) is int:
        return "an object" if tree else "a tensor"
    try:
        kind = {"td": "TensorDict", "ordered": "OrderedDict"}.get(tree[0], tree[0])
        if tree[0] == "td":
            return f"a {kind} of batch size {list(tree[1])}"
        return f"a {kind} of {len(tree[1])}" if tree[0] in ("list", "tuple") else f"a {kind}"
    except (LookupError, TypeError):
        raise MalformedError("a malformed node") from None
