"""What is one leaf for its user and several tensors inside, or a tensor in another coat.

    ["ndarray", tensor]                                            a numpy array whose dtype torch has
    ["jagged", ragged index, min, max, requires_grad, [values, offsets, lengths or nothing]]
    ["nested", requires_grad, buffer, sizes]                       the strided layout of nested tensors
    ["quantized", integers, object [scale, zero point]]            one scale for the whole tensor
    ["quantized_channels", axis, integers, scales, zero points]

Plain tensors come here only in a careful walk, which names the one that can't be stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memstore.engine.record import Path
from memstore.structure.node import (
    TENSOR,
    Kids,
    Node,
    Parts,
    Reader,
    Tree,
    register,
    require,
    unpack,
)
from memstore.structure.walk import Flattener, RefusedError, Walk, flattens, refuse, refuse_unless_pickled, rule

_NONE = type(None)

# -- numpy -----------------------------------------------------------------------------------------------------------

_ARRAY_DTYPES = frozenset(
    np.dtype(name)
    for name in (
        *("float16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)


class _WritableView:
    """The memory of an array as if it could be written: torch warns about others, and here they are only read."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


@flattens(np.ndarray)
def _flatten_array(value: np.ndarray[Any, Any], walk: Walk) -> Tree:
    if value.dtype not in _ARRAY_DTYPES or not value.dtype.isnative:
        return walk.object(value)
    if walk.in_place and not _is_writable(value):
        raise RefusedError("a numpy array that can't be written, or not through a tensor")
    if any(step < 0 or step % value.itemsize for step in value.strides) or not value.size:
        value = value.copy()  # torch has no such strides
    if not value.flags.writeable:
        value = np.asarray(_WritableView(value))
    walk.tensors.append(torch.from_numpy(value))
    return ("ndarray", TENSOR)


def _is_writable(value: np.ndarray[Any, Any]) -> bool:
    return value.flags.writeable and all(step >= 0 and step % value.itemsize == 0 for step in value.strides)


@register
class ArrayNode(Node):
    __slots__ = ("entry",)
    kind = "ndarray"

    def __init__(self, entry: Node) -> None:
        self.entry = entry

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        (tree,) = unpack(payload, int)
        return cls(reader.host_tensor(tree))

    def build(self, parts: Parts) -> Any:
        return self.entry.build(parts).detach().numpy()

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.entry

    def describe(self) -> str:
        return "numpy array"


# -- nested tensors --------------------------------------------------------------------------------------------------


def _flatten_jagged(value: Any, walk: Walk) -> Tree:
    if value.device.type == "meta":
        raise RefusedError("a meta tensor: it has a shape, but no bytes")
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
    __slots__ = ("bounds", "kids", "ragged", "requires_grad")
    kind = "jagged"

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        ragged, low, high, requires_grad, trees = unpack(payload, int, (_NONE, int), (_NONE, int), bool, list)
        require(2 <= len(trees) <= 3 and all(tree == TENSOR for tree in trees), "no jagged tensor")
        require(all(bound is None or 0 <= bound < 1 << 48 for bound in (low, high)), "no lengths of a jagged tensor")
        node = cls()
        node.ragged = ragged
        node.bounds = {"min_seqlen": low, "max_seqlen": high}
        node.requires_grad = requires_grad
        reader.exact.update(range(reader.tensors + 1, reader.tensors + len(trees)))
        node.kids = reader.kids(trees)
        return node

    def build(self, parts: Parts) -> Any:
        from torch.nested._internal.nested_tensor import NestedTensor

        values, offsets, lengths = [*self.kids.build(parts), None][:3]
        require(1 <= self.ragged <= values.ndim and offsets.ndim == 1 and len(offsets) > 0, "no jagged tensor")
        require(lengths is None or lengths.shape == (len(offsets) - 1,), "no jagged tensor")
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
        for name, node in zip(("values", "offsets", "lengths"), self.kids.nodes, strict=False):
            yield (name,), node

    def describe(self) -> str:
        return "nested tensor"


def _flatten_nested(value: torch.Tensor, walk: Walk) -> Tree:
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

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        requires_grad, buffer, sizes = unpack(payload, bool, int, int)
        node = cls()
        node.requires_grad = requires_grad
        require(buffer == TENSOR, "no nested tensor")
        node.buffer = reader.node(buffer)
        reader.exact.add(reader.tensors)
        node.sizes = reader.host_tensor(sizes)
        return node

    def build(self, parts: Parts) -> Any:
        buffer, sizes = self.buffer.build(parts), self.sizes.build(parts)
        # torch trusts these numbers, and would read beyond the buffer
        require(sizes.dtype == torch.int64 and sizes.ndim == 2 and buffer.ndim == 1, "no nested tensor")
        rows = sizes.tolist()
        require(all(0 <= size <= buffer.numel() for row in rows for size in row), "no nested tensor")
        counts = [math.prod(row) for row in rows]
        require(sum(counts) == buffer.numel(), "no nested tensor")
        strides = [[math.prod(row[i + 1 :]) for i in range(len(row))] for row in rows]
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


def _flatten_quantized(value: torch.Tensor, walk: Walk) -> Tree:
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


@register
class QuantizedNode(Node):
    __slots__ = ("integers", "parameters")
    kind = "quantized"

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        integers, parameters = unpack(payload, int, int)
        require(integers == TENSOR and parameters != TENSOR, "no quantized tensor")
        node = cls()
        node.integers = reader.fixed_tensor(integers)
        node.parameters = reader.node(parameters)
        return node

    def build(self, parts: Parts) -> Any:
        parameters = self.parameters.build(parts)
        require(type(parameters) is list and list(map(type, parameters)) == [float, int], "no quantized tensor")
        integers = self.integers.build(parts)
        require(integers.dtype in (torch.int8, torch.uint8, torch.int32), "no quantized tensor")
        return torch._make_per_tensor_quantized_tensor(integers, *parameters)

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.integers
        yield ("scale and zero point",), self.parameters

    def describe(self) -> str:
        return "quantized tensor"


@register
class ChannelQuantizedNode(Node):
    __slots__ = ("axis", "kids")
    kind = "quantized_channels"

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        axis, *trees = unpack(payload, int, int, int, int)
        require(trees == [TENSOR] * 3, "no quantized tensor")
        node = cls()
        node.axis = axis
        node.kids = Kids([reader.fixed_tensor(tree) for tree in trees])
        return node

    def build(self, parts: Parts) -> Any:
        integers, scales, zero_points = self.kids.build(parts)
        require(integers.dtype in (torch.int8, torch.uint8, torch.int32), "no quantized tensor")
        require(0 <= self.axis < integers.ndim, "no quantized tensor")
        require(scales.shape == zero_points.shape == (integers.shape[self.axis],), "no quantized tensor")
        return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, self.axis)

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield from zip(((), ("scales",), ("zero_points",)), self.kids.nodes, strict=True)

    def describe(self) -> str:
        return "quantized tensor"


# -- tensors by themselves -------------------------------------------------------------------------------------------


@flattens(torch.Tensor, torch.nn.Parameter)
def _flatten_carefully(value: torch.Tensor, walk: Walk) -> Tree:
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise RefusedError("a tensor inside vmap, grad or another transform of torch.func: it has no bytes of its own")
    if value.is_nested:
        return _flatten_nested(value, walk)
    if value.device.type == "meta":
        raise RefusedError("a meta tensor: it has a shape, but no bytes")
    if value.layout is not torch.strided:
        raise RefusedError(f"a {_layout_name(value)} tensor (layout {value.layout}); put its to_dense()")
    if value.is_quantized:
        return _flatten_quantized(value, walk)
    try:
        value.data_ptr()
    except RuntimeError as error:
        raise RefusedError(f"a tensor that has no plain memory ({str(error).splitlines()[0]})") from None
    walk.tensors.append(value)
    return TENSOR


def _layout_name(value: torch.Tensor) -> str:
    return "mkldnn" if value.layout is torch._mkldnn else "sparse"  # type: ignore[attr-defined]


_REFUSED_SUBCLASSES = {
    "FakeTensor": "a fake tensor: it has a shape, but no bytes",
    "DTensor": "a DTensor, which only a sharded put can store; put its to_local() or full_tensor()",
    "UninitializedTensorMixin": "a parameter or buffer that is not initialized yet",
    "FunctionalTensor": "a tensor inside a transform of torch.func: it has no bytes of its own",
}


@rule
def _tensor_rule(kind: type) -> Flattener | None:
    if not issubclass(kind, torch.Tensor):
        return None
    bases = {base.__name__: base.__module__ for base in kind.__mro__}
    if bases.get("NestedTensor", "").startswith("torch.nested."):
        return _flatten_jagged
    if bases.get("MemoryMappedTensor", "").startswith("tensordict."):
        return _flatten_memory_mapped
    for name, reason in _REFUSED_SUBCLASSES.items():
        if bases.get(name, "").startswith("torch."):
            return refuse(reason)
    return refuse_unless_pickled(f"a {kind.__module__}.{kind.__qualname__}, an unknown subclass of torch.Tensor")


def _flatten_memory_mapped(value: torch.Tensor, walk: Walk) -> Tree:
    # where its bytes lie is no part of the value: it comes back as a plain tensor, over the store's memory
    return walk.visit(value.as_subclass(torch.Tensor))
