"""A stored value, described for people; and the tensors of a value, by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from memstore.engine import Path
from memstore.structure.objects import shown_attributes
from memstore.structure.plans import Plan, cluster_leaves, storage_range
from memstore.structure.tensors import DTYPES
from memstore.structure.tree import name_of


def leaf_table(plan: Plan) -> list[tuple[Path, torch.dtype, tuple[int, ...], int]]:
    """Name, dtype, shape and bytes of each tensor. A nested tensor is several: its values, offsets, lengths."""
    return [(leaf.name, DTYPES[leaf.dtype], leaf.shape, leaf.nbytes) for leaf in plan.leaves]


def stored_bytes(plan: Plan) -> int:
    """Bytes of the tensors; shared bytes are counted once."""
    ranges = [storage_range(plan.leaves, cluster) for cluster in cluster_leaves(plan.leaves, plan.same)]
    return sum(stop - start for start, stop in ranges)


def structure_text(plan: Plan) -> str:
    """ "TensorDict[3] of 12 leaves", "dict of 300 leaves and 2 objects", "Tensor"."""
    name = plan.root.describe()
    tensors, others = len(plan.leaves), plan.object_count
    if not any(True for _ in plan.root.children()):
        return name if tensors or others else f"empty {name}"
    text = f"{name} of {tensors} {'leaf' if tensors == 1 else 'leaves'}"
    return f"{text} and {others} {'object' if others == 1 else 'objects'}" if others else text


def iter_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of a value, with their names. Nested and unbatched tensors are given whole."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple, deque)):
        for i, entry in enumerate(value):
            yield from iter_tensors(entry, (*path, i))
    elif hasattr(value, "tensordicts"):
        yield from iter_tensors(value.tensordicts, path)  # a lazy stack
    elif hasattr(value, "_tensordict") and not isinstance(value, Mapping):
        yield from iter_tensors(value._tensordict, path)  # a tensorclass
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from iter_tensors(entry, (*path, name_of(key)))
    else:
        for name, entry in (shown_attributes(value) or {}).items():
            yield from iter_tensors(entry, (*path, name))
