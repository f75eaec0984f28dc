"""The plan of a structure: where its leaves lie, and how they become the value again. Made once, cached, shared.

A *description* is the msgpack of `[tree, leaves, inline]`; `node.py` has the grammar of the tree. A leaf is

    [dtype, shape, offset, stride or nil, flags, device or nil]      trailing defaults (nil, 0, nil) left out
    index                                                            the very same tensor as that earlier leaf

with flags = kind * 2 + requires_grad. Leaves whose bytes overlap are tied. The description of a bare tensor of two
dimensions takes some 20 bytes. It may come from a file that somebody tampered with: everything is checked here, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import xxhash

from memstore.engine.layout import Span, lay_out
from memstore.engine.record import Leaf, Path
from memstore.errors import CorruptionError
from memstore.structure import traits
from memstore.structure.node import (
    MalformedError,
    Node,
    ObjectNode,
    Reader,
    TensorNode,
    as_list,
    require,
    sizes,
    unpack,
    walk_names,
)
from memstore.structure.traits import DTYPES, PLAIN, Traits

_MAX_BYTES = 1 << 60
_CACHED_PLANS = 256
_CACHED_BYTES = 16 << 20  # of descriptions


class Plan:
    """How a value of one structure is laid out in memory and built from it. Immutable.

    Attributes:
        description: what `plan_of` makes this plan from.
        leaves: the tensors, in the order of the walk.
        traits: of the leaves: kind, requires_grad, device.
        marked: whether any leaf has traits.
        same: {leaf: the earlier leaf that is the very same tensor}.
        nbytes: size of the data section.
        inline: whether the value is meant to live in its record.
        root: the compiled tree.
        fixed, host: leaves that a get's dtype=, or device=, doesn't concern.
        object_count: how many leaves are no tensors.
    """

    __slots__ = (
        "_header",
        "_loaded",
        "description",
        "fixed",
        "host",
        "inline",
        "leaves",
        "marked",
        "nbytes",
        "object_count",
        "object_names",
        "recipe",
        "root",
        "same",
        "traits",
    )

    def __init__(
        self,
        description: bytes,
        root: Node,
        leaves: tuple[Leaf, ...],
        leaf_traits: tuple[Traits, ...],
        same: dict[int, int],
        inline: bool,
        object_names: tuple[Path, ...],
        fixed: frozenset[int],
        host: frozenset[int],
    ) -> None:
        self.description = description
        self.root = root
        self.leaves = leaves
        self.traits = leaf_traits
        self.same = same
        self.marked = any(found is not PLAIN for found in leaf_traits)
        self.inline = inline
        self.object_names = object_names
        self.fixed = fixed
        self.host = host
        self.object_count = len(object_names)
        self.nbytes = max((leaf.offset + leaf.nbytes for leaf in leaves), default=0)
        self._loaded: frozenset[int] | None = None
        self._header: bytes | None = None
        self.recipe: Any = None  # see storage.py

    @property
    def header(self) -> bytes:
        """The entries of the safetensors header. Only puts need them."""
        if self._header is None:
            spans = [span for span, _ in spans_of(self.leaves, self.same)]
            self._header = lay_out(spans, aligned=not self.inline).header
        return self._header

    @property
    def loaded(self) -> frozenset[int]:
        """Leaves that a view has as plain tensors. Only views need them."""
        if self._loaded is None:
            self._loaded = frozenset(_leaves_looked_into(self.root, False))
        return self._loaded

    def __repr__(self) -> str:
        return f"Plan({len(self.leaves)} leaves, {self.nbytes} bytes)"


def _leaves_looked_into(node: Node, inside: bool) -> Iterator[int]:
    if isinstance(node, TensorNode):
        if inside:
            yield node.index
        return
    for _, child in node.children():
        yield from _leaves_looked_into(child, inside or node.loads)


def cluster_leaves(leaves: Sequence[Leaf], same: dict[int, int]) -> list[list[int]]:
    """The leaves by their storages: alone, or with those that their bytes overlap. Empty ones are left out."""
    order = sorted((leaf.offset, i) for i, leaf in enumerate(leaves) if leaf.nbytes and i not in same)
    clusters: list[list[int]] = []
    end = -1
    for offset, i in order:
        stop = offset + leaves[i].nbytes
        if offset < end:
            clusters[-1].append(i)
            end = max(end, stop)
        else:
            clusters.append([i])
            end = stop
    return clusters


def storage_range(leaves: Sequence[Leaf], cluster: Sequence[int]) -> tuple[int, int]:
    """Where the storage of tied leaves starts, on a multiple of their widest element, and where it stops."""
    if len(cluster) == 1:  # need not be aligned
        leaf = leaves[cluster[0]]
        return leaf.offset, leaf.offset + leaf.nbytes
    widest = max(DTYPES[leaves[i].dtype].itemsize for i in cluster)
    first = min(leaves[i].offset for i in cluster)
    return first - first % widest, max(leaves[i].offset + leaves[i].nbytes for i in cluster)


def _span_of(leaves: Sequence[Leaf], members: Sequence[int]) -> Span:
    """The span that a storage is stored as: a tensor's own where one leaf is all of it, else plain bytes."""
    start, stop = storage_range(leaves, members)
    widest = max((DTYPES[leaves[i].dtype] for i in members), key=lambda dtype: dtype.itemsize)
    for i in members:
        leaf = leaves[i]
        whole = leaf.offset == start and leaf.nbytes == stop - start
        if whole and (leaf.stride is None or traits.is_c_ordered(leaf.shape, leaf.stride)):
            return Span(leaf.name, leaf.dtype, widest.itemsize, leaf.shape, leaf.nbytes)
    return Span(leaves[members[0]].name, traits.DTYPE_NAMES[widest], widest.itemsize, None, stop - start)


def spans_of(leaves: Sequence[Leaf], same: dict[int, int]) -> list[tuple[Span, list[int]]]:
    """What is laid out, with the leaves that lie there, in the order of the leaves."""
    empty = [[i] for i, leaf in enumerate(leaves) if not leaf.nbytes and i not in same]
    found = sorted([sorted(cluster) for cluster in cluster_leaves(leaves, same)] + empty)
    return [(_span_of(leaves, members), members) for members in found]


# -- descriptions ----------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """For what trees carry that msgpack has not."""
    if isinstance(value, torch.device):
        return str(value)
    raise NotImplementedError(f"{type(value)} in a tree")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder().decode


def encode_tree(tree: Any) -> bytes:
    return _encode(tree)


def describe(
    tree: Any, leaves: Sequence[Leaf], leaf_traits: Sequence[Traits], same: dict[int, int], inline: bool
) -> bytes:
    written = [
        same[i] if i in same else _write_leaf(leaf, leaf_trait)
        for i, (leaf, leaf_trait) in enumerate(zip(leaves, leaf_traits, strict=True))
    ]
    return _encode([tree, written, inline])


def _write_leaf(leaf: Leaf, leaf_traits: Traits) -> list[Any]:
    flags = leaf_traits.kind * 2 + leaf_traits.requires_grad
    written: list[Any] = [leaf.dtype, leaf.shape, leaf.offset, leaf.stride, flags, leaf_traits.device]
    while not written[-1] and len(written) > 3 and written[-1] != ():
        written.pop()
    return written


_plans: dict[int, Plan] = {}
_plans_bytes = 0


def plan_of(description: bytes) -> Plan:
    """The plan that a stored description says. Cached by hash, and compared: hashes can be made to collide.

    Raises:
        CorruptionError: no flatten wrote this description.
    """
    digest = xxhash.xxh3_64_intdigest(description)
    plan = _plans.get(digest)
    if plan is not None and plan.description == description:
        return plan
    plan = _read(bytes(description))
    _remember(digest, plan)
    return plan


def _remember(digest: int, plan: Plan) -> None:
    global _plans_bytes
    # Threads may be here at once: the count can drift by one plan, which the clear puts right.
    if len(_plans) >= _CACHED_PLANS or _plans_bytes > _CACHED_BYTES:
        _plans.clear()
        _plans_bytes = 0
    _plans[digest] = plan
    _plans_bytes += len(plan.description)


def _read(description: bytes) -> Plan:
    try:
        return _read_checked(description)
    except (MalformedError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CorruptionError(f"the description of the value is damaged: {error}") from error


def _read_checked(description: bytes) -> Plan:
    tree, written, inline = unpack(as_list(_decode(description)), (int, list), list, bool)
    reader = Reader()
    root = reader.node(tree)
    require(reader.tensors == len(written), f"{reader.tensors} tensors in the tree, {len(written)} leaves")
    names: list[Path] = []
    object_names: list[Path] = []
    for name, node in walk_names(root):
        if type(node) is ObjectNode:
            object_names.append(name)
        elif type(node) is TensorNode:
            names.append(name)
    leaves: list[Leaf] = []
    leaf_traits: list[Traits] = []
    same: dict[int, int] = {}
    for i, entry in enumerate(written):
        if type(entry) is int:
            require(0 <= entry < i and entry not in same, "a leaf that is the same as none before it")
            same[i] = entry
            twin = leaves[entry]
            leaves.append(Leaf(names[i], twin.dtype, twin.shape, twin.stride, twin.offset, twin.nbytes))
            leaf_traits.append(leaf_traits[entry])
        else:
            leaf, leaf_trait = _read_leaf(names[i], entry)
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


def _read_leaf(name: Path, entry: Any) -> tuple[Leaf, Traits]:
    entry = as_list(entry)
    require(3 <= len(entry) <= 6 and type(entry[0]) is str, "no leaf")
    dtype_name, shape, offset, stride, flags, device = entry + [None, 0, None][len(entry) - 3 :]
    dtype = DTYPES.get(str(dtype_name))
    if dtype is None or dtype in traits.QUANTIZED:
        raise MalformedError(f"no dtype is called {dtype_name!r}")
    require(type(offset) is int and 0 <= offset < _MAX_BYTES, "no offset")
    shape = sizes(shape)
    require(len(shape) <= 1024, "a leaf of too many dimensions")
    if stride is not None:
        stride = sizes(stride)
        require(len(stride) == len(shape), "other strides than sizes")
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
    require(type(flags) is int and 0 <= flags < 8, "no flags of a leaf")
    require(device is None or (type(device) is str and _is_device(device)), "no device")
    kind, requires_grad = divmod(flags, 2)
    require(not requires_grad or dtype.is_floating_point or dtype.is_complex, "a gradient of integers")
    return Traits(kind, bool(requires_grad), device) if flags or device else PLAIN


def _is_device(name: str) -> bool:
    try:
        return torch.device(name).type not in ("cpu", "meta")
    except RuntimeError:
        return False


def _check_ties(leaves: Sequence[Leaf], same: dict[int, int]) -> None:
    for cluster in cluster_leaves(leaves, same):
        if len(cluster) > 1:
            for i in cluster:
                require(leaves[i].offset % DTYPES[leaves[i].dtype].itemsize == 0, "tied leaves between elements")
