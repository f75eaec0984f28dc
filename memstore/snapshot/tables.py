"""A snapshot as a table of what it has: for a terminal, and for a notebook. No tensor is read."""

from __future__ import annotations

from collections.abc import Iterator

from memstore.snapshot.read import SnapshotMetadata, TensorEntry
from memstore.wording import age, shown, size, table_html, table_text

_COLUMNS = ("path", "dtype", "shape", "size", "files")
_LONGEST = 40  # characters of a value


def snapshot_text(path: str, found: SnapshotMetadata) -> str:
    return table_text(_COLUMNS, _cells(found), _title(path, found))


def snapshot_html(path: str, found: SnapshotMetadata) -> str:
    return table_html(_COLUMNS, _cells(found), _title(path, found))


def _title(path: str, found: SnapshotMetadata) -> str:
    ranks = f"{found.world_size:,} {'rank' if found.world_size == 1 else 'ranks'}"
    sums = "" if found.checksum else ", no checksums"
    entries = shown(len(found.manifest), "entry", "entries")
    return f"memstore.Snapshot {path}: {size(found.nbytes)} of {ranks}, {age(found.created)} old{sums}; {entries}"


def _cells(found: SnapshotMetadata) -> Iterator[tuple[str, str, str, str, str]]:
    for path, entry in found.manifest.items():
        if isinstance(entry, TensorEntry):
            dtype = str(entry.dtype).removeprefix("torch.")
            yield path, dtype, str(list(entry.shape)), size(entry.nbytes), f"{len(entry.files)}"
        else:
            text = repr(entry.value)
            short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
            yield path, type(entry.value).__name__, short, "", ""
