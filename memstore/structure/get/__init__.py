"""A stored value, built again: as it was put, with lazy leaves, or in the form that the caller asks for.

rebuild          the value as it was put
into             get with out=
like             get with like=
matching         what a stored value and such a target have in common, and how they differ
target_objects   the leaves of a target that are no tensors
storage          bytes as tensors, without a copy
"""

from __future__ import annotations

from memstore.structure.get.into import get_into
from memstore.structure.get.like import get_like
from memstore.structure.get.rebuild import build, rebuild, rebuild_lazily
from memstore.structure.get.storage import bare_array

__all__ = ["bare_array", "build", "get_into", "get_like", "rebuild", "rebuild_lazily"]
