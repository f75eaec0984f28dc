"""Rows in plain columns, written as they come: of a store with many keys the first lines are there at once.

Columns are as wide as what has been written so far needs, so they are aligned within each page of rows. A table of
`rich` would have to see all rows first, and takes a hundred times as long.
"""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.cells import cell_len, set_cell_size
from rich.markup import escape

from memstore.cli import render

_PAGE = 256  # rows that are aligned with each other before the first of them is written
_GAP = "  "
LEAST, _MOST = 8, 60  # columns of a first cell with which others are aligned
_INDENT = 2  # columns, of the others where there is no room for it
_TEXT = 16  # columns, at least, for text that goes on in the next line

_Row = TypeVar("_Row")


def write(
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
        shown = [[render.escaped(cell) for cell in row] for row in some]
        for i, column in enumerate(zip(*shown, strict=True)):
            if i:
                wide[i] = max(wide[i], max(map(width, column)))
        room = _room(wide, is_text=not sides[-1])
        firsts = [wide[0], *(width(row[0]) for row in shown)]
        wide[0] = max([first for first in firsts if first <= room], default=_INDENT)
        if not count and is_headed:
            render.console.print(escape(_line(titles, wide, sides)), style="bold")
        count += len(some)
        for row in shown:
            sys.stdout.write(_line(row, wide, sides) + "\n")
    return count


def fit(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> bool:
    """Whether each row has room in one line, aligned with the others. In a file or a pipe it has."""
    if not render.console.is_terminal:
        return True
    wide = [max(width(render.escaped(cell)) for cell in column) for column in zip(titles, *rows, strict=True)]
    return sum(wide) + len(_GAP) * (len(wide) - 1) <= render.console.width


def pages(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    """In lists of `size`; the last one may be shorter."""
    left = iter(rows)
    while page := list(itertools.islice(left, size)):
        yield page


def width(text: str) -> int:
    """In columns of a terminal."""
    return len(text) if text.isascii() else cell_len(text)


def gaps(count: int) -> int:
    """Columns of a terminal between so many of a table."""
    return len(_GAP) * (count - 1)


def cut(text: str, room: int) -> str:
    """Its start, where it takes more than `room` columns."""
    shown = render.escaped(text)
    if width(shown) <= room:
        return shown
    return set_cell_size(shown, room - 1).rstrip() + render.left_out()


def _room(widths: Sequence[int], *, is_text: bool) -> int:
    """For the first column; 0: too little."""
    if not render.console.is_terminal:
        return _MOST
    last = min(widths[-1], _MOST // 2) if is_text else widths[-1]
    others = sum(widths[1:-1]) + last + len(_GAP) * (len(widths) - 1)
    room = render.console.width - others
    return room if room >= LEAST else 0


def _line(row: Sequence[str], widths: Sequence[int], sides: Sequence[bool]) -> str:
    *cells, last = [
        " " * (wide - width(cell)) + cell if is_right else cell + " " * (wide - width(cell))
        for cell, wide, is_right in zip(row, widths, sides, strict=True)
    ]
    if not render.console.is_terminal:
        return _GAP.join([*cells, last]).rstrip()
    above = ""
    if width(row[0]) > widths[0]:
        above, cells[0] = f"{row[0]}\n", " " * widths[0]
    text, used = above, 0
    for cell, wide in zip(cells, widths, strict=False):
        text, used = _next_line(text, used, wide)
        text, used = text + cell + _GAP, used + wide + len(_GAP)
    text, used = _next_line(text, used, min(widths[-1], _MOST // 2) if not sides[-1] else widths[-1])
    return text + _wrapped(last.rstrip(), used)


def _next_line(text: str, used: int, wide: int) -> tuple[str, int]:
    """Where a column goes that has no room left in the line: below, where those of a first cell above start."""
    start = _INDENT + len(_GAP)
    if used <= start or used + wide <= render.console.width:
        return text, used
    return f"{text.rstrip()}\n{' ' * start}", start


def _wrapped(text: str, indent: int) -> str:
    """In as many lines as it takes in the terminal, behind `indent` columns."""
    room = render.console.width - indent
    if width(text) <= room or room < _TEXT:
        return text
    return f"\n{' ' * indent}".join(textwrap.wrap(text, room))
