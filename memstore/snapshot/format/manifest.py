"""The manifest: what a snapshot consists of, as one JSON file that is linked last (docs/snapshot-format.md).

Everything that can be told without torch is checked here, once, when it is read; the rest (that a value's leaves are
the tensors it names) where values are read. Imports no torch: the writer's process makes manifests too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NoReturn

import msgspec
import xxhash

from memstore.depth import nests_too_deeply
from memstore.engine import has_settings
from memstore.errors import (
    AmbiguousCheckpointError,
    CorruptionError,
    FormatVersionError,
    KeyNotFoundError,
    NoSnapshotError,
    NotAStoreError,
    UnsupportedValueError,
)
from memstore.snapshot.format.manifest_checks import BrokenError, check
from memstore.snapshot.format.manifest_nouns import (
    MOST_RANKS,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    StoredValue,
)
from memstore.snapshot.format.names import MANIFEST, others_in
from memstore.snapshot.storage import FileStorage
from memstore.strict_json import count_names
from memstore.undecodable import UNDECODABLE
from memstore.wording import of_no_place, short

__all__ = [
    "LIMIT",
    "VERSION",
    "Manifest",
    "StoredBox",
    "StoredFile",
    "StoredTensor",
    "StoredValue",
    "check_length",
    "encode_manifest",
    "load_manifest",
    "read_manifest",
    "refuse_two",
]

VERSION = 1
LIMIT = 1 << 28  # bytes of a manifest
_START = re.compile(rb'\{"memstore_snapshot":([0-9]{1,9}),"checksum":"([0-9a-f]{16})",')
_NO_SUM = b"0" * 16

_read = msgspec.json.Decoder(Manifest).decode


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises UnsupportedValueError for one that would be too large to be read."""
    body = msgspec.json.encode(manifest)[1:]
    text = b'{"memstore_snapshot":%d,"checksum":"%s",' % (VERSION, _NO_SUM) + body
    check_length(len(text), manifest.values)
    if _has_many_objects(text):
        raise UnsupportedValueError("names in the app state have more '{' than a manifest may have: rename them")
    return text.replace(_NO_SUM, xxhash.xxh3_64_hexdigest(text).encode(), 1)


def _has_many_objects(text: bytes | bytearray) -> bool:
    """Whether these are more than ranks, files and tensors have: empty ones take 25 times their text in memory."""
    return text.count(b"{") > MOST_RANKS + len(text) // 8


def check_length(nbytes: int, values: Iterable[StoredValue]) -> None:
    """Raises UnsupportedValueError if so many bytes of a manifest, or a part of one, are too many; names the values."""
    if nbytes > LIMIT:
        largest = sorted(values, key=lambda value: -value.manifest_bytes)[:3]
        found = ", ".join(f"app_state[{short(value.key)}] ({value.manifest_bytes:,} bytes)" for value in largest)
        raise UnsupportedValueError(
            f"what is no tensor, and the names of tensors, stand in a manifest: it would have {nbytes:,} bytes, "
            f"and {LIMIT:,} are the most. The largest are {found}: save large bytes and texts as uint8 tensors"
        )


def read_manifest(path: str, text: bytes | bytearray) -> Manifest:
    """The manifest of the snapshot at `path`.

    Raises:
        CorruptionError: it is damaged, or no take wrote it.
        FormatVersionError: a newer memstore wrote it.
    """
    start = _START.match(text)
    if start is None:
        _damaged(path, f"it is no manifest of a snapshot: it starts with {short(text[:60])}")
    found = _checksum(text, start.start(2))
    if found != start[2]:
        _damaged(path, f"its checksum is {found.decode()}, and it says {start[2].decode()}")
    if int(start[1]) != VERSION:
        raise FormatVersionError(
            f"{path} is a snapshot of format {int(start[1])}, and this memstore reads {VERSION}: use a newer one"
        )
    manifest = _decode(path, text, start.end())
    try:
        check(manifest)
    except BrokenError as error:
        _damaged(path, str(error))
    return manifest


def _of_others(path: str) -> str:
    for other in others_in(path):
        reads = ", whose `load` reads it" if other.is_torchs else ""
        return f"it is {other.kind}{reads}: `memstore convert {path} NEW` makes a snapshot of it"
    return "a take that was not finished leaves none"


def refuse_two(path: str, folder: str | None = None) -> None:
    """Raises AmbiguousCheckpointError if another library's checkpoint is beside the manifest in `path`.

    Args:
        path: of the folder that has a manifest.
        folder: where the other one would be; None: in the same.
    """
    there = folder or path
    for other in others_in(there):
        raise AmbiguousCheckpointError(
            f"two checkpoints are there, and nothing says which is newer: memstore's ({path}/{MANIFEST}) and "
            f"{other.kind} ({there}/{other.name}). Remove that file of the older one, or save there again with "
            f"memstore; `memstore convert {there} NEW --from {other.format}` reads the second"
        )


def load_manifest(path: str) -> Manifest:
    """The manifest of the snapshot in a folder.

    Raises:
        CorruptionError, FormatVersionError: as `read_manifest`.
        NotAStoreError: there is none; a NoSnapshotError where nothing else is there either.
        AmbiguousCheckpointError: another library has saved to the folder, too.
    """
    if not os.path.isdir(path):
        if os.path.isfile(path):
            raise NotAStoreError(f"{path} is no snapshot: it is a file, and a snapshot is a folder")
        raise NoSnapshotError(f"{path} is no snapshot: there is no such folder{of_no_place(path)}")
    try:
        text = FileStorage(path).read_bytes(MANIFEST, LIMIT)
    except KeyNotFoundError:
        if has_settings(path):
            raise NotAStoreError(f"{path} is a store, and no snapshot: memstore.open opens it") from None
        kind = NotAStoreError if others_in(path) else NoSnapshotError
        raise kind(f"{path} is no snapshot: it has no {MANIFEST}; {_of_others(path)}") from None
    refuse_two(path)
    return read_manifest(path, text)


def _checksum(text: bytes | bytearray, at: int) -> bytes:
    """Of a manifest, with zeros where its own is."""
    hasher = xxhash.xxh3_64()
    for piece in (memoryview(text)[:at], _NO_SUM, memoryview(text)[at + len(_NO_SUM) :]):
        hasher.update(piece)
    return hasher.hexdigest().encode()


def _decode(path: str, text: bytes | bytearray, start: int) -> Manifest:
    """What stands behind the version and the checksum."""
    rest = bytearray(memoryview(text)[start - 1 :])
    rest[:1] = b"{"
    if _has_many_objects(rest):
        _damaged(path, f"its JSON can't be read: it has {rest.count(b'{'):,} objects")
    try:
        manifest = _read(rest)
    except UNDECODABLE as error:
        if isinstance(error, RecursionError) and not nests_too_deeply(lambda: _read(rest)):
            raise
        _damaged(path, f"its JSON can't be read: {error}")
    if count_names(rest, _texts(manifest)) != _count_fields(manifest):
        _damaged(path, "its JSON can't be read: a name stands there twice, or is missing")
    return manifest


def _texts(manifest: Manifest) -> list[str]:
    """All that may have colons."""
    return [
        *(manifest.id, manifest.writer),
        *[file.name for file in manifest.files],
        *[tensor.path for tensor in manifest.tensors],
        *[tensor.dtype for tensor in manifest.tensors],
        *[value.key for value in manifest.values],
        *[key for values in manifest.ranks for key in values],
    ]


def _count_fields(manifest: Manifest) -> int:
    """How many names the objects of its JSON have."""
    fields = len(manifest.__struct_fields__) + sum(map(len, manifest.ranks))
    for structs in (manifest.files, manifest.tensors, manifest.values):
        fields += len(structs) * len(structs[0].__struct_fields__) if structs else 0
    return fields


def _damaged(path: str, detail: str) -> NoReturn:
    raise CorruptionError(path=f"{path}/{MANIFEST}", detail=detail)
