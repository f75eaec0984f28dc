"""Statistics of a tensor's elements, histograms, and how two tensors differ. All of it in bounded memory.

summarize, histogram    what a person looks at first: minimum, mean, maximum; what is no number; elements by size
compare                 how many elements of two tensors differ, and by how much
pieces, numbers         a tensor in pieces that fit into memory, as arrays that numpy counts with
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memstore._wording import count_of
from memstore.structure import NUMPY_DTYPES

# --- Statistics and histograms, in two passes ------------------------------------------------------------------------


Number = int | float
_NEAR = 1e-150
_FAR = 1e300  # beyond, ranges are no float64 any more


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of a tensor's elements; of complex ones, those of their magnitudes.

    Attributes:
        count: how many there are.
        minimum, mean, maximum, deviation: of those that are finite; None: there are none. `deviation` is the standard
            one, of all of them as they are.
        zeros, nans, infinities: how many.
    """

    count: int
    minimum: Number | None
    mean: float | None
    maximum: Number | None
    deviation: float | None
    zeros: int
    nans: int
    infinities: int


@dataclass(frozen=True, slots=True)
class Bin:
    """Elements from `start` up to `stop`, which the last bin has too; of a bin of one number, the two are equal."""

    start: Number
    stop: Number
    count: int


class _Moments:
    """Count, mean and squared deviations, of pieces put together as by Chan, Golub and LeVeque (1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = np.longdouble(0)  # the squares of large and of small doubles are no doubles
        self.squares: Any = np.longdouble(0)

    def add(self, values: Any) -> None:
        largest = float(abs(values).max()) if values.dtype == np.float64 else 1.0
        kind = np.float64 if largest == 0 or _NEAR < largest < 1 / _NEAR else np.longdouble
        mean = values.mean(dtype=kind)
        squares = np.square(values - mean, dtype=kind).sum()
        count, apart = self.count + values.size, mean - self.mean
        self.squares += squares + apart * apart * self.count * values.size / count
        self.mean += apart * values.size / count
        self.count = count


def summarize(tensor: torch.Tensor) -> Summary | None:
    """Counts and measures the elements; None where torch can't count with the dtype."""
    moments, zeros, nans, infinities = _Moments(), 0, 0, 0
    lowest: list[Number] = []
    highest: list[Number] = []
    with np.errstate(all="ignore"):
        for piece in pieces(tensor):
            values = _counted(piece)
            if values is None:
                return None
            if values.dtype.kind == "f":
                finite = values[np.isfinite(values)]
                unknown = int(np.isnan(values).sum())
                nans, infinities = nans + unknown, infinities + values.size - finite.size - unknown
                values = finite
            zeros += values.size - int(np.count_nonzero(values))
            if values.size:
                moments.add(values)
                lowest.append(values.min().item())
                highest.append(values.max().item())
    if not moments.count:
        return Summary(tensor.numel(), None, None, None, None, zeros, nans, infinities)
    deviation = float(np.sqrt(moments.squares / moments.count))
    least, most = min(lowest), max(highest)
    return Summary(tensor.numel(), least, float(moments.mean), most, deviation, zeros, nans, infinities)


def histogram(tensor: torch.Tensor, summary: Summary, bins: int = 10) -> list[Bin]:
    """Counts the finite elements by size; of a few whole numbers one bin each. Empty where there are none."""
    least, most = summary.minimum, summary.maximum
    if least is None or most is None:
        return []
    if isinstance(least, int) and isinstance(most, int) and most - least < bins:
        edges: list[Number] = [*range(least, most + 2)]
        stops: list[Number] = [*range(least, most + 1)]
    elif least == most:
        return [Bin(least, most, summary.count - summary.nans - summary.infinities)]
    else:
        scale = 0.25 if max(abs(least), abs(most)) > _FAR else 1.0
        edges = [float(edge) / scale for edge in np.linspace(least * scale, most * scale, bins + 1)]
        edges[0], edges[-1] = least, most
        stops = edges[1:]
    counts = np.zeros(len(stops), np.int64)
    with np.errstate(all="ignore"):
        for values in _finite(tensor):
            counts += np.histogram(values, np.asarray(edges, np.float64))[0]
    return [Bin(start, stop, int(count)) for start, stop, count in zip(edges, stops, counts, strict=False)]


def _finite(tensor: torch.Tensor) -> Iterator[Numbers]:
    for piece in pieces(tensor):
        values = _counted(piece)
        if values is not None:
            yield values[np.isfinite(values)] if values.dtype.kind == "f" else values


def _counted(piece: torch.Tensor) -> Numbers | None:
    """Returns the elements as one flat array of whole numbers or floats."""
    values = numbers(piece)
    if values is None:
        return None
    if values.dtype.kind == "c":
        values = np.abs(values)
    elif values.dtype.kind == "b":
        values = values.astype(np.uint8)
    return values.ravel()


# --- Differences: elements are equal if their bits are ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unequal:
    """The differences between two tensors of one shape.

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
    """Measures how far elements are apart; NaN where one is no number, and the other isn't the same."""
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
    """Returns whether a difference may be no int64."""
    return max(ours.dtype.itemsize, theirs.dtype.itemsize) == 8 and (
        max(int(ours.max()), int(theirs.max())) - min(int(ours.min()), int(theirs.min())) >= 1 << 63
    )


# --- Tensors in pieces; lazy leaves are read piece by piece ----------------------------------------------------------


PIECE = 1 << 20  # elements

Numbers = np.ndarray[Any, np.dtype[Any]]


def pieces(tensor: torch.Tensor, most: int = PIECE) -> Iterator[torch.Tensor]:
    """Cuts a tensor into pieces of up to `most` elements, in order. Tensors of one shape are cut alike."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    rows = tensor.shape[0]
    row = tensor.numel() // rows
    if row > most:
        for i in range(rows):
            yield from pieces(tensor[i], most)
        return
    step = most // row
    for start in range(0, rows, step):
        yield tensor[start : start + step]


def numbers(piece: torch.Tensor) -> Numbers | None:
    """Returns the elements as numpy has them, floats that it lacks as float64. None: torch can't count with them."""
    name = str(piece.dtype).removeprefix("torch.")
    if name not in NUMPY_DTYPES and not (piece.is_floating_point() or piece.is_complex()):
        return None
    try:
        if name not in NUMPY_DTYPES:
            piece = piece.to(torch.complex64 if piece.is_complex() else torch.float64)
        return piece.detach().resolve_conj().resolve_neg().numpy()
    except (RuntimeError, NotImplementedError):  # several numbers in a byte
        return None


def bits(piece: torch.Tensor) -> Numbers:
    """Returns the bytes of each element: [elements, bytes]."""
    plain = piece.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).reshape(plain.numel(), -1).numpy()
