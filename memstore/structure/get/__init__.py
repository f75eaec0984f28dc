"""A stored value, built again: as it was put, with lazy leaves, or in the form that the caller asks for.

rebuild          the value as it was put
target           get with out= and like=
matching         what a stored value and such a target have in common, and how they differ
target_objects   the leaves of a target that are no tensors
storage          bytes as tensors, without a copy
"""

from __future__ import annotations

from memstore.structure.get.rebuild import rebuild, rebuild_lazily
from memstore.structure.get.storage import bare_array
from memstore.structure.get.target import get_into, get_like

__all__ = [
    "bare_array",
    "get_into",
    "get_like",
    "rebuild",
    "rebuild_lazily",
]
