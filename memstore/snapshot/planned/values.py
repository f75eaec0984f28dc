"""Values whose tensors lie somewhere else, as a snapshot of one rank: how one is made of the files of others."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from memstore.sharding import Box
from memstore.snapshot.format import (
    MANIFEST,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    StoredValue,
    encode_manifest,
    file_name,
)
from memstore.snapshot.planned.publishing import new_save
from memstore.snapshot.storage import Done, FilePart, FileStorage, LateBytes
from memstore.snapshot.take import Piece, StateWalker, draft_file, label_of
from memstore.snapshot.tensor_bytes import bytes_of
from memstore.structure import DTYPE_NAMES


def write_values(
    path: str,
    values: Mapping[str, Any],
    boxes_of: Callable[[torch.Tensor], Sequence[tuple[Box, torch.Tensor]]],
    *,
    durable: bool,
    allow_pickle: bool,
    done: Done | None,
) -> None:
    """Makes a snapshot in a folder, which is there and is empty.

    Args:
        values: by their names in the app state.
        boxes_of: gives the boxes of a tensor of a value, each with the tensor that has its elements.
        done: told the bytes that are written.

    Raises:
        UnsupportedValueError: a leaf can't be stored, or the manifest would be too long. Nothing was written.
        StoreFullError, OSError: as `FileStorage.write`.
    """
    walker = StateWalker(allow_pickle=allow_pickle)
    stored_values = tuple(StoredValue(*walker.add(key, value)) for key, value in values.items())
    found: list[tuple[str, Piece]] = []
    for i, held in enumerate(walker.tensors):
        for shard in held.shards:
            for box, elements in boxes_of(shard.local):
                found.append((label_of(held.path, held.shape, box), Piece(i, box, elements)))
    storage = FileStorage(path, file_mode=0o666)
    files: tuple[StoredFile, ...] = ()
    boxes: list[list[StoredBox]] = [[] for _ in walker.tensors]
    if found:
        draft = draft_file(file_name("state", 0, 1, None), found)
        parts, at = [FilePart(0, draft.header)], len(draft.header)
        for piece in draft.pieces:
            parts.append(FilePart(at, _memory(piece)))
            boxes[piece.tensor].append(StoredBox(0, at, piece.nbytes, piece.box.offsets, piece.box.shape))
            at += piece.nbytes
        sums = storage.write(draft.name, draft.size, parts, durable=durable, checksum=True, done=done)
        files = (StoredFile(draft.name, draft.size, sums),)
    tensors = tuple(
        StoredTensor(held.path, DTYPE_NAMES[held.dtype], held.shape, tuple(boxes[i]))
        for i, held in enumerate(walker.tensors)
    )
    writer = f"memstore {importlib.import_module('memstore').__version__}"  # which is a layer above this one
    by_key = {value.key: number for number, value in enumerate(stored_values)}
    manifest = Manifest(new_save(), time.time(), writer, 1, files, tensors, stored_values, (by_key,))
    storage.publish(MANIFEST, encode_manifest(manifest), durable=durable)


def _memory(piece: Piece) -> Any:
    """The elements' own memory, or late copies of what lies otherwise."""
    if piece.elements.is_contiguous() and not piece.elements.is_conj() and not piece.elements.is_neg():
        return bytes_of(piece.elements)
    return LateBytes(piece.nbytes, partial(bytes_of, piece.elements))
