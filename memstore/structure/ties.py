"""Which tensors share bytes. Ties are stored once, and share one storage again when they are got.

By address: tensors whose bytes overlap are tied, also when torch holds them in two storages (two `from_numpy` of one
array). Tensors of one storage that don't overlap are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from memstore.structure import traits


class Group(NamedTuple):
    """Leaves that share a span of bytes. Hashable: it is a part of the key that plans are cached by."""

    pad: int  # bytes before the first leaf, so that the span starts on a multiple of its widest element
    nbytes: int  # of the span, with the pad
    members: tuple[tuple[int, int], ...]  # (leaf, offset in the span)
    packed: bool  # all members are the same elements, with gaps between them: stored contiguous, without the gaps


class Ties(NamedTuple):
    same: tuple[tuple[int, int], ...]  # (leaf, an earlier leaf that is the very same tensor)
    groups: tuple[Group, ...]


NO_TIES = Ties((), ())


def overlap(addresses: Sequence[int], spans: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    """Whether any two byte ranges overlap. 20 µs for 300."""
    if len(addresses) < 2:
        return False
    starts = np.array(addresses, np.int64)
    order = starts.argsort()
    starts = starts[order]
    return bool((starts[:-1] + spans[order][:-1] > starts[1:]).any())


def find_ties(
    tensors: Sequence[torch.Tensor], addresses: Sequence[int], spans: Sequence[int], alone: Sequence[bool]
) -> Ties:
    """Args: spans: bytes from first to last element; alone: leaves whose bytes in memory aren't their values (conj)."""
    same: list[tuple[int, int]] = []
    groups: list[Group] = []
    firsts: dict[int, int] = {}
    ranges: dict[torch.device, list[tuple[int, int]]] = {}
    for i, tensor in enumerate(tensors):
        if not spans[i]:
            continue
        first = firsts.setdefault(id(tensor), i)
        if first != i:
            same.append((i, first))
        elif not alone[i]:
            ranges.setdefault(tensor.device, []).append((addresses[i], i))
    for found in ranges.values():
        found.sort()
        cluster: list[int] = []
        end = 0
        for address, i in found:
            if cluster and address >= end:
                groups += _group(cluster, tensors, addresses, spans)
                cluster = []
            cluster.append(i)
            end = max(end, address + spans[i]) if len(cluster) > 1 else address + spans[i]
        groups += _group(cluster, tensors, addresses, spans)
    return Ties(tuple(same), tuple(groups))


def _group(
    cluster: list[int], tensors: Sequence[torch.Tensor], addresses: Sequence[int], spans: Sequence[int]
) -> list[Group]:
    if len(cluster) < 2:
        return []
    looks = {(addresses[i], tensors[i].dtype, tensors[i].shape, tensors[i].stride()) for i in cluster}
    tensor = tensors[cluster[0]]
    if len(looks) == 1 and traits.reach(tensor.shape, tensor.stride()) > tensor.numel():
        nbytes = tensor.numel() * tensor.dtype.itemsize
        return [Group(0, nbytes, tuple((i, 0) for i in sorted(cluster)), packed=True)]
    if any(addresses[i] % tensors[i].dtype.itemsize for i in cluster):
        return []  # no common storage could hold them at whole elements: stored apart
    first = min(addresses[i] for i in cluster)
    widest = max(tensors[i].dtype.itemsize for i in cluster)
    start = first - first % widest
    end = max(addresses[i] + spans[i] for i in cluster)
    return [Group(first - start, end - start, tuple((i, addresses[i] - start) for i in sorted(cluster)), packed=False)]
