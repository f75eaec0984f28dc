"""Drafts: which rank writes which boxes of which tensors, in which file, under which names, and where in the file.

In a take the ranks divide the bytes among themselves: `partition` says who writes what, `draft` makes a rank's files of
it. In a planned snapshot the boxes come from outside: `write_boxes` drafts and writes them. Both use `draft_file`.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from memstore import _modes as modes
from memstore.engine import SAFETENSORS_DTYPES, make_header
from memstore.errors import ShardMismatchError, UnsupportedValueError
from memstore.sharding import Box, whole
from memstore.snapshot.file_storage import FileStorage
from memstore.snapshot.manifest import ManifestBox, ManifestFile, ManifestValue
from memstore.snapshot.names import file_name
from memstore.snapshot.publishing import PartTensor, SnapshotPart, Take
from memstore.snapshot.stateful import HeldTensor, State, cut
from memstore.snapshot.storage import FilePart, LateBytes
from memstore.snapshot.stored import check_cover
from memstore.structure import DTYPE_NAMES, memory_of, traits, why_no_memory

# --- Who writes what -------------------------------------------------------------------------------------------------
# Who writes what: each box of a tensor once, the bytes balanced among the ranks that have it. Pure arithmetic.
#
# Every rank computes this from the same offers, and gets the same answer.


SPLIT = 1 << 30  # bytes: a larger box that several ranks have is written by several


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that several ranks may have (parts of), as one rank has it. `boxes`: offsets and shape of each."""

    path: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    is_sharded: bool


class _BoxToWrite(NamedTuple):
    nbytes: int
    path: str
    box: Box
    holders: tuple[int, ...]


def lone_replicas(offers: Sequence[Sequence[Offer]]) -> set[str]:
    """Paths of whole tensors that were said to be replicated, and that some ranks don't have: each keeps its own."""
    counts = Counter(offer.path for mine in offers for offer in mine)
    whole_ones = {offer.path for mine in offers for offer in mine if not offer.is_sharded}
    sharded = {offer.path for mine in offers for offer in mine if offer.is_sharded}
    return {path for path in whole_ones if counts[path] < len(offers) and path not in sharded}


Shares = list[dict[str, list[Box]]]  # for each rank the boxes that it writes, by path


def partition(own: Sequence[int], offers: Sequence[Sequence[Offer]]) -> Shares:
    """Which boxes each rank writes.

    Args:
        own: for each rank the bytes that it writes anyway: of tensors that it alone has.
        offers: for each rank the tensors that others may have, too.

    Raises:
        ShardMismatchError: the ranks disagree about a tensor, or don't cover it.
    """
    items = _boxes_to_write(_merged(offers))
    loads = [(nbytes, rank) for rank, nbytes in enumerate(own)]
    for item in items:
        if len(item.holders) == 1:
            rank = item.holders[0]
            loads[rank] = (loads[rank][0] + item.nbytes, rank)
    shares: Shares = [{} for _ in own]
    for item in items:
        rank = item.holders[0] if len(item.holders) == 1 else min(loads[holder] for holder in item.holders)[1]
        if len(item.holders) > 1:
            loads[rank] = (loads[rank][0] + item.nbytes, rank)
        shares[rank].setdefault(item.path, []).append(item.box)
    return shares


class _MergedOffer(NamedTuple):
    offer: Offer
    rank: int
    holders: dict[Box, list[int]]


def _merged(offers: Sequence[Sequence[Offer]]) -> Mapping[str, _MergedOffer]:
    """By path, who has which boxes."""
    found: dict[str, _MergedOffer] = {}
    for rank, mine in enumerate(offers):
        for offer in mine:
            first = found.setdefault(offer.path, _MergedOffer(offer, rank, {}))
            if (first.offer.dtype, first.offer.shape) != (offer.dtype, offer.shape):
                raise ShardMismatchError(
                    f"{offer.path}: rank {first.rank} has it as {first.offer.dtype}{list(first.offer.shape)}, rank "
                    f"{rank} as {offer.dtype}{list(offer.shape)}: a tensor of one path is the same on all ranks that "
                    "share it"
                )
            for offsets, shape in offer.boxes:
                first.holders.setdefault(Box(offsets, shape), []).append(rank)
    return found


def _boxes_to_write(merged: Mapping[str, _MergedOffer]) -> list[_BoxToWrite]:
    """What is to be written, the largest first."""
    items: list[_BoxToWrite] = []
    for path, (offer, _, holders) in merged.items():
        check_cover(path, offer.shape, list(holders))
        for box, ranks in holders.items():
            pieces = _split(box, offer.itemsize, len(ranks))
            items += [
                _BoxToWrite(math.prod(piece.shape) * offer.itemsize, path, piece, tuple(ranks)) for piece in pieces
            ]
    return sorted(items, key=lambda item: (-item.nbytes, item.path, item.box))


def _split(box: Box, itemsize: int, holders: int) -> list[Box]:
    """Along the first dimension, where it is worth it."""
    nbytes = math.prod(box.shape) * itemsize
    if holders == 1 or nbytes <= SPLIT or not box.shape:
        return [box]
    count = min(holders, -(-nbytes // SPLIT), box.shape[0])
    starts = [box.shape[0] * i // count for i in range(count + 1)]
    return [
        Box((box.offsets[0] + start, *box.offsets[1:]), (stop - start, *box.shape[1:]))
        for start, stop in zip(starts, starts[1:], strict=False)
    ]


# --- Files of a take -------------------------------------------------------------------------------------------------


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


class DraftPiece(NamedTuple):
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
    pieces: tuple[DraftPiece, ...]

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
) -> tuple[SnapshotPart, list[FileDraft]]:
    """What the rank writes, and what it says of that."""
    pieces: dict[str, list[tuple[str, DraftPiece]]] = {"model": [], "state": []}
    for i, tensor in enumerate(tensors):
        own = naming.name_in_model(tensor)
        boxes = shares[rank].get(tensor.path, []) if tensor.path in shared else [shard.box for shard in tensor.shards]
        for box in boxes:
            shard = next(shard for shard in tensor.shards if shard.box == box or shard.box.meet(box) == box)
            elements = shard.local if shard.box == box else cut(shard, box)
            label = label_of(own or tensor.path, tensor.shape, box)
            pieces["model" if own else "state"].append((label, DraftPiece(i, box, elements)))
    files: list[FileDraft] = []
    stored: dict[int, list[ManifestBox]] = {}
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
    values = tuple(ManifestValue(state.key, state.structure, state.objects, state.tensors) for state in states)
    return SnapshotPart(
        take, rank, tuple(ManifestFile(file.name, file.size) for file in files), part_tensors, values
    ), files


def label_of(name: str, shape: tuple[int, ...], box: Box) -> str:
    """What a piece is called in its file: as its tensor, with the slices of its elements if they aren't all."""
    if box == whole(shape):
        return name
    return name + "[" + ", ".join(f"{part.start}:{part.stop}" for part in box.slices) + "]"


def draft_file(name: str, found: list[tuple[str, DraftPiece]]) -> FileDraft:
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


def _add_boxes(stored: dict[int, list[ManifestBox]], file: FileDraft, index: int) -> None:
    at = len(file.header)
    for piece in file.pieces:
        box = ManifestBox(index, at, piece.nbytes, piece.box.offsets, piece.box.shape)
        stored.setdefault(piece.tensor, []).append(box)
        at += piece.nbytes


# --- Files of a planned snapshot -------------------------------------------------------------------------------------
# The boxes that one rank writes, as a file of a snapshot.
#
# What a box has is made when it is written, so that a tensor which is on a device, or lies otherwise than in its file,
# is in memory a second time for a moment only.


class PlannedBox(NamedTuple):
    """A part of a tensor, to be written.

    Attributes:
        path: of the tensor in the snapshot.
        dtype, shape: of the whole tensor.
        box: which elements the part has.
        make: makes a tensor of just these; called once, by one thread at a time, which need not be the caller's.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    make: Callable[[], torch.Tensor]


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that is written, and where its boxes are. It travels to the rank that publishes.

    Attributes:
        save: the id of the save that it is a part of.
        boxes: one for each box that was planned; None where that has no elements. `file` is 0 in all of them.
    """

    save: str
    file: ManifestFile | None  # None: no box has elements
    boxes: tuple[ManifestBox | None, ...]


def write_boxes(
    path: str,
    planned: Sequence[PlannedBox],
    *,
    save: str,
    rank: int,
    world_size: int,
    durable: bool,
    checksum: bool,
) -> WrittenFile:
    """Writes a file of the boxes into the folder, which is there. If it fails, the file is gone again.

    Raises:
        UnsupportedValueError: a dtype that can't be stored.
        ShardMismatchError: a tensor that was made is of another shape than its box.
        AlreadyExistsError: this rank has written for this save already.
        StoreFullError, OSError: as `FileStorage.write`.
    """
    held = [(i, one) for i, one in enumerate(planned) if not one.box.is_empty]
    if not held:
        return WrittenFile(save, None, (None,) * len(planned))
    pieces = [(label_of(one.path, one.shape, one.box), DraftPiece(i, one.box, _shown(one))) for i, one in held]
    draft = draft_file(file_name("state", rank, world_size, save), pieces)
    lock = threading.Lock()
    parts = [FilePart(0, draft.header)]
    boxes: list[ManifestBox | None] = [None] * len(planned)
    at = len(draft.header)
    for piece in draft.pieces:
        parts.append(FilePart(at, LateBytes(piece.nbytes, _Making(planned[piece.tensor], lock))))
        boxes[piece.tensor] = ManifestBox(0, at, piece.nbytes, piece.box.offsets, piece.box.shape)
        at += piece.nbytes
    storage = FileStorage(path)
    sums = storage.write(draft.name, draft.size, parts, durable=durable, checksum=checksum)
    return WrittenFile(save, ManifestFile(draft.name, draft.size, sums), tuple(boxes))


def _shown(planned: PlannedBox) -> torch.Tensor:
    """What has the dtype and the shape of the box, and no memory."""
    if planned.dtype not in DTYPE_NAMES:
        raise UnsupportedValueError(f"{planned.path}: a tensor of {planned.dtype} can't be stored")
    return torch.empty(planned.box.shape, dtype=planned.dtype, device="meta")


class _Making:
    """The bytes of a box, once they are wanted. The lock is that of all boxes: tensors are made one at a time."""

    def __init__(self, planned: PlannedBox, lock: threading.Lock) -> None:
        self._planned, self._lock = planned, lock

    def __call__(self) -> Any:
        planned = self._planned
        with modes.put_aside(), torch.no_grad():
            with self._lock:
                made = planned.make().detach()
            if made.shape != planned.box.shape:
                raise ShardMismatchError(
                    f"{planned.path}: the plan has a part of shape {list(planned.box.shape)}, and the tensor for it is "
                    f"of shape {list(made.shape)}"
                )
            if made.layout is not torch.strided:
                raise UnsupportedValueError(f"{planned.path}: a tensor whose layout is {made.layout} can't be stored")
            return bytes_of(made if made.dtype == planned.dtype else made.to(planned.dtype))


# --- Bytes of a tensor -----------------------------------------------------------------------------------------------


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The elements in C order, as bytes: the tensor's own memory, or a copy if they don't lie so there.

    Raises UnsupportedValueError if it has no memory.
    """
    reason = why_no_memory(tensor)
    if reason is not None:
        raise UnsupportedValueError(reason)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cpu" or not plain.is_contiguous():
        plain = traits.copyable(plain).cpu().contiguous()
    return memory_of(plain)
