"""Keys drawn as a tree, by the "/" in them: what `Store.tree` returns."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field

from memstore.keys import encode_prefix
from memstore.listing.entries import Listed, entries
from memstore.listing.keyspace import Keyspace
from memstore.wording import age, columns_of, escaped, size

_SHOWN = 20  # entries of a folder, of which there may be a million
_WIDEST = 60  # characters of a name that others are aligned with
_LINES = 200
_DEEPEST = 16  # folders in one another


@dataclass(slots=True)
class _Folder:
    """What has a common start, up to a "/"."""

    keys: int = 0
    nbytes: int = 0
    folders: dict[str, _Folder] = field(default_factory=dict[str, "_Folder"])
    entries: dict[str, Listed] = field(default_factory=dict[str, Listed])

    def add(self, entry: Listed, start: int, depth: int = 0) -> None:
        self.keys += 1
        self.nbytes += entry.nbytes
        end = entry.key.find("/", start)
        if end < 0 or depth == _DEEPEST:
            self.entries[entry.key[start:]] = entry
        else:
            self.folders.setdefault(entry.key[start : end + 1], _Folder()).add(entry, end + 1, depth + 1)


class KeyTree:
    """Keys as a tree, as they were when it was made. Made by `Store.tree`.

    Its text is the drawing; a notebook shows it too.

    Attributes:
        root: the store's folder.
        prefix: what the keys start with.
    """

    def __init__(self, root: str, prefix: str, listed: Iterator[Listed]) -> None:
        self.root, self.prefix = root, prefix
        self._top = _Folder()
        start = prefix.rfind("/") + 1  # "pol" draws "policy/" and "polish"
        for entry in listed:
            self._top.add(entry, start)

    def __len__(self) -> int:
        """How many keys it has."""
        return self._top.keys

    def __repr__(self) -> str:
        lines = [self._title(), *_draw(self._top, "")]
        more = len(lines) - _LINES
        return "\n".join(lines[:_LINES] + ([f"... and {more:,} lines more: tree(prefix) draws a part"] * (more > 0)))

    def _repr_html_(self) -> str:
        return f"<pre style='font-family:monospace;white-space:pre'>{html.escape(repr(self))}</pre>"

    def _title(self) -> str:
        start = f", those that start with {self.prefix!r}" if self.prefix else ""
        return f"{self.root}: {_counted(self._top)}{start}"


def key_tree(store: Keyspace, prefix: str) -> KeyTree:
    """Raises InvalidKeyError, StoreClosedError."""
    encode_prefix(prefix)
    return KeyTree(store.root, prefix, entries(store, prefix))


def _draw(folder: _Folder, indent: str) -> Iterator[str]:
    names = sorted({*folder.folders, *folder.entries})
    shown = names if len(names) <= _SHOWN + 1 else names[:_SHOWN]
    texts = [escaped(name) for name in shown]  # a line end in a key is none of the drawing's
    widths = list(map(columns_of, texts))
    widest = max((width for width in widths if width <= _WIDEST), default=0)
    for name, text, width in zip(shown, texts, widths, strict=True):
        is_last, padded = name is names[-1], text + " " * (widest - width)
        branch, below = ("└── ", "    ") if is_last else ("├── ", "│   ")
        if name in folder.folders:
            inner = folder.folders[name]
            yield f"{indent}{branch}{padded}  {_counted(inner)}"
            yield from _draw(inner, indent + below)
        else:
            yield f"{indent}{branch}{padded}  {_said(folder.entries[name])}"
    if len(shown) < len(names):
        yield f"{indent}└── ... {len(names) - len(shown):,} more"


def _counted(folder: _Folder) -> str:
    return f"{folder.keys:,} {'key' if folder.keys == 1 else 'keys'}, {size(folder.nbytes)}"


def _said(entry: Listed) -> str:
    what = f"{entry.leaves:,} {'tensor' if entry.leaves == 1 else 'tensors'}" if entry.leaves else "no tensor"
    return f"{what}, {size(entry.nbytes)}, version {entry.version}, {age(entry.created)} old"
