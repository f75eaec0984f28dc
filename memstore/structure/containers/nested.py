"""Nested and quantized tensors: one leaf for a user, several tensors inside.

["jagged", ragged index, min, max, requires_grad, [values, offsets, lengths or nothing]]
["nested", requires_grad, buffer, sizes]                       the strided layout of nested tensors
["quantized", integers, object [scale, zero point]]            one scale for the whole tensor
["quantized_channels", axis, integers, scales, zero points]
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

import torch

from memstore.engine import Path
from memstore.late_imports import between_forks
from memstore.structure.checks import require, unpack
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import traits
from memstore.structure.tree import TENSOR, Entries, Node, Parts, Reader, Tree, register
from memstore.structure.walk import Walk

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
    def read(cls, payload: list[Any], reader: Reader) -> Node:
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

    def build(self, parts: Parts) -> Any:
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
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        requires_grad, buffer, sizes = unpack(payload, bool, int, int)
        node = cls()
        node.requires_grad = requires_grad
        require(buffer == TENSOR, "a malformed nested tensor")
        node.buffer = reader.node(buffer)
        reader.exact.add(reader.tensors)
        node.sizes = reader.host_tensor(sizes)
        return node

    def build(self, parts: Parts) -> Any:
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
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        integers, parameters = unpack(payload, int, int)
        require(integers == TENSOR and parameters != TENSOR, "a malformed quantized tensor")
        node = cls()
        node.integers = reader.fixed_tensor(integers)
        node.parameters = reader.node(parameters)
        return node

    def build(self, parts: Parts) -> Any:
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
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        axis, *trees = unpack(payload, int, int, int, int)
        require(trees == [TENSOR] * 3, "a malformed quantized tensor")
        node = cls()
        node.axis = axis
        node.entries = Entries([reader.fixed_tensor(tree) for tree in trees])
        return node

    def build(self, parts: Parts) -> Any:
        integers, scales, zero_points = self.entries.build(parts)
        _check_integers(integers)
        require(0 <= self.axis < integers.ndim, "a malformed quantized tensor")
        require(scales.shape == zero_points.shape == (integers.shape[self.axis],), "a malformed quantized tensor")
        return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, self.axis)

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield from zip(((), ("scales",), ("zero_points",)), self.entries.nodes, strict=True)

    def describe(self) -> str:
        return "quantized tensor"
