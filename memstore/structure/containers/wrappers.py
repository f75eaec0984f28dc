"""Tensors of classes that are made of other tensors and can name them, like torchao's quantized weights.

    ["wrapper", class, kind and requires_grad, names, entries, tree of [context, shape, strides]]
    ["wrapped_shards", shape of the whole, its dtype, kind and requires_grad, boxes, entries]

The second is a tensor of which each rank holds a part that wraps others, as a DTensor's local tensor may. Which part
has which elements of the inner tensors only the class knows. So the parts are stored as they are, by their boxes.

Such a class has `__tensor_flatten__`, which gives the names of the tensors inside and a context, and
`__tensor_unflatten__`, which makes it of them: torch's protocol for its compiler. These two run, of a class that is
imported, a subclass of torch.Tensor, and has both; nothing else that a stored name could choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memstore import _compat
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
from memstore.structure.refusals import MalformedError, RefusedError, require, sizes
from memstore.structure.tensor_memory import copy_into, why_not_filled
from memstore.structure.traits import DTYPE_NAMES, DTYPES
from memstore.structure.tree import Container, Make, Node, Tree, TreeReader, compile_tree, reads, to_msgpack
from memstore.structure.walk import Walk, flattener


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
    except RefusedError:
        if walk.allow_pickle:
            return walk.object(value)
        raise
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
    """Attributes:
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
