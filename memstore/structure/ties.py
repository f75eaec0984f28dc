"""Ties: which tensors share bytes. Ties are stored once, and share one storage again when they are got.

By address: tensors whose bytes overlap are tied, also when torch holds them in two storages (two `from_numpy` of one
array). Tensors of one storage that don't overlap are not.

Bytes that were never put are never stored, and ties never take more than the elements would. So a tensor with gaps,
like a column of a matrix, is tied only to tensors without gaps that cover all of its span (the matrix), or to others of
the very same elements. Else it is stored apart, without its gaps: a column, and that column and its neighbour, become
two.

A put that casts ties the leaves that it casts from one dtype with one another: element by element they lie to each
other as before. With leaves of other dtypes, or that it leaves as they are, they have no bytes in common any more.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore.structure import traits
from memstore.structure.traits import has_gaps, pack

# --- Footprints: the bytes that tensors reach over, and whether their storages still have them -----------------------


_storage = torch.Tensor.untyped_storage
_storage_size = torch.UntypedStorage.nbytes
_offset: Any = torch.Tensor.storage_offset  # an int, or in a trace a symbol


class Locations(NamedTuple):
    """Where tensors lie in memory."""

    addresses: list[int]
    sizes: list[int]  # of their storages, in bytes
    offsets: list[int]  # in these, in elements


def locate_tensors(tensors: Sequence[torch.Tensor], addresses: list[int]) -> Locations:
    """Takes 0.12 µs a tensor."""
    return Locations(addresses, list(map(_storage_size, map(_storage, tensors))), list(map(_offset, tensors)))


class Footprints:
    """The bytes that the tensors of one structure reach over.

    Attributes:
        spans: bytes from the first to the last element of each, gaps included.
        gaps: for each, whether some of its span is none of its elements.
    """

    __slots__ = ("_itemsizes", "_whole", "gaps", "spans")

    def __init__(
        self, dtypes: Sequence[torch.dtype], shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]]
    ) -> None:
        reaches = list(map(traits.reach, shapes, strides))
        self._whole = [reach * dtype.itemsize for reach, dtype in zip(reaches, dtypes, strict=True)]
        self._itemsizes = np.array([dtype.itemsize for dtype in dtypes], np.int64)
        self.spans = np.array(self._whole, np.int64)
        self.gaps = list(map(has_gaps, shapes, strides))

    def missing(self, locations: Locations) -> list[int]:
        """Finds the tensors whose storages lack some of their bytes.

        A storage can be shrunk under its tensors: FSDP frees parameters by `resize_(0)`. Their shapes stay, and a copy
        would read whatever lies at the address that is left.
        """
        addresses, sizes, offsets = locations
        if sizes == self._whole and not any(offsets) and 0 not in addresses:
            return []
        starts = np.array(offsets, np.int64) * self._itemsizes
        short = starts + self.spans > np.array(sizes, np.int64)
        nowhere = np.array(addresses, np.int64) <= starts  # of a storage without memory: torch adds the offset to 0
        return np.flatnonzero((short | nowhere) & (self.spans > 0)).tolist()


# --- Ties ------------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Leaves that share a span of bytes. Hashable: it is a part of the key that plans are cached by."""

    pad: int  # bytes before the first leaf, so that the span starts on a multiple of its widest element
    nbytes: int  # of the span, with the pad
    members: tuple[tuple[int, int], ...]  # (leaf, offset in the span)
    packed: bool  # all members are the same elements, with gaps between them: stored without the gaps


class Ties(NamedTuple):
    same: tuple[tuple[int, int], ...]  # (leaf, an earlier leaf that is the very same tensor)
    groups: tuple[Group, ...]


NO_TIES = Ties((), ())


def overlapping(addresses: Sequence[int], spans: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    """Finds the tensors whose byte ranges overlap those of others. Takes 20 µs for 300."""
    if len(addresses) < 2:
        return []
    starts = np.array(addresses, np.int64)
    order = starts.argsort()
    starts = starts[order]
    ends = starts + spans[order]
    if not (ends[:-1] > starts[1:]).any():
        return []
    inside = np.maximum.accumulate(ends)[:-1] > starts[1:]
    return np.sort(order[np.append(inside, False) | np.append(False, inside)]).tolist()


class ByteRange(NamedTuple):
    """The bytes of a leaf, by its number."""

    start: int
    stop: int
    leaf: int


def clusters_of(ranges: Iterable[ByteRange]) -> list[list[ByteRange]]:
    """Groups ranges, none of them empty: each with all that overlap it, and all that overlap those."""
    clusters: list[list[ByteRange]] = []
    end = 0
    for part in sorted(ranges):
        if clusters and part.start < end:
            clusters[-1].append(part)
            end = max(end, part.stop)
        else:
            clusters.append([part])
            end = part.stop
    return clusters


def find_ties(
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
    footprints: Footprints,
    alone: Sequence[bool],
    candidates: Sequence[int],
    kinds: Sequence[object],
) -> Ties:
    """Finds which of the tensors are to be stored as one.

    Args:
        alone: leaves whose bytes in memory aren't their values (conj).
        candidates: as `overlapping` found them.
        kinds: only leaves of one kind are tied, as those that are cast from one dtype.
    """
    same: list[tuple[int, int]] = []
    groups: list[Group] = []
    firsts: dict[tuple[int, object], int] = {}
    ranges: dict[tuple[torch.device, object], list[ByteRange]] = {}
    for i in candidates:
        tensor, span = tensors[i], int(footprints.spans[i])
        if not span:
            continue
        first = firsts.setdefault((id(tensor), kinds[i]), i)
        if first != i:
            same.append((i, first))
        elif not alone[i]:
            ranges.setdefault((tensor.device, kinds[i]), []).append(ByteRange(addresses[i], addresses[i] + span, i))
    for found in ranges.values():
        clusters = clusters_of([part for part in found if not footprints.gaps[part.leaf]])
        starts = [cluster[0].start for cluster in clusters]
        ends = [max(part.stop for part in cluster) for cluster in clusters]
        looks: dict[Any, list[int]] = {}
        for part in found:
            if footprints.gaps[part.leaf]:
                cover = bisect.bisect_right(starts, part.start) - 1
                if cover >= 0 and part.stop <= ends[cover]:
                    clusters[cover].append(part)
                else:
                    tensor = tensors[part.leaf]
                    look = (part.start, tensor.dtype, tensor.shape, tensor.stride())
                    looks.setdefault(look, []).append(part.leaf)
        groups += [group for group in (_group(cluster, tensors) for cluster in clusters) if group is not None]
        for leaves in looks.values():
            if len(leaves) > 1:
                tensor = tensors[leaves[0]]
                nbytes = pack(tensor.shape, tensor.stride()).elements * tensor.dtype.itemsize
                groups.append(Group(0, nbytes, tuple((i, 0) for i in leaves), packed=True))
    return Ties(tuple(same), tuple(groups))


def _group(cluster: list[ByteRange], tensors: Sequence[torch.Tensor]) -> Group | None:
    if len(cluster) < 2:
        return None
    sizes = {part.leaf: tensors[part.leaf].dtype.itemsize for part in cluster}
    if any(part.start % sizes[part.leaf] for part in cluster):
        return None  # no common storage could hold them at whole elements: stored apart
    first = cluster[0].start
    start = first - first % max(sizes.values())
    end = max(part.stop for part in cluster)
    members = sorted((part.leaf, part.start - start) for part in cluster)
    return Group(first - start, end - start, tuple(members), packed=False)
