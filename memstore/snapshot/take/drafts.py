"""The files that a rank writes: which tensors are in which, under which names, and where."""

from __future__ import annotations

from typing import NamedTuple

import torch

from memstore.engine import SAFETENSORS_DTYPES, make_header
from memstore.sharding import Box, whole
from memstore.snapshot.format import StoredBox, StoredFile, StoredValue, file_name
from memstore.snapshot.parts import Part, PartTensor, Take
from memstore.snapshot.take.partition import Offer, Shares
from memstore.snapshot.take.state import HeldTensor, State, cut
from memstore.structure import DTYPE_NAMES


class Naming(NamedTuple):
    """How the tensors of the one module in an app state are called in files, for readers of models.

    Attributes:
        key: of the module in the app state; None if there is none, or several.
        prefix: what DistributedDataParallel has put before the names.
    """

    key: str | None
    prefix: str

    def name_in_model(self, tensor: HeldTensor) -> str:
        """ "" for tensors of others."""
        if self.key is None or not tensor.path.startswith(f"{self.key}/"):
            return ""
        return ".".join(map(str, tensor.parts)).removeprefix(self.prefix)


class Piece(NamedTuple):
    """A box of a tensor, and the tensor that has just its elements."""

    tensor: int  # its place in the list of this rank's tensors
    box: Box
    elements: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.elements.numel() * self.elements.itemsize


class FileDraft(NamedTuple):
    """A file to be written: its header, then the elements of the pieces, in C order, one behind the other."""

    name: str
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)


def offers_of(tensors: list[HeldTensor], shared: set[str]) -> list[Offer]:
    """What this rank has of the tensors that others may have, too."""
    return [
        Offer(
            tensor.path,
            DTYPE_NAMES[tensor.dtype],
            tensor.dtype.itemsize,
            tensor.shape,
            tuple((shard.box.offsets, shard.box.shape) for shard in tensor.shards),
            tensor.is_sharded,
        )
        for tensor in tensors
        if tensor.path in shared
    ]


def own_bytes(tensors: list[HeldTensor], shared: set[str]) -> int:
    """The bytes that this rank writes in any case."""
    return sum(
        shard.local.numel() * shard.local.itemsize
        for tensor in tensors
        if tensor.path not in shared
        for shard in tensor.shards
    )


def draft(
    take: Take,
    rank: int,
    states: list[State],
    tensors: list[HeldTensor],
    shared: set[str],
    shares: Shares,
    naming: Naming,
) -> tuple[Part, list[FileDraft]]:
    """What the rank writes, and what it says of that."""
    pieces: dict[str, list[tuple[str, Piece]]] = {"model": [], "state": []}
    for i, tensor in enumerate(tensors):
        own = naming.name_in_model(tensor)
        boxes = shares[rank].get(tensor.path, []) if tensor.path in shared else [shard.box for shard in tensor.shards]
        for box in boxes:
            shard = next(shard for shard in tensor.shards if shard.box == box or shard.box.meet(box) == box)
            elements = shard.local if shard.box == box else cut(shard, box)
            label = label_of(own or tensor.path, tensor.shape, box)
            pieces["model" if own else "state"].append((label, Piece(i, box, elements)))
    files: list[FileDraft] = []
    stored: dict[int, list[StoredBox]] = {}
    for group, found in pieces.items():
        if found:
            name = file_name(group, rank, take.world_size, None if take.plain else take.id)
            files.append(draft_file(name, found))
            _add_boxes(stored, files[-1], len(files) - 1)
    part_tensors = tuple(
        PartTensor(
            tensor.path,
            DTYPE_NAMES[tensor.dtype],
            tensor.shape,
            tensor.path in shared,
            naming.name_in_model(tensor),
            tuple(stored.get(i, ())),
        )
        for i, tensor in enumerate(tensors)
    )
    values = tuple(StoredValue(state.key, state.structure, state.objects, state.tensors) for state in states)
    return Part(take, rank, tuple(StoredFile(file.name, file.size) for file in files), part_tensors, values), files


def label_of(name: str, shape: tuple[int, ...], box: Box) -> str:
    """What a piece is called in its file: as its tensor, with the slices of its elements if they aren't all."""
    if box == whole(shape):
        return name
    return name + "[" + ", ".join(f"{part.start}:{part.stop}" for part in box.slices) + "]"


def draft_file(name: str, found: list[tuple[str, Piece]]) -> FileDraft:
    """A file of these pieces. Wide elements first, so that each tensor starts on a multiple of its own.

    Args:
        name: of the file.
        found: each piece, and what it is called in the file.
    """
    found = sorted(found, key=lambda entry: -entry[1].elements.itemsize)
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    labels: set[str] = set()
    for label, piece in found:
        while label in labels or label == "__metadata__":
            label += "~"
        labels.add(label)
        dtype = DTYPE_NAMES[piece.elements.dtype]
        if dtype in SAFETENSORS_DTYPES:
            entries.append((label, dtype, tuple(piece.elements.shape), piece.nbytes))
        else:
            entries.append((label, "uint8", (piece.nbytes,), piece.nbytes))
    return FileDraft(name, make_header(entries), tuple(piece for _, piece in found))


def _add_boxes(stored: dict[int, list[StoredBox]], file: FileDraft, index: int) -> None:
    at = len(file.header)
    for piece in file.pieces:
        box = StoredBox(index, at, piece.nbytes, piece.box.offsets, piece.box.shape)
        stored.setdefault(piece.tensor, []).append(box)
        at += piece.nbytes
