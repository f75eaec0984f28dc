"""What a caller allows, and what every step of a conversion takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """What a caller allows.

    Attributes:
        allow_pickle: objects that only pickle can read or write.
        untie: tensors that share memory are stored one by one, where the target can't keep them together.
    """

    allow_pickle: bool = False
    untie: bool = False
