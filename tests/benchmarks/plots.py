"""SVG plots of a report: bars for contestants, lines for series by size. White ground, for dark pages too."""

from __future__ import annotations

from itertools import cycle
from math import log2
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullFormatter, NullLocator

from tests.benchmarks.report import RATES, Report, Role, Series
from tests.benchmarks.table import amount, named

WITH_MARKERS = 20  # points a line
A_SCALE = 6  # labels, about
A_LABEL = 0.12  # of the width of a plot's lines
COLOURS: dict[Role, str] = {"memstore": "#1b6ca8", "peer": "#b9c3cc", "limit": "#e0a030"}
OURS = ("#1b6ca8", "#7dbdf0", "#0b3556", "#3fa3a3")
LINES = ("#7a8a99", "#c46a5a", "#6a9a6a", "#8a6ab0", "#b08a30", "#4aa0a0")
TWO_DECADES = 100  # below, powers of ten alone would label an axis once
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "svg.hashsalt": "memstore",  # the same report gives the same file
    "svg.fonttype": "none",  # text stays text: a fifth of the size
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for workload in report.workloads:
            for series in workload.series:
                if series.has_plot:
                    canvas = _lines(series) if series.x_title else _bars(series)
                    canvas.savefig(folder / workload.plot_name(series), metadata={"Date": None}, facecolor="white")


def _bars(series: Series) -> Canvas:
    figures = sorted(series.figures, key=lambda figure: figure.value.median)
    canvas = Canvas(figsize=(7.2, 0.9 + 0.29 * len(figures)), layout="constrained")
    axes = canvas.subplots()
    rows = range(len(figures))
    medians = [figure.value.median for figure in figures]
    lowest = min(figure.value.p10 for figure in figures) / 2
    axes.barh(rows, medians, color=[COLOURS[figure.role] for figure in figures], height=0.66)
    whiskers = ([f.value.median - f.value.p10 for f in figures], [f.value.p90 - f.value.median for f in figures])
    axes.errorbar(medians, rows, xerr=whiskers, fmt="none", ecolor="#404850", elinewidth=0.8, capsize=2)
    for row, figure in zip(rows, figures, strict=True):
        axes.annotate(
            amount(figure.value.median, series.unit),
            (figure.value.p90, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_xscale("log")
    axes.set_xlim(lowest, max(figure.value.p90 for figure in figures) * 3)
    axes.set_yticks(rows, [named(figure) for figure in figures])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    _finish(axes.xaxis, series)
    _entitle(axes, series)
    return canvas


def _lines(series: Series) -> Canvas:
    canvas = Canvas(figsize=(8.0, 3.4), layout="constrained")
    axes = canvas.subplots()
    ours, others = cycle(OURS), cycle(LINES)
    for name in dict.fromkeys(figure.name for figure in series.figures):
        points = sorted((f for f in series.figures if f.name == name), key=lambda figure: figure.x or 0.0)
        role = points[0].role
        colour = next(ours if role == "memstore" else others)
        sizes = [figure.x or 0.0 for figure in points]
        axes.plot(
            sizes,
            [figure.value.median for figure in points],
            color=colour,
            marker="o" if len(points) < WITH_MARKERS else None,
            markersize=4,
            linewidth=2.2 if role == "memstore" else 1.2,
            linestyle="--" if role == "limit" else "-",
            label=named(points[0]),
            zorder=3 if role == "memstore" else 2,
        )
        axes.fill_between(
            sizes, [f.value.p10 for f in points], [f.value.p90 for f in points], color=colour, alpha=0.15, linewidth=0
        )
    axes.set_xlabel(series.x_title)
    if series.is_over_time:
        top = axes.get_ylim()[1] * 1.05
        axes.set_ylim(0, top)
        if series.unit == "B":
            axes.yaxis.set_major_locator(MultipleLocator(2.0 ** round(log2(top / A_SCALE))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, series.unit)))
        axes.grid(True, axis="y", color="#d8dde2", linewidth=0.6)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, series.x_unit)))
    else:
        axes.set_xscale("log", base=10 if series.x_unit == "n" else 2)
        sizes = sorted({figure.x or 0.0 for figure in series.figures})
        axes.set_xticks(sizes, _labels(sizes, series.x_unit))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yscale("log")
        _finish(axes.yaxis, series)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    _entitle(axes, series)
    return canvas


def _labels(sizes: list[float], unit: str) -> list[str]:
    """Of a logarithmic axis. What would run into the label before stands on a line of its own, below."""
    room = log2(sizes[-1] / sizes[0]) * A_LABEL
    labels: list[str] = []
    for i, size in enumerate(sizes):
        is_below = bool(labels) and not labels[-1].startswith("\n") and log2(size / sizes[i - 1]) < room
        labels.append("\n" * is_below + amount(size, unit))
    return labels


def _entitle(axes: Any, series: Series) -> None:
    better = "more" if series.unit in RATES else "less"
    axes.set_title(f"{series.title} ({better} is better)", loc="left", fontsize=10)


def _finish(axis: Any, series: Series) -> None:
    """Whole units on a logarithmic axis, with a light grid behind the data."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(base=10, subs=(1.0,) if high / low > TWO_DECADES else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, series.unit)))
    axis.set_minor_formatter(NullFormatter())
    axis.grid(True, which="major", color="#d8dde2", linewidth=0.6)
    axis.axes.set_axisbelow(True)
