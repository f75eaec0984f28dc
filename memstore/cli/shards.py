"""The shards of a tensor as a picture in characters: which rank has put which part.

   0       4       8
 0 ┌───────┬───────┐
   │   0   │   1   │
 6 ├───────┴───────┤
   │       2       │
12 └───────────────┘
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from memstore.cli import render
from memstore.info import LeafInfo

_SHOWN = 8  # intervals of a dimension at most; those in the middle are left out
_PICTURES = 12  # of an entry
_GRIDS = 3  # of a tensor that is cut along more than two dimensions
_GAP = 4  # columns in place of intervals that are left out
_WIDE = 56  # columns of a picture, unless more are needed
_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_LINES = {
    _UP | _DOWN: "│",
    _LEFT | _RIGHT: "─",
    _DOWN | _RIGHT: "┌",
    _DOWN | _LEFT: "┐",
    _UP | _RIGHT: "└",
    _UP | _LEFT: "┘",
    _UP | _DOWN | _RIGHT: "├",
    _UP | _DOWN | _LEFT: "┤",
    _DOWN | _LEFT | _RIGHT: "┬",
    _UP | _LEFT | _RIGHT: "┴",
    _UP | _DOWN | _LEFT | _RIGHT: "┼",
}
_PLAIN_LINES = {**dict.fromkeys(_LINES, "+"), _UP | _DOWN: "|", _LEFT | _RIGHT: "-"}  # where these can't be drawn

_Shard = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, shape, rank
Layout = tuple[tuple[int, ...], tuple[_Shard, ...]]


class Layouts(NamedTuple):
    """How the leaves of an entry lie on ranks; those that lie in the same way have one picture.

    Attributes:
        notes: by leaf, the rank that has put it, or the number of its picture.
        drawn: the layouts, in the order of their numbers.
    """

    notes: dict[tuple[str | int, ...], str]
    drawn: list[Layout]

    def pictures(self, width: int) -> Iterator[str]:
        """The lines of all pictures; of the first, if there are many."""
        for number, layout in enumerate(self.drawn[:_PICTURES], 1):
            yield ""
            title, *lines = picture(layout, width)
            yield f"({number})  {title}"
            yield from lines
        if len(self.drawn) > _PICTURES:
            yield f"\n... and {len(self.drawn) - _PICTURES} more: --json has them all"


def number_layouts(leaves: Iterable[LeafInfo]) -> Layouts:
    numbers: dict[Layout, int] = {}
    notes: dict[tuple[str | int, ...], str] = {}
    for leaf in leaves:
        if len(leaf.shards) == 1:
            notes[leaf.name] = f"rank {leaf.shards[0].rank}"
        elif leaf.shards:
            layout = leaf.shape, tuple((one.offsets, one.shape, one.rank) for one in leaf.shards)
            notes[leaf.name] = f"({numbers.setdefault(layout, len(numbers) + 1)})"
    return Layouts(notes, list(numbers))


def picture(layout: Layout, width: int) -> list[str]:
    """The lines of the picture, of `width` columns, unless these are too few for anything."""
    shape, shards = layout
    cuts = [_cuts((offsets[dim], sizes[dim]) for offsets, sizes, _ in shards) for dim in range(len(shape))]
    split = [dim for dim in range(len(shape)) if len(cuts[dim]) > 2]
    across, down, others = split[-1:], split[-2:-1], split[:-2]
    lines = [f"{list(shape)}{_named(down, 'down')}{_named(across, 'right')}"]
    places = list(itertools.product(*(cuts[dim][:-1] for dim in others)))
    for place in places[:_GRIDS]:
        if others:
            lines.append("at " + ", ".join(f"{start} of dim {dim}" for dim, start in zip(others, place, strict=True)))
        here = [
            _Part(_side(one, down), _side(one, across), str(one[2])) for one in shards if _covers(one, others, place)
        ]
        lines += _grid(here, cuts[down[0]] if down else None, cuts[across[0]] if across else [0, 1], width)
    if len(places) > _GRIDS:
        lines.append(f"... and {len(places) - _GRIDS} more")
    return lines


def _named(dims: Sequence[int], where: str) -> str:
    return f"  {where}: dim {dims[0]}" if dims else ""


def _cuts(sides: Iterable[tuple[int, int]]) -> list[int]:
    return sorted({cut for start, size in sides for cut in (start, start + size)})


def _side(one: _Shard, dims: Sequence[int]) -> tuple[int, int]:
    offsets, sizes, _ = one
    return (offsets[dims[0]], offsets[dims[0]] + sizes[dims[0]]) if dims else (0, 1)


def _covers(one: _Shard, dims: Sequence[int], place: Sequence[int]) -> bool:
    offsets, sizes, _ = one
    return all(offsets[dim] <= start < offsets[dim] + sizes[dim] for dim, start in zip(dims, place, strict=True))


class _Part(NamedTuple):
    """A shard within a grid: from and up to, down and across."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    label: str


class _Axis:
    """Where the cuts of a dimension are drawn. If there are too many, those in the middle are left out.

    Attributes:
        at: by cut, its line or column.
        gap: between which places something is left out, if it is.
        end: the last place.
    """

    def __init__(self, cuts: Sequence[int], steps: Sequence[int], most: int, gap: int) -> None:
        before = after = len(cuts)
        if len(cuts) - 1 > most:
            before, after = (most + 1) // 2, len(cuts) - 1 - most // 2
        self.at: dict[int, int] = {}
        self.gap: tuple[int, int] | None = None
        place = 0
        for i, cut in enumerate(cuts):
            if before < i < after:
                continue
            if before < i == after:
                self.gap = place, place + gap
                place += gap
            elif i:
                place += steps[i - 1]
            self.at[cut] = place
        self.end = place

    def find(self, side: tuple[int, int]) -> tuple[int, int]:
        """The places of an interval. What ends in the gap ends at the side of it that shows no more than is there."""
        gap = self.gap or (0, 0)
        return self.at.get(side[0], gap[0]), self.at.get(side[1], gap[1])


def _grid(parts: Sequence[_Part], down: list[int] | None, across: list[int], width: int) -> list[str]:
    margin = max((len(str(cut)) + 1 for cut in down or ()), default=0)
    least = max((len(part.label) for part in parts), default=1) + 3
    room = max(width - margin - len(str(across[-1])) - 1, 2 * least + _GAP)
    most = min(_SHOWN if down else 2 * _SHOWN, (room - _GAP) // least)
    wide, total = min(_WIDE, room), across[-1] - across[0]
    steps = [max(least, (stop - start) * wide // total) for start, stop in itertools.pairwise(across)]
    if sum(steps) > room:
        steps = [least] * len(steps)
    x = _Axis(across, steps, most, _GAP)
    y = _Axis(down or [0, 1], [2] * len(down or "1"), _SHOWN, 2)
    canvas = _Canvas(x.end + 1, y.end + 1)
    for part in parts:
        columns, rows = x.find(part.columns), y.find(part.rows)
        is_left_out = x.gap == columns or y.gap == rows
        canvas.draw(columns, rows, render.left_out() if is_left_out else part.label)
    named = {place: str(cut) for cut, place in y.at.items()} if down else {}
    text = [f"{named.get(i, ''):>{margin - 1}} {line}" if down else line for i, line in enumerate(canvas.lines())]
    return [" " * margin + _ruler(x), *text]


def _ruler(axis: _Axis) -> str:
    """The cuts, as far as there is room for each."""
    text = ""
    for cut, place in axis.at.items():
        if not text or place > len(text):
            text = text.ljust(place) + str(cut)
    return text


class _Canvas:
    """Characters, on which lines meet."""

    def __init__(self, width: int, height: int) -> None:
        self._lines = [[0] * width for _ in range(height)]
        self._labels: list[tuple[int, int, str]] = []

    def draw(self, columns: tuple[int, int], rows: tuple[int, int], label: str) -> None:
        """Draws a box, and a text in its middle."""
        (left, right), (top, bottom) = columns, rows
        for x in range(left, right + 1):
            for y in rows:
                self._lines[y][x] |= _LEFT * (x > left) | _RIGHT * (x < right)
        for y in range(top, bottom + 1):
            for x in columns:
                self._lines[y][x] |= _UP * (y > top) | _DOWN * (y < bottom)
        self._labels.append(((left + right + 1 - len(label)) // 2, (top + bottom) // 2, label))

    def lines(self) -> list[str]:
        signs = _LINES if render.is_utf8() else _PLAIN_LINES
        made = [[signs.get(mask, " ") for mask in line] for line in self._lines]
        for x, y, label in self._labels:
            made[y][x : x + len(label)] = label
        return ["".join(line).rstrip() for line in made]
