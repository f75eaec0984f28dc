"""How things look: sizes, ages, tables, trees, JSON, progress bars."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from rich.console import Console
from rich.markup import escape
from rich.segment import Segments
from rich.table import Table
from rich.tree import Tree

from memstore.engine import Path
from memstore.listing import Leaf
from memstore.wording import age, escaped, runs, size

_PATIENCE = 1.0  # seconds before a progress bar is shown
_ANY_WIDTH = 100_000  # columns

__all__ = [
    "age",
    "complain",
    "console",
    "consoles",
    "errors",
    "escaped",
    "head",
    "is_utf8",
    "leaf_tree",
    "left_out",
    "print_items",
    "print_json",
    "print_whole",
    "printable",
    "progress",
    "runs",
    "size",
    "table",
    "tell",
]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process with code 1, which says that damage was found."""
        raise BrokenPipeError


def consoles() -> tuple[Console, Console]:
    """For what is asked for, and for errors: of the streams and the terminal that there are now."""
    return _Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)


console, errors = consoles()


def plain(value: Any) -> Any:
    """For JSON: dataclasses as objects, names of leaves as arrays, all else as text, dtypes as "float32"."""
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
    """A JSON list, written as its items come."""
    write = sys.stdout.write
    write("[")
    for number, one in enumerate(found):
        write((", " if number else "") + _encode(one))
    write("]\n")
    sys.stdout.flush()


def tell(found: object, text: str, *, as_json: bool) -> None:
    """A result, as JSON or in one line."""
    if as_json:
        print_json(found)
    else:
        console.print(text)


def head(text: str) -> None:
    """A title, with markup. A terminal gets it in lines that end with words."""
    console.print(text, soft_wrap=not console.is_terminal)


def complain(text: str) -> None:
    """On the standard error. A terminal gets it in lines that end with words.

    Messages list what they found in lines that begin with two spaces; other line ends are of names, and are escaped.
    """
    lines = "\n  ".join(map(printable, text.split("\n  ")))
    errors.print(f"[bold red]memstore:[/] {lines}", soft_wrap=not errors.is_terminal)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, show_header=any(columns))
    for column in columns:
        is_text = column == columns[0]
        made.add_column(
            column, justify="right" if column in right else "left", overflow="fold" if is_text else "ellipsis"
        )
    for row in rows:
        made.add_row(*map(printable, row))
    return made


def printable(text: str) -> str:
    """As `escaped`, for what is printed with markup: brackets are none."""
    return escape(escaped(text))


def is_utf8() -> bool:
    """Whether lines and blocks can be drawn."""
    return console.encoding.replace("-", "").lower() == "utf8"


def left_out() -> str:
    """What stands for what isn't shown: of one column."""
    return "…" if is_utf8() else "~"


def leaf_tree(title: str, leaves: Sequence[Leaf], notes: Mapping[Path, str] = MappingProxyType({})) -> Tree:
    """The leaves under their names' parts, some with a note."""
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
def progress(text: str) -> Generator[Callable[[int, int], None]]:
    """A bar for what takes longer than a second, where somebody sees it. Yields a `Progress`."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    if not errors.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
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
