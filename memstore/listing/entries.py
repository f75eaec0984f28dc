"""Entries: what a store holds, told from records alone, for the command line and for `repr`s. Imports no torch."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from memstore._arguments import encode_key, encode_prefix
from memstore._wording import age, columns_of, count_of, escaped, size
from memstore.engine import Record, Root, index, plan_bytes
from memstore.listing.keyspace import Keyspace, opened, timeout_of
from memstore.listing.outline import OBJECT, is_one_array, object_types, type_name

# --- Entries ---------------------------------------------------------------------------------------------------------


_BITS = re.compile(r"[0-9]+")  # in the name of a dtype


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """An entry, as `memstore ls` shows it."""

    key: str
    version: int
    kind: str
    nbytes: int
    created: float  # Unix seconds
    leaves: int  # tensors
    type: str  # of the value: "TensorDict[3]"; of an entry whose rows are written in place its kind
    dtype: str | None = None  # of a value that is a single array; None: it is another one
    shape: tuple[int, ...] | None = None
    spilled: bool = False  # moved to a disk, as `EntryInfo.spilled`

    @property
    def content(self) -> str:
        """Says what the value is: "float32 [3, 4]", or "2 leaves"."""
        if self.dtype is not None:
            return f"{self.dtype} {list(self.shape or ())}"
        return count_of(self.leaves, "leaf", "leaves") if self.leaves else ""


COLUMNS = ("key", "type", "content", "size", "version", "age")


def cells(one: ListedEntry) -> tuple[str, ...]:
    """Returns an entry as text, under COLUMNS."""
    return one.key, one.type, one.content, size(one.nbytes), str(one.version), age(one.created)


def entries(store: Keyspace, prefix: str = "", *, timeout: float | None = None) -> Iterator[ListedEntry]:
    """Iterates over the entries whose keys start with `prefix`, sorted. They are read in pages.

    Args:
        timeout: seconds for a page; None: the store's own.
    """
    within = timeout_of(store) if timeout is None else timeout
    for key, record in index.records_from(partial(opened, store), encode_prefix(prefix), within):
        yield _listed(key, record, opened(store))


def entries_after(
    store: Keyspace, prefix: str = "", after: str | None = None, *, limit: int, timeout: float | None = None
) -> list[tuple[ListedEntry, Record]]:
    """Returns up to `limit` entries as `entries` does, beyond the key `after`, each with its record."""
    within = timeout_of(store) if timeout is None else timeout
    beyond = None if after is None else after.encode()
    root = opened(store)
    found = index.records_after(root, encode_prefix(prefix), beyond, limit, within)
    return [(_listed(key, record, root), record) for key, record in found]


def version_entries(store: Keyspace, key: str) -> list[ListedEntry]:
    """Returns the versions of a key that can be read, the current one last; none if there is no such key."""
    name, root = encode_key(key), opened(store)
    return [_listed(name, record, root) for record in index.version_records(root, name, timeout_of(store))]


def _listed(key: bytes, record: Record, root: Root) -> ListedEntry:
    tree, leaves, _ = msgspec.msgpack.decode(plan_bytes(record.description))
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    if is_one_array(tree):
        dtype, shape = leaves[0][0], tuple(leaves[0][1])
    kind = type_name(tree) if not record.is_mutable else record.kind
    if kind == OBJECT:
        kind = next(iter(object_types(record.objects)), OBJECT)
    nbytes = _nbytes(record, leaves)
    return ListedEntry(
        key.decode(),
        record.version,
        record.kind,
        nbytes,
        record.created,
        len(leaves),
        kind,
        dtype,
        shape,
        index.is_spilled(root, record),
    )


def value_bytes(record: Record) -> int:
    """Returns how many bytes the tensors of a value have, as `Store.info` says."""
    return _nbytes(record, msgspec.msgpack.decode(plan_bytes(record.description))[1])


def _nbytes(record: Record, leaves: list[Any]) -> int:
    """Counts the bytes of the leaves by their places, where the data section has headers of files in it too."""
    if record.boxes is None and record.adopted is None and not record.is_delta:
        return record.nbytes
    sizes: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, int):  # the same tensor as an earlier one
            dtype, shape, offset = leaf[:3]
            bits = _BITS.search(dtype)
            itemsize = max(int(bits[0]), 8) // 8 if bits else 1
            sizes[offset] = max(sizes.get(offset, 0), math.prod(shape) * itemsize)
    return sum(sizes.values())


# --- Keys drawn as a tree --------------------------------------------------------------------------------------------


_SHOWN = 20  # entries of a folder, of which there may be a million
_WIDEST = 60  # characters of a name that others are aligned with
_LINES = 200
_DEEPEST = 16  # folders in one another


@dataclass(slots=True)
class _Folder:
    """The keys that have a common start, up to a "/"."""

    keys: int = 0
    nbytes: int = 0
    folders: dict[str, _Folder] = field(default_factory=dict[str, "_Folder"])
    entries: dict[str, ListedEntry] = field(default_factory=dict[str, ListedEntry])

    def add(self, entry: ListedEntry, start: int) -> None:
        """Adds an entry, in the folders that its key names from `start` on."""
        folder = self
        for depth in itertools.count():
            folder.keys += 1
            folder.nbytes += entry.nbytes
            end = entry.key.find("/", start)
            if end < 0 or depth == _DEEPEST:
                folder.entries[entry.key[start:]] = entry
                return
            folder = folder.folders.setdefault(entry.key[start : end + 1], _Folder())
            start = end + 1


class KeyTree:
    """Keys as a tree, as they were when it was made. Made by `Store.tree`.

    Its text is the drawing; a notebook shows it too.

    Attributes:
        root: the store's folder.
        prefix: what the keys start with.
    """

    def __init__(self, root: str, prefix: str, listed: Iterator[ListedEntry]) -> None:
        self.root, self.prefix = root, prefix
        self._top = _Folder()
        start = prefix.rfind("/") + 1  # "pol" draws "policy/" and "polish"
        for entry in listed:
            self._top.add(entry, start)

    def __len__(self) -> int:
        """Returns how many keys it has."""
        return self._top.keys

    def __repr__(self) -> str:
        start = f", those that start with {self.prefix!r}" if self.prefix else ""
        lines = [f"{self.root}: {_counted(self._top)}{start}", *_draw(self._top, "")]
        more = len(lines) - _LINES
        return "\n".join(lines[:_LINES] + ([f"... and {more:,} lines more: tree(prefix) draws a part"] * (more > 0)))

    def _repr_html_(self) -> str:
        return f"<pre style='font-family:monospace;white-space:pre'>{html.escape(repr(self))}</pre>"


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


def _said(entry: ListedEntry) -> str:
    what = f"{entry.leaves:,} {'tensor' if entry.leaves == 1 else 'tensors'}" if entry.leaves else "no tensor"
    return f"{what}, {size(entry.nbytes)}, version {entry.version}, {age(entry.created)} old"
