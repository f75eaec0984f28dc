"""A value, walked over: its tree, its tensors, its other leaves, and what plans need to know of the tensors.

walk    the walk; how each type of container is flattened, or why it is refused
facts   a value taken apart: the walk, and the facts of all its tensors
held    tensors that are stored by address: a rank's shards, and others
"""

from __future__ import annotations

from memstore.structure.walk.facts import Facts, take_apart
from memstore.structure.walk.held import check_held, held_in_memory, in_memory
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
    "held_in_memory",
    "in_memory",
    "refuse",
    "refuse_unless_pickled",
    "rule",
    "take_apart",
]
