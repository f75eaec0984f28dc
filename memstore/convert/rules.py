"""What a caller allows, and what every step of a conversion takes."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.structure import MOST_EXPANDED


@dataclass(frozen=True, slots=True)
class Rules:
    """What a caller allows.

    Attributes:
        allow_pickle: objects that only pickle can read or write.
        untie: tensors that share memory are stored one by one, where the target can't keep them together.
        max_expanded: bytes that all tensors together may take in the target beyond those that they have in the source.
    """

    allow_pickle: bool = False
    untie: bool = False
    max_expanded: int = MOST_EXPANDED
