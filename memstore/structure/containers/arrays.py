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

from __future__ import annotations

import itertools
import math
import operator
from types import NoneType
from typing import Any

import numpy as np
import torch

from memstore import _compat
from memstore._wording import first_line
from memstore.sharding import TensorShard
from memstore.structure import traits
from memstore.structure.containers.wrappers import flatten_wrapper, is_wrapper
from memstore.structure.refusals import RefusedError, require, sizes, unpack
from memstore.structure.traits import NUMPY_DTYPES
from memstore.structure.tree import NAMELESS, TENSOR, Container, Tree, TreeReader, reads
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
    is_writable = value.flags.writeable and all(step >= 0 and step % value.itemsize == 0 for step in value.strides)
    if walk.in_place and not is_writable:
        raise RefusedError("a numpy array that can't be written, or not through a tensor")
    walk.tensors.append(tensor)
    return ("ndarray", TENSOR)


def tensor_of_array(value: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Returns the array's values, to be read, or None where torch has no such dtype.

    It lies over the array's memory, where torch has such strides.
    """
    if value.dtype not in _ARRAY_DTYPES or not value.dtype.isnative:
        return None
    if any(step < 0 or step % value.itemsize for step in value.strides) or not value.size:
        value = value.copy()
    if not value.flags.writeable:
        value = np.asarray(_WritableView(value))
    return torch.from_numpy(value)


@reads("ndarray", int)
def _read_array(reader: TreeReader, tree: Tree) -> Container:
    node = reader.host_tensor(tree)
    return Container(
        "numpy array", lambda values, _: values[0].detach().numpy(), (NAMELESS,), [node], reads_leaves=True
    )


# -- tensors by themselves -------------------------------------------------------------------------------------------


@flattens(torch.Tensor, torch.nn.Parameter)
def _flatten_carefully(value: torch.Tensor, walk: Walk) -> Tree:
    if _compat.is_in_transform(value):
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
    """Returns whether it is stored as several tensors: one that wraps others, a sparse, nested or quantized one."""
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
        inner, coalesced = _compat.coo_parts(plain), plain.is_coalesced()
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


@reads("sparse", str, int, list, int)
def _read_sparse(reader: TreeReader, layout_name: str, flags: int, trees: list[Tree], about: Tree) -> Container:
    require(layout_name in _LAYOUTS and about != TENSOR, "a malformed sparse tensor")
    layout = _LAYOUTS[layout_name]
    names = _NAMES[layout]
    kind, requires_grad = traits.read_flags(flags)
    require(len(trees) == len(names) and all(tree == TENSOR for tree in trees), "a malformed sparse tensor")
    nodes = [*reader.nodes(trees), reader.node(about)]

    def make(values: list[Any], _: torch.device | None) -> Any:
        size, coalesced = unpack(values.pop(), list, bool)
        shape, tensors = sizes(size), [tensor.detach() for tensor in values]
        require(not any(map(traits.repeats, tensors)), "indices without memory of their own")
        if layout is torch.sparse_coo:
            indices, elements = tensors
            # torch makes another tensor of indices that aren't of this dtype, without a look at them
            require(indices.dtype is torch.int64, "indices of another dtype")
            made = torch.sparse_coo_tensor(indices, elements, shape, is_coalesced=coalesced, check_invariants=True)
        else:
            compressed, plain, elements = tensors
            made = torch.sparse_compressed_tensor(
                compressed, plain, elements, shape, layout=layout, check_invariants=True
            )
        differentiable = made.is_floating_point() or made.is_complex()
        require(differentiable or not requires_grad, "a gradient of integers")
        return traits.with_traits(made, traits.Traits(kind, requires_grad, None))

    return Container("sparse tensor", make, (*names, "size"), nodes, reads_leaves=True)


# --- Nested and quantized tensors ------------------------------------------------------------------------------------


# -- nested tensors --------------------------------------------------------------------------------------------------


def flatten_jagged(value: Any, walk: Walk) -> Tree:
    if value.device.type == "meta":
        raise RefusedError("a meta tensor: it has a shape, but no bytes: put a real one")
    values, offsets, lengths, ragged, low, high = _compat.jagged_parts(value)
    # offsets go as they are: a second tensor with the same offsets is found to be tied, and both are of one shape again
    inner = [values, offsets] if lengths is None else [values, offsets, lengths]
    trees = walk.entries(value, ("values", "offsets", "lengths"), inner)
    return ("jagged", ragged, low, high, value.requires_grad, trees)


@reads("jagged", int, (NoneType, int), (NoneType, int), bool, list)
def _read_jagged(
    reader: TreeReader, ragged: int, low: int | None, high: int | None, requires_grad: bool, trees: list[Tree]
) -> Container:
    require(2 <= len(trees) <= 3 and all(tree == TENSOR for tree in trees), "a malformed jagged tensor")
    require(all(bound is None or 0 <= bound < 1 << 48 for bound in (low, high)), "malformed lengths of a jagged tensor")
    reader.exact.update(range(reader.tensors + 1, reader.tensors + len(trees)))

    def make(found: list[Any], _: torch.device | None) -> Any:
        values, offsets, *others = found
        lengths = others[0] if others else None
        require(1 <= ragged <= values.ndim and offsets.ndim == 1 and len(offsets) > 0, "a malformed jagged tensor")
        require(lengths is None or lengths.shape == (len(offsets) - 1,), "a malformed jagged tensor")
        _check_offsets(offsets, lengths, values.shape[ragged - 1])
        parts = _compat.JaggedParts(values, offsets, lengths, ragged, low, high)
        return _compat.make_jagged(parts, requires_grad=requires_grad)

    names = ("values", "offsets", "lengths")[: len(trees)]
    return Container("nested tensor", make, names, reader.nodes(trees), reads_leaves=True)


def _check_offsets(offsets: torch.Tensor, lengths: torch.Tensor | None, end: int) -> None:
    """Checks that the rows lie in the values: torch trusts these numbers, and would read beyond."""
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
    sizes = _compat.nested_sizes(plain)
    trees = walk.entries(value, ("values", "sizes"), [plain.values(), sizes])
    return ("nested", value.requires_grad, *trees)


@reads("nested", bool, int, int)
def _read_nested(reader: TreeReader, requires_grad: bool, buffer_tree: Tree, sizes_tree: Tree) -> Container:
    require(buffer_tree == TENSOR, "a malformed nested tensor")
    buffer_node = reader.node(buffer_tree)
    reader.exact.add(reader.tensors)
    nodes = [buffer_node, reader.host_tensor(sizes_tree)]

    def make(values: list[Any], _: torch.device | None) -> Any:
        buffer, sizes = values
        # torch trusts these numbers, and would read beyond the buffer
        require(sizes.dtype == torch.int64 and sizes.ndim == 2 and buffer.ndim == 1, "a malformed nested tensor")
        require(not traits.repeats(sizes), "a malformed nested tensor")
        rows: list[list[int]] = sizes.tolist()
        require(all(size >= 0 for row in rows for size in row), "a malformed nested tensor")
        counts = [math.prod(row) for row in rows]
        require(sum(counts) == buffer.numel(), "a malformed nested tensor")
        strides = [[*itertools.accumulate(row[:0:-1], operator.mul, initial=1)][: len(row)][::-1] for row in rows]
        offsets = [0, *itertools.accumulate(counts)][: len(counts)]
        made = _compat.make_nested(
            buffer,
            sizes,
            torch.tensor(strides, dtype=torch.int64, device="cpu").reshape(sizes.shape),
            torch.tensor(offsets, dtype=torch.int64, device="cpu"),
        )
        return made.requires_grad_() if requires_grad else made

    return Container("nested tensor", make, ("values", "sizes"), nodes, reads_leaves=True)


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


@reads("quantized", int, int)
def _read_quantized(reader: TreeReader, integers_tree: Tree, parameters_tree: Tree) -> Container:
    require(integers_tree == TENSOR and parameters_tree != TENSOR, "a malformed quantized tensor")
    nodes = [reader.fixed_tensor(integers_tree), reader.node(parameters_tree)]

    def make(values: list[Any], _: torch.device | None) -> Any:
        integers, parameters = values
        is_pair = type(parameters) is list and list(map(type, parameters)) == [float, int]
        require(is_pair, "a malformed quantized tensor")
        _check_integers(integers)
        return _compat.make_quantized(integers, *parameters)

    return Container("quantized tensor", make, (NAMELESS, "scale and zero point"), nodes, reads_leaves=True)


@reads("quantized_channels", int, int, int, int)
def _read_quantized_channels(reader: TreeReader, axis: int, *trees: Tree) -> Container:
    require(trees == (TENSOR,) * 3, "a malformed quantized tensor")
    nodes = [reader.fixed_tensor(tree) for tree in trees]

    def make(values: list[Any], _: torch.device | None) -> Any:
        integers, scales, zero_points = values
        _check_integers(integers)
        require(0 <= axis < integers.ndim, "a malformed quantized tensor")
        require(scales.shape == zero_points.shape == (integers.shape[axis],), "a malformed quantized tensor")
        return _compat.make_channel_quantized(integers, scales, zero_points, axis)

    return Container("quantized tensor", make, (NAMELESS, "scales", "zero_points"), nodes, reads_leaves=True)
