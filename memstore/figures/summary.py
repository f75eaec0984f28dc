"""Statistics of a tensor, and a histogram: what a person looks at first. Two passes, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memstore.figures.pieces import Numbers, numbers, pieces

Number = int | float
_NEAR = 1e-150
_FAR = 1e300  # beyond, ranges are no float64 any more


@dataclass(frozen=True, slots=True)
class Summary:
    """What the elements of a tensor are like; of complex ones, their magnitudes.

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
    """None: torch can't count with the dtype."""
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
    """The finite elements by size; of a few whole numbers one bin each. Empty where there are none."""
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
    """The elements as one flat array of whole numbers or floats."""
    values = numbers(piece)
    if values is None:
        return None
    if values.dtype.kind == "c":
        values = np.abs(values)
    elif values.dtype.kind == "b":
        values = values.astype(np.uint8)
    return values.ravel()
