"""Descriptions: plans as bytes, in records and headers.

A *description* is the msgpack of `[tree, leaves, inline]`; `tree/node.py` has the grammar of the tree. A leaf is

    [dtype, shape, offset, stride or nil, flags, device or nil]      trailing defaults (nil, 0, nil) left out
    index                                                            the very same tensor as that earlier leaf

with flags = kind * 2 + requires_grad. Leaves whose bytes overlap are tied. The description of a bare tensor of two
dimensions takes some 20 bytes. It may come from a file that somebody tampered with: everything is checked here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from memstore.depth import nests_too_deeply
from memstore.engine import Leaf, Path
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure.checks import MalformedError, as_list, require, sizes, unpack
from memstore.structure.plans.clusters import cluster_leaves
from memstore.structure.plans.plan import Plan
from memstore.structure.tensors import DTYPES, PLAIN, Traits, read_device, read_flags, to_flags, traits
from memstore.structure.tree import ObjectNode, Reader, TensorNode, from_msgpack, leaf_names, to_msgpack
from memstore.undecodable import UNDECODABLE

_MAX_BYTES = 1 << 60
_CACHED_PLANS = 256
_CACHED_BYTES = 16 << 20  # of descriptions

# -- writing ---------------------------------------------------------------------------------------------------------


def describe(
    tree: Any, leaves: Sequence[Leaf], leaf_traits: Sequence[Traits], same: dict[int, int], inline: bool
) -> bytes:
    written = [
        same[i] if i in same else _write_leaf(leaf, leaf_trait)
        for i, (leaf, leaf_trait) in enumerate(zip(leaves, leaf_traits, strict=True))
    ]
    return to_msgpack([tree, written, inline])


def _write_leaf(leaf: Leaf, leaf_traits: Traits) -> list[Any]:
    flags = to_flags(leaf_traits.kind, leaf_traits.requires_grad)
    written: list[Any] = [leaf.dtype, leaf.shape, leaf.offset, leaf.stride, flags, leaf_traits.device]
    while not written[-1] and len(written) > 3 and written[-1] != ():
        written.pop()
    return written


# -- reading ---------------------------------------------------------------------------------------------------------

_SHORT = 128  # bytes; up to here Python's own hash is as fast as xxh3
_plans: dict[int | bytes, Plan] = {}
_plans_bytes = 0


def plan_of(description: bytes) -> Plan:
    """The plan of a stored description. Cached, long ones by hash, and compared: hashes can be made to collide.

    Raises:
        CorruptionError: no put wrote this description.
    """
    name = description if len(description) <= _SHORT else xxhash.xxh3_64_intdigest(description)
    plan = _plans.get(name)
    if plan is not None and plan.description == description:
        return plan
    plan = _read(bytes(description))
    _remember(name, plan)
    return plan


def _remember(name: int | bytes, plan: Plan) -> None:
    global _plans_bytes
    # Threads may be here at once: the count can drift by one plan, which the clear puts right.
    if len(_plans) >= _CACHED_PLANS or _plans_bytes > _CACHED_BYTES:
        _plans.clear()
        _plans_bytes = 0
    _plans[name] = plan
    _plans_bytes += len(plan.description)


def _read(description: bytes) -> Plan:
    try:
        return _read_checked(description)
    except (MalformedError, *UNDECODABLE) as error:
        if isinstance(error, RecursionError) and not nests_too_deeply(lambda: _read_checked(description)):
            raise
        raise CorruptionError(f"the description of the value is damaged: {error}") from error


def _read_checked(description: bytes) -> Plan:
    tree, written, inline = unpack(as_list(from_msgpack(description)), (int, list), list, bool)
    reader = Reader()
    root = reader.node(tree)
    require(reader.tensors == len(written), f"{reader.tensors} tensors in the tree, {len(written)} leaves")
    names: list[Path] = []
    object_names: list[Path] = []
    for name, node in leaf_names(root):
        if type(node) is ObjectNode:
            object_names.append(name)
        elif type(node) is TensorNode:
            names.append(name)
    leaves: list[Leaf] = []
    leaf_traits: list[Traits] = []
    same: dict[int, int] = {}
    for i, entry in enumerate(written):
        if type(entry) is int:
            require(0 <= entry < i and entry not in same, "a leaf that is said to be the same as no earlier leaf")
            same[i] = entry
            twin = leaves[entry]
            leaves.append(Leaf(names[i], twin.dtype, twin.shape, twin.stride, twin.offset, twin.nbytes))
            leaf_traits.append(leaf_traits[entry])
        else:
            leaf, leaf_trait = read_leaf(names[i], entry)
            leaves.append(leaf)
            leaf_traits.append(leaf_trait)
    _check_ties(leaves, same)
    return Plan(
        description,
        root,
        tuple(leaves),
        tuple(leaf_traits),
        same,
        inline,
        tuple(object_names),
        frozenset(reader.fixed),
        frozenset(reader.host),
    )


def read_leaf(name: Path, entry: Any) -> tuple[Leaf, Traits]:
    """A leaf as it is written: see the head of this file. Raises MalformedError, and UnsupportedValueError."""
    entry = as_list(entry)
    require(3 <= len(entry) <= 6 and type(entry[0]) is str, "a malformed leaf")
    dtype_name, shape, offset, stride, flags, device = entry + [None, 0, None][len(entry) - 3 :]
    dtype = DTYPES.get(str(dtype_name))
    if dtype is None and traits.may_be_dtype(str(dtype_name)):
        raise UnsupportedValueError(
            f"the stored value has a leaf of torch.{dtype_name}, which torch {torch.__version__} hasn't; "
            "read it with the version that wrote it, or a newer one"
        )
    if dtype is None or dtype in traits.QUANTIZED:
        raise MalformedError(f"no dtype is called {dtype_name!r}")
    require(type(offset) is int and 0 <= offset < _MAX_BYTES, "a malformed offset")
    shape = sizes(shape)
    require(len(shape) <= 1024, "a leaf of too many dimensions")
    if stride is not None:
        stride = sizes(stride)
        require(len(stride) == len(shape), "a leaf with fewer or more strides than sizes")
    elements = check_extent(shape, stride, dtype)
    return (
        Leaf(name, dtype_name, shape, stride, offset, elements * dtype.itemsize),
        _read_traits(flags, device, dtype),
    )


def check_extent(shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> int:
    """The elements that a leaf takes, gaps included; MalformedError for more than any memory has."""
    # torch refuses products beyond 63 bits, also where another size is 0
    require(traits.count([max(size, 1) for size in shape]) * dtype.itemsize < _MAX_BYTES, "a leaf that is too large")
    require(stride is None or all(step < _MAX_BYTES for step in stride), "a leaf of too large strides")
    elements = traits.count(shape) if stride is None else traits.reach(shape, stride)
    require(elements < _MAX_BYTES, "a leaf that is too large")
    return elements


def _read_traits(flags: Any, device: Any, dtype: torch.dtype) -> Traits:
    kind, requires_grad = read_flags(flags)
    require(device is None or (type(device) is str and _is_device(device)), "a malformed device")
    require(not requires_grad or dtype.is_floating_point or dtype.is_complex, "a gradient of integers")
    return Traits(kind, requires_grad, device) if flags or device else PLAIN


def _is_device(name: str) -> bool:
    try:
        device = read_device(name)
    except MalformedError:
        return False
    return isinstance(device, str) or device.type not in ("cpu", "meta")


def _check_ties(leaves: Sequence[Leaf], same: dict[int, int]) -> None:
    for cluster in cluster_leaves(leaves, same):
        if len(cluster) > 1:
            for i in cluster:
                require(
                    leaves[i].offset % DTYPES[leaves[i].dtype].itemsize == 0,
                    "tied leaves that don't start at a whole element",
                )
