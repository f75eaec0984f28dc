"""Numbers as people read them, and tables for notebooks."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
ROWS = 30  # of a table in a notebook


def size(nbytes: float) -> str:
    """ "1.5 MiB"."""
    for unit in _UNITS[:-1]:
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def age(created: float) -> str:
    """ "3 min", since a time in Unix seconds."""
    seconds = max(time.time() - created, 0.0)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def shown(count: int, what: str) -> str:
    """ "3 keys", "100 keys, the first 30 shown"."""
    return f"{count:,} {what}, the first {ROWS} shown" if count > ROWS else f"{count:,} {what}"


def table_html(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """A table for a notebook, of the first rows."""
    head = "".join(f"<th style='text-align:left'>{column}</th>" for column in columns)
    cells = (
        "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row)
        for row, _ in zip(rows, range(ROWS), strict=False)
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    caption = html.escape(caption)
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
