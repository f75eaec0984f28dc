"""numpy arrays, and tensors that are not plain: sparse, nested and quantized ones, and the rules for subclasses.

    ["ndarray", tensor]
    ["sparse", layout, kind and requires_grad, [indices, values], object [size, coalesced]]                COO
    ["sparse", layout, kind and requires_grad, [compressed, plain indices, values], object [size, false]]  others
    ["jagged", ragged index, min, max, requires_grad, [values, offsets, lengths or nothing]]
    ["nested", requires_grad, buffer, sizes]                       the strided layout of nested tensors
    ["quantized", integers, object [scale, zero point]]            one scale for the whole tensor
    ["quantized_channels", axis, integers, scales, zero points]

An array comes back writable, also if the one that was put was not: its memory is the getter's own. Its strides are kept
where a tensor's are, if they are whole elements and not negative; else it comes back in C order. So do arrays of other
dtypes (text, dates, foreign byte order), which are stored as objects.

Plain tensors come here only in a careful walk, which looks at each of them to name the one that can't be stored. Sparse
tensors that are built are checked by torch, all indices, since its operators trust them.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import importlib
import itertools
import math
import operator
from collections.abc import Iterator
from types import NoneType
from typing import Any

import numpy as np
import torch

from memstore._threads import between_forks
from memstore._wording import first_line
from memstore.engine import Path
from memstore.sharding import TensorShard
from memstore.structure import traits
from memstore.structure.containers.wrappers import flatten_wrapper, is_wrapper
from memstore.structure.refusals import RefusedError, require, sizes, unpack
from memstore.structure.traits import NUMPY_DTYPES
from memstore.structure.tree import TENSOR, Entries, Node, Tree, TreeParts, TreeReader, register
from memstore.structure.walk import Flattener, Walk, flattener, flattens, refuse, refuse_unless_pickled, rule

# --- Arrays, and the rules for tensors -------------------------------------------------------------------------------


# -- numpy -----------------------------------------------------------------------------------------------------------

_ARRAY_DTYPES = frozenset(NUMPY_DTYPES.values())


class _WritableView:
    """The memory of an array, claimed to be writable: torch warns about arrays that are not. It is only read here."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


@flattens(np.ndarray)
def _flatten_array(value: np.ndarray[Any, Any], walk: Walk) -> Tree:
    tensor = tensor_of_array(value)
    if tensor is None:
        return walk.object(value)
    if walk.in_place and not _is_writable(value):
        raise RefusedError("a numpy array that can't be written, or not through a tensor")
    walk.tensors.append(tensor)
    return ("ndarray", TENSOR)


def tensor_of_array(value: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """The array's values, to be read: over its memory, where torch has such strides. None: torch has no such dtype."""
    if value.dtype not in _ARRAY_DTYPES or not value.dtype.isnative:
        return None
    if any(step < 0 or step % value.itemsize for step in value.strides) or not value.size:
        value = value.copy()
    if not value.flags.writeable:
        value = np.asarray(_WritableView(value))
    return torch.from_numpy(value)


def _is_writable(value: np.ndarray[Any, Any]) -> bool:
    return value.flags.writeable and all(step >= 0 and step % value.itemsize == 0 for step in value.strides)


@register
class ArrayNode(Node):
    __slots__ = ("entry",)
    kind = "ndarray"
    reads_leaves = True

    def __init__(self, entry: Node) -> None:
        self.entry = entry

    @classmethod
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        (tree,) = unpack(payload, int)
        return cls(reader.host_tensor(tree))

    def build(self, parts: TreeParts) -> Any:
        return self.entry.build(parts).detach().numpy()

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.entry

    def describe(self) -> str:
        return "numpy array"


# -- tensors by themselves -------------------------------------------------------------------------------------------


@flattens(torch.Tensor, torch.nn.Parameter)
def _flatten_carefully(value: torch.Tensor, walk: Walk) -> Tree:
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # pyright: ignore[reportAttributeAccessIssue]
        raise RefusedError(
            "a tensor inside vmap, grad or another transform of torch.func: it has no bytes of its own: return it from "
            "the function, and use the result"
        )
    if value.device.type == "meta":
        raise RefusedError("a meta tensor: it has a shape, but no bytes: put a real one")
    if value.is_nested:
        return flatten_nested(value, walk)
    if is_sparse(value):
        return flatten_sparse(value, walk)
    if value.layout is not torch.strided:
        raise RefusedError(f"a {value.layout} tensor; put its to_dense()")
    if value.is_quantized:
        return flatten_quantized(value, walk)
    try:
        value.data_ptr()
    except RuntimeError as error:
        raise RefusedError(f"a tensor that has no plain memory ({first_line(error)})") from None
    walk.tensors.append(value)
    return TENSOR


def is_made_of_several(tensor: torch.Tensor) -> bool:
    """Whether a value stores it as several tensors: one that wraps others, a sparse, nested or quantized one."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return tensor.is_nested or tensor.is_quantized or is_sparse(tensor)
    return flattener(kind) in (flatten_wrapper, flatten_jagged)


@flattens(TensorShard)
def _flatten_shard(value: TensorShard, walk: Walk) -> Tree:
    raise RefusedError("a TensorShard, which only a sharded put can store")


_REFUSED_SUBCLASSES = {
    "FakeTensor": "a fake tensor: it has a shape, but no bytes: give a real one, "
    "which materialize_module makes of a deferred one",
    "DTensor": "a DTensor, which only a sharded put can store; put its to_local() or full_tensor()",
    "ShardedTensor": "a ShardedTensor, which only a sharded put can store",
    "AsyncCollectiveTensor": "a result of a collective that may still be on its way; put its wait()",
    "UninitializedTensorMixin": "a parameter or buffer that is not initialized yet",
    "FunctionalTensor": "a tensor inside a transform of torch.func: it has no bytes of its own",
}


@rule
def _tensor_rule(kind: type) -> Flattener | None:
    if not issubclass(kind, torch.Tensor):
        return None
    bases = {base.__name__: base.__module__ for base in kind.__mro__}
    if bases.get("NestedTensor", "").startswith("torch.nested."):
        return flatten_jagged
    if bases.get("MemoryMappedTensor", "").startswith("tensordict."):
        return _flatten_memory_mapped
    for name, reason in _REFUSED_SUBCLASSES.items():
        if bases.get(name, "").startswith(("torch.", "memstore.fake.")):
            return refuse(reason)
    if is_wrapper(kind):
        return flatten_wrapper
    name = f"{kind.__module__}.{kind.__qualname__}"
    reason = f"a {name}, an unknown subclass of torch.Tensor (put its as_subclass(torch.Tensor))"
    refused = refuse_unless_pickled(reason)
    return lambda value, walk: _flatten_memory_mapped(value, walk) if walk.in_place else refused(value, walk)


def _flatten_memory_mapped(value: torch.Tensor, walk: Walk) -> Tree:
    # where its bytes lie is no part of the value: it comes back as a plain tensor, over the store's memory;
    # and to be filled, any class will do whose elements lie in memory
    return walk.visit(value.as_subclass(torch.Tensor))


# --- Sparse tensors --------------------------------------------------------------------------------------------------


_ROWS, _COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in (torch.sparse_coo, *_ROWS, *_COLUMNS)}
_NAMES = {
    torch.sparse_coo: ("indices", "values"),
    **dict.fromkeys(_ROWS, ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(_COLUMNS, ("ccol_indices", "row_indices", "values")),
}


def is_sparse(value: torch.Tensor) -> bool:
    return value.layout in _NAMES


def flatten_sparse(value: torch.Tensor, walk: Walk) -> Tree:
    if walk.in_place:
        raise RefusedError("a sparse tensor can't be filled in place; get it without out=")
    found = traits.traits_of(value)
    plain, coalesced = value.detach(), False
    if value.layout is torch.sparse_coo:
        inner, coalesced = [plain._indices(), plain._values()], plain.is_coalesced()
    else:
        inner = [getattr(plain, name)() for name in _NAMES[value.layout]]
    inner = [part.contiguous() if traits.repeats(part) else part for part in inner]
    trees = walk.entries(value, _NAMES[value.layout], inner)
    layout = str(value.layout).removeprefix("torch.")
    return (
        "sparse",
        layout,
        traits.to_flags(found.kind, found.requires_grad),
        trees,
        walk.visit([list(value.shape), coalesced]),
    )


@register
class SparseNode(Node):
    __slots__ = ("about", "entries", "kind_of_tensor", "layout", "requires_grad")
    kind = "sparse"
    reads_leaves = True

    @classmethod
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        layout, flags, trees, about = unpack(payload, str, int, list, int)
        require(layout in _LAYOUTS and about != TENSOR, "a malformed sparse tensor")
        node = cls()
        node.layout = _LAYOUTS[layout]
        node.kind_of_tensor, node.requires_grad = traits.read_flags(flags)
        require(
            len(trees) == len(_NAMES[node.layout]) and all(tree == TENSOR for tree in trees),
            "a malformed sparse tensor",
        )
        node.entries = reader.entries(trees)
        node.about = reader.node(about)
        return node

    def build(self, parts: TreeParts) -> Any:
        size, coalesced = unpack(self.about.build(parts), list, bool)
        shape, tensors = sizes(size), [tensor.detach() for tensor in self.entries.build(parts)]
        require(not any(map(traits.repeats, tensors)), "indices without memory of their own")
        if self.layout is torch.sparse_coo:
            indices, values = tensors
            # torch makes another tensor of indices that aren't of this dtype, without a look at them
            require(indices.dtype is torch.int64, "indices of another dtype")
            made = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
        else:
            made = torch.sparse_compressed_tensor(*tensors, shape, layout=self.layout, check_invariants=True)
        differentiable = made.is_floating_point() or made.is_complex()
        require(differentiable or not self.requires_grad, "a gradient of integers")
        return traits.with_traits(made, traits.Traits(self.kind_of_tensor, self.requires_grad, None))

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield from self.entries.named(_NAMES[self.layout])
        yield ("size",), self.about

    def describe(self) -> str:
        return "sparse tensor"


# --- Nested and quantized tensors ------------------------------------------------------------------------------------


# -- nested tensors --------------------------------------------------------------------------------------------------


def flatten_jagged(value: Any, walk: Walk) -> Tree:
    if value.device.type == "meta":
        raise RefusedError("a meta tensor: it has a shape, but no bytes: put a real one")
    cached = value._metadata_cache
    bounds = [None if cached.get(key) is None else int(cached[key].shape[0]) for key in ("min_seqlen", "max_seqlen")]
    # offsets go as they are: a second tensor with the same offsets is found to be tied, and both are of one shape again
    inner = [value._values.detach(), value._offsets] + ([] if value._lengths is None else [value._lengths])
    return (
        *("jagged", value._ragged_idx, *bounds, value.requires_grad),
        walk.entries(value, ("values", "offsets", "lengths"), inner),
    )


@register
class JaggedNode(Node):
    __slots__ = ("bounds", "entries", "ragged", "requires_grad")
    kind = "jagged"
    reads_leaves = True

    @classmethod
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        ragged, low, high, requires_grad, trees = unpack(payload, int, (NoneType, int), (NoneType, int), bool, list)
        require(2 <= len(trees) <= 3 and all(tree == TENSOR for tree in trees), "a malformed jagged tensor")
        require(
            all(bound is None or 0 <= bound < 1 << 48 for bound in (low, high)), "malformed lengths of a jagged tensor"
        )
        node = cls()
        node.ragged = ragged
        node.bounds = {"min_seqlen": low, "max_seqlen": high}
        node.requires_grad = requires_grad
        reader.exact.update(range(reader.tensors + 1, reader.tensors + len(trees)))
        node.entries = reader.entries(trees)
        return node

    def build(self, parts: TreeParts) -> Any:
        with between_forks():
            from torch.nested._internal.nested_tensor import NestedTensor

            if any(bound is not None for bound in self.bounds.values()):
                importlib.import_module("torch._dynamo")  # its constructor does, to mark them

        values, offsets, lengths = [*self.entries.build(parts), None][:3]
        require(1 <= self.ragged <= values.ndim and offsets.ndim == 1 and len(offsets) > 0, "a malformed jagged tensor")
        require(lengths is None or lengths.shape == (len(offsets) - 1,), "a malformed jagged tensor")
        _check_offsets(offsets, lengths, values.shape[self.ragged - 1])
        cache = {key: torch.zeros(bound, 0, device="cpu") for key, bound in self.bounds.items() if bound is not None}
        return NestedTensor(
            values,
            offsets,
            lengths=lengths,
            _ragged_idx=self.ragged,
            requires_grad=self.requires_grad,
            _metadata_cache=cache,
        )

    def children(self) -> Iterator[tuple[Path, Node]]:
        return self.entries.named(("values", "offsets", "lengths")[: len(self.entries.nodes)])

    def describe(self) -> str:
        return "nested tensor"


def _check_offsets(offsets: torch.Tensor, lengths: torch.Tensor | None, end: int) -> None:
    """The rows lie in the values: torch trusts these numbers, and would read beyond."""
    for tensor in (offsets,) if lengths is None else (offsets, lengths):
        require(tensor.dtype in (torch.int32, torch.int64), "malformed offsets of a jagged tensor")
        require(not traits.repeats(tensor), "malformed offsets of a jagged tensor")
    if offsets.is_meta:
        return
    starts: list[int] = offsets.tolist()
    stops = starts[1:] if lengths is None else list(map(operator.add, starts, lengths.tolist()))
    fits = all(0 <= start <= stop <= end for start, stop in zip(starts, stops, strict=False))
    require(fits, "malformed offsets of a jagged tensor")


def flatten_nested(value: torch.Tensor, walk: Walk) -> Tree:
    plain = value.detach()
    if not plain.is_contiguous():
        if walk.in_place:
            raise RefusedError("a nested tensor that is not contiguous")
        plain = plain.contiguous()
    sizes = plain._nested_tensor_size()  # type: ignore[attr-defined]
    trees = walk.entries(value, ("values", "sizes"), [plain.values(), sizes])
    return ("nested", value.requires_grad, *trees)


@register
class NestedNode(Node):
    __slots__ = ("buffer", "requires_grad", "sizes")
    kind = "nested"
    reads_leaves = True

    @classmethod
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        requires_grad, buffer, sizes = unpack(payload, bool, int, int)
        node = cls()
        node.requires_grad = requires_grad
        require(buffer == TENSOR, "a malformed nested tensor")
        node.buffer = reader.node(buffer)
        reader.exact.add(reader.tensors)
        node.sizes = reader.host_tensor(sizes)
        return node

    def build(self, parts: TreeParts) -> Any:
        buffer, sizes = self.buffer.build(parts), self.sizes.build(parts)
        # torch trusts these numbers, and would read beyond the buffer
        require(sizes.dtype == torch.int64 and sizes.ndim == 2 and buffer.ndim == 1, "a malformed nested tensor")
        require(not traits.repeats(sizes), "a malformed nested tensor")
        rows: list[list[int]] = sizes.tolist()
        require(all(size >= 0 for row in rows for size in row), "a malformed nested tensor")
        counts = [math.prod(row) for row in rows]
        require(sum(counts) == buffer.numel(), "a malformed nested tensor")
        strides = [[*itertools.accumulate(row[:0:-1], operator.mul, initial=1)][: len(row)][::-1] for row in rows]
        offsets = [0, *itertools.accumulate(counts)][: len(counts)]
        made = torch._nested_view_from_buffer(  # type: ignore[attr-defined]
            buffer,
            sizes,
            torch.tensor(strides, dtype=torch.int64, device="cpu").reshape(sizes.shape),
            torch.tensor(offsets, dtype=torch.int64, device="cpu"),
        ).detach()
        return made.requires_grad_() if self.requires_grad else made

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield ("values",), self.buffer
        yield ("sizes",), self.sizes

    def describe(self) -> str:
        return "nested tensor"


# -- quantized tensors -----------------------------------------------------------------------------------------------


def flatten_quantized(value: torch.Tensor, walk: Walk) -> Tree:
    if walk.in_place:
        raise RefusedError("a quantized tensor can't be filled in place")
    if value.dtype not in (torch.qint8, torch.quint8, torch.qint32):
        raise RefusedError(f"a quantized tensor of dtype {value.dtype}; dequantize() it")
    if value.qscheme() == torch.per_tensor_affine:
        walk.tensors.append(value.int_repr())
        return ("quantized", TENSOR, walk.visit([value.q_scale(), value.q_zero_point()]))
    if value.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        walk.tensors += [value.int_repr(), value.q_per_channel_scales(), value.q_per_channel_zero_points()]
        return ("quantized_channels", value.q_per_channel_axis(), TENSOR, TENSOR, TENSOR)
    raise RefusedError(f"a quantized tensor of the scheme {value.qscheme()}; dequantize() it")


def _check_integers(integers: torch.Tensor) -> None:
    require(integers.dtype in (torch.int8, torch.uint8, torch.int32), "a malformed quantized tensor")
    require(not traits.repeats(integers), "a malformed quantized tensor")  # torch copies them


@register
class QuantizedNode(Node):
    __slots__ = ("integers", "parameters")
    kind = "quantized"
    reads_leaves = True

    @classmethod
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        integers, parameters = unpack(payload, int, int)
        require(integers == TENSOR and parameters != TENSOR, "a malformed quantized tensor")
        node = cls()
        node.integers = reader.fixed_tensor(integers)
        node.parameters = reader.node(parameters)
        return node

    def build(self, parts: TreeParts) -> Any:
        parameters = self.parameters.build(parts)
        require(
            type(parameters) is list and list(map(type, parameters)) == [float, int], "a malformed quantized tensor"
        )
        integers = self.integers.build(parts)
        _check_integers(integers)
        return torch._make_per_tensor_quantized_tensor(integers, *parameters)

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.integers
        yield ("scale and zero point",), self.parameters

    def describe(self) -> str:
        return "quantized tensor"


@register
class ChannelQuantizedNode(Node):
    __slots__ = ("axis", "entries")
    kind = "quantized_channels"
    reads_leaves = True

    @classmethod
    def read(cls, payload: list[Any], reader: TreeReader) -> Node:
        axis, *trees = unpack(payload, int, int, int, int)
        require(trees == [TENSOR] * 3, "a malformed quantized tensor")
        node = cls()
        node.axis = axis
        node.entries = Entries([reader.fixed_tensor(tree) for tree in trees])
        return node

    def build(self, parts: TreeParts) -> Any:
        integers, scales, zero_points = self.entries.build(parts)
        _check_integers(integers)
        require(0 <= self.axis < integers.ndim, "a malformed quantized tensor")
        require(scales.shape == zero_points.shape == (integers.shape[self.axis],), "a malformed quantized tensor")
        return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, self.axis)

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield from zip(((), ("scales",), ("zero_points",)), self.entries.nodes, strict=True)

    def describe(self) -> str:
        return "quantized tensor"
