"""numpy arrays, and tensors that are not plain: sparse, nested and quantized ones, and those that are made of others.

    ["ndarray", tensor]
    ["sparse", layout, kind and requires_grad, [indices, values], object [size, coalesced]]                COO
    ["sparse", layout, kind and requires_grad, [compressed, plain indices, values], object [size, false]]  others
    ["jagged", ragged index, min, max, requires_grad, [values, offsets, lengths or nothing]]
    ["nested", requires_grad, buffer, sizes]                       the strided layout of nested tensors
    ["quantized", integers, object [scale, zero point]]            one scale for the whole tensor
    ["quantized_channels", axis, integers, scales, zero points]
    ["wrapper", class, kind and requires_grad, names, entries, tree of [context, shape, strides]]
    ["wrapped_shards", shape of the whole, its dtype, kind and requires_grad, boxes, entries]

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
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch

from memstore import _compat
from memstore._wording import first_line
from memstore.engine import Path
from memstore.errors import MemstoreError, UnsupportedValueError
from memstore.sharding import (
    Box,
    Cover,
    ShardedLeaf,
    TensorShard,
    TensorShards,
    box_of,
    cover_of,
    narrow_to,
    sharded_leaf,
)
from memstore.structure import traits
from memstore.structure.classes import class_name, defines, dotted, find_class, short
from memstore.structure.memory import EXPANDED, copy_into, why_not_filled
from memstore.structure.refusals import MalformedError, RefusedError, require, sizes, unpack
from memstore.structure.traits import DTYPE_NAMES, DTYPES, NUMPY_DTYPES
from memstore.structure.tree import (
    NAMELESS,
    TENSOR,
    Container,
    Make,
    Node,
    Tree,
    TreeReader,
    compile_tree,
    reads,
    to_msgpack,
)
from memstore.structure.walk import Flattener, Walk, flattener, flattens, refuse, refuse_unless_pickled, rule

# --- Tensors that are made of others ---------------------------------------------------------------------------------
# Tensors of classes that are made of other tensors and can name them, like torchao's quantized weights.
#
#     ["wrapper", class, kind and requires_grad, names, entries, tree of [context, shape, strides]]
#     ["wrapped_shards", shape of the whole, its dtype, kind and requires_grad, boxes, entries]
#
# The second is a tensor of which each rank holds a part that wraps others, as a DTensor's local tensor may. Which part
# has which elements of the inner tensors only the class knows. So the parts are stored as they are, by their boxes.
#
# Such a class has `__tensor_flatten__`, which gives the names of the tensors inside and a context, and
# `__tensor_unflatten__`, which makes it of them: torch's protocol for its compiler. These two run, of a class that is
# imported, a subclass of torch.Tensor, and has both; nothing else that a stored name could choose.


def is_wrapper(kind: type) -> bool:
    """Returns whether the class has the protocol; torch.Tensor itself has not."""
    return (
        issubclass(kind, torch.Tensor) and defines(kind, "__tensor_flatten__") and defines(kind, "__tensor_unflatten__")
    )


def flatten_wrapper(value: Any, walk: Walk) -> Tree:
    kind = type(value)
    if walk.in_place:
        raise RefusedError(f"a {kind.__qualname__} can't be filled in place; get it without out=")
    try:
        name = class_name(kind)
    except RefusedError as error:
        return walk.pickled(value, error)
    try:
        names, context = value.__tensor_flatten__()
        inner = [getattr(value, one) for one in names]
    except Exception as error:  # the class's own code
        raise RefusedError(f"a {kind.__qualname__} whose __tensor_flatten__ fails: {error}") from error
    if not names or not all(isinstance(one, torch.Tensor) for one in inner):
        raise RefusedError(f"a {kind.__qualname__} whose __tensor_flatten__ names no tensors")
    found = traits.traits_of(value)
    is_parameter = getattr(value, _compat.PARAMETER_MARK, False)
    flags = traits.to_flags(traits.PARAMETER if is_parameter else found.kind, found.requires_grad)
    trees = walk.entries(value, names, inner)
    about = walk.visit([context, list(value.shape), list(value.stride())])
    return ("wrapper", name, flags, walk.keys(names), trees, about)


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def pair_parts(target: torch.Tensor, source: torch.Tensor) -> Pairs | None:
    """Pairs the plain tensors of a tensor that wraps others, each with the one of `source` that is copied into it.

    None if the two aren't made alike. What isn't in the parts (block sizes, dtypes) stands in the context, which has to
    be equal.
    """
    pairs: Pairs = []
    return pairs if _is_wrapper(type(target)) and _pair(target, source, pairs) else None


def _pair(target: Any, source: Any, pairs: Pairs) -> bool:
    kind = type(target)
    if not _is_wrapper(kind):
        pairs.append((target, source))
        alike = not _is_wrapper(type(source)) and target.shape == source.shape and target.dtype == source.dtype
        return alike and why_not_filled(target) is None
    if type(source) is not kind:
        return False
    (names, context), (others, other) = target.__tensor_flatten__(), source.__tensor_flatten__()
    try:
        is_equal = names == others and bool(context == other)
    except Exception:  # of what the class has for a context
        return False
    return is_equal and all(_pair(getattr(target, one), getattr(source, one), pairs) for one in names)


def why_parts_not_filled(tensor: Any) -> str | None:
    """Says `why_not_filled` of a tensor that may wrap others: of the first of these that can't be filled."""
    if not _is_wrapper(type(tensor)):
        return why_not_filled(tensor)
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return next(filter(None, map(why_parts_not_filled, inner)), None)


def fill_parts(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copies a tensor into one that is made alike, part by part. False, with nothing copied, where it isn't."""
    pairs = pair_parts(target, source)
    for into, source_part in pairs or ():
        copy_into(into, source_part)
    return pairs is not None


def clone_parts(tensor: Any) -> Any:
    """Copies a tensor that wraps others: its class makes it of copies of them. Clones any other tensor."""
    if not _is_wrapper(type(tensor)):
        return tensor.detach().clone()
    names, context = tensor.__tensor_flatten__()
    inner = {name: clone_parts(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def _is_wrapper(kind: type) -> bool:
    return flattener(kind) is flatten_wrapper


@reads("wrapper", str, int, list, list, (int, list))
def _read_wrapper(
    reader: TreeReader, name: str, flags: int, names: list[Any], trees: list[Tree], about: Tree
) -> Container:
    require(len(names) == len(trees) > 0, "malformed wrapped tensors")
    require(all(type(one) is str for one in names) and len(set(names)) == len(names), "malformed names of tensors")
    flags_read = traits.read_flags(flags)
    first = reader.tensors
    nodes = reader.nodes(trees)
    reader.fixed.update(range(first, reader.tensors))  # only the class knows what they mean together: no cast
    nodes.append(reader.node(about))

    def make(values: list[Any], _: torch.device | None) -> Any:
        about = values.pop()
        require(type(about) is list and len(about) == 3, "malformed wrapped tensors")
        shape, stride = sizes(about[1]), sizes(about[2])
        require(len(shape) == len(stride), "malformed wrapped tensors")
        require(all(isinstance(tensor, torch.Tensor) for tensor in values), "malformed wrapped tensors")
        kind = find_class(name, _is_wrapper, "a subclass of torch.Tensor that has __tensor_unflatten__")
        inner = dict(zip(names, values, strict=True))
        refusal = f"the stored value has a {dotted(name)}, which can't be made again here: its __tensor_unflatten__"
        try:
            made = kind.__tensor_unflatten__(inner, about[0], torch.Size(shape), stride)
        except (MemstoreError, MalformedError):
            raise
        except Exception as error:  # the class's own code, which may have changed
            raise UnsupportedValueError(f"{refusal} fails: {error}") from error
        if type(made) is not kind or tuple(made.shape) != shape:
            raise UnsupportedValueError(f"{refusal} makes a {type(made).__qualname__} of another shape or class")
        return _finished(made, *flags_read)

    return Container(short(name), make, (*names, "context"), nodes, reads_leaves=True)


def _finished(made: Any, kind: int, requires_grad: bool) -> Any:
    """Makes a tensor that nobody has yet the Parameter or Buffer that was put."""
    if made.requires_grad != requires_grad:
        made = made.detach()
        if requires_grad:
            try:
                made.requires_grad_()
            except RuntimeError as error:  # of integers
                raise MalformedError(f"a gradient that can't be: {error}") from None
    if kind == traits.PARAMETER:
        setattr(made, _compat.PARAMETER_MARK, True)
        return made
    return traits.with_traits(made, traits.Traits(kind, False, None))


# -- parts of them, of several ranks ---------------------------------------------------------------------------------


def has_wrapped_shards(value: Any) -> bool:
    """Returns whether it is a DTensor, or the like, whose local tensor wraps others."""
    if not isinstance(value, (torch.Tensor, TensorShard)) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return False
    return _is_wrapper(type(_local_of(value)))


def _local_of(value: Any) -> Any:
    """Returns the local tensor of a DTensor or TensorShard."""
    local = _compat.local_tensor(value)
    return getattr(value, "local", None) if local is None else local


def flatten_wrapped_shards(value: Any, leaf: ShardedLeaf, flags: int, walk: Walk) -> Tree | None:
    """Flattens what a rank holds of a sharded tensor, if that wraps others. Returns None if it doesn't.

    Args:
        value: the DTensor, or whatever `leaf` is made of.
        flags: kind and requires_grad.
    """
    held = [shard.local for shard in leaf.shards] or [_local_of(value)]
    if not all(_is_wrapper(type(one)) for one in held):
        return None
    boxes = tuple(shard.box.text for shard in leaf.shards)
    trees = walk.entries(leaf, boxes, held if boxes else [])
    return (_SHARDS, tuple(leaf.shape), DTYPE_NAMES[leaf.dtype], flags, boxes, trees)


def _read_box(name: Any) -> Box:
    try:
        bounds = [one.split(":") for one in name.split(", ")] if name else []
        box = box_of([(int(start), int(stop)) for start, stop in bounds])
    except (AttributeError, ValueError) as error:
        raise MalformedError(f"the name of a box: {error}") from None
    require(all(start >= 0 <= size for start, size in zip(*box, strict=True)), "a box that can't be")
    return box


_SHARDS = "wrapped_shards"


class _WrappedShards(Container):
    """The parts of a tensor that wraps others.

    Attributes:
        shape: of the whole.
        boxes: those of the whole that are here, in the order of the entries.
    """

    __slots__ = ("boxes", "shape")

    def __init__(self, make: Make, shape: tuple[int, ...], boxes: tuple[Box, ...], names: list[Any], nodes: list[Node]):
        super().__init__("shards of wrapped tensors", make, names, nodes, reads_leaves=True)
        self.shape, self.boxes = shape, boxes


@reads(_SHARDS, list, str, int, list, list)
def _read_wrapped_shards(
    reader: TreeReader, written: list[Any], dtype_name: str, flags: int, names: list[Any], trees: list[Tree]
) -> Container:
    """Reads what is built as the whole, if it is one part or its class can join the parts; else as TensorShards."""
    require(dtype_name in DTYPES, "a dtype that isn't known")
    shape, dtype, flags_read = sizes(written), DTYPES[dtype_name], traits.read_flags(flags)
    boxes = tuple(map(_read_box, names))
    require(len(names) == len(trees) and len(set(names)) == len(names), "other boxes than entries")
    require(all(len(box.shape) == len(shape) for box in boxes), "boxes of other dimensions")

    def make(values: list[Any], _: torch.device | None) -> Any:
        require(all(isinstance(one, torch.Tensor) for one in values), "malformed wrapped tensors")
        shapes = [tuple(one.shape) for one in values]
        require(shapes == [box.shape for box in boxes], "parts of other shapes than their boxes")
        joined = _joined(shape, boxes, values)
        if joined is not None:
            return _finished(joined, *flags_read)
        return TensorShards(dtype, shape, tuple(zip((box.offsets for box in boxes), values, strict=True)))

    return _WrappedShards(make, shape, boxes, names, reader.nodes(trees))


def _joined(shape: tuple[int, ...], boxes: Sequence[Box], parts: list[Any]) -> Any:
    """Returns the whole of these parts, or None if some of it isn't there or its class can't join them."""
    if not parts or not cover_of(shape, boxes).is_exact:
        return None
    if len(parts) == 1:
        return parts[0]
    dims = [dim for dim, size in enumerate(shape) if any(box.shape[dim] != size for box in boxes)]
    if len(dims) != 1:
        return None
    in_order = [one for _, one in sorted(zip(boxes, parts, strict=True), key=lambda pair: pair[0].offsets)]
    try:
        with torch.no_grad():
            made = torch.cat(in_order, dims[0])
    except Exception:  # of the class's own operators: most can't
        return None
    return made if type(made) is type(parts[0]) and tuple(made.shape) == shape else None


def check_wrapped_shards(tree: Tree) -> Iterator[tuple[Path, Cover]]:
    """Iterates over the tensors of a value that ranks hold in parts that wrap others: name, and how these cover it."""
    if _SHARDS.encode() not in to_msgpack(tree):
        return
    stack: list[tuple[Path, Node]] = [((), compile_tree(tree)[0])]
    while stack:
        name, node = stack.pop()
        if isinstance(node, _WrappedShards):
            yield name, cover_of(node.shape, node.boxes)
        else:
            stack += [(name + key, child) for key, child in node.children()]


def pair_shards(target: Any, found: Any) -> Pairs | None:
    """Pairs parts as `pair_parts`, of a DTensor or the like whose local tensors wrap others: those that are here."""
    leaf = sharded_leaf(target)
    if leaf is None or not all(_is_wrapper(type(shard.local)) for shard in leaf.shards):
        return None
    pairs: Pairs = []
    for box, local in leaf.shards:
        own_part = _part_of(found, box)
        own = None if own_part is None else pair_parts(local, own_part)
        if own is None:
            return None
        pairs += own
    return pairs


def _part_of(found: Any, box: Box) -> Any:
    """Returns a part that was stored so, or that the class can cut out of the whole; None if there is none."""
    if isinstance(found, TensorShards):
        return next((one for at, one in found.parts if (at, tuple(one.shape)) == box), None)
    if not isinstance(found, torch.Tensor) or len(found.shape) != len(box.shape):
        return None
    try:
        with torch.no_grad():
            return narrow_to(found, box)
    except Exception:  # of the class's own operators: many can't
        return None


def are_shards_of(built: Any, target: Any) -> bool:
    """Returns whether a value was built of the inner tensors of a DTensor, or the like."""
    pairs = pair_shards(target, built)
    return bool(pairs) and all(one.data_ptr() == other.data_ptr() for one, other in pairs)


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
    return lambda value, walk: _flatten_to_fill(value, walk) if walk.in_place else refused(value, walk)


def _flatten_memory_mapped(value: torch.Tensor, walk: Walk) -> Tree:
    # where its bytes lie is no part of the value: it comes back as a plain tensor, over the store's memory
    return walk.visit(value.as_subclass(torch.Tensor))


def _flatten_to_fill(value: torch.Tensor, walk: Walk) -> Tree:
    """Takes a target of an unknown class. Any will do whose elements lie in memory, and are what is written there."""
    why = why_not_filled(value)
    if why is not None and why != EXPANDED:  # of this a match tells, which looks at strides
        raise RefusedError(why)
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
