"""Sparse tensors: one leaf for a user, their indices and values inside.

["sparse", layout, kind and requires_grad, [indices, values], object [size, coalesced]]                     COO
["sparse", layout, kind and requires_grad, [compressed, plain indices, values], object [size, false]]       others

What is built is checked by torch, all indices, since its operators trust them.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memstore.engine import Path
from memstore.structure.checks import require, sizes, unpack
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import traits
from memstore.structure.tree import TENSOR, Node, Parts, Reader, Tree, register
from memstore.structure.walk import Walk

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
    def read(cls, payload: list[Any], reader: Reader) -> Node:
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

    def build(self, parts: Parts) -> Any:
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
