"""Plans: where the leaves of a structure lie in memory, and how they become the value again; and descriptions.

A plan is made once, cached, and shared by threads. A *description* is a plan as bytes, in records and headers: the
msgpack of `[tree, leaves, inline]`; `tree.py` has the grammar of the tree. A leaf is

    [dtype, shape, offset, stride or nil, flags, device or nil]      trailing defaults (nil, 0, nil) left out
    index                                                            the very same tensor as that earlier leaf

with flags = kind * 2 + requires_grad. Leaves whose bytes overlap are tied. The description of a bare tensor of two
dimensions takes some 20 bytes. It may come from a file that somebody tampered with: everything is checked here, once.

A *recipe* says how the tensors of a plan's leaves are made over a data section. The leaves are sorted once, so that a
get only runs through lists: one storage a leaf, but for leaves that share bytes; leaves of one dtype and shape that lie
one behind the other are the rows of one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from memstore._parsing import UNDECODABLE, nests_too_deeply
from memstore.engine import CONTROL_SIZE, Leaf, Path, Span, decode_mutable, lay_out
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure import traits
from memstore.structure.memory import ByteRange, Memory, clusters_of
from memstore.structure.refusals import MalformedError, as_list, require, sizes, unpack
from memstore.structure.traits import DTYPES, NUMPY_DTYPES, PARAMETER, PLAIN, Traits, read_device, read_flags, to_flags
from memstore.structure.tree import Container, Node, TensorNode, TreeReader, from_msgpack, names_of, to_msgpack

# --- Plans -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Plan:
    """The layout of values of one structure in memory, and what builds them from it. Immutable.

    Attributes:
        description: the bytes from which `plan_of` makes this plan.
        root: the compiled tree.
        leaves: the tensors, in the order of the walk.
        traits: kind, requires_grad and device of each leaf.
        same: {leaf: the earlier leaf that is the very same tensor}.
        inline: whether the value is meant to live in its record.
        object_names: of the leaves that are no tensors.
        fixed, host: leaves that keep their dtype, or stay on the CPU, whatever a get's dtype= or device= says.
        marked: whether any leaf has traits.
        nbytes: size of the data section.
        recipe: made by the first get; see structure/rebuilding.py.
    """

    description: bytes
    root: Node
    leaves: tuple[Leaf, ...]
    traits: tuple[Traits, ...]
    same: dict[int, int]
    inline: bool
    object_names: tuple[Path, ...]
    fixed: frozenset[int]
    host: frozenset[int]
    marked: bool = field(init=False)
    object_count: int = field(init=False)
    nbytes: int = field(init=False)
    recipe: Recipe | None = field(init=False, default=None)
    _bare: tuple[np.dtype[Any], tuple[int, ...]] | tuple[()] | None = field(init=False, default=None)
    _header: bytes | None = field(init=False, default=None)
    _loaded: frozenset[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.marked = any(found is not PLAIN for found in self.traits)
        self.object_count = len(self.object_names)
        self.nbytes = max((leaf.offset + leaf.nbytes for leaf in self.leaves), default=0)

    @property
    def header(self) -> bytes:
        """The entries of the safetensors header. Only puts need them."""
        if self._header is None:
            spans = [span for span, _ in spans_of(self.leaves, self.same)]
            self._header = lay_out(spans, aligned=not self.inline).header
        return self._header

    @property
    def loaded(self) -> frozenset[int]:
        """The leaves that a view has as plain tensors. Only views need them."""
        if self._loaded is None:
            self._loaded = frozenset(_leaves_looked_into(self.root, False))
        return self._loaded

    def bare_array(self, memory: bytearray | Memory, start: int) -> np.ndarray[Any, Any] | None:
        """Returns the array to make the value of, over the bytes from `start`; None if it is no single plain tensor."""
        if self._bare is None:
            self._bare = ()
            if type(self.root) is TensorNode and not self.marked and self.nbytes:
                (leaf,) = self.leaves
                if suits_numpy(leaf) and not leaf.offset:
                    self._bare = NUMPY_DTYPES[leaf.dtype], leaf.shape
        if not self._bare:
            return None
        dtype, shape = self._bare
        return np.ndarray(shape, dtype, memory, start)

    def __repr__(self) -> str:
        return f"Plan({len(self.leaves)} leaves, {self.nbytes} bytes)"


def _leaves_looked_into(node: Node, inside: bool) -> Iterator[int]:
    if isinstance(node, TensorNode):
        if inside:
            yield node.index
    elif isinstance(node, Container):
        for _, child in node.children():
            yield from _leaves_looked_into(child, inside or node.reads_leaves)


# --- Descriptions ----------------------------------------------------------------------------------------------------


_MAX_BYTES = 1 << 60
_CACHED_PLANS = 256
_CACHED_BYTES = 16 << 20  # of descriptions

# -- writing ---------------------------------------------------------------------------------------------------------


def describe(
    tree: Any, leaves: Sequence[Leaf], leaf_traits: Sequence[Traits], same: dict[int, int], inline: bool
) -> bytes:
    """Writes the description from which `plan_of` makes a plan."""
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
    """Returns the plan of a stored description. Cached, long ones by hash, and compared: hashes can be made to collide.

    Raises:
        CorruptionError: no put wrote this description.
    """
    global _plans_bytes
    name = description if len(description) <= _SHORT else xxhash.xxh3_64_intdigest(description)
    plan = _plans.get(name)
    if plan is not None and plan.description == description:
        return plan
    description = bytes(description)
    try:
        plan = _parse_description(description)
    except (MalformedError, *UNDECODABLE) as error:
        if isinstance(error, RecursionError) and not nests_too_deeply(lambda: _parse_description(description)):
            raise
        raise CorruptionError(f"the description of the value is damaged: {error}") from error
    # Threads may be here at once: the count can drift by one plan, which the clear puts right.
    if len(_plans) >= _CACHED_PLANS or _plans_bytes > _CACHED_BYTES:
        _plans.clear()
        _plans_bytes = 0
    _plans[name] = plan
    _plans_bytes += len(description)
    return plan


def _parse_description(description: bytes) -> Plan:
    tree, written, inline = unpack(as_list(from_msgpack(description)), (int, list), list, bool)
    reader = TreeReader()
    root = reader.node(tree)
    require(reader.tensors == len(written), f"{reader.tensors} tensors in the tree, {len(written)} leaves")
    names, object_names = names_of(root)
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
    for cluster in cluster_leaves(leaves, same):
        whole = len(cluster) == 1 or all(leaves[i].offset % DTYPES[leaves[i].dtype].itemsize == 0 for i in cluster)
        require(whole, "tied leaves that don't start at a whole element")
    return Plan(
        description,
        root,
        tuple(leaves),
        tuple(leaf_traits),
        same,
        inline,
        object_names,
        frozenset(reader.fixed),
        frozenset(reader.host),
    )


def read_leaf(name: Path, entry: Any) -> tuple[Leaf, Traits]:
    """Reads a leaf as it is written: see the head of this file. Raises MalformedError, and UnsupportedValueError."""
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
    nbytes = check_extent(shape, stride, dtype) * dtype.itemsize
    kind, requires_grad = read_flags(flags)
    require(device is None or (type(device) is str and _is_device(device)), "a malformed device")
    require(not requires_grad or dtype.is_floating_point or dtype.is_complex, "a gradient of integers")
    leaf_traits = Traits(kind, requires_grad, device) if flags or device else PLAIN
    return Leaf(name, dtype_name, shape, stride, offset, nbytes), leaf_traits


def check_extent(shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> int:
    """Counts the elements that a leaf takes, gaps included. Raises MalformedError for more than any memory has."""
    # torch refuses products beyond 63 bits, also where another size is 0
    require(traits.count([max(size, 1) for size in shape]) * dtype.itemsize < _MAX_BYTES, "a leaf that is too large")
    require(stride is None or all(step < _MAX_BYTES for step in stride), "a leaf of too large strides")
    elements = traits.count(shape) if stride is None else traits.reach(shape, stride)
    require(elements < _MAX_BYTES, "a leaf that is too large")
    return elements


def _is_device(name: str) -> bool:
    try:
        device = read_device(name)
    except MalformedError:
        return False
    return isinstance(device, str) or device.type not in ("cpu", "meta")


# --- Plans of mutable entries: leaves of one number of rows, behind a control page -----------------------------------


def plan_of_rows(description: bytes, nbytes: int) -> Plan:
    """Returns the plan of all rows, of an entry with so many bytes of data. Raises CorruptionError."""
    plan = plan_of(decode_mutable(description).plan)
    capacity = plan.leaves[0].shape[0] if plan.leaves and plan.leaves[0].shape else 0
    for leaf in plan.leaves:
        has_rows = leaf.stride is None and leaf.shape[:1] == (capacity,)
        if not has_rows or leaf.offset < CONTROL_SIZE or leaf.offset + leaf.nbytes > nbytes:
            raise CorruptionError(f"its leaf {leaf.name} doesn't have {capacity:,} rows within its {nbytes:,} bytes")
    if not capacity or plan.object_count or plan.same or plan.marked:
        raise CorruptionError("its description isn't that of rows")
    return plan


def capacity_of(description: bytes, nbytes: int) -> int:
    """Counts the rows that there is room for. Raises CorruptionError."""
    return plan_of_rows(description, nbytes).leaves[0].shape[0]


# --- Leaves by their storages ----------------------------------------------------------------------------------------


def cluster_leaves(leaves: Sequence[Leaf], same: dict[int, int]) -> list[list[int]]:
    """Groups the leaves by their storages: alone, or with those that their bytes overlap. Leaves empty ones out."""
    ranges = (
        ByteRange(leaf.offset, leaf.offset + leaf.nbytes, i)
        for i, leaf in enumerate(leaves)
        if leaf.nbytes and i not in same
    )
    return [[one.leaf for one in cluster] for cluster in clusters_of(ranges)]


def storage_range(leaves: Sequence[Leaf], cluster: Sequence[int]) -> tuple[int, int]:
    """Returns where the storage of tied leaves starts, on a multiple of their widest element, and where it stops."""
    if len(cluster) == 1:  # need not be aligned
        leaf = leaves[cluster[0]]
        return leaf.offset, leaf.offset + leaf.nbytes
    widest = max(DTYPES[leaves[i].dtype].itemsize for i in cluster)
    first = min(leaves[i].offset for i in cluster)
    return first - first % widest, max(leaves[i].offset + leaves[i].nbytes for i in cluster)


def _span_of(leaves: Sequence[Leaf], members: Sequence[int]) -> Span:
    """Returns the span that a storage is stored as: a tensor's own where one leaf is all of it, else plain bytes."""
    start, stop = storage_range(leaves, members)
    widest = max((DTYPES[leaves[i].dtype] for i in members), key=lambda dtype: dtype.itemsize)
    for i in members:
        leaf = leaves[i]
        whole = leaf.offset == start and leaf.nbytes == stop - start
        if whole and (leaf.stride is None or traits.is_c_ordered(leaf.shape, leaf.stride)):
            return Span(leaf.name, leaf.dtype, widest.itemsize, leaf.shape, leaf.nbytes)
    return Span(leaves[members[0]].name, traits.DTYPE_NAMES[widest], widest.itemsize, None, stop - start)


def spans_of(leaves: Sequence[Leaf], same: dict[int, int]) -> list[tuple[Span, list[int]]]:
    """Returns the spans to be laid out, with the leaves that lie there, in the order of the leaves."""
    empty = [[i] for i, leaf in enumerate(leaves) if not leaf.nbytes and i not in same]
    found = sorted([sorted(cluster) for cluster in cluster_leaves(leaves, same)] + empty)
    return [(_span_of(leaves, members), members) for members in found]


# --- A stored value, described for people ----------------------------------------------------------------------------


def leaf_table(plan: Plan) -> list[tuple[Path, torch.dtype, tuple[int, ...], int]]:
    """Lists name, dtype, shape and bytes of each tensor. A nested tensor is several: values, offsets, lengths."""
    return [(leaf.name, DTYPES[leaf.dtype], leaf.shape, leaf.nbytes) for leaf in plan.leaves]


def stored_bytes(plan: Plan) -> int:
    """Counts the bytes of the tensors; shared bytes once."""
    ranges = [storage_range(plan.leaves, cluster) for cluster in cluster_leaves(plan.leaves, plan.same)]
    return sum(stop - start for start, stop in ranges)


def structure_text(plan: Plan) -> str:
    """Describes a structure: "TensorDict[3] of 12 leaves", "dict of 300 leaves and 2 objects", "Tensor"."""
    name = plan.root.title
    tensors, others = len(plan.leaves), plan.object_count
    if not any(True for _ in plan.root.children()):
        return name if tensors or others else f"empty {name}"
    text = f"{name} of {tensors} {'leaf' if tensors == 1 else 'leaves'}"
    return f"{text} and {others} {'object' if others == 1 else 'objects'}" if others else text


# --- Recipes ---------------------------------------------------------------------------------------------------------


_NUMPY_DIMENSIONS = 32  # numpy 1 allows no more


class ArrayRun(NamedTuple):
    """Leaves of one dtype and shape that lie one behind the other: one array, whose rows they are."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # with the number of leaves in front
    offset: int
    leaves: tuple[int, ...]


class StoragePart(NamedTuple):
    """A leaf somewhere in a storage that others may share."""

    leaf: int
    dtype: torch.dtype
    offset: int  # in elements, in the storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Recipe:
    """A plan's leaves, sorted by the way in which their tensors are made."""

    __slots__ = ("alone", "buffers", "copied", "count", "empty", "parameters", "runs", "same", "storages", "traits")

    def __init__(self, leaves: Sequence[Leaf], leaf_traits: Sequence[Traits], same: dict[int, int]) -> None:
        self.count = len(leaves)
        self.runs: list[ArrayRun] = []
        self.alone: list[tuple[int, np.dtype[Any], tuple[int, ...], int]] = []  # leaf, dtype, shape, offset
        self.buffers: list[tuple[int, torch.dtype, tuple[Any, ...], int, int]] = []  # leaf, dtype, sizes, count, offset
        self.storages: list[tuple[int, int, tuple[StoragePart, ...]]] = []  # start, stop
        # the same, of leaves in files of others that start between elements
        self.copied: list[tuple[int, int, tuple[StoragePart, ...]]] = []
        self.empty = [i for i, leaf in enumerate(leaves) if not leaf.nbytes and i not in same]
        self.same = tuple(same.items())
        marked = [(i, found) for i, found in enumerate(leaf_traits) if found is not PLAIN and i not in same]
        self.parameters = [(i, t.requires_grad) for i, t in marked if t.kind == PARAMETER and t.device is None]
        self.traits = [(i, t) for i, t in marked if t.kind != PARAMETER or t.device is not None]
        rows: list[int] = []
        for cluster in cluster_leaves(leaves, same):
            first, leaf, dtype = cluster[0], leaves[cluster[0]], DTYPES[leaves[cluster[0]].dtype]
            if len(cluster) > 1:
                self.storages.append(_shared_storage(leaves, cluster))
            elif leaf.offset % dtype.itemsize:
                self.copied.append(_shared_storage(leaves, cluster))
            elif suits_numpy(leaf):
                rows.append(first)
            elif leaf.stride is None:
                sizes = leaf.shape or ((),)  # for resize_: of numbers, or of no dimension
                self.buffers.append((first, dtype, sizes, leaf.nbytes // dtype.itemsize, leaf.offset))
            else:
                self.storages.append(_shared_storage(leaves, cluster))
        for run in runs_of(leaves, rows):
            leaf, dtype = leaves[run[0]], NUMPY_DTYPES[leaves[run[0]].dtype]
            if len(run) == 1:
                self.alone.append((run[0], dtype, leaf.shape, leaf.offset))
            else:
                self.runs.append(ArrayRun(dtype, (len(run), *leaf.shape), leaf.offset, tuple(run)))


def runs_of(leaves: Sequence[Leaf], members: Iterable[int]) -> list[list[int]]:
    """Groups leaves, each with those of its dtype and shape that lie right behind it."""
    runs: list[list[int]] = []
    for i in members:
        before = leaves[runs[-1][-1]] if runs else None
        if (
            before is not None
            and before.dtype == leaves[i].dtype
            and before.shape == leaves[i].shape
            and before.shape != ()  # the rows of a one-dimensional array are scalars, not arrays
            and before.offset + before.nbytes == leaves[i].offset
        ):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def strides_of(leaf: Leaf) -> tuple[int, ...]:
    return traits.contiguous_stride(leaf.shape) if leaf.stride is None else leaf.stride


def suits_numpy(leaf: Leaf) -> bool:
    """Returns whether a leaf can be a numpy array over the memory, which costs least."""
    return leaf.stride is None and leaf.dtype in NUMPY_DTYPES and len(leaf.shape) < _NUMPY_DIMENSIONS


def _shared_storage(leaves: Sequence[Leaf], cluster: Sequence[int]) -> tuple[int, int, tuple[StoragePart, ...]]:
    start, stop = storage_range(leaves, cluster)
    parts = []
    for i in cluster:
        leaf, dtype = leaves[i], DTYPES[leaves[i].dtype]
        offset = (leaf.offset - start) // dtype.itemsize
        parts.append(StoragePart(i, dtype, offset, leaf.shape, strides_of(leaf)))
    return start, stop, tuple(parts)
