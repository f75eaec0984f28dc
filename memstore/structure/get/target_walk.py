"""A target, taken apart: its tensors stay as they are, so that they can be written; its objects are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memstore.errors import UnsupportedValueError
from memstore.sharding import ShardedLeaf, sharded_leaf
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import EXPANDED, GONE, why_not_filled
from memstore.structure.tree import TENSOR, Tree
from memstore.structure.walk import Walk, check_held

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, tuple, int, float, str, bool, type(None)})


class ShardedTarget(NamedTuple):
    """A DTensor, TensorShard or ShardedTensor in a target, and what this rank holds of it."""

    value: Any
    leaf: ShardedLeaf


class TargetWalk(Walk):
    """The walk over a target.

    Attributes:
        sharded: what is spread over ranks, by where it stands among the tensors. There stands this rank's only shard,
            or an empty tensor where there are several or none.
    """

    __slots__ = ("sharded",)

    def __init__(self, allow_pickle: bool, careful: bool = False) -> None:
        super().__init__(allow_pickle, careful)
        self.sharded: dict[int, ShardedTarget] = {}

    def visit(self, value: Any) -> Tree:
        if type(value) not in _PLAIN_TYPES:
            try:
                leaf = sharded_leaf(value)
            except UnsupportedValueError as error:
                raise RefusedError(str(error)) from None
            if leaf is not None:
                check_held(leaf)
                if self.in_place:
                    self._check_shards(leaf)
                self.sharded[len(self.tensors)] = ShardedTarget(value, leaf)
                is_one = len(leaf.shards) == 1
                self.tensors.append(leaf.shards[0].local if is_one else torch.empty(0, dtype=leaf.dtype, device="cpu"))
                return TENSOR
        return super().visit(value)

    def _check_shards(self, leaf: ShardedLeaf) -> None:
        """Raises RefusedError where a match, which tells what is wrong with memory and strides, can't look further."""
        for _, local in leaf.shards:
            why = why_not_filled(local)
            if why is not None and why not in (GONE, EXPANDED):
                raise RefusedError(why)

    def write_leaf(self, value: Any) -> Any:
        return None


class SplittingWalk(TargetWalk):
    """As the walk of a sharded put: some containers in which no tensor lies stay containers.

    Attributes:
        split: these, by their ids.
    """

    __slots__ = ("_is_split", "split")

    def __init__(self, allow_pickle: bool, careful: bool, split: dict[int, Any]) -> None:
        super().__init__(allow_pickle, careful)
        self.split = split
        self._is_split: list[bool] = []  # of the value that is visited, and those around it

    def visit(self, value: Any) -> Tree:
        self._is_split.append(id(value) in self.split)
        tree = super().visit(value)
        self._is_split.pop()
        return tree

    def joined(self, tree: Tree, trees: tuple[Tree, ...], join: Callable[[list[Any]], Any] | None = None) -> Tree:
        return tree if self._is_split[-1] else super().joined(tree, trees, join)
