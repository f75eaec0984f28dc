"""Plots that can be read: no text on another or cut off, none too small, and every colour has one for dark pages."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # comes with the extra `bench`

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import tests.benchmarks.__main__ as main
from tests.benchmarks.plots import draw, picture
from tests.benchmarks.plots.lines import lines_of_series
from tests.benchmarks.plots.style import DARK, FAINT, GROUND, INK, LIMITS, OURS, PEERS, ROLES, SMALL, WIDTH
from tests.benchmarks.plots.ticks import overlap, round_numbers, spread_out, staggered, that_fit
from tests.benchmarks.report import FORMAT, Figure, Report, Series, Spread, Workload, exactly, read

SIZES = [64.0, 4096.0, 28672.0, 262144.0, 524288.0]
LONG = "files of the catalog, with what they have in reserve"


def figure(name: str, median: float, x: float | None = None, role: str = "peer", wide: float = 1.3) -> Figure:
    return Figure(name, role, Spread(median, median / wide, median * wide), 10, x=x)  # type: ignore[arg-type]


def by_name(unit: str = "s", scale: float = 1e-6) -> Series:
    ours = figure("memstore", 4 * scale, role="memstore")
    limit = figure("a plain mapped file", 2 * scale, role="limit", wide=1.0)
    others = [figure(f"{LONG} {i}", 7.7**i * scale) for i in range(9)]
    title = "a title that goes on for so long that no line of this width has room for all of it, in bold"
    return Series("s", title, unit, [ours, limit, *others])  # type: ignore[arg-type]


def by_size(unit: str = "s", apart: float = 1.01) -> Series:
    """Lines whose ends lie nearly at one place."""
    figures = [figure("memstore", 1e-6 * x**0.5, x, "memstore") for x in SIZES]
    figures += [figure(f"another library, its way {i}", 1e-6 * x**0.5 * apart**i, x) for i in range(8) for x in SIZES]
    return Series("s", "by size", unit, figures, x_title="bytes of a row")  # type: ignore[arg-type]


def over_time() -> Series:
    names = ("writer, RSS", "writer, anonymous", "reader, RSS")
    figures = [Figure(name, "memstore", exactly(2e8 + s * 1e5), 1, x=float(s)) for name in names for s in range(600)]
    return Series("s", "memory of the processes", "B", figures, x_title="time", x_unit="s")


def unreadable(series: Series) -> list[str]:
    """Texts that lie on another one, or outside of the picture, or are too small."""
    canvas = picture(series)
    agg = FigureCanvasAgg(canvas)
    agg.draw()
    shown = [text for text in canvas.findobj(Text) if isinstance(text, Text) and text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), _box(text, agg)) for text in shown]
    found = [f"{text.get_text()!r} is {text.get_size()}" for text in shown if text.get_size() < SMALL]
    for text, box in boxes:
        inside = canvas.bbox.x0 <= box.x0 and box.x1 <= canvas.bbox.x1
        if not (inside and canvas.bbox.y0 <= box.y0 and box.y1 <= canvas.bbox.y1):
            found.append(f"{text!r} is cut off")
    for (one, its), (other, others) in combinations(boxes, 2):
        if its.padded(-0.5).overlaps(others.padded(-0.5)):
            found.append(f"{one!r} lies on {other!r}")
    return found


def _box(text: Text, agg: FigureCanvasAgg) -> Bbox:
    """Where the letters are: without the arrow of a note, and without the first line of a label that stands below."""
    box = Text.get_window_extent(text, agg.get_renderer())
    return Bbox.from_extents(box.x0, box.y0, box.x1, (box.y0 + box.y1) / 2) if text.get_text()[0] == "\n" else box


@pytest.mark.parametrize(
    "series",
    [
        by_name(),
        by_name("n/s", 1e5),
        msgspec.structs.replace(by_name("B/s", 1e9), figures=[figure("memstore", 1.02e9, role="memstore", wide=1.01)]),
        by_size(),
        by_size("B/s", apart=3.0),
        over_time(),
    ],
    ids=["times", "rates", "alone", "near lines", "far lines", "over time"],
)
def test_all_texts_can_be_read(series: Series) -> None:
    assert unreadable(series) == []


@pytest.mark.full
@pytest.mark.parametrize("data", [main.DATA, main.LONG_DATA])
def test_all_texts_of_what_is_published_can_be_read(data: str) -> None:
    for workload in read(main.DOCS / data).workloads:
        for series in workload.series:
            if series.has_plot:
                assert unreadable(series) == [], f"{workload.id} {series.id}"


def test_every_colour_has_one_for_dark_pages(tmp_path: Path) -> None:
    series = [msgspec.structs.replace(one, id=str(i)) for i, one in enumerate((by_name(), by_size(), over_time()))]
    draw(Report(FORMAT, "", False, {}, {}, [Workload("w", "", "", series, [])]), tmp_path)
    plots = sorted(tmp_path.iterdir())
    assert len(plots) == 3
    for plot in plots:
        light, rules, dark = re.split(r"<style>@media \(prefers-color-scheme:dark\)\{(.*)\}</style>", plot.read_text())
        used = set(re.findall(r"((?:fill|stroke): #[0-9a-f]{6})", light + dark))
        assert used and used == set(re.findall(r"\"((?:fill|stroke): #\w+)\"", rules)), plot.name
        assert not re.findall(r"<text style=\"(?![^\"]*fill: #)", dark), "black text, which no rule reaches"


def test_a_name_has_one_colour_on_all_plots_and_no_plot_has_one_twice() -> None:
    colours: dict[str, set[str]] = {}
    for workload in read(main.DOCS / main.DATA).workloads:
        for series in workload.series:
            if series.x_title:
                drawn = lines_of_series(series)
                assert len({line.colour for line in drawn}) == len(drawn), series.title
                for line in drawn:
                    colours.setdefault(line.points[0].name, set()).add(line.colour)
    assert len(colours) > 10 and all(len(found) == 1 for found in colours.values()), colours


def test_colours_stand_out_on_both_grounds() -> None:
    for texts in (INK, FAINT):
        assert contrast(texts, GROUND) >= 4.5 and contrast(DARK[texts], DARK[GROUND]) >= 4.5
    for colour in {*ROLES.values(), *OURS, *PEERS, *LIMITS}:
        assert contrast(colour, GROUND) >= 2.5 and contrast(DARK[colour], DARK[GROUND]) >= 4.5, colour


def contrast(one: str, other: str) -> float:
    """As the guidelines for accessible pages (WCAG 2) have it: 21 for black on white."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# --- ticks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (3e-6, 4e-6, [2e-6, 5e-6]),
        (1.0, 1.0, [1.0, 2.0]),
        (0.9, 11.0, [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]),
        (2e9, 5e9, [2e9, 5e9]),
    ],
)
def test_an_axis_begins_and_ends_at_round_numbers(low: float, high: float, numbers: list[float]) -> None:
    assert round_numbers(low, high) == numbers


def test_an_axis_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="logarithmic axis from 0"):
        round_numbers(0, 1)


@pytest.mark.parametrize(("length", "kept"), [(500, 10), (150, 4), (100, 2), (10, 2)])
def test_as_many_labels_as_fit(length: float, kept: int) -> None:
    numbers = round_numbers(1.0, 1000.0)
    assert len(that_fit(numbers, length, lambda _: 30.0)) == kept


def test_labels_that_are_near_stand_below() -> None:
    assert staggered(["a", "b", "c", "d"], [0, 10, 15, 100], [30] * 4) == ["a", "\nb", "", "d"]


def test_names_keep_their_order_and_are_as_near_as_can_be() -> None:
    assert spread_out([50, 10], [20, 20], 100) == [50, 10]
    found = spread_out([95, 94, 96], [20, 20, 20], 100)
    assert found == [70, 50, 90]
    assert spread_out([50, 50], [20, 20], 100) == [40, 60]
    assert not overlap(sorted(found), [10, 10, 10]) and WIDTH > 100
