"""Tensors as `memstore get` shows them: first elements, statistics, a histogram in characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from memstore import _wording as wording
from memstore import figures
from memstore.cli import inspection, render
from memstore.engine import Path
from memstore.figures import Bin, Summary

_EDGES = 3  # elements at each side of a dimension that is too long to be shown
_LINES = 12  # of the elements
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR = 40  # columns
_OBJECT = 60  # characters of an object
_LONG = 10**9

TITLES = ("leaf", "content", "min", "mean", "max", "NaN", "inf")
RIGHT = TITLES[2:]


def content(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def number(value: float | None) -> str:
    """Writes a number in four digits; whole ones as they are, as long as these are not too many."""
    if value is None:
        return "-"
    return f"{value}" if isinstance(value, int) and abs(value) < _LONG else f"{value:.4g}"


# --- many leaves ------------------------------------------------------------------------------------------------------


def rows(tensors: Iterable[tuple[Path, torch.Tensor]]) -> Iterator[Sequence[str]]:
    """Yields the rows under TITLES, each when it has been counted."""
    for name, tensor in tensors:
        found = figures.summarize(tensor)
        start = inspection.leaf_text(name), content(tensor)
        if found is None:
            yield (*start, *["-"] * len(RIGHT))
        else:
            ends = number(found.minimum), number(found.mean), number(found.maximum)
            yield (*start, *ends, f"{found.nans:,}", f"{found.infinities:,}")


def shown_object(value: object, *, is_whole: bool = False) -> str:
    """Writes an object in one line: its start, unless it is asked for alone."""
    text = wording.escaped(repr(value))
    return text if is_whole or len(text) <= _OBJECT else f"{text[: _OBJECT - 1]}{render.left_out()}"


# --- one tensor -------------------------------------------------------------------------------------------------------


def show(tensor: torch.Tensor, found: Summary | None, bins: Sequence[Bin]) -> None:
    """Prints first elements, statistics, and the histogram."""
    for line in head(tensor, render.console.width):
        render.console.print(render.printable(line), soft_wrap=True)
    if found is None:
        render.console.print(f"[dim]no statistics for the dtype {content(tensor).split(' ')[0]}[/dim]")
        return
    for line in told(tensor.dtype, found):
        render.console.print(line)
    for line in bars(bins, render.console.width, is_bool=tensor.dtype is torch.bool):
        render.console.print(render.printable(line))


def told(dtype: torch.dtype, found: Summary) -> Iterator[str]:
    """Yields the statistics, as far as elements of the dtype have them."""
    count = wording.count_of(found.count, "element", "elements")
    if dtype is torch.bool:
        yield f"{count}: {found.count - found.zeros:,} True, {found.zeros:,} False"
        return
    ends = [("min", found.minimum), ("mean", found.mean), ("max", found.maximum), ("std", found.deviation)]
    what = "magnitudes: " if dtype.is_complex else ""
    if found.mean is not None:
        yield what + "  ".join(f"{name} {number(value)}" for name, value in ends)
    counts = [f"{found.zeros:,} zero"]
    if dtype.is_floating_point or dtype.is_complex:
        counts += [f"{found.nans:,} NaN", f"{found.infinities:,} infinite"]
    yield f"{count}: {', '.join(counts)}" if found.count else count


def head(tensor: torch.Tensor, width: int) -> list[str]:
    """Returns the elements as numpy shows them; of long dimensions the first and the last ones. Just these are read."""
    index: tuple[int, ...] = ()
    if not tensor.numel():
        return []
    if tensor.ndim > 2:
        index = (0,) * (tensor.ndim - 2)
        tensor = tensor[index]
    values = _edges(tensor)
    if values is None:
        return []
    text = np.array2string(
        values, max_line_width=width, precision=4, threshold=0, edgeitems=_EDGES, suppress_small=False
    )
    lines = text.split("\n")
    title = [f"[{', '.join(map(str, index))}, :, :]"] if index else []
    return [*title, *lines[:_LINES], *([render.left_out()] if len(lines) > _LINES else [])]


def _edges(tensor: torch.Tensor) -> np.ndarray | None:
    """Returns so few elements that numpy leaves the middle out where the tensor has more."""
    for dim, size in enumerate(tensor.shape):
        if size > 2 * _EDGES + 1:
            ends = (tensor.narrow(dim, 0, _EDGES + 1), tensor.narrow(dim, size - _EDGES, _EDGES))
            try:
                tensor = torch.cat(ends, dim)
            except (RuntimeError, NotImplementedError):  # of a dtype that can't be copied
                return None
    return figures.numbers(tensor)


def bars(bins: Sequence[Bin], width: int, *, is_bool: bool = False) -> Iterator[str]:
    """Yields a line for each bin: where it starts, a bar as long as it has elements, and how many these are."""
    if not bins:
        return
    names = [str(bool(one.start)) if is_bool else number(one.start) for one in bins]
    ends = [number(one.stop) if one.stop != one.start and not is_bool else "" for one in bins]
    counts = [f"{one.count:,}" for one in bins]
    left, right, last = (max(map(len, texts)) for texts in (names, ends, counts))
    room = max(min(_BAR, width - left - right - last - 8), 8)
    most = max(one.count for one in bins) or 1
    for one, name, end, count in zip(bins, names, ends, counts, strict=True):
        span = f"{name:>{left}} … {end:<{right}}" if right else f"{name:>{left}}"
        if not render.is_utf8():
            span = span.replace("…", "..")
        yield f"{span}  {count:>{last}}  {bar(one.count / most, room)}".rstrip()


def bar(part: float, room: int) -> str:
    """Draws a bar as long as `part` of the room; what is there at all can be seen."""
    if not render.is_utf8():
        return "#" * max(round(part * room), 1 if part else 0)
    eighths = max(math.floor(part * room * 8), 1 if part else 0)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def widths(tensors: Iterable[tuple[Path, torch.Tensor]], objects: Iterable[Path] = ()) -> list[int]:
    """Returns the widths of the columns under TITLES, before any element is counted.

    Objects stand below, in the first two.
    """
    found = [max((render.cell_width(inspection.leaf_text(name)) for name in objects), default=0), 0, 9, 9, 9, 3, 3]
    for name, tensor in tensors:
        found[0] = max(found[0], render.cell_width(inspection.leaf_text(name)))
        found[1] = max(found[1], len(content(tensor)))
    return found
