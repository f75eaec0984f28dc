"""What belongs to one opener of a buffer: how it samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from memstore.arguments import flag
from memstore.errors import ReadOnlyError
from memstore.replay.picking import Dice, EachOnce, Picker, Prioritized, Uniform
from memstore.replay.ring import Ring
from memstore.replay.taking import Taking

Sampler = Literal["uniform", "fifo", "lifo", "prioritized"]


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Raises ValueError, TypeError: there is no such sampler."""

    sampler: Sampler
    replacement: bool
    beta: float

    def __post_init__(self) -> None:
        if self.sampler not in ("uniform", "fifo", "lifo", "prioritized"):
            raise ValueError(f"sampler is 'uniform', 'fifo', 'lifo' or 'prioritized', and not {self.sampler!r}")
        flag("replacement", self.replacement)
        if self.sampler == "prioritized" and not self.replacement:
            raise ValueError("replacement=False: rows that are drawn by priorities may come again; use 'uniform'")
        given: Any = self.beta
        if isinstance(given, str) or not hasattr(given, "__float__"):
            raise TypeError(f"beta is a number, 0 at least, and not {given!r:.100}")
        if not math.isfinite(self.beta) or self.beta < 0:
            raise ValueError(f"beta is a number, 0 at least, and not {self.beta!r}")


def picker_for(ring: Ring, options: SamplerOptions, dice: Dice) -> Picker:
    """Raises ReadOnlyError where samples are to be noted, and can't be."""
    if not ring.entry.writable and (options.sampler in ("fifo", "lifo") or ring.limiter is not None):
        what = "a rate limiter that counts them" if ring.limiter is not None else f"sampler={options.sampler!r}"
        raise ReadOnlyError(f"{ring.key!r}: samples with {what} are notes, and the store was opened with mode 'r'")
    if options.sampler in ("fifo", "lifo"):
        return Taking(ring, newest=options.sampler == "lifo")
    if options.sampler == "prioritized" and ring.priorities is not None:
        return Prioritized(ring, ring.priorities, dice)
    return Uniform(ring, dice) if options.replacement else EachOnce(ring, dice)
