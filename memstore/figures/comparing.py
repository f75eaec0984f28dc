"""How two tensors differ: elements are equal if their bits are. In bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from memstore.figures.pieces import Numbers, bits, numbers, pieces
from memstore.wording import count_of


@dataclass(frozen=True, slots=True)
class Unequal:
    """What differs between two tensors of one shape.

    Attributes:
        count: how many elements are others; of two dtypes, how many are other numbers.
        total: how many there are.
        largest: the largest difference between two that are numbers; None: there is none, or it can't be told; 0: all
            are equal as numbers, and differ by the sign of zero or the bits of NaN.
    """

    count: int
    total: int
    largest: float | None

    def __str__(self) -> str:
        differ = "differs" if self.count == 1 else "differ"
        text = f"{self.count:,} of {count_of(self.total, 'element', 'elements')} {differ}"
        if self.largest == 0:
            return f"{text}, and only by the sign of zero or the bits of NaN"
        return text if self.largest is None else f"{text}, by up to {self.largest:.3g}"


def compare(one: torch.Tensor, other: torch.Tensor) -> Unequal | None:
    """Compares two tensors of one shape. None: their bits, or of two dtypes their numbers, are the same."""
    same_dtype = one.dtype == other.dtype
    count, largest, has_unknown = 0, -1.0, False
    for left, right in zip(pieces(one), pieces(other), strict=True):
        if same_dtype:
            unequal = (bits(left) != bits(right)).any(1)
            if not unequal.any():
                continue
            count += int(unequal.sum())
        ours, theirs = numbers(left), numbers(right)
        if ours is None or theirs is None:
            count += 0 if same_dtype else left.numel()
            continue
        apart = _apart(ours.ravel(), theirs.ravel())
        if not same_dtype:
            count += int((apart != 0).sum())
        known = apart[~np.isnan(apart)]
        has_unknown = has_unknown or known.size < apart.size
        if known.size:
            largest = max(largest, float(known.max()))
    if not count:
        return None
    is_number = one.dtype != torch.bool and (largest > 0 or (largest == 0 and not has_unknown))
    return Unequal(count, one.numel(), largest if is_number else None)


def _apart(ours: Numbers, theirs: Numbers) -> Numbers:
    """How far elements are apart; NaN where one is no number, and the other isn't the same."""
    with np.errstate(all="ignore"):
        if {ours.dtype.kind, theirs.dtype.kind} <= set("biu"):
            whole = np.abs(ours.astype(object) - theirs.astype(object)) if _are_large(ours, theirs) else None
            found = np.abs(ours.astype(np.int64) - theirs.astype(np.int64)) if whole is None else whole
            return found.astype(np.float64)
        wide = np.complex128 if "c" in (ours.dtype.kind, theirs.dtype.kind) else np.float64
        ours, theirs = ours.astype(wide), theirs.astype(wide)
        apart = np.abs(ours - theirs)
        apart[(ours == theirs) | (np.isnan(ours) & np.isnan(theirs))] = 0.0  # infinities, too
        return apart


def _are_large(ours: Numbers, theirs: Numbers) -> bool:
    """Whether a difference may be no int64."""
    return max(ours.dtype.itemsize, theirs.dtype.itemsize) == 8 and (
        max(int(ours.max()), int(theirs.max())) - min(int(ours.min()), int(theirs.min())) >= 1 << 63
    )
