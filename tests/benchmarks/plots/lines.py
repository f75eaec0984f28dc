"""Contestants by size, on logarithmic axes, or over the time of a run, from zero: a line each, named at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from math import log2
from typing import Any

from matplotlib.ticker import MaxNLocator, NullLocator

from tests.benchmarks.plots.style import (
    GAP,
    GRID,
    INK,
    LIMITS,
    LINE,
    NAMED,
    OURS,
    PEERS,
    TEXT,
    WIDTH,
    Canvas,
    Margins,
    is_bold,
    lines_of,
    sheet,
    spread_note,
    width_of,
    wrapped,
)
from tests.benchmarks.plots.ticks import round_numbers, spread_out, staggered, that_fit
from tests.benchmarks.report import Figure, Role, Series
from tests.benchmarks.table import amount, named

HEIGHT = 210.0
NAMES = 0.3 * WIDTH  # at most
LEADER = 20.0  # from a line's end to its name
WITH_DOTS = 20  # points a line
MARKS = 5  # on an axis of time, about


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    role: Role
    colour: str
    points: list[Figure]


@dataclass(frozen=True, slots=True)
class Scale:
    """The axis of values: where it begins and ends, and its marks."""

    low: float
    high: float
    marks: list[float]
    is_log: bool


def lines(series: Series) -> Canvas:
    drawn = lines_of_series(series)
    rooms = [lines_of(line.name) * TEXT * LINE for line in drawn]
    height = max(HEIGHT, sum(rooms))
    scale = _times_scale(series) if series.is_over_time else _size_scale(series, height)
    margins = Margins(
        left=max(width_of(amount(mark, series.unit)) for mark in scale.marks) + 2 * GAP,
        right=max(width_of(line.name, bold=is_bold(line.role)) for line in drawn) + LEADER + 2 * GAP,
        bottom=3 * TEXT * LINE + 2 * GAP,
    )
    note = spread_note(series, "Line: median; shade: p10 to p90.")
    canvas, axes = sheet(series, note, margins, height)
    if scale.is_log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_ylim(scale.low, scale.high)
    axes.set_yticks(scale.marks, [amount(mark, series.unit) for mark in scale.marks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(axis="x", pad=GAP)
    _sizes(axes, series, margins.between)
    axes.set_xlabel(series.x_title, labelpad=GAP / 2)
    for line in drawn:
        _draw(axes, line)
    ends = [axes.transAxes.inverted().transform(axes.transData.transform(_end(line)))[1] * height for line in drawn]
    for line, place in zip(drawn, spread_out(ends, rooms, height), strict=True):
        _name(axes, line, place / height)
    return canvas


def lines_of_series(series: Series) -> list[Line]:
    names = dict.fromkeys(figure.name for figure in series.figures)
    taken = {NAMED[name] for name in names if name in NAMED}
    palettes: dict[Role, tuple[str, ...]] = {"memstore": OURS, "peer": PEERS, "limit": LIMITS}
    colours = {role: cycle([one for one in palettes[role] if one not in taken] or palettes[role]) for role in palettes}
    found: list[Line] = []
    for name in names:
        points = sorted((f for f in series.figures if f.name == name), key=lambda figure: figure.x or 0.0)
        role = points[0].role
        shown = wrapped(named(points[0]), NAMES, bold=is_bold(role))
        found.append(Line(shown, role, NAMED.get(name) or next(colours[role]), points))
    return found


def _size_scale(series: Series, height: float) -> Scale:
    values = [figure.value for figure in series.figures]
    numbers = round_numbers(min(value.p10 for value in values), max(value.p90 for value in values))
    return Scale(numbers[0], numbers[-1], that_fit(numbers, height, lambda _: TEXT), is_log=True)


def _times_scale(series: Series) -> Scale:
    top = max(figure.value.p90 for figure in series.figures) * 1.05 or 1.0
    if series.unit == "B":
        step = 2.0 ** round(log2(top / MARKS))
        marks = [step * i for i in range(int(top / step) + 1)]
    else:
        marks = [mark for mark in MaxNLocator(MARKS).tick_values(0, top) if 0 <= mark <= top]
    return Scale(0.0, top, marks, is_log=False)


def _sizes(axes: Any, series: Series, width: float) -> None:
    """Marks at the sizes that were measured, or at round times."""
    sizes = sorted({figure.x or 0.0 for figure in series.figures})
    if series.is_over_time:
        axes.set_xlim(0, sizes[-1] or 1.0)
        marks = [mark for mark in MaxNLocator(MARKS).tick_values(0, sizes[-1]) if mark <= sizes[-1]]
        axes.set_xticks(marks, [amount(mark, series.x_unit) for mark in marks])
        return
    beside = (sizes[-1] / sizes[0]) ** 0.03 if len(sizes) > 1 else 2.0
    low, high = sizes[0] / beside, sizes[-1] * beside
    axes.set_xlim(low, high)
    labels = [amount(size, series.x_unit) for size in sizes]
    places = [log2(size / low) / log2(high / low) * width for size in sizes]
    axes.set_xticks(sizes, staggered(labels, places, [width_of(label) for label in labels]))
    axes.xaxis.set_minor_locator(NullLocator())


def _draw(axes: Any, line: Line) -> None:
    sizes = [figure.x or 0.0 for figure in line.points]
    ours = line.role == "memstore"
    axes.plot(
        sizes,
        [figure.value.median for figure in line.points],
        color=line.colour,
        marker="o" if len(line.points) < WITH_DOTS else None,
        markersize=6.5 if ours else 5.0,
        linewidth=2.6 if ours else 1.5,
        linestyle=(0, (4, 2)) if line.role == "limit" else "-",
        zorder=3 if ours else 2,
    )
    low, high = _ends(line.points)
    axes.fill_between(sizes, low, high, color=line.colour, alpha=0.13, linewidth=0, zorder=1)


def _ends(points: Sequence[Figure]) -> tuple[list[float], list[float]]:
    return [figure.value.p10 for figure in points], [figure.value.p90 for figure in points]


def _end(line: Line) -> tuple[float, float]:
    return line.points[-1].x or 0.0, line.points[-1].value.median


def _name(axes: Any, line: Line, place: float) -> None:
    """Beside the axes, at this part of their height, and a thin line to it from the last point."""
    axes.annotate(
        line.name,
        _end(line),
        xycoords="data",
        xytext=(1 + LEADER / (axes.bbox.width / axes.figure.dpi * 72), place),
        textcoords="axes fraction",
        va="center",
        ha="left",
        weight="bold" if is_bold(line.role) else "normal",
        color=INK,
        annotation_clip=False,
        arrowprops={
            "arrowstyle": "-",
            "color": line.colour,
            "linewidth": 1.2,
            "relpos": (0, 0.5),  # it ends before the name
            "shrinkA": 3,
            "shrinkB": 0,
        },
    )
