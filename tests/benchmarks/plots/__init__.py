"""SVG plots of a report, one a series.

style   what all of them look like, and their sheet: title, note and axes, placed so that no text runs into another
ticks   marks and labels that fit on an axis       dark    other colours where a page is dark
dots    contestants, one a row                     lines   contestants by size, or over the time of a run
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import matplotlib

from tests.benchmarks.plots.dark import with_dark_colours
from tests.benchmarks.plots.dots import dots
from tests.benchmarks.plots.lines import lines
from tests.benchmarks.plots.style import SETTINGS, Canvas
from tests.benchmarks.report import Report, Series

__all__ = ["draw", "drawn", "picture"]


def draw(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for workload in report.workloads:
        for series in workload.series:
            if series.has_plot:
                (folder / workload.plot_name(series)).write_text(drawn(series), encoding="utf-8")


def picture(series: Series) -> Canvas:
    with matplotlib.rc_context(SETTINGS):
        return lines(series) if series.x_title else dots(series)


def drawn(series: Series) -> str:
    written = StringIO()
    with matplotlib.rc_context(SETTINGS):
        picture(series).savefig(written, format="svg", metadata={"Date": None})
    return with_dark_colours(written.getvalue())
