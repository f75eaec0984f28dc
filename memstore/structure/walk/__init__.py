"""A value, walked over: its tree, its tensors, its other leaves, and what plans need to know of the tensors.

walk    the walk; how each type of container is flattened, or why it is refused
facts   a value taken apart: the walk, and the facts of all its tensors
held    what a rank holds of a tensor, refused where boxes can't be made of it
"""

from __future__ import annotations

from memstore.structure.walk.facts import Facts, take_apart
from memstore.structure.walk.held import check_held
from memstore.structure.walk.walk import (
    Flattener,
    Walk,
    check_nesting,
    flattener,
    flattens,
    refuse,
    refuse_unless_pickled,
    rule,
)

__all__ = [
    "Facts",
    "Flattener",
    "Walk",
    "check_held",
    "check_nesting",
    "flattener",
    "flattens",
    "refuse",
    "refuse_unless_pickled",
    "rule",
    "take_apart",
]
