"""The files of a snapshot, mapped: views, and entries of a store that lie in them."""

from __future__ import annotations

import os
from typing import Any

import torch

from memstore import modes, structure
from memstore.contents import encode_boxes
from memstore.engine import Content, Leaf, check_header
from memstore.errors import CorruptionError, MemstoreError
from memstore.snapshot.progress import SILENT
from memstore.snapshot.read import MappedFiles, Places, Stored, Value, Want, new_target, read_into
from memstore.snapshot.restore import state_dict_of
from memstore.structure import DTYPES, ExternalValue, over, traits
from memstore.view import StoredTensor, lazy_leaf


def describe_snapshot(key: str, path: str | os.PathLike[str], format: object, *, allow_pickle: bool) -> Content:
    """What a record says of rank 0's state dicts, which lie in the files of a snapshot.

    Args:
        key: for errors.
        format: not used: the arguments are those of `formats.describe_files`.
    """
    try:
        stored = Stored(os.path.abspath(path))
        values = _values(stored, 0)
        places = Places(stored, [tensor for value in values for tensor in value.tensors])
        starts, boxes = places.with_room([tensor for value in values for tensor in value.tensors])
        keys = [value.key for value in values]
        try:
            joined = structure.join_external(keys, [ExternalValue(one.plan, one.objects) for one in values], starts)
        except CorruptionError as error:
            raise stored.damaged(error.detail) from error
        boxes = {leaf: found for leaf, found in boxes.items() if leaf not in joined.plan.same}
        check_header(key, len(joined.plan.description) + len(joined.objects))
    except MemstoreError as error:
        error.key = key
        raise
    return Content(
        joined.plan.description,
        joined.objects,
        joined.plan.nbytes,
        adopted=places.files,
        boxes=encode_boxes(boxes, {}) if boxes else None,
    )


def load_snapshot(key: str, path: str | os.PathLike[str], format: object, *, allow_pickle: bool) -> Any:
    """Rank 0's state dicts in new memory, compared with their checksums."""
    try:
        stored = Stored(os.path.abspath(path))
        values = _values(stored, 0)
        return {value.key: state_dict_of(stored, value, allow_pickle=allow_pickle) for value in values}
    except MemstoreError as error:
        error.key = key
        raise


@modes.put_aside()
def view(stored: Stored, rank: int, *, allow_pickle: bool) -> dict[str, Any]:
    """As `Snapshot.view`."""
    values = _values(stored, rank)
    places = Places(stored, [tensor for value in values for tensor in value.tensors])
    source = MappedFiles(stored.path, places.files)
    with torch.inference_mode(False):
        return {
            value.key: stored.build(value, _leaves(stored, value, places, source), allow_pickle=allow_pickle)
            for value in values
        }


def _leaves(stored: Stored, value: Value, places: Places, source: MappedFiles) -> list[torch.Tensor]:
    """Lazy ones, and plain ones where a container looks into its leaves (jagged, quantized, numpy arrays)."""
    leaves: list[torch.Tensor] = []
    plan, loaded = value.plan, value.plan.loaded
    for i, (tensor, leaf, kind) in enumerate(zip(value.tensors, plan.leaves, plan.traits, strict=True)):
        start, boxes = places.of(tensor)
        if i in plan.same:
            leaves.append(leaves[plan.same[i]])
        elif i in loaded and boxes:
            made = new_target(tensor)
            read_into(stored, [Want(tensor, made.shards)], SILENT)
            leaves.append(traits.with_traits(made.value, kind))
        elif i in loaded:
            leaves.append(traits.with_traits(_over(source, leaf, start), kind))
        else:
            leaves.append(lazy_leaf(StoredTensor, source, leaf, start, boxes, kind))
    return leaves


def _over(source: MappedFiles, leaf: Leaf, start: int) -> torch.Tensor:
    part = source.memory[start : start + leaf.nbytes]
    if start % DTYPES[leaf.dtype].itemsize:
        part = part.copy()
    storage = torch.from_numpy(part).untyped_storage()
    storage._memstore_mapping = source.mapping  # pyright: ignore[reportAttributeAccessIssue] - as structure's own leaves
    return over(storage, DTYPES[leaf.dtype], 0, leaf.shape, traits.contiguous_stride(leaf.shape))


def _values(stored: Stored, rank: int) -> list[Value]:
    found = [stored.value(rank, key) for key in stored.keys(rank)]
    return [value for value in found if value is not None]
