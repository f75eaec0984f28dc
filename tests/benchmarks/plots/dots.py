"""Contestants, one a row, the best on top: a dot at the median, a line from the tenth to the ninetieth of a hundred.

On a logarithmic axis a bar says nothing by its length, which depends on where the axis happens to begin.
"""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import NullLocator

from tests.benchmarks.plots.style import (
    FAINT,
    GAP,
    GRID,
    GROUND,
    GUIDE,
    INK,
    LINE,
    ROLES,
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
from tests.benchmarks.plots.ticks import round_numbers, that_fit
from tests.benchmarks.report import RATES, Figure, Series
from tests.benchmarks.table import amount, named

NAMES = 0.4 * WIDTH  # at most
SHAPES = {"memstore": ("o", 9.5), "peer": ("o", 8.0), "limit": ("D", 6.5)}


def dots(series: Series) -> Canvas:
    figures = sorted(series.figures, key=lambda figure: figure.value.median, reverse=series.unit in RATES)
    names = [wrapped(named(figure), NAMES, bold=is_bold(figure.role)) for figure in figures]
    values = [amount(figure.value.median, series.unit) for figure in figures]
    row = max(map(lines_of, names)) * TEXT * LINE + 0.9 * GAP
    numbers = round_numbers(min(f.value.p10 for f in figures), max(f.value.p90 for f in figures))
    labels = {number: amount(number, series.unit) for number in numbers}
    column = max(width_of(value, bold=True) for value in values)
    margins = Margins(
        left=max(width_of(name, bold=is_bold(f.role)) for name, f in zip(names, figures, strict=True)) + 3 * GAP,
        right=max(column + 3 * GAP, width_of(labels[numbers[-1]]) / 2 + GAP),
        bottom=TEXT * LINE + 2 * GAP,
    )
    note = spread_note(series, "Dot: median; line: p10 to p90.")
    canvas, axes = sheet(series, note, margins, row * len(figures))
    axes.set_xscale("log")
    axes.set_xlim(numbers[0], numbers[-1])
    axes.set_ylim(len(figures) - 0.5, -0.5)
    kept = that_fit(numbers, margins.between, lambda number: width_of(labels[number]))
    axes.set_xticks(kept, [labels[number] for number in kept])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks([])
    axes.grid(True, axis="x", color=GRID, linewidth=0.8)
    for place, (figure, name, value) in enumerate(zip(figures, names, values, strict=True)):
        _row(axes, place, figure, name, value)
    return canvas


def _row(axes: Any, place: int, figure: Figure, name: str, value: str) -> None:
    colour, (shape, size) = ROLES[figure.role], SHAPES[figure.role]
    weight = "bold" if is_bold(figure.role) else "normal"
    axes.axhline(place, color=GUIDE, linewidth=1.0, zorder=0.5)
    spread = figure.value
    axes.plot([spread.p10, spread.p90], [place, place], color=colour, linewidth=3.0, alpha=0.45, clip_on=False)
    axes.plot(
        [spread.median],
        [place],
        color=colour,
        marker=shape,
        markersize=size,
        markeredgecolor=GROUND,
        markeredgewidth=1.0,
        clip_on=False,
        zorder=4,
    )
    for x, text, side in ((0.0, name, "right"), (1.0, value, "left")):
        axes.annotate(
            text,
            (x, place),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-1.5 * GAP if side == "right" else 1.5 * GAP, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            weight=weight,
            color=INK if is_bold(figure.role) or side == "right" else FAINT,
            annotation_clip=False,
        )
