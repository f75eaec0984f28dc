"""Numbers as people read them, and what a notebook shows of stores and entries. Nothing here reads a tensor."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstore.info import EntryInfo
    from memstore.store import Store

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_ROWS = 30  # of a table in a notebook


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


def store_html(store: Store) -> str:
    """A table of the first keys, and how many there are."""
    from memstore.listing import entries

    found = [one for one, _ in zip(entries(store), range(_ROWS), strict=False)]
    rows = [(one.key, str(one.version), one.kind, str(one.leaves), size(one.nbytes), age(one.created)) for one in found]
    more = f", the first {_ROWS} shown" if len(store) > _ROWS else ""
    caption = f"{html.escape(store.root)}: {len(store):,} keys{more}"
    return _table(("key", "version", "kind", "leaves", "size", "age"), rows, caption)


def entry_html(info: EntryInfo) -> str:
    """A table of the leaves."""
    leaves = info.leaves[:_ROWS]
    rows = [
        (
            ".".join(map(str, leaf.name)),
            str(leaf.dtype).removeprefix("torch."),
            str(list(leaf.shape)),
            size(leaf.nbytes),
        )
        for leaf in leaves
    ]
    more = f", the first {_ROWS} shown" if len(info.leaves) > _ROWS else ""
    return _table(("leaf", "dtype", "shape", "size"), rows, f"{html.escape(entry_text(info))}{more}")


def entry_text(info: EntryInfo) -> str:
    return f"{info.key!r} version {info.version}: {info.structure}, {info.kind}, {size(info.nbytes)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    head = "".join(f"<th style='text-align:left'>{column}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
