"""Leaves by their storages: which of them overlap, where each storage lies, and the span that it is stored as."""

from __future__ import annotations

from collections.abc import Sequence

from memstore.engine import Leaf, Span
from memstore.structure.tensors import DTYPES, traits


def cluster_leaves(leaves: Sequence[Leaf], same: dict[int, int]) -> list[list[int]]:
    """The leaves by their storages: alone, or with those that their bytes overlap. Empty ones are left out."""
    order = sorted((leaf.offset, i) for i, leaf in enumerate(leaves) if leaf.nbytes and i not in same)
    clusters: list[list[int]] = []
    end = -1
    for offset, i in order:
        stop = offset + leaves[i].nbytes
        if offset < end:
            clusters[-1].append(i)
            end = max(end, stop)
        else:
            clusters.append([i])
            end = stop
    return clusters


def storage_range(leaves: Sequence[Leaf], cluster: Sequence[int]) -> tuple[int, int]:
    """Where the storage of tied leaves starts, on a multiple of their widest element, and where it stops."""
    if len(cluster) == 1:  # need not be aligned
        leaf = leaves[cluster[0]]
        return leaf.offset, leaf.offset + leaf.nbytes
    widest = max(DTYPES[leaves[i].dtype].itemsize for i in cluster)
    first = min(leaves[i].offset for i in cluster)
    return first - first % widest, max(leaves[i].offset + leaves[i].nbytes for i in cluster)


def _span_of(leaves: Sequence[Leaf], members: Sequence[int]) -> Span:
    """The span that a storage is stored as: a tensor's own where one leaf is all of it, else plain bytes."""
    start, stop = storage_range(leaves, members)
    widest = max((DTYPES[leaves[i].dtype] for i in members), key=lambda dtype: dtype.itemsize)
    for i in members:
        leaf = leaves[i]
        whole = leaf.offset == start and leaf.nbytes == stop - start
        if whole and (leaf.stride is None or traits.is_c_ordered(leaf.shape, leaf.stride)):
            return Span(leaf.name, leaf.dtype, widest.itemsize, leaf.shape, leaf.nbytes)
    return Span(leaves[members[0]].name, traits.DTYPE_NAMES[widest], widest.itemsize, None, stop - start)


def spans_of(leaves: Sequence[Leaf], same: dict[int, int]) -> list[tuple[Span, list[int]]]:
    """What is laid out, with the leaves that lie there, in the order of the leaves."""
    empty = [[i] for i, leaf in enumerate(leaves) if not leaf.nbytes and i not in same]
    found = sorted([sorted(cluster) for cluster in cluster_leaves(leaves, same)] + empty)
    return [(_span_of(leaves, members), members) for members in found]
