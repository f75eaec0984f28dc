"""Numbers and names as people read them, and tables for notebooks."""

from __future__ import annotations

import html
import os
import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import TypeVar, cast

_Class = TypeVar("_Class", bound=type)

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
ROWS = 30  # of a table in a notebook
_RUNS = 8
_LONGEST = 100  # characters of a name in an error


def size(nbytes: float) -> str:
    """Returns a number of bytes as text: "1.5 MiB"."""
    for unit in _BINARY[:-1]:
        if abs(nbytes) < (1023.5 if unit == "B" else 1023.95):  # what is more is shown as 1024
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_BINARY[-1]}"


def age(created: float) -> str:
    """Returns the time since then as text: "3 min". `created` is in Unix seconds."""
    seconds = max(time.time() - created, 0.0)
    for length, most, unit in ((1, 60, "s"), (60, 60, "min"), (3600, 24, "h")):
        if seconds / length < most - 0.5:  # what is more is shown as `most`
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def runs(numbers: Iterable[int]) -> str:
    """Returns numbers as text: "0-3, 7". Of many runs it has the first ones."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found[:_RUNS])
    return text + (", ..." if len(found) > _RUNS else "")


def count_of(number: int, one: str, many: str) -> str:
    """Returns a number of things as text: "1 leaf", "2,000 leaves"."""
    return f"{number:,} {one if number == 1 else many}"


def first_of(texts: Sequence[str], most: int) -> str:
    """Returns texts in a row, so many at most, and how many more there are: "a, b and 3 more"."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more:,} more" if more > 0 else "")


_MOST_LINES = 20


def listed(lines: Sequence[str]) -> str:
    """Returns texts as lines of a message, indented: the first 20, and how many more there are."""
    more = len(lines) - _MOST_LINES
    return "".join(f"\n  {line}" for line in lines[:_MOST_LINES]) + (f"\n  and {more:,} more" if more > 0 else "")


def escaped(text: str) -> str:
    """Returns text with control characters as escapes: keys may hold anything."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def columns_of(text: str) -> int:
    """Counts the columns of a terminal that text takes: an ideograph or an emoji takes two, a lone accent none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def short(value: object) -> str:
    """Returns a value of a file for an error, cut short: it may be of 100 MB."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def check_progress(progress: object) -> None:
    """Raises TypeError for what can't be called, before anything is done."""
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress is a function of the bytes done and those in all, and not {progress!r:.100}: progress=print "
            "shows both"
        )


def names_its_methods(kind: _Class) -> _Class:
    """Names the methods that a user's class inherits by that class, where Python names a method. A class decorator.

    So a wrong keyword is one of `Store.get()`. The module goes with it, since pickle finds a function by both.
    """
    for base in kind.__mro__:
        for name, method in vars(base).items():
            is_ours = isinstance(method, FunctionType) and method.__module__.startswith("memstore.")
            if is_ours and getattr(kind, name) is method and (name == "__init__" or not name.startswith("_")):
                method.__qualname__, method.__module__ = f"{kind.__name__}.{name}", kind.__module__
    return kind


def offered(names: Iterable[str]) -> Callable[[], list[str]]:
    """Makes the `__dir__` of a package, so that completion offers these names, which users call, and no others."""
    found = sorted({*names, "__doc__", "__file__", "__name__", "__path__"})
    return lambda: list(found)


def an(kind: type) -> str:
    """Returns the name of a class with its article: "an int", "a dict"."""
    name = kind.__qualname__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def an_instance(value: object) -> str:
    """Returns the name of a value's class with its article."""
    return an(type(value))


def first_line(error: BaseException) -> str:
    """Returns the first line of another library's error; its class, if the error says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def of_no_place(path: str) -> str:
    """Says, for an error, what is nearly always wrong with an absolute path that leads nowhere; "": nobody can tell."""
    if "/~" in path:
        return '; "~" is taken as a name: os.path.expanduser makes your home folder of it'
    return "; paths are those of this host, or of storage that is mounted there" if ":/" in path else ""


_BUCKETS = ("s3", "gs", "gcs", "az", "memory")


def is_flattened(path: object) -> bool:
    """Returns whether a path was the URL of a bucket, of which a Path has removed a slash: "s3:/bucket/run"."""
    return isinstance(path, str) and ":/" in path and path.partition(":/")[0].lower() in _BUCKETS


def refuse_url(path: object, what: str, instead: str) -> None:
    """Raises ValueError if a call that takes files of this host was given a URL: it would make a folder "s3:".

    Args:
        what: takes them: "attach".
        instead: what to do.
    """
    found: object = os.fspath(cast("os.PathLike[str]", path)) if isinstance(path, os.PathLike) else path
    if is_flattened(found) or (isinstance(found, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", found)):
        raise ValueError(f"{found!r:.200}: {what} takes files of this host, and no URL: {instead}")


def check_new_folder(path: str) -> None:
    """Raises ValueError for a folder "~" that isn't there: a new one would be taken for one's own, and removed."""
    if os.path.basename(path) == "~" and not os.path.lexists(path):
        raise ValueError(f"{path} doesn't exist{of_no_place(path)}")


def no_key(key: str) -> str:
    return f"no key {key!r}"


def conflict(key: str, expected: int, found: int) -> str:
    is_at = f"is at version {found}" if found else "doesn't exist"
    return f"{key!r} {is_at}, and version {expected} was expected: get it again and decide anew"


def shown(count: int, one: str, many: str) -> str:
    """Returns a number of rows as text: "3 keys", "100 keys, the first 30 shown"."""
    return f"{count_of(count, one, many)}{f', the first {ROWS} shown' if count > ROWS else ''}"


def table_text(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Makes a table for a terminal, of the first rows: its caption, and columns below it.

    Without `columns`, no heads.
    """
    found = [row for row, _ in zip(rows, range(ROWS), strict=False)]
    lines = [[escaped(cell) for cell in line] for line in ([columns, *found] if columns else found)]
    widths = [max(map(columns_of, cells)) for cells in zip(*lines, strict=True)]
    text = (
        "  ".join(cell + " " * (width - columns_of(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return "\n".join([caption, *(f"  {line}" for line in text)])


def table_html(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Makes a table for a notebook, of the first rows. Without rows, or names of columns, it has no heads."""
    heads = "".join(f"<th style='text-align:left'>{column}</th>" for column in columns)
    cells = (
        "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row)
        for row, _ in zip(rows, range(ROWS), strict=False)
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    caption = f"<caption style='text-align:left;white-space:nowrap'>{html.escape(caption)}</caption>"
    head = f"<thead><tr>{heads}</tr></thead>" if body and any(columns) else ""
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


_UNITS = {
    "": 1,
    "B": 1,
    "kB": 1000,
    **{letter: 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
}


def parse_size(size: int | str) -> int:
    """Returns a number of bytes, given as a number, or as text: "8GiB" (2**33), "500MB" (5 * 10**8), "2G" (2**31)."""
    found = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        if match and match[2] in _UNITS:
            found = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 1 << 63:
        raise ValueError(f"a size is a positive number of bytes, or text such as '8GiB' or '500MB', and not {size!r}")
    return found
