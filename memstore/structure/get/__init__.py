"""A stored value, built again: as it was put, with lazy leaves, or in the form that the caller asks for.

rebuild          the value as it was put
into             get with out=
like             get with like=
matching         what a stored value and such a target have in common, and how they differ
target_walk      a target, taken apart
target_objects   the leaves of a target that are no tensors
target_overlaps  those of its tensors that share memory
pieces           what of a stored value goes where in a target
parts            what is stored of a leaf: all of it, or boxes that lie apart
storage          bytes as tensors, without a copy
"""

from __future__ import annotations

from memstore.structure.get.into import get_into
from memstore.structure.get.like import get_like
from memstore.structure.get.matching import can_cast
from memstore.structure.get.parts import (
    assemble,
    box_bytes,
    box_tensor,
    boxes_of_leaf,
    check_box,
    check_boxes,
    leaf_tensor,
    lies_in_order,
)
from memstore.structure.get.rebuild import (
    build,
    rebuild,
    rebuild_lazily,
)
from memstore.structure.get.storage import (
    bare_array,
    in_own_storage,
)

__all__ = [
    "assemble",
    "bare_array",
    "box_bytes",
    "box_tensor",
    "boxes_of_leaf",
    "build",
    "can_cast",
    "check_box",
    "check_boxes",
    "get_into",
    "get_like",
    "in_own_storage",
    "leaf_tensor",
    "lies_in_order",
    "rebuild",
    "rebuild_lazily",
]
