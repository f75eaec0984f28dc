"""What a manifest consists of, as it is written (docs/snapshot-format.md). Imports no torch."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MOST_RANKS = 1 << 20
_MOST_DIMENSIONS = 1024

Size = Annotated[int, Meta(ge=0, lt=1 << 60)]
Sizes = Annotated[tuple[Size, ...], Meta(max_length=_MOST_DIMENSIONS)]


class StoredFile(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A file of the snapshot: its size, and the sums of its chunks (none without checksums)."""

    name: str
    size: Size
    sums: bytes = b""


class StoredBox(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A part of a tensor, contiguous in a file: `nbytes` from `offset` on; which elements it has."""

    file: Size
    offset: Size
    nbytes: Size
    offsets: Sizes
    shape: Sizes


class StoredTensor(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A tensor: the path under which it was saved, and where its boxes are."""

    path: str
    dtype: str
    shape: Sizes
    boxes: tuple[StoredBox, ...]


class StoredValue(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A state dict: its structure and objects as memstore writes them, and the tensors that its leaves are."""

    key: str
    structure: bytes
    objects: bytes
    tensors: tuple[Size, ...]

    @property
    def manifest_bytes(self) -> int:
        """About how much of a manifest it takes, where bytes are in base64."""
        return (len(self.structure) + len(self.objects)) * 4 // 3


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of a snapshot. `ranks` has, for each rank, its values by the names in its app state."""

    id: str
    created: Annotated[float, Meta(ge=0, lt=1 << 40)]  # Unix seconds
    writer: str
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]
    values: tuple[StoredValue, ...]
    ranks: tuple[dict[str, Size], ...]

    @property
    def nbytes(self) -> int:
        """Of the files."""
        return sum(file.size for file in self.files)
