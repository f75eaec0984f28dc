"""The parts of an attempt, merged into one value: its tree, its leaves with their boxes, its objects. Pure.

1. Trees merge by key (`structure/tree/merge.py`); leaves and objects are told by their names.
2. A leaf of which ranks hold boxes: all ranks must say the same shape and dtype. Equal boxes must have equal checksums,
   and the lowest rank that has written one provides it; others may not overlap; together they must cover the leaf.
3. A leaf that ranks hold whole, as a plain tensor or object, is the lowest rank's. Whether the others have the same is
   looked at, and one warning tells if not: the buffers of a BatchNorm differ by right.
4. The segments are laid one behind the other in one range of addresses. A leaf whose boxes adjoin there lies where they
   lie; room for the others is behind the segments: see `boxes.py`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from memstore import structure
from memstore.contents.merged_layout import LeafLayout, find_ties
from memstore.contents.merged_leaves import LeafMerger, LeafOfRank
from memstore.contents.parts import RankPart
from memstore.engine import Content, Path, SegmentExtent, base_after, encode_extents, end_of
from memstore.errors import PartialCommitError, ShardMismatchError
from memstore.structure import TreesDifferError

log = logging.getLogger("memstore")

_SHOWN = 8  # names in one message
_encode = msgspec.msgpack.Encoder().encode


def merge(key: str, parts: Sequence[RankPart], *, with_checksums: bool) -> Content:
    """What the record of the whole value says, with the checksums of its bytes if the store has them.

    Raises:
        ShardMismatchError: the parts disagree; it names the leaf and the ranks.
        PartialCommitError: no rank holds some part of a leaf.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    extents, data = _place_segments(parts)
    names, objects, tree = _merge_trees(key, parts)
    _check_wrapped_shards(key, tree)
    held = _by_name(parts, names, data)
    laid_out = LeafLayout(end_of(extents))
    differing: dict[str, list[int]] = {}
    merger = LeafMerger(key, differing)
    for name, found in held.items():
        laid_out.add(merger.merge(name, found), name)
    written = _merge_objects(parts, objects, differing)
    _warn(key, differing)
    same = find_ties(laid_out.leaves, held)
    described = structure.describe_external_tree(tree, laid_out.leaves, written, laid_out.traits, same)
    return Content(
        description=described.plan.description,
        objects=described.objects,
        nbytes=described.plan.nbytes,
        checksums=laid_out.checksums() if with_checksums else None,
        parts=encode_extents(extents),
        boxes=laid_out.encode_boxes(with_checksums=with_checksums),
    )


def _place_segments(parts: Sequence[RankPart]) -> tuple[list[SegmentExtent], dict[int, int]]:
    """The segments, one behind the other; and by rank, where its data section starts."""
    extents: list[SegmentExtent] = []
    data: dict[int, int] = {}
    for part in parts:
        if part.segment is not None:
            base = base_after(end_of(extents), part.segment.size)
            extents.append(msgspec.structs.replace(part.segment, base=base))
            data[part.rank] = base + part.segment.start
    return extents, data


def _by_name(parts: Sequence[RankPart], names: Sequence[Path], data: dict[int, int]) -> dict[Path, list[LeafOfRank]]:
    held: dict[Path, list[LeafOfRank]] = {name: [] for name in names}
    for part in parts:
        sums = iter(part.sums or itertools.repeat(None))
        rank, own_names = part.rank, part.said.names.tensors
        start = data.get(rank, 0)
        for name, leaf, look in zip(own_names, part.said.value.leaves, part.said.looks, strict=True):
            own = tuple(itertools.islice(sums, len(leaf.boxes)))
            twin = own_names[leaf.same] if leaf.same >= 0 else None
            held[name].append(LeafOfRank(rank, leaf, look, own, start, twin))
    return held


# --- trees and objects ------------------------------------------------------------------------------------------------


def _merge_trees(key: str, parts: Sequence[RankPart]) -> tuple[tuple[Path, ...], tuple[Path, ...], Any]:
    """The names of the leaves, those of the objects, and the tree of the whole value."""
    tree = parts[0].said.tree
    merged: set[int] = set()  # parts with the same tree share it
    for part in parts[1:]:
        if id(part.said.tree) in merged:
            continue
        merged.add(id(part.said.tree))
        try:
            tree = structure.merge_trees(tree, part.said.tree)
        except TreesDifferError as error:
            found, other = error.found
            raise ShardMismatchError(
                f"{key!r}: {structure.render_path(error.path)} is {found} on rank {parts[0].rank} and {other} on rank "
                f"{part.rank}: dicts merge by key, all else must agree",
                key=key,
            ) from None
    names = structure.tree_names(tree)
    return names.tensors, names.objects, tree


def _check_wrapped_shards(key: str, tree: Any) -> None:
    """Raises ShardMismatchError and PartialCommitError, as for other leaves that ranks hold in parts."""
    for name, missing, pair in structure.check_wrapped_shards(tree):
        text = structure.render_path(name)
        if pair is not None:
            raise ShardMismatchError(
                f"{key!r}: {text}: two ranks hold parts that overlap and are not the same", key=key
            )
        if missing:
            raise PartialCommitError(
                f"{key!r}: all ranks have put their parts, and none holds {missing[0]} of {text}",
                key=key,
                missing_boxes=tuple((text, box.offsets, box.shape) for box in missing),
            )


def _merge_objects(parts: Sequence[RankPart], names: Sequence[Path], differing: dict[str, list[int]]) -> list[Any]:
    chosen: dict[Path, tuple[int, Any]] = {}
    for part in parts:
        objects = structure.written_objects(part.said.value.objects)
        for name, value in zip(part.said.names.objects, objects, strict=True):
            if name not in chosen:
                chosen[name] = (part.rank, value)
            elif _encode(chosen[name][1]) != _encode(value):  # by bytes: a NaN is no other NaN's equal
                differing.setdefault(structure.render_path(name), [chosen[name][0]]).append(part.rank)
    return [chosen[name][1] for name in names]


def _warn(key: str, differing: dict[str, list[int]]) -> None:
    if not differing:
        return
    shown = [f"{name} (ranks {', '.join(map(str, ranks))})" for name, ranks in list(differing.items())[:_SHOWN]]
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    _warn_once(key, ", ".join(shown) + more)


@functools.lru_cache(256)  # the buffers of a BatchNorm differ at every put
def _warn_once(key: str, text: str) -> None:
    log.warning("%r: ranks hold different values of %s; those of the lowest rank are stored", key, text)
