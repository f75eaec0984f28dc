"""Output of the commands: sizes, ages, trees, JSON, progress bars; rows in columns; pictures of shards.

tell, print_json, complain   a result, as JSON or in one line; a message on standard error
progress                     a bar for what takes longer than a second
write_rows                   rows in plain columns, written as they come: of a store with many keys the first lines are
                             there at once. Columns are as wide as what has been written so far needs, so they are
                             aligned within each page of rows. A table of `rich` would have to see all rows first, and
                             takes 320 us a row instead of 6; and no cell of it spans the columns beside it, as a long
                             key does here, which can so be copied whole
number_layouts, picture      the shards of a tensor as a picture in characters: which rank has put which part

    0       4       8
  0 ┌───────┬───────┐
    │   0   │   1   │
  6 ├───────┴───────┤
    │       2       │
 12 └───────────────┘
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.segment import Segments
from rich.text import Text
from rich.tree import Tree

from memstore._info import LeafInfo, Shown
from memstore._wording import escaped
from memstore.engine import Path
from memstore.listing import OutlineLeaf

_PATIENCE = 1.0  # seconds before a progress bar is shown
_ANY_WIDTH = 100_000  # columns


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError. Rich would end the process with code 1, which says that damage was found."""
        raise BrokenPipeError


def consoles() -> tuple[Console, Console]:
    """Makes the consoles for what is asked for, and for errors: of the streams and the terminal that there are now."""
    plainly: dict[str, Any] = {"highlight": False, "soft_wrap": True, "emoji": False}  # ":dog:" may be a key's
    return _Console(**plainly), Console(stderr=True, **plainly)


console, errors = consoles()


def plain(value: Any) -> Any:
    """Prepares a value for JSON: dataclasses as objects, names of leaves as arrays, all else as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in cast(list[Any], value)]
    if isinstance(value, float) and not math.isfinite(value):  # which JSON hasn't
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value).removeprefix("torch.")


def print_json(value: object) -> None:
    sys.stdout.write(_encode(value) + "\n")
    sys.stdout.flush()


def _encode(value: object) -> str:
    text = json.dumps(plain(value), ensure_ascii=not is_utf8(), allow_nan=False)
    return text.encode(errors="backslashreplace").decode()  # paths may have odd bytes, which JSON has as escapes


def print_items(found: Iterable[object]) -> None:
    """Prints a JSON list, written as its items come."""
    write = sys.stdout.write
    write("[")
    for number, one in enumerate(found):
        write((", " if number else "") + _encode(one))
    write("]\n")
    sys.stdout.flush()


def tell(found: object, text: str, *, as_json: bool) -> None:
    """Prints a result, as JSON or in one line."""
    if as_json:
        print_json(found)
    else:
        console.print(text)


def head(text: str) -> None:
    """Prints a title, with markup. A terminal gets it in lines that end with words."""
    console.print(text, soft_wrap=not console.is_terminal)


def complain(text: str) -> None:
    """Prints a message on standard error. A terminal gets it in lines that end with words.

    Messages list what they found in lines that begin with two spaces; other line ends are of names, and are escaped.
    """
    lines = "\n  ".join(map(printable, text.split("\n  ")))
    errors.print(f"[bold red]memstore:[/] {lines}", soft_wrap=not errors.is_terminal)


def printable(text: str) -> str:
    """Escapes text as `escaped` does, for what is printed with markup: brackets are none."""
    return escape(escaped(text))


def is_utf8() -> bool:
    """Returns whether lines and blocks can be drawn."""
    return console.encoding.replace("-", "").lower() == "utf8"


def left_out() -> str:
    """Returns the sign for what isn't shown, of one column."""
    return "…" if is_utf8() else "~"


def leaf_tree(title: str, leaves: Sequence[OutlineLeaf], notes: Mapping[Path, str] = MappingProxyType({})) -> Tree:
    """Makes a tree of the leaves under their names' parts, some with a note."""
    top = Tree(printable(title), guide_style="dim")
    branches: dict[tuple[str | int, ...], Tree] = {(): top}
    for leaf in leaves:
        branch = top
        for depth in range(1, len(leaf.name)):
            path = leaf.name[:depth]
            if path not in branches:
                branches[path] = branch.add(printable(str(path[-1])), style="bold")
            branch = branches[path]
        name = printable(str(leaf.name[-1])) if leaf.name else "value"
        what = leaf.type if leaf.dtype is None else f"{leaf.dtype} {list(leaf.shape)}"
        note = f"  {printable(notes[leaf.name])}" if leaf.name in notes else ""
        branch.add(f"{name}  [dim]{printable(what)}[/dim]{note}", style="not bold")
    return top


def print_whole(tree: Tree) -> None:
    """Prints a tree whose lines may be longer than the window: rich would cut them there, and in a pipe too."""
    console.print(Segments(console.render(tree, console.options.update(width=_ANY_WIDTH))), end="")


@contextlib.contextmanager
def progress(text: str, *, lines: bool = False) -> Generator[Callable[[int, int], None]]:
    """Shows a bar for what takes longer than a second, where somebody sees it. Yields a `Progress`.

    Args:
        text: what is being done.
        lines: where there is no terminal, write a line every ten seconds, and one at the end.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    if not errors.is_terminal:
        yield Shown(text, lambda line: errors.print(printable(line))).tell if lines else lambda done, total: None
        return
    sizes = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    columns = (TextColumn("{task.description}"), BarColumn(), *sizes)
    bar = Progress(*columns, console=errors, transient=True)
    task = bar.add_task(text)
    started = time.monotonic()
    shown = False

    def advance(done: int, total: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - started > _PATIENCE:
            shown = True
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if shown:
            bar.stop()


# --- Rows in columns -------------------------------------------------------------------------------------------------


_PAGE = 256  # rows that are aligned with each other before the first of them is written
_COLUMN_GAP = "  "
LEAST_FIRST, _MOST_FIRST = 8, 60  # columns of a first cell with which others are aligned
_INDENT = 2  # columns, of the others where there is no room for it
_LEAST_TEXT = 16  # columns, at least, for text that goes on in the next line

_Row = TypeVar("_Row")


def write_rows(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    widths: Sequence[int] = (),
    page: int = _PAGE,
    is_headed: bool = True,
) -> int:
    """Writes rows under their titles, if there are any. Returns how many.

    A first cell that is too long for the terminal gets a line for itself: it can be copied as a whole. All get one if
    the others leave no room; those that don't fit stand in a line below. A last one that is text goes on in the next
    line. In a file or a pipe each row is one line.

    Args:
        right: the titles of columns that are aligned to the right.
        widths: what columns take at least, where that is known before the rows are.
        page: how many rows are waited for before the first of them is written.
        is_headed: whether the titles are written.
    """
    sides = [title in right for title in titles]
    wide = [max(len(title), least) for title, least in zip(titles, [*widths, *[0] * len(titles)], strict=False)]
    count = 0
    for some in pages(rows, page):
        shown = [[escaped(cell) for cell in row] for row in some]
        for i, column in enumerate(zip(*shown, strict=True)):
            if i:
                wide[i] = max(wide[i], max(map(cell_width, column)))
        room = _room_for_first(wide, is_text=not sides[-1])
        firsts = [wide[0], *(cell_width(row[0]) for row in shown)]
        wide[0] = max([first for first in firsts if first <= room], default=_INDENT)
        if not count and is_headed:
            console.print(escape(_row_line(titles, wide, sides)), style="bold")
        count += len(some)
        for row in shown:
            sys.stdout.write(_row_line(row, wide, sides) + "\n")
    return count


def rows_fit(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> bool:
    """Returns whether each row has room in one line, aligned with the others. In a file or a pipe it has."""
    if not console.is_terminal:
        return True
    wide = [max(cell_width(escaped(cell)) for cell in column) for column in zip(titles, *rows, strict=True)]
    return sum(wide) + len(_COLUMN_GAP) * (len(wide) - 1) <= console.width


def pages(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    """Yields lists of `size`; the last one may be shorter."""
    left = iter(rows)
    while page := list(itertools.islice(left, size)):
        yield page


def cell_width(text: str) -> int:
    """Returns how many columns of a terminal a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def gap_width(count: int) -> int:
    """Returns the columns of a terminal between so many of a table."""
    return len(_COLUMN_GAP) * (count - 1)


def cut_cell(text: str, room: int) -> str:
    """Returns the start of a text that takes more than `room` columns."""
    shown = escaped(text)
    if cell_width(shown) <= room:
        return shown
    return set_cell_size(shown, room - 1).rstrip() + left_out()


def _room_for_first(widths: Sequence[int], *, is_text: bool) -> int:
    """Returns the room for the first column; 0 if it is too little."""
    if not console.is_terminal:
        return _MOST_FIRST
    last = min(widths[-1], _MOST_FIRST // 2) if is_text else widths[-1]
    others = sum(widths[1:-1]) + last + len(_COLUMN_GAP) * (len(widths) - 1)
    room = console.width - others
    return room if room >= LEAST_FIRST else 0


def _row_line(row: Sequence[str], widths: Sequence[int], sides: Sequence[bool]) -> str:
    *cells, last = [
        " " * (wide - cell_width(cell)) + cell if is_right else cell + " " * (wide - cell_width(cell))
        for cell, wide, is_right in zip(row, widths, sides, strict=True)
    ]
    if not console.is_terminal:
        return _COLUMN_GAP.join([*cells, last]).rstrip()
    above = ""
    if cell_width(row[0]) > widths[0]:
        above, cells[0] = f"{row[0]}\n", " " * widths[0]
    text, used = above, 0
    for cell, wide in zip(cells, widths, strict=False):
        text, used = _next_line(text, used, wide)
        text, used = text + cell + _COLUMN_GAP, used + wide + len(_COLUMN_GAP)
    text, used = _next_line(text, used, min(widths[-1], _MOST_FIRST // 2) if not sides[-1] else widths[-1])
    return text + _wrapped_text(last.rstrip(), used)


def _next_line(text: str, used: int, wide: int) -> tuple[str, int]:
    """Goes on below, where a column has no room left in the line: where those of a first cell above start."""
    start = _INDENT + len(_COLUMN_GAP)
    if used <= start or used + wide <= console.width:
        return text, used
    return f"{text.rstrip()}\n{' ' * start}", start


def _wrapped_text(text: str, indent: int) -> str:
    """Breaks text into as many lines as it takes in the terminal, behind `indent` columns."""
    room = console.width - indent
    if cell_width(text) <= room or room < _LEAST_TEXT:
        return text
    return f"\n{' ' * indent}".join(line.plain for line in Text(text).wrap(console, room))


# --- Pictures of shards ----------------------------------------------------------------------------------------------


_SHOWN_INTERVALS = 8  # intervals of a dimension at most; those in the middle are left out
_PICTURES = 12  # of an entry
_GRIDS = 3  # of a tensor that is cut along more than two dimensions
_PICTURE_GAP = 4  # columns in place of intervals that are left out
_WIDE = 56  # columns of a picture, unless more are needed
_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_BOX_LINES = {
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
_PLAIN_BOX_LINES = {
    **dict.fromkeys(_BOX_LINES, "+"),
    _UP | _DOWN: "|",
    _LEFT | _RIGHT: "-",
}  # where these can't be drawn

_Shard = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, shape, rank
ShardLayout = tuple[tuple[int, ...], tuple[_Shard, ...]]


class ShardLayouts(NamedTuple):
    """The layouts of an entry's leaves on ranks; leaves that lie in the same way have one picture.

    Attributes:
        notes: by leaf, the rank that has put it, or the number of its picture.
        drawn: the layouts, in the order of their numbers.
    """

    notes: dict[tuple[str | int, ...], str]
    drawn: list[ShardLayout]

    def pictures(self, width: int) -> Iterator[str]:
        """Yields the lines of all pictures; of the first, if there are many."""
        for number, layout in enumerate(self.drawn[:_PICTURES], 1):
            yield ""
            title, *lines = picture(layout, width)
            yield f"({number})  {title}"
            yield from lines
        if len(self.drawn) > _PICTURES:
            yield f"\n... and {len(self.drawn) - _PICTURES} more: --json has them all"


def number_layouts(leaves: Iterable[LeafInfo]) -> ShardLayouts:
    numbers: dict[ShardLayout, int] = {}
    notes: dict[tuple[str | int, ...], str] = {}
    for leaf in leaves:
        if len(leaf.shards) == 1:
            notes[leaf.name] = f"rank {leaf.shards[0].rank}"
        elif leaf.shards:
            layout = leaf.shape, tuple((one.offsets, one.shape, one.rank) for one in leaf.shards)
            notes[leaf.name] = f"({numbers.setdefault(layout, len(numbers) + 1)})"
    return ShardLayouts(notes, list(numbers))


def picture(layout: ShardLayout, width: int) -> list[str]:
    """Draws the lines of the picture, of `width` columns, unless these are too few for anything."""
    shape, shards = layout
    cuts = [
        sorted({cut for offsets, sizes, _ in shards for cut in (offsets[dim], offsets[dim] + sizes[dim])})
        for dim in range(len(shape))
    ]
    split = [dim for dim in range(len(shape)) if len(cuts[dim]) > 2]
    across, down, others = split[-1:], split[-2:-1], split[:-2]
    lines = [f"{list(shape)}{_named_dim(down, 'down')}{_named_dim(across, 'right')}"]
    places = list(itertools.product(*(cuts[dim][:-1] for dim in others)))
    for place in places[:_GRIDS]:
        if others:
            lines.append("at " + ", ".join(f"{start} of dim {dim}" for dim, start in zip(others, place, strict=True)))
        here = [
            _ShardBox(_side(one, down), _side(one, across), str(one[2]))
            for one in shards
            if _covers(one, others, place)
        ]
        lines += _grid(here, cuts[down[0]] if down else None, cuts[across[0]] if across else [0, 1], width)
    if len(places) > _GRIDS:
        lines.append(f"... and {len(places) - _GRIDS} more")
    return lines


def _named_dim(dims: Sequence[int], where: str) -> str:
    return f"  {where}: dim {dims[0]}" if dims else ""


def _side(one: _Shard, dims: Sequence[int]) -> tuple[int, int]:
    offsets, sizes, _ = one
    return (offsets[dims[0]], offsets[dims[0]] + sizes[dims[0]]) if dims else (0, 1)


def _covers(one: _Shard, dims: Sequence[int], place: Sequence[int]) -> bool:
    offsets, sizes, _ = one
    return all(offsets[dim] <= start < offsets[dim] + sizes[dim] for dim, start in zip(dims, place, strict=True))


class _ShardBox(NamedTuple):
    """A shard within a grid: from and up to, down and across."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    label: str


class _Axis:
    """The places where the cuts of a dimension are drawn. If there are too many, those in the middle are left out.

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
        """Returns the places of an interval.

        One that ends in the gap ends at its side that shows no more than is there.
        """
        gap = self.gap or (0, 0)
        return self.at.get(side[0], gap[0]), self.at.get(side[1], gap[1])


def _grid(parts: Sequence[_ShardBox], down: list[int] | None, across: list[int], width: int) -> list[str]:
    margin = max((len(str(cut)) + 1 for cut in down or ()), default=0)
    least = max((len(part.label) for part in parts), default=1) + 3
    room = max(width - margin - len(str(across[-1])) - 1, 2 * least + _PICTURE_GAP)
    most = min(_SHOWN_INTERVALS if down else 2 * _SHOWN_INTERVALS, (room - _PICTURE_GAP) // least)
    wide, total = min(_WIDE, room), across[-1] - across[0]
    steps = [max(least, (stop - start) * wide // total) for start, stop in itertools.pairwise(across)]
    if sum(steps) > room:
        steps = [least] * len(steps)
    x = _Axis(across, steps, most, _PICTURE_GAP)
    y = _Axis(down or [0, 1], [2] * len(down or "1"), _SHOWN_INTERVALS, 2)
    canvas = _Canvas(x.end + 1, y.end + 1)
    for part in parts:
        columns, rows = x.find(part.columns), y.find(part.rows)
        is_left_out = x.gap == columns or y.gap == rows
        canvas.draw(columns, rows, left_out() if is_left_out else part.label)
    named = {place: str(cut) for cut, place in y.at.items()} if down else {}
    text = [f"{named.get(i, ''):>{margin - 1}} {line}" if down else line for i, line in enumerate(canvas.lines())]
    return [" " * margin + _ruler(x), *text]


def _ruler(axis: _Axis) -> str:
    """Writes the cuts, as far as there is room for each."""
    text = ""
    for cut, place in axis.at.items():
        if not text or place > len(text):
            text = text.ljust(place) + str(cut)
    return text


class _Canvas:
    """A grid of characters, on which lines meet."""

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
        signs = _BOX_LINES if is_utf8() else _PLAIN_BOX_LINES
        made = [[signs.get(mask, " ") for mask in line] for line in self._lines]
        for x, y, label in self._labels:
            made[y][x : x + len(label)] = label
        return ["".join(line).rstrip() for line in made]
