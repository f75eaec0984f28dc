"""Drafts: which rank writes which boxes of which tensors, in which file, under which names, and where in the file.

In a take the ranks divide the bytes among themselves: `partition` says who writes what, and `draft` makes the files of
a rank. `write_values` takes a snapshot of values whose tensors lie in files of others. In a planned snapshot a plan
from outside says who writes what: `write_boxes` makes one file of a rank's boxes, `publish_planned` a snapshot of all
files. All of them lay out a file with `draft_file` and write it with `FileDraft.write`.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from memstore import _modes as modes
from memstore._threads import collect_later
from memstore.engine import SAFETENSORS_DTYPES, make_header
from memstore.errors import ShardMismatchError, UnsupportedValueError
from memstore.sharding import Box, Shard, TensorShard, narrow_to
from memstore.snapshot.chunks import Done, FilePart, LateBytes, PieceSums
from memstore.snapshot.increments import BoxSums, BoxToWrite, SharedFiles, sums_of_boxes
from memstore.snapshot.manifest import ManifestBox, ManifestFile, ManifestValue, file_name
from memstore.snapshot.objects import Storage, storage_at
from memstore.snapshot.publishing import PartTensor, Replacing, SnapshotPart, Take, new_take, publish, with_sums
from memstore.snapshot.stateful import HeldTensor, StateWalker
from memstore.snapshot.storage import FileStorage
from memstore.snapshot.stored import check_cover
from memstore.structure import DTYPE_NAMES, memory_of, over, traits, why_no_memory

# --- Who writes what -------------------------------------------------------------------------------------------------
# Each box of a tensor is written once, and the bytes are balanced among the ranks that have it. Every rank computes
# this from the same offers, by pure arithmetic, and gets the same answer.


SPLIT = 1 << 30  # bytes: a larger box that several ranks have is written by several


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that several ranks may have (parts of), as one rank has it.

    Attributes:
        boxes: the parts.
    """

    path: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    is_sharded: bool


class _BoxToWrite(NamedTuple):
    nbytes: int
    path: str
    box: Box
    holders: tuple[int, ...]


def lone_replicas(offers: Sequence[Sequence[Offer]]) -> set[str]:
    """Returns the paths of tensors that were said to be replicated and that some ranks lack: each keeps its own."""
    counts = Counter(offer.path for mine in offers for offer in mine)
    whole_ones = {offer.path for mine in offers for offer in mine if not offer.is_sharded}
    sharded = {offer.path for mine in offers for offer in mine if offer.is_sharded}
    return {path for path in whole_ones if counts[path] < len(offers) and path not in sharded}


Shares = list[dict[str, list[Box]]]  # for each rank the boxes that it writes, by path


def partition(own: Sequence[int], offers: Sequence[Sequence[Offer]]) -> Shares:
    """Returns which boxes each rank writes.

    Args:
        own: for each rank the bytes of tensors that it alone has, which it writes anyway.
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
    """Returns by path which ranks have which boxes."""
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
            for box in offer.boxes:
                first.holders.setdefault(box, []).append(rank)
    return found


def _boxes_to_write(merged: Mapping[str, _MergedOffer]) -> list[_BoxToWrite]:
    """Returns the boxes that are to be written, the largest first."""
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
    """Splits a large box that several ranks have along its first dimension."""
    nbytes = math.prod(box.shape) * itemsize
    if holders == 1 or nbytes <= SPLIT or not box.shape:
        return [box]
    count = min(holders, -(-nbytes // SPLIT), box.shape[0])
    starts = [box.shape[0] * i // count for i in range(count + 1)]
    return [box.narrow(0, start, stop - start) for start, stop in zip(starts, starts[1:], strict=False)]


# --- A file, before it is written ------------------------------------------------------------------------------------


class DraftPiece(NamedTuple):
    """A box of a tensor, which is one run of bytes in a file.

    Attributes:
        tensor: the number of the tensor in the caller's list.
        box: which elements of the tensor the piece has.
        elements: a tensor of just these elements; one without memory if `make` is given.
        make: makes the bytes of the elements when they are written, in any thread.
    """

    tensor: int
    box: Box
    elements: torch.Tensor
    make: Callable[[], Any] | None = None

    def late_bytes(self) -> Callable[[], Any] | None:
        """Returns what makes the bytes of the elements; None if they lie in the tensor's own memory as in a file."""
        if self.make is None and _lies_as_in_file(self.elements):
            return None
        return self.make or modes.put_aside()(partial(bytes_of, self.elements))


def _wait_for_devices(pieces: Iterable[DraftPiece]) -> None:
    """Waits for the current streams of the pieces' devices: threads that read them have streams of their own."""
    for device in {piece.elements.device for piece in pieces if piece.elements.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class FileDraft(NamedTuple):
    """A file to be written: its header, then the elements of the pieces, in C order, one behind the other.

    Attributes:
        boxes: where each of the pieces lies, as the manifest has it.
    """

    name: str
    header: bytes
    pieces: Sequence[DraftPiece]
    boxes: Sequence[ManifestBox]
    size: int

    def write(
        self,
        storage: Storage,
        *,
        durable: bool,
        checksum: bool,
        done: Done | None = None,
        pieces: PieceSums | None = None,
    ) -> ManifestFile:
        """Writes the file, from the memory of the tensors where their elements lie in it as in the file.

        Other elements are copied when their turn has come, so all copies together are never in memory. `pieces` gets
        the sums of the boxes' pieces.

        Raises:
            UnsupportedValueError: a tensor has no memory.
            StoreFullError, OSError: as `FileStorage.write`.
        """
        _wait_for_devices(self.pieces)
        parts = [FilePart(0, self.header)]
        with modes.put_aside(), collect_later():
            for piece, box in zip(self.pieces, self.boxes, strict=True):
                make = piece.late_bytes()
                memory = memory_of(piece.elements) if make is None else LateBytes(box.nbytes, make)
                parts.append(FilePart(box.offset, memory))
        sums = storage.write(self.name, self.size, parts, durable=durable, checksum=checksum, done=done, pieces=pieces)
        return ManifestFile(self.name, self.size, sums)


def draft_file(name: str, number: int, found: Sequence[tuple[str, DraftPiece]]) -> FileDraft:
    """Lays out a file of these pieces. Wide elements come first, so each piece starts on a multiple of its own.

    Args:
        name: of the file.
        number: the file's number, which its boxes have.
        found: each piece, and its name in the file. A name that is taken gets a "~".
    """
    found = sorted(found, key=lambda entry: -entry[1].elements.itemsize)
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    labels = {"__metadata__"}  # safetensors' own
    for label, piece in found:
        while label in labels:
            label += "~"
        labels.add(label)
        elements = piece.elements
        dtype, nbytes = DTYPE_NAMES[elements.dtype], elements.numel() * elements.itemsize
        if dtype in SAFETENSORS_DTYPES:
            entries.append((label, dtype, tuple(elements.shape), nbytes))
        else:
            entries.append((label, "uint8", (nbytes,), nbytes))
    header = make_header(entries)
    boxes: list[ManifestBox] = []
    at = len(header)
    for (_, piece), (_, _, _, nbytes) in zip(found, entries, strict=True):
        boxes.append(ManifestBox(number, at, nbytes, piece.box.offsets, piece.box.shape))
        at += nbytes
    return FileDraft(name, header, [piece for _, piece in found], boxes, at)


def label_of(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Returns the name of a piece in its file: the tensor's, with the slices of the elements if they aren't all."""
    if box.shape == shape:
        return name
    return name + "[" + ", ".join(f"{part.start}:{part.stop}" for part in box.slices) + "]"


Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_OWN_PAGES = 1 << 20  # bytes, from which on a copy gets pages of its own


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns the elements in C order, as bytes: the tensor's own memory, or a copy if they don't lie so there.

    Raises UnsupportedValueError if the tensor has no memory.
    """
    reason = why_no_memory(tensor)
    if reason is not None:
        raise UnsupportedValueError(reason)
    source = tensor.detach()
    if _lies_as_in_file(source):
        return memory_of(source)
    memory = _new_memory(source.numel() * source.itemsize)
    if len(memory):
        shape = tuple(source.shape)
        storage = torch.from_numpy(memory).untyped_storage()
        target = over(storage, source.dtype, 0, shape, traits.contiguous_stride(shape))
        with torch.no_grad():
            traits.copyable(target).copy_(traits.copyable(source))  # resolves what is conjugate or negative, too
    return memory


def _new_memory(nbytes: int) -> Bytes:
    """Makes memory that goes back to the machine as soon as nobody has it.

    What malloc frees stays in the process after the first large free, up to 32 MiB each (M_MMAP_THRESHOLD in
    mallopt(3)): an upload kept copies that were long put, and took 96 MiB more than its budget.
    """
    if nbytes < _OWN_PAGES:
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _lies_as_in_file(tensor: torch.Tensor) -> bool:
    """Returns whether the elements lie in the memory of the tensor as they are to lie in a file."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# --- Files of a take -------------------------------------------------------------------------------------------------


class Naming(NamedTuple):
    """The names in files of the tensors of the one module in an app state, for readers of models.

    Attributes:
        key: of the module in the app state; None if there is none, or several.
        prefix: what DistributedDataParallel has put before the names.
    """

    key: str | None
    prefix: str

    def name_in_model(self, tensor: HeldTensor) -> str:
        """Returns the name of a tensor of the module, "" for another tensor."""
        if self.key is None or not tensor.path.startswith(f"{self.key}/"):
            return ""
        return ".".join(map(str, tensor.parts)).removeprefix(self.prefix)


def offers_of(tensors: list[HeldTensor], shared: set[str]) -> list[Offer]:
    """Returns what this rank has of the tensors that others may have, too."""
    return [
        Offer(
            tensor.path,
            DTYPE_NAMES[tensor.dtype],
            tensor.dtype.itemsize,
            tensor.shape,
            tuple([shard.box for shard in tensor.shards]),
            tensor.is_sharded,
        )
        for tensor in tensors
        if tensor.path in shared
    ]


def own_bytes(tensors: list[HeldTensor], shared: set[str]) -> int:
    """Counts the bytes that this rank writes in any case."""
    alone = [tensor.shards for tensor in tensors if tensor.path not in shared]
    return sum(shard.local.numel() * shard.local.itemsize for shards in alone for shard in shards)


_NOTHING_SHARED = SharedFiles()


class RankDraft(NamedTuple):
    """The share of a rank in a take, before it is written.

    Attributes:
        part: what it says of itself; the sums of the files that are to be written are missing.
        files: that are to be written.
        linked: what it shares with an earlier snapshot.
    """

    part: SnapshotPart
    files: list[FileDraft]
    linked: SharedFiles


def draft(
    take: Take,
    rank: int,
    values: Sequence[ManifestValue],
    tensors: list[HeldTensor],
    shared: set[str],
    shares: Shares,
    naming: Naming,
    sharing: Callable[[Sequence[BoxToWrite]], SharedFiles] | None = None,
) -> RankDraft:
    """Returns what the rank says of its part, and the files that it is to write.

    Args:
        shared: paths of the tensors that others may have, too.
        shares: what `partition` says of these.
        sharing: links what an earlier snapshot has already: `Base.share`.
    """
    model: list[tuple[str, DraftPiece]] = []
    state: list[tuple[str, DraftPiece]] = []
    names = [naming.name_in_model(tensor) for tensor in tensors]
    with collect_later():
        for i, (tensor, own) in enumerate(zip(tensors, names, strict=True)):
            shards: Sequence[Shard] = tensor.shards
            if tensor.path in shared:
                shards = [_shard_of(tensor.shards, box) for box in shares[rank].get(tensor.path, ())]
            for box, elements in shards:
                label = label_of(own or tensor.path, tensor.shape, box)
                (model if own else state).append((label, DraftPiece(i, box, elements)))
    linked = _NOTHING_SHARED
    pieces = [piece for _, piece in (*model, *state)]
    if sharing is not None:
        _wait_for_devices(pieces)
        with modes.put_aside():
            with collect_later():
                wanted = [_box_to_write(tensors[piece.tensor], piece) for piece in pieces]
            linked = sharing(wanted)
        model, state = (
            [one for i, one in enumerate(found, start) if i not in linked.boxes]
            for found, start in ((model, 0), (state, len(model)))
        )
    files: list[FileDraft] = []
    with collect_later():
        for group, found in (("model", model), ("state", state)):
            if found:
                name = file_name(group, rank, take.world_size, None if take.plain else take.id)
                files.append(draft_file(name, len(files), found))
        part = part_of(take, rank, values, tensors, files, shared, names, linked, pieces)
        return RankDraft(part, files, linked)


def _box_to_write(tensor: HeldTensor, piece: DraftPiece) -> BoxToWrite:
    make, box, nbytes = piece.late_bytes(), piece.box, piece.elements.numel() * piece.elements.itemsize
    memory = make or partial(_itself, memory_of(piece.elements))
    return BoxToWrite(
        tensor.path, DTYPE_NAMES[tensor.dtype], tensor.shape, box.offsets, box.shape, memory, make is None, nbytes
    )


def _itself(memory: Any) -> Any:
    return memory


def _shard_of(shards: Sequence[Shard], box: Box) -> Shard:
    """Returns a box with its elements, which one of the shards has."""
    shard = next(shard for shard in shards if box.within(shard.box).fits(shard.box.shape))
    return Shard(box, narrow_to(shard.local, box.within(shard.box)))


def part_of(
    take: Take,
    rank: int,
    values: Sequence[ManifestValue],
    tensors: Sequence[HeldTensor],
    files: Sequence[FileDraft],
    shared: set[str],
    names: Sequence[str],
    linked: SharedFiles = _NOTHING_SHARED,
    pieces: Sequence[DraftPiece] = (),
) -> SnapshotPart:
    """Returns what a rank says of its part; the sums of its files are missing until they are written.

    Args:
        names: of each tensor in the index for transformers; "" for a tensor that isn't in there.
        linked: the files that it shares, which come behind its own.
        pieces: what the numbers of the boxes in these stand for.
    """
    boxes: list[list[ManifestBox]] = [[] for _ in tensors]
    for file in files:
        for piece, box in zip(file.pieces, file.boxes, strict=True):
            boxes[piece.tensor].append(box)
    for number, box in linked.boxes.items():
        moved = ManifestBox(len(files) + box.file, box.offset, box.nbytes, box.offsets, box.shape)
        boxes[pieces[number].tensor].append(moved)
    told = tuple(
        [
            PartTensor(tensor.path, DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.path in shared, name, tuple(here))
            for tensor, name, here in zip(tensors, names, boxes, strict=True)
        ]
    )
    own = [ManifestFile(file.name, file.size) for file in files]
    sums = (*[{} for _ in files], *linked.sums) if linked.files else ()
    return SnapshotPart(take, rank, (*own, *linked.files), told, tuple(values), sums, bool(linked.files))


def write_values(
    path: str,
    values: Mapping[str, Any],
    boxes_of: Callable[[torch.Tensor], Sequence[tuple[Box, torch.Tensor]]],
    *,
    durable: bool,
    allow_pickle: bool,
    done: Done | None,
) -> None:
    """Takes a snapshot of one rank in a folder, which is there and is empty.

    Args:
        values: by their names in the app state.
        boxes_of: gives the boxes of a tensor of a value, each with the tensor that has its elements.
        done: told the bytes that are written.

    Raises:
        UnsupportedValueError: a leaf can't be stored, or the manifest would be too long. Nothing was written.
        StoreFullError, OSError: as `FileStorage.write`.
    """
    walker = StateWalker(allow_pickle=allow_pickle)
    stored = [walker.add(key, value) for key, value in values.items()]
    found = [
        (label_of(held.path, held.shape, box), DraftPiece(i, box, elements))
        for i, held in enumerate(walker.tensors)
        for shard in held.shards
        for box, elements in boxes_of(shard.local)
    ]
    storage = FileStorage(path, file_mode=0o666)
    files = [draft_file(file_name("state", 0, 1, None), 0, found)] if found else []
    take = new_take(path, 1, durable=durable)
    part = part_of(take, 0, stored, walker.tensors, files, set(), [""] * len(walker.tensors))
    publish(storage, [write_files(storage, part, files, durable=durable, checksum=True, done=done, written=[])])


def write_files(
    storage: Storage,
    part: SnapshotPart,
    files: Sequence[FileDraft],
    *,
    durable: bool,
    checksum: bool,
    done: Done | None,
    written: list[str],
) -> SnapshotPart:
    """Writes the files of a part, and returns it with their sums.

    Args:
        written: gets the name of each file that is there.
    """
    sums: dict[str, bytes] = {}
    pieces: dict[str, PieceSums] = {}
    for file in files:
        own = pieces.setdefault(file.name, {})
        sums[file.name] = file.write(storage, durable=durable, checksum=checksum, done=done, pieces=own).sums
        written.append(file.name)
    return with_sums(part, sums, pieces)


# --- Planned snapshots -----------------------------------------------------------------------------------------------
# Others say who writes which boxes, as torch.distributed.checkpoint does. A planned save is a take whose ranks don't
# know of each other, and whose snapshot takes the place of an earlier one:
#
#   1. each rank leaves a trace of the save (`publishing.begin_save`), and writes its file, which no manifest names.
#      What an earlier snapshot has already, it links instead (`Base.share`)
#   2. one rank, alone in the folder, makes one part of all files, and publishes it
#
# A kill before the publication leaves the earlier snapshot, one after it the new one; both leave files that the next
# save removes before it writes (`publishing.sweep_saves`).


class PlannedBox(NamedTuple):
    """A part of a tensor, to be written.

    Attributes:
        path: of the tensor, as errors and the file have it.
        dtype, shape: of the whole tensor.
        box: which elements the part has.
        make: makes a tensor of just these. It is called in any thread, and in one thread at a time: once, or in an
            increment once more for what has changed.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    make: Callable[[], torch.Tensor]


class WrittenFiles(msgspec.Struct, frozen=True):
    """The files that a rank has written, or shares, and where its boxes are. It travels to the rank that publishes.

    Attributes:
        save: the id of the save that they are a part of.
        files: none if no box has elements.
        boxes: one for each box that was planned; None where that has no elements.
        sums: of the boxes, for each file.
    """

    save: str
    files: tuple[ManifestFile, ...]
    boxes: tuple[ManifestBox | None, ...]
    sums: tuple[BoxSums, ...] = ()


Sharing = Callable[[Storage, Sequence[BoxToWrite]], SharedFiles]


def write_boxes(
    path: str,
    planned: Sequence[PlannedBox],
    *,
    save: str,
    rank: int,
    world_size: int,
    durable: bool,
    checksum: bool,
    options: Mapping[str, Any] | None = None,
    paths: Sequence[str] = (),
    sharing: Sharing | None = None,
) -> WrittenFiles:
    """Writes a file of the boxes into the folder, which is there. If it fails, the file is gone again.

    The elements of a box are made when they are written. So a tensor that is on a device, or lies otherwise than in its
    file, is in memory a second time for a moment only.

    Args:
        paths: of the boxes' tensors in the snapshot, for `sharing`.
        sharing: links what an earlier snapshot has already (`Base.share`).

    Raises:
        UnsupportedValueError: a dtype that can't be stored.
        ShardMismatchError: a tensor that was made is of another shape than its box.
        AlreadyExistsError: this rank has written for this save already.
        StoreFullError, OSError: as `FileStorage.write`.
    """
    lock = threading.Lock()
    found: list[tuple[str, DraftPiece]] = []
    for i, one in enumerate(planned):
        if one.box.is_empty:
            continue
        if one.dtype not in DTYPE_NAMES:
            raise UnsupportedValueError(f"{one.path}: a tensor of {one.dtype} can't be stored")
        elements = torch.empty(one.box.shape, dtype=one.dtype, device="meta")
        piece = DraftPiece(i, one.box, elements, partial(_make_bytes, one, lock))
        found.append((label_of(one.path, one.shape, one.box), piece))
    if not found:
        return WrittenFiles(save, (), (None,) * len(planned))
    storage = storage_at(path, options)
    boxes: list[ManifestBox | None] = [None] * len(planned)
    files: list[ManifestFile] = []
    sums: list[BoxSums] = []
    linked = SharedFiles()
    if sharing is not None:
        linked = sharing(storage, [_planned_to_write(paths[one.tensor], planned[one.tensor], one) for _, one in found])
    left = [one for number, one in enumerate(found) if number not in linked.boxes]
    if left:
        file = draft_file(file_name("state", rank, world_size, save), 0, left)
        pieces: PieceSums = {}
        files.append(file.write(storage, durable=durable, checksum=checksum, pieces=pieces))
        sums.append(sums_of_boxes(file.boxes, pieces))
        for piece, box in zip(file.pieces, file.boxes, strict=True):
            boxes[piece.tensor] = box
    for number, box in linked.boxes.items():
        boxes[found[number][1].tensor] = msgspec.structs.replace(box, file=len(files) + box.file)
    return WrittenFiles(save, (*files, *linked.files), tuple(boxes), (*sums, *linked.sums))


def _planned_to_write(path: str, planned: PlannedBox, piece: DraftPiece) -> BoxToWrite:
    make, box = piece.late_bytes(), planned.box
    assert make is not None
    nbytes = piece.elements.numel() * piece.elements.itemsize
    return BoxToWrite(path, DTYPE_NAMES[planned.dtype], planned.shape, box.offsets, box.shape, make, False, nbytes)


def _make_bytes(planned: PlannedBox, lock: threading.Lock) -> Bytes:
    """Makes the tensor of a box, and returns its bytes. The lock is that of all boxes."""
    with modes.put_aside(), torch.no_grad():
        with lock:
            made = planned.make().detach()
        if made.shape != planned.box.shape:
            raise ShardMismatchError(
                f"{planned.path}: the plan has a part of shape {list(planned.box.shape)}, and the tensor for it is "
                f"of shape {list(made.shape)}"
            )
        if made.layout is not torch.strided:
            raise UnsupportedValueError(f"{planned.path}: a tensor whose layout is {made.layout} can't be stored")
        return bytes_of(made if made.dtype == planned.dtype else made.to(planned.dtype))


class PlannedTensor(NamedTuple):
    """A tensor of the snapshot, and all its parts.

    Attributes:
        parts: the number of the rank's files that have each, and which of its boxes that is.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[tuple[int, int]]


def publish_planned(
    path: str,
    written: Sequence[WrittenFiles],
    planned: Mapping[str, Mapping[str, PlannedTensor]],
    objects: Mapping[str, Any],
    replacing: Replacing,
    *,
    save: str,
    durable: bool,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Makes the files of all ranks a snapshot, as one part.

    Args:
        written: the files of each rank.
        planned: the tensors, by the name of the value, and by their own.
        objects: values without tensors.
        save: the id of the new snapshot.

    Raises:
        ShardMismatchError: the parts of a tensor don't cover it, or overlap.
        UnsupportedValueError: an object can't be stored, or the manifest would be too long.
        AlreadyExistsError, UnknownOutcomeError: as `publish`.
    """
    files: list[ManifestFile] = []
    sums: list[BoxSums] = []
    numbers: list[int] = []  # in `files`, of the first one of each rank
    for one in written:
        numbers.append(len(files))
        files += one.files
        sums += one.sums
    walker = StateWalker(allow_pickle=False)
    tensors: list[PartTensor] = []
    values: list[ManifestValue] = []
    for key, found in planned.items():
        stand_ins: dict[str, TensorShard] = {}  # that have none of the elements
        for name, one in found.items():
            none = (0,) * len(one.shape)
            stand_ins[name] = TensorShard(torch.empty(none, dtype=one.dtype), one.shape, none)
        values.append(walker.add(key, stand_ins))
        for place, one in zip(values[-1].tensors, found.values(), strict=True):
            boxes: list[ManifestBox] = []
            for rank, part in one.parts:
                box = written[rank].boxes[part]
                if box is not None:
                    boxes.append(msgspec.structs.replace(box, file=numbers[rank] + box.file))
            name = walker.tensors[place].path
            check_cover(name, one.shape, [Box(box.offsets, box.shape) for box in boxes])
            tensors.append(PartTensor(name, DTYPE_NAMES[one.dtype], one.shape, False, "", tuple(boxes)))
    values += [walker.add(key, value) for key, value in objects.items()]
    take = new_take(path, 1, id=save, durable=durable)
    whole = SnapshotPart(take, 0, tuple(files), tuple(tensors), tuple(values), tuple(sums))
    publish(storage_at(path, options), [whole], replacing)
