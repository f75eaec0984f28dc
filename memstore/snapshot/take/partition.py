"""Who writes what: each box of a tensor once, the bytes balanced among the ranks that have it. Pure arithmetic.

Every rank computes this from the same offers, and gets the same answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from memstore.errors import ShardMismatchError
from memstore.sharding import Box
from memstore.snapshot.cover import check_cover

SPLIT = 1 << 30  # bytes: a larger box that several ranks have is written by several


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that several ranks may have (parts of), as one rank has it. `boxes`: offsets and shape of each."""

    path: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    is_sharded: bool


class _Item(NamedTuple):
    nbytes: int
    path: str
    box: Box
    holders: tuple[int, ...]


def lone_replicas(offers: Sequence[Sequence[Offer]]) -> set[str]:
    """Paths of whole tensors that were said to be replicated, and that some ranks don't have: each keeps its own."""
    counts = Counter(offer.path for mine in offers for offer in mine)
    whole_ones = {offer.path for mine in offers for offer in mine if not offer.is_sharded}
    sharded = {offer.path for mine in offers for offer in mine if offer.is_sharded}
    return {path for path in whole_ones if counts[path] < len(offers) and path not in sharded}


Shares = list[dict[str, list[Box]]]  # for each rank the boxes that it writes, by path


def partition(own: Sequence[int], offers: Sequence[Sequence[Offer]]) -> Shares:
    """Which boxes each rank writes.

    Args:
        own: for each rank the bytes that it writes anyway: of tensors that it alone has.
        offers: for each rank the tensors that others may have, too.

    Raises:
        ShardMismatchError: the ranks disagree about a tensor, or don't cover it.
    """
    items = _items(_merged(offers))
    loads = [(nbytes, rank) for rank, nbytes in enumerate(own)]
    for item in items:
        if len(item.holders) == 1:
            rank = item.holders[0]
            loads[rank] = (loads[rank][0] + item.nbytes, rank)
    shares: Shares = [{} for _ in own]
    for item in items:
        rank = item.holders[0] if len(item.holders) == 1 else min(loads[holder] for holder in item.holders)[1]
        if len(item.holders) > 1:
            loads[rank] = (loads[rank][0] + item.nbytes, rank)
        shares[rank].setdefault(item.path, []).append(item.box)
    return shares


class _Merged(NamedTuple):
    offer: Offer
    rank: int
    holders: dict[Box, list[int]]


def _merged(offers: Sequence[Sequence[Offer]]) -> Mapping[str, _Merged]:
    """By path, who has which boxes."""
    found: dict[str, _Merged] = {}
    for rank, mine in enumerate(offers):
        for offer in mine:
            first = found.setdefault(offer.path, _Merged(offer, rank, {}))
            if (first.offer.dtype, first.offer.shape) != (offer.dtype, offer.shape):
                raise ShardMismatchError(
                    f"{offer.path}: rank {first.rank} has it as {first.offer.dtype}{list(first.offer.shape)}, rank "
                    f"{rank} as {offer.dtype}{list(offer.shape)}: a tensor of one path is the same on all ranks that "
                    "share it"
                )
            for offsets, shape in offer.boxes:
                first.holders.setdefault(Box(offsets, shape), []).append(rank)
    return found


def _items(merged: Mapping[str, _Merged]) -> list[_Item]:
    """What is to be written, the largest first."""
    items: list[_Item] = []
    for path, (offer, _, holders) in merged.items():
        check_cover(path, offer.shape, list(holders))
        for box, ranks in holders.items():
            pieces = _split(box, offer.itemsize, len(ranks))
            items += [_Item(math.prod(piece.shape) * offer.itemsize, path, piece, tuple(ranks)) for piece in pieces]
    return sorted(items, key=lambda item: (-item.nbytes, item.path, item.box))


def _split(box: Box, itemsize: int, holders: int) -> list[Box]:
    """Along the first dimension, where it is worth it."""
    nbytes = math.prod(box.shape) * itemsize
    if holders == 1 or nbytes <= SPLIT or not box.shape:
        return [box]
    count = min(holders, -(-nbytes // SPLIT), box.shape[0])
    starts = [box.shape[0] * i // count for i in range(count + 1)]
    return [
        Box((box.offsets[0] + start, *box.offsets[1:]), (stop - start, *box.shape[1:]))
        for start, stop in zip(starts, starts[1:], strict=False)
    ]
