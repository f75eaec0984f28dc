"""What all plots look like: colours, sizes of text, and the sheet that they are drawn on.

A page shows a plot at 730 pixels, a phone or a split screen at half of that: text of 12 points is 8 pixels high then.
Sizes are in points. Texts are measured by the font that matplotlib brings; Verdana, which browsers take where they lack
it, is as wide.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from tests.benchmarks.report import RATES, Role, Series

__all__ = ["Canvas", "Margins", "is_bold", "sheet", "spread_note", "width_of", "wrapped"]

WIDTH = 547.2
TEXT, SMALL, TITLE = 12.0, 11.0, 14.0
LINE = 1.25  # times the size of its text
GAP = 8.0
INCH = 72.0

# The colours for a light page, each with the one that takes its place on a dark page.
GROUND, INK, FAINT = "#ffffff", "#1f2328", "#59636e"
GRID, GUIDE = "#d3d9df", "#eaeef2"
ROLES: dict[Role, str] = {"memstore": "#1a69a8", "peer": "#6e7a86", "limit": "#c27a12"}
OURS = ("#1a69a8", "#3a9d9d", "#5c50b8", "#7fa8c9")
PEERS = ("#6e7a86", "#b5564a", "#5d8c3c", "#8c61b2", "#a3588a", "#4f6d8f")
LIMITS = ("#c27a12", "#8f7440")
# Who stands on several plots with lines has one colour on all of them.
NAMED = {
    "memstore": OURS[0],
    "TensorDict.memmap": PEERS[0],
    "memmap kept open, update_": PEERS[1],
    "safetensors": PEERS[2],
    "TorchRL": PEERS[3],
    "TorchRL, its lock taken out": PEERS[4],
    "cpprb MPReplayBuffer": PEERS[5],
    "memcpy": LIMITS[0],
    "plain mapped file": LIMITS[1],
}
DARK = {
    GROUND: "#0d1117",
    INK: "#e6edf3",
    FAINT: "#9da7b1",
    GRID: "#30363d",
    GUIDE: "#1b2027",
    "#1a69a8": "#5aaef0",
    "#3a9d9d": "#56c8c8",
    "#5c50b8": "#a99ef5",
    "#7fa8c9": "#9db9cf",
    "#6e7a86": "#9aa6b2",
    "#b5564a": "#e89186",
    "#5d8c3c": "#95c774",
    "#8c61b2": "#c59ce8",
    "#a3588a": "#e096c6",
    "#4f6d8f": "#88abd6",
    "#c27a12": "#f0b65c",
    "#8f7440": "#cdb27c",
}
SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": TEXT,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": GROUND,
    "figure.facecolor": GROUND,
    "savefig.facecolor": GROUND,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "axes.labelcolor": FAINT,
    "svg.hashsalt": "memstore",  # the same report gives the same file
    "svg.fonttype": "none",  # text stays text: a fifth of the size
}


@dataclass(frozen=True, slots=True)
class Margins:
    """Around the axes, in points; the title has its own room above."""

    left: float
    right: float
    bottom: float

    @property
    def between(self) -> float:
        """The width of the axes."""
        return WIDTH - self.left - self.right


def sheet(series: Series, note: str, margins: Margins, height: float) -> tuple[Canvas, Any]:
    """A canvas with title and note, and its axes, which are `height` high."""
    title = wrapped(series.title[0].upper() + series.title[1:], WIDTH - 2 * GAP, TITLE, bold=True)
    head = GAP + lines_of(title) * TITLE * LINE + SMALL * LINE + GAP
    whole = head + height + margins.bottom
    canvas = Canvas(figsize=(WIDTH / INCH, whole / INCH))
    canvas.text(GAP / WIDTH, 1 - GAP / whole, title, size=TITLE, weight="bold", va="top")
    below = GAP + lines_of(title) * TITLE * LINE
    canvas.text(GAP / WIDTH, 1 - below / whole, note, size=SMALL, color=FAINT, va="top")
    place = (margins.left / WIDTH, margins.bottom / whole, margins.between / WIDTH, height / whole)
    axes = canvas.add_axes(place)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=TEXT)
    axes.set_axisbelow(True)
    return canvas, axes


def spread_note(series: Series, shown: str) -> str:
    """Which way is better, and what is shown, where there is a spread."""
    better = "Higher is better" if series.unit in RATES else "Lower is better"
    has_spread = any(figure.value.p10 != figure.value.p90 for figure in series.figures)
    return f"{better}. {shown}" if has_spread else f"{better}."


def is_bold(role: Role) -> bool:
    return role == "memstore"


def lines_of(text: str) -> int:
    return text.count("\n") + 1


def width_of(text: str, size: float = TEXT, *, bold: bool = False) -> float:
    """Of its widest line."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    return max(text_to_path.get_text_width_height_descent(line, font, False)[0] for line in text.split("\n"))


def wrapped(text: str, width: float, size: float = TEXT, *, bold: bool = False) -> str:
    """In as many lines as it needs to be at most that wide, where it has spaces."""
    columns = len(text)
    while columns > 1:
        lines = "\n".join(textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False))
        if width_of(lines, size, bold=bold) <= width:
            return lines
        columns -= 1
    return text.replace(" ", "\n")
