"""What each rank says of what it wrote: nouns, as they travel between ranks and to the writer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from memstore.snapshot.format import StoredBox, StoredFile, StoredValue


class Take(msgspec.Struct, frozen=True):
    """What all ranks of one take know of it.

    Attributes:
        id: of this attempt to take a snapshot; 16 hexadecimal digits.
        path: the folder.
        plain: whether its files have the plain names: no other take may have written to the folder.
    """

    id: str
    path: str
    world_size: int
    created: float
    writer: str
    plain: bool
    durable: bool
    checksum: bool


class PartTensor(msgspec.Struct, frozen=True):
    """A tensor of a rank's values. `boxes` are those that the rank wrote; of what others wrote, there are none.

    Attributes:
        shared: other ranks may have the same tensor: it is the one of the same path.
        index_name: what it is called in the index for transformers; "" if it isn't in there.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    shared: bool
    index_name: str
    boxes: tuple[StoredBox, ...]  # whose files are this part's


class Part(msgspec.Struct, frozen=True):
    """What one rank wrote."""

    take: Take
    rank: int
    files: tuple[StoredFile, ...]  # their sums come from who writes them
    tensors: tuple[PartTensor, ...]
    values: tuple[StoredValue, ...]  # their tensors are this part's


def with_sums(part: Part, sums: Mapping[str, bytes]) -> Part:
    """The part once its files are written."""
    files = tuple(msgspec.structs.replace(file, sums=sums[file.name]) for file in part.files)
    return msgspec.structs.replace(part, files=files)
