"""Rows in plain columns, written as they come: of a store with many keys the first lines are there at once.

Columns are as wide as what has been written so far needs, so they are aligned within each page of rows. A table of
`rich` would have to see all rows first, and takes a hundred times as long.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.cells import cell_len

from memstore.cli import render

_PAGE = 256  # rows that are aligned with each other before the first of them is written
_GAP = "  "
_LEAST, _MOST = 16, 60  # columns of a first cell with which others are aligned

_Row = TypeVar("_Row")


def write(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    widths: Sequence[int] = (),
    page: int = _PAGE,
) -> int:
    """Writes rows under their titles, if there are any. Returns how many.

    A first cell that is too long for the terminal gets a line for itself: it can be copied as a whole. In a file or a
    pipe each row is one line.

    Args:
        right: the titles of columns that are aligned to the right.
        widths: what columns take at least, where that is known before the rows are.
        page: how many rows are waited for before the first of them is written.
    """
    sides = [title in right for title in titles]
    wide = [max(len(title), least) for title, least in zip(titles, [*widths, *[0] * len(titles)], strict=False)]
    count = 0
    for some in pages(rows, page):
        shown = [[render.escaped(cell) for cell in row] for row in some]
        for i, column in enumerate(zip(*shown, strict=True)):
            if i:
                wide[i] = max(wide[i], max(map(width, column)))
        room = _room(wide)
        firsts = [wide[0], *(width(row[0]) for row in shown)]
        wide[0] = max([first for first in firsts if first <= room], default=len(titles[0]))
        if not count:
            render.console.print(render.printable(_line(titles, wide, sides)), style="bold")
        count += len(some)
        for row in shown:
            sys.stdout.write(_line(row, wide, sides) + "\n")
    return count


def pages(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    """In lists of `size`; the last one may be shorter."""
    left = iter(rows)
    while page := list(itertools.islice(left, size)):
        yield page


def width(text: str) -> int:
    """In columns of a terminal."""
    return len(text) if text.isascii() else cell_len(text)


def _room(widths: Sequence[int]) -> int:
    """For the first column."""
    if not render.console.is_terminal:
        return _MOST
    others = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
    return max(render.console.width - others, _LEAST, 0)


def _line(row: Sequence[str], widths: Sequence[int], sides: Sequence[bool]) -> str:
    first, *others = [
        " " * (wide - width(cell)) + cell if is_right else cell + " " * (wide - width(cell))
        for cell, wide, is_right in zip(row, widths, sides, strict=True)
    ]
    rest = _GAP.join(others).rstrip()
    if width(row[0]) > widths[0] and render.console.is_terminal:
        return f"{row[0]}\n{' ' * widths[0]}{_GAP}{rest}"
    return f"{first}{_GAP}{rest}".rstrip()
