"""How the tensors of a plan's leaves are made over a data section: sorted once, so that a get only runs through lists.

One storage a leaf, but for leaves that share bytes. Leaves of one dtype and shape that lie one behind the other are the
rows of one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore.engine import Leaf
from memstore.structure.plans.clusters import cluster_leaves, storage_range
from memstore.structure.tensors import DTYPES, NUMPY_DTYPES, PARAMETER, PLAIN, Traits, traits

_NUMPY_DIMENSIONS = 32  # numpy 1 allows no more


class Run(NamedTuple):
    """Leaves of one dtype and shape that lie one behind the other: one array, whose rows they are."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # with the number of leaves in front
    offset: int
    leaves: tuple[int, ...]


class Part(NamedTuple):
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
        self.runs: list[Run] = []
        self.alone: list[tuple[int, np.dtype[Any], tuple[int, ...], int]] = []  # leaf, dtype, shape, offset
        self.buffers: list[tuple[int, torch.dtype, tuple[Any, ...], int, int]] = []  # leaf, dtype, sizes, count, offset
        self.storages: list[tuple[int, int, tuple[Part, ...]]] = []  # start, stop
        self.copied: list[tuple[int, int, tuple[Part, ...]]] = []  # the same; in files of others, between elements
        self.empty = [i for i, leaf in enumerate(leaves) if not leaf.nbytes and i not in same]
        self.same = tuple(same.items())
        marked = [(i, found) for i, found in enumerate(leaf_traits) if found is not PLAIN and i not in same]
        self.parameters = [(i, t.requires_grad) for i, t in marked if t.kind == PARAMETER and t.device is None]
        self.traits = [(i, t) for i, t in marked if t.kind != PARAMETER or t.device is not None]
        rows: list[int] = []
        for cluster in cluster_leaves(leaves, same):
            if len(cluster) == 1 and leaves[cluster[0]].offset % DTYPES[leaves[cluster[0]].dtype].itemsize:
                self.copied.append(_storage(leaves, cluster))
            elif len(cluster) == 1 and suits_numpy(leaves[cluster[0]]):
                rows.append(cluster[0])
            elif len(cluster) == 1 and leaves[cluster[0]].stride is None:
                leaf = leaves[cluster[0]]
                dtype = DTYPES[leaf.dtype]
                sizes = leaf.shape or ((),)  # for resize_: of numbers, or of no dimension
                self.buffers.append((cluster[0], dtype, sizes, leaf.nbytes // dtype.itemsize, leaf.offset))
            else:
                self.storages.append(_storage(leaves, cluster))
        self._add_runs(leaves, rows)

    def _add_runs(self, leaves: Sequence[Leaf], rows: list[int]) -> None:
        run: list[int] = []
        for i in [*rows, -1]:
            if run and (i < 0 or not _continues(leaves[run[-1]], leaves[i])):
                first = leaves[run[0]]
                dtype = NUMPY_DTYPES[first.dtype]
                if len(run) == 1:
                    self.alone.append((run[0], dtype, first.shape, first.offset))
                else:
                    self.runs.append(Run(dtype, (len(run), *first.shape), first.offset, tuple(run)))
                run = []
            run.append(i)


def suits_numpy(leaf: Leaf) -> bool:
    """Whether a leaf is a numpy array over the memory, which costs least."""
    return leaf.stride is None and leaf.dtype in NUMPY_DTYPES and len(leaf.shape) < _NUMPY_DIMENSIONS


def _continues(before: Leaf, leaf: Leaf) -> bool:
    return (
        before.dtype == leaf.dtype
        and before.shape == leaf.shape
        and leaf.shape != ()  # the rows of a one-dimensional array are scalars, not arrays
        and before.offset + before.nbytes == leaf.offset
    )


def _storage(leaves: Sequence[Leaf], cluster: Sequence[int]) -> tuple[int, int, tuple[Part, ...]]:
    start, stop = storage_range(leaves, cluster)
    parts = []
    for i in cluster:
        leaf, dtype = leaves[i], DTYPES[leaves[i].dtype]
        stride = traits.contiguous_stride(leaf.shape) if leaf.stride is None else leaf.stride
        parts.append(Part(i, dtype, (leaf.offset - start) // dtype.itemsize, leaf.shape, stride))
    return start, stop, tuple(parts)
