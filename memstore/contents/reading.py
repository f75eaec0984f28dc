"""Reading: values made of mapped entries, and their bytes verified. Nothing is copied unless it was asked for.

`bring` and its relatives ask for bytes that lie on other hosts: see `engine.Absent`. `bytes_read` counts what was read
through lazy leaves and by rows, out of boxes, and into shards.

What a rank says of a sharded value is read and checked here, as is the table of all boxes in a record. It stands in
the header of the rank's segment, so that a repair can merge parts without the catalog, and, with the checksums of its
boxes, in the catalog until the attempt is published (`merging.py`). It is made in `writing.py`.

A record has the boxes as msgpack of `[[[leaf, [[offsets, shape, place, checksum or nil, rank], ...]], ...], [[leaf,
rank], ...]]`: first the leaves of which ranks have put boxes, then those that a rank has put as plain tensors. Places
count in the entry's data section, which is one range of addresses with all segments (`engine/format/records.py`).
Behind the last segment it has room where nothing is stored: there a get assembles leaves whose boxes don't lie in
order.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from memstore import _modes as modes
from memstore import structure
from memstore._parsing import UNDECODABLE
from memstore.engine import (
    PART_MARK,
    Absent,
    MappedEntry,
    Record,
    Root,
    SegmentExtent,
    check_page,
    files_of,
    leading_base64,
    objects_at,
    read_objects,
    watch,
)
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from memstore.sharding import MOST_DIMENSIONS, NO_BOXES, Box, Boxes, StoredBox, runs, whole
from memstore.structure import DTYPES, LeafNames, MalformedError, Tree, check_boxes, plan_of, render_path, require

# --- What a rank says of the value -----------------------------------------------------------------------------------


CHECKSUM_SIZE = 8  # bytes of xxh3-64, a leaf or box
_CACHED_PARTS = 64  # of what parts say
_MOST_RANKS = 1 << 20
_MOST_BYTES = 1 << 62


class PartBox(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box that the rank holds. `place` is that of its bytes in its segment's data section; None: it wrote none."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: int | None


class PartLeaf(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A leaf of the whole value, as this rank knows it. `nbytes` is the span of a plain leaf, in its segment."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    flags: int
    is_plain: bool
    same: int  # the earlier leaf that is the very same tensor; -1: none
    nbytes: int
    boxes: tuple[PartBox, ...]


class PartValue(msgspec.Struct, frozen=True, array_like=True):
    """The whole value, as a part describes it. The tree is left encoded: most ranks have the same."""

    rank: int
    world_size: int
    tree: msgspec.Raw
    leaves: tuple[PartLeaf, ...]
    objects: bytes


class LeafSignature(NamedTuple):
    """The facts of a leaf on this rank: all but where its bytes are. Leaves that look alike share one.

    Attributes:
        written: by box, whether this rank has written it.
    """

    dtype: str
    shape: tuple[int, ...]
    is_plain: bool
    boxes: tuple[Box, ...]
    written: tuple[bool, ...]


_encode = msgspec.msgpack.Encoder(enc_hook=str).encode  # devices, in trees
_decode_tree = msgspec.msgpack.Decoder().decode
_decode = msgspec.msgpack.Decoder(PartValue).decode
_decode_content = msgspec.msgpack.Decoder(tuple[bytes, tuple[bytes | None, ...]]).decode


class SaidPart(NamedTuple):
    """The description that a part gives, taken apart.

    Attributes:
        tree: not to be changed: other parts have it too.
        names: of the leaves that it says something of.
        looks: of its tensors.
    """

    value: PartValue
    tree: Tree
    names: LeafNames
    looks: tuple[LeafSignature, ...]


class RankPart(NamedTuple):
    """A part that was put.

    Attributes:
        segment: where its bytes are; None if it has none.
        sums: the checksums of its boxes, in the order of leaves and boxes; empty where nobody knows them, as in a
            repair.
    """

    said: SaidPart
    segment: SegmentExtent | None
    sums: tuple[bytes | None, ...] = ()

    @property
    def rank(self) -> int:
        return self.said.value.rank


def encode_said(rank: int, world_size: int, tree: Tree, leaves: tuple[PartLeaf, ...], objects: bytes) -> bytes:
    return PART_MARK + _encode(PartValue(rank, world_size, msgspec.Raw(_encode(tree)), leaves, objects))


def read_part(said: bytes, segment: SegmentExtent | None, sums: tuple[bytes | None, ...] = ()) -> RankPart:
    """Reads a part by what the header of its segment says. Raises CorruptionError unless a put could have said it."""
    try:
        read = _read_said(said, 0 if segment is None else segment.size - segment.start)
        require(not sums or len(sums) == sum(len(look.boxes) for look in read.looks), "other checksums than boxes")
        require(all(one is None or len(one) == CHECKSUM_SIZE for one in sums), "a checksum of another size")
    except (*UNDECODABLE, MalformedError, UnsupportedValueError) as error:
        raise CorruptionError(f"what a part says of its value can't be read: {error}") from None
    return RankPart(read, segment, sums)


@functools.lru_cache(_CACHED_PARTS)
def _read_said(said: bytes, nbytes: int) -> SaidPart:
    """Raises MalformedError unless all of it fits a segment with so many bytes. Cached: the next step says the same."""
    value = _decode(said.removeprefix(PART_MARK))
    tree, names = _read_tree(bytes(value.tree))
    require(0 <= value.rank < value.world_size <= _MOST_RANKS, "a rank that can't be")
    require(len(names.tensors) == len(value.leaves), "other leaves than the tree has")
    objects = structure.written_objects(value.objects)
    require(len(names.objects) == len(objects), "other objects than the tree has")
    return SaidPart(value, tree, names, _signatures_of(value, nbytes))


@functools.lru_cache(_CACHED_PARTS)
def _read_tree(encoded: bytes) -> tuple[Tree, LeafNames]:
    tree = _decode_tree(encoded)
    return tree, structure.tree_names(tree)


def _signatures_of(value: PartValue, nbytes: int) -> tuple[LeafSignature, ...]:
    """Checks every leaf; what is the same for many, once."""
    looks: list[LeafSignature] = []
    known: dict[Any, tuple[LeafSignature, int, list[int]]] = {}
    for number, leaf in enumerate(value.leaves):
        require(-1 <= leaf.same < number, "a leaf that is said to be the same as no earlier leaf")
        boxes = tuple([(box.offsets, box.shape, box.place is None) for box in leaf.boxes])
        alike = (leaf.dtype, leaf.shape, leaf.stride, leaf.flags, leaf.is_plain, leaf.nbytes, boxes)
        found = known.get(alike)
        if found is None:
            found = known[alike] = _check_leaf(leaf, value.rank)
        look, item, sizes = found
        for box, size in zip(leaf.boxes, sizes, strict=True):
            place = box.place
            if place is not None and not (0 <= place <= nbytes - size and place % item == 0):
                raise MalformedError("a box that lies outside of its segment")
        looks.append(look)
    return tuple(looks)


def _check_leaf(leaf: PartLeaf, rank: int) -> tuple[LeafSignature, int, list[int]]:
    """Returns a leaf's look, the bytes of an element, and those of each box. Raises MalformedError."""
    stride = None if leaf.stride is None else list(leaf.stride)
    read, _ = structure.read_leaf((), [leaf.dtype, list(leaf.shape), 0, stride, leaf.flags])
    if not leaf.is_plain:
        require(stride is None and len(leaf.shape) <= MOST_DIMENSIONS, "a leaf that can't be in boxes")
    else:
        require(len(leaf.boxes) == (0 not in leaf.shape), "a plain leaf in boxes")
    boxes = tuple(Box(box.offsets, box.shape) for box in leaf.boxes)
    sizes: list[int] = []
    for box, held in zip(boxes, leaf.boxes, strict=True):
        require(not leaf.is_plain or box == whole(leaf.shape), "a plain leaf in boxes")
        stored = StoredBox(box, 0, rank, None)
        structure.check_box(read, stored, _MOST_BYTES)
        sizes.append(read.nbytes if leaf.is_plain else structure.box_bytes(read, stored))
        is_written = held.place is not None
        require(not (leaf.is_plain and is_written) or leaf.nbytes == sizes[-1], "a plain leaf of another size")
    written = tuple(box.place is not None for box in leaf.boxes)
    return LeafSignature(leaf.dtype, leaf.shape, leaf.is_plain, boxes, written), DTYPES[leaf.dtype].itemsize, sizes


def read_content(content: bytes, segment: SegmentExtent | None) -> RankPart:
    """Reads a part by what the catalog keeps of it. Raises CorruptionError."""
    try:
        said, sums = _decode_content(content)
    except UNDECODABLE as error:
        raise CorruptionError(f"what the catalog keeps of a part can't be read: {error}") from None
    return read_part(said, segment, sums)


def encode_content(said: bytes, sums: list[bytes | None]) -> bytes:
    """Encodes what the catalog keeps of a part, as `read_content` takes it."""
    return _encode((said, sums))


# --- The boxes of a record -------------------------------------------------------------------------------------------


_CACHED_TABLES = 64  # tables


class BoxTable(NamedTuple):
    """The boxes and plain tensors that the ranks have put.

    Attributes:
        boxes: by leaf; they may lie in order, so that the leaf needs no assembling.
        ranks: by leaf that was put as a plain tensor, who put it.
    """

    boxes: Boxes
    ranks: Mapping[int, int]


class _BoxRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: int
    checksum: bytes | None
    rank: int


_encode_table = msgspec.msgpack.Encoder().encode
_decode_table = msgspec.msgpack.Decoder(tuple[list[tuple[int, tuple[_BoxRow, ...]]], list[tuple[int, int]]]).decode


def encode_boxes(
    boxes: Mapping[int, Sequence[StoredBox]], ranks: Mapping[int, int], *, with_checksums: bool = True
) -> bytes:
    rows = [
        (leaf, [(*box, place, checksum if with_checksums else None, rank) for box, place, rank, checksum in found])
        for leaf, found in boxes.items()
    ]
    return _encode_table((rows, list(ranks.items())))


def boxes_of(record: Record) -> Boxes:
    """Returns the boxes by leaf; none, for an entry that isn't sharded.

    Raises CorruptionError unless they are all of their leaves.
    """
    return NO_BOXES if record.boxes is None else _checked_boxes(record.boxes, record.description, record.nbytes)


def box_table(record: Record) -> BoxTable:
    """Reads the table of any entry, but doesn't look whether the boxes are those of its leaves.

    Raises CorruptionError.
    """
    return BoxTable(NO_BOXES, {}) if record.boxes is None else _read_table(record.boxes)


@functools.lru_cache(_CACHED_TABLES)
def _checked_boxes(stored: bytes, description: bytes, nbytes: int) -> Boxes:
    boxes = _read_table(stored).boxes
    check_boxes(plan_of(description), boxes, nbytes)
    return boxes


@functools.lru_cache(_CACHED_TABLES)
def _read_table(stored: bytes) -> BoxTable:
    try:
        rows, ranks = _decode_table(stored)
    except UNDECODABLE as error:
        raise CorruptionError(f"the boxes of a sharded value can't be read: {error}") from None
    box = functools.lru_cache(None)(Box)  # leaves of one shape are mostly cut alike
    boxes = {
        leaf: tuple([StoredBox(box(row.offsets, row.shape), row.place, row.rank, row.checksum) for row in found])
        for leaf, found in rows
    }
    return BoxTable(boxes, dict(ranks))


# --- Values of mapped entries ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The form in which a get wants its value: arguments of `Store.get`."""

    out: Any = None
    like: Any = None
    device: Any = None
    dtype: Any = None
    non_blocking: bool = False
    strict: bool = True
    cast: bool = False

    def __post_init__(self) -> None:
        if self.out is not None and self.like is not None:
            raise TypeError("get takes out= or like=, not both: out= fills what is there, like= makes its double")
        if (self.out is not None or self.like is not None) and (self.device is not None or self.dtype is not None):
            raise TypeError("out= and like= have devices and dtypes of their own: leave device= and dtype= out")
        if self.cast and self.out is None:
            raise TypeError("cast= is for out=, whose dtypes may differ: like= has its own, and dtype= names one")


PLAIN_READ = ReadOptions()
_from_numpy: Any = torch.from_numpy  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_in_inference_mode, _dispatch_modes, _transform = (
    torch.is_inference_mode_enabled,
    modes.count_dispatch_modes,
    modes.current_transform,
)


def read_bare(held: MappedEntry) -> torch.Tensor | None:
    """Makes a value that is a single plain tensor, in a third of the time that `read` takes otherwise.

    Returns None if it isn't one, or where `read` has more to look at. (A tensor in boxes doesn't start at the first
    byte.)
    """
    record, mapping = held.record, held.mapping
    if record.objects or record.hosts is not None:
        return None
    if _in_inference_mode() or _dispatch_modes() or _transform() is not None:
        return None
    try:
        plan = structure.plan_of(record.description)
        if plan.nbytes != record.nbytes:
            return None
        if mapping is not None:
            array = plan.bare_array(np.asarray(mapping), record.start)
        else:
            array = plan.bare_array(bytearray(record.inline or b""), 0)
        if array is None:
            return None
        tensor: torch.Tensor = _from_numpy(array)
    except (MemstoreError, TypeError, ValueError, RuntimeError):  # `read` says of what
        return None
    tensor.untyped_storage()._memstore_mapping = array if mapping is None else mapping  # type: ignore[attr-defined]
    if mapping is None:
        watch(tensor.data_ptr(), array)
    return tensor


def read(root: Root, key: str, held: MappedEntry, options: ReadOptions, *, verify: bool, allow_pickle: bool) -> Any:
    """Makes the value of a mapped entry: without a copy, unless the options ask for one.

    What another host has put on storage that both have is compared with its checksums, if there are any, whatever
    `verify` says: there a file may show zeros for what has not come yet.
    """
    if options is PLAIN_READ and not verify:
        bare = read_bare(held)
        if bare is not None:
            return bare
    verify = verify or (root.storage.sees_all_hosts and held.record.hosts is not None)
    try:
        if not (_dispatch_modes() or _transform() is not None or (options is not PLAIN_READ and modes.are_active())):
            try:
                return _read(root, key, held, options, verify=verify, allow_pickle=allow_pickle)
            except MemstoreError:
                if not modes.are_active():  # the other kinds: what they do is no damage
                    raise
        with modes.put_aside():
            return _read(root, key, held, options, verify=verify, allow_pickle=allow_pickle)
    except MemstoreError as error:
        if isinstance(error, CorruptionError) and error.key is None:  # structure knows neither key nor file
            raise blame(root, key, held.record, error) from error
        error.key = key
        raise


def _read(root: Root, key: str, held: MappedEntry, options: ReadOptions, *, verify: bool, allow_pickle: bool) -> Any:
    plan, objects, memory, boxes = locate(root, key, held)
    target = options.like if options.out is None else options.out
    if target is not None:
        copy: Any = structure.get_like
        if options.out is not None:
            copy = partial(structure.get_into, cast=options.cast)
        return copy(
            plan,
            objects,
            memory,
            target,
            boxes=boxes,
            checks=Checksums(held.record, plan, boxes, memory) if verify else None,
            need=bringing(held.absent),
            count=count_read,
            strict=options.strict,
            non_blocking=options.non_blocking,
            allow_pickle=allow_pickle,
        )
    if held.absent is not None:
        held.absent.need_all()
    if verify:
        compare(held.record, plan, memory, boxes)
    if boxes:
        count_read(structure.assemble(plan, boxes, memory))
    return structure.rebuild(
        plan,
        objects,
        memory,
        held.mapping,
        allow_pickle=allow_pickle,
        device=options.device,
        dtype=options.dtype,
        non_blocking=options.non_blocking,
    )


def memory_of(held: MappedEntry) -> np.ndarray:
    """Returns the data section: over the mapping, which it keeps alive, or a copy of an inline value's bytes."""
    record, mapping = held.record, held.mapping
    if mapping is not None:
        return np.asarray(mapping)[record.start : record.start + record.nbytes]
    memory = np.frombuffer(bytearray(record.inline or b""), np.uint8)
    if record.inline:
        watch(memory.__array_interface__["data"][0], memory)
    return memory


class Located(NamedTuple):
    """A held value, ready to be read.

    Attributes:
        memory: its data section, of as many bytes as its plan says.
        boxes: of its leaves, checked.
    """

    plan: structure.Plan
    objects: bytes
    memory: np.ndarray
    boxes: Boxes


def locate(root: Root, key: str, held: MappedEntry) -> Located:
    record, memory, objects = held.record, memory_of(held), held.record.objects
    if held.mapping is not None and record.objects_checksum is not None:
        objects = checked_objects(record, held.header()[8:].tobytes())
    plan = structure.plan_of(record.description)
    if plan.nbytes != memory.nbytes:
        raise damaged(root, key, record, f"{memory.nbytes:,} bytes instead of {plan.nbytes:,}")
    return Located(plan, objects, memory, NO_BOXES if record.boxes is None else boxes_of(record))


def damaged(root: Root, key: str, record: Record, detail: str, place: int = 0) -> CorruptionError:
    """Makes the error of a damage. `place`: where it is, in the data section."""
    path = f"{root.path} (inline)"
    for extent, file in zip(record.extents, files_of(root, record), strict=True):
        if extent.base <= place or not extent.base:
            path = file
    return CorruptionError(key=key, path=path, detail=detail)


def blame(root: Root, key: str, record: Record, error: CorruptionError) -> CorruptionError:
    """Makes the same error with the key, and the file where the damage is."""
    return damaged(root, key, record, error.detail, error.place if isinstance(error, DamagedBytesError) else 0)


def verify(root: Root, key: str, held: MappedEntry, done: Callable[[int], None]) -> bool:
    """Compares the bytes of a value with their checksums; `done` is told how many there were.

    Returns whether it has any; an inline value has its record's. Raises CorruptionError.
    """
    record, mapping = held.record, held.mapping
    if record.is_mutable:
        try:
            capacity = structure.capacity_of(held.record.description, held.record.nbytes)
            check_page(memory_of(held).data, capacity)
        except CorruptionError as error:
            raise damaged(root, key, held.record, error.detail) from error
        done(record.nbytes)
        return False
    try:
        found = locate(root, key, held)
        compare(record, found.plan, found.memory, found.boxes, done)
    except CorruptionError as error:
        raise blame(root, key, record, error) from error
    if record.checksums is None:
        done(record.nbytes)
    return mapping is None or record.checksums is not None or not record.nbytes


# --- Checksums -------------------------------------------------------------------------------------------------------
# xxh3-64, one for each leaf, and one for objects that don't fit into the record.


class DamagedBytesError(CorruptionError):
    """Bytes that don't fit their checksum. `place` is that of the first of them, in the data section."""

    def __init__(self, detail: str, place: int) -> None:
        super().__init__(detail)
        self.place = place


class Checksums:
    """The checksums of a record's leaves, and of their boxes; none where the store has none.

    Raises CorruptionError if they are of other leaves.
    """

    def __init__(self, record: Record, plan: structure.Plan, boxes: Boxes, memory: np.ndarray) -> None:
        stored = record.checksums
        if stored is not None and len(stored) != CHECKSUM_SIZE * len(plan.leaves):
            raise CorruptionError(f"{len(stored):,} bytes of checksums for {len(plan.leaves):,} leaves")
        self._stored, self._plan, self._boxes, self._data = stored, plan, boxes, memory.data

    def compare(self, i: int) -> None:
        """Compares a leaf that lies whole, or all of its boxes. Raises CorruptionError if one differs."""
        leaf, boxes = self._plan.leaves[i], structure.boxes_of_leaf(self._plan, self._boxes, i)
        if boxes:
            self.compare_boxes(i, boxes)
        elif self._stored is not None:
            checksum = self._stored[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]
            if xxhash.xxh3_64_digest(self._data[leaf.offset : leaf.offset + leaf.nbytes]) != checksum:
                raise DamagedBytesError(f"the bytes of {render_path(leaf.name)} don't fit their checksum", leaf.offset)

    def compare_boxes(self, i: int, boxes: Sequence[StoredBox]) -> None:
        leaf = self._plan.leaves[i]
        for box in boxes:
            data = self._data[box.place : box.place + structure.box_bytes(leaf, box)]
            if box.checksum is not None and xxhash.xxh3_64_digest(data) != box.checksum:
                (offsets, shape), rank = box.box, box.rank
                where = f"its box at {list(offsets)}, of shape {list(shape)}, put by rank {rank},"
                detail = f"the bytes of {render_path(leaf.name)}, {where} don't fit their checksum"
                raise DamagedBytesError(detail, box.place)


def compare(
    record: Record,
    plan: structure.Plan,
    memory: np.ndarray,
    boxes: Boxes = NO_BOXES,
    done: Callable[[int], None] | None = None,
) -> None:
    """Compares the leaves with their checksums, if the record has any, and raises CorruptionError if one differs.

    `done` is called with how many bytes of the data section were passed since its last call.
    """
    if record.checksums is None and not boxes:
        return
    checksums, reached = Checksums(record, plan, boxes, memory), 0
    for i, leaf in enumerate(plan.leaves):
        checksums.compare(i)
        if done is None:
            continue
        if i in boxes:
            done(sum(structure.box_bytes(leaf, box) for box in boxes[i]))
        elif i not in plan.same or plan.same[i] not in boxes:
            end = leaf.offset + leaf.nbytes
            done(max(end - reached, 0))
            reached = max(end, reached)


def checked_objects(record: Record, header: bytes) -> bytes:
    """Reads the objects of a value whose record has no room for them: they are in the header of its segment."""
    return _checked(record, read_objects(header))


def placed_objects(record: Record, key: str, store: str, content: memoryview) -> bytes:
    """Reads the objects in a header that may be damaged elsewhere: they are found by their place in it."""
    at = objects_at(key, store, len(record.checksums or b""))
    return _checked(record, leading_base64(bytes(content[at : record.start])))


def _checked(record: Record, objects: bytes) -> bytes:
    if xxhash.xxh3_64_digest(objects) != record.objects_checksum:
        raise CorruptionError("the objects in the header don't fit their checksum")
    return objects


# --- Bytes that lie on other hosts -----------------------------------------------------------------------------------


_MOST_RUNS = 1 << 20  # of a tensor; beyond, gaps come too
_LEAST_ROW = 1024  # bytes of one that comes by itself; shorter ones come with the gaps between them


def bring(absent: Absent, tensors: Sequence[torch.Tensor]) -> None:
    """Brings the elements of all tensors, by one request a host. Tensors in other memory are there already."""
    found = [_ranges(tensor, _MOST_RUNS) for tensor in tensors if tensor.numel() and tensor.device.type == "cpu"]
    if found:
        absent.need(*map(np.concatenate, zip(*found, strict=True)))


def bring_rows(absent: Absent, tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Brings some rows of a tensor; none of them is negative."""
    if rows.numel() and tensor.numel():
        starts, stops = _ranges(tensor[0], max(_MOST_RUNS // len(rows), 1))
        first = np.unique(rows.numpy())[:, None] * (tensor.stride(0) * tensor.dtype.itemsize)
        absent.need((first + starts).ravel(), (first + stops).ravel())


def receive_rows(absent: Absent, tensor: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> bool:
    """Brings some rows of a tensor, none of them negative, straight into another one, which has them in that order.

    Returns False where they don't lie in one piece each, or are to be kept here: see `bring_rows`. After an error
    anything may lie in the target.
    """
    step = tensor.stride(0) * tensor.dtype.itemsize if tensor.ndim else 0
    if not (rows.numel() and tensor.numel() and target.is_contiguous() and tensor[0].is_contiguous()):
        return False
    nbytes = tensor[0].nbytes
    if nbytes < _LEAST_ROW:
        return False
    found, firsts, which = np.unique(rows.numpy(), return_index=True, return_inverse=True)
    starts = tensor.data_ptr() + found * step
    if step < nbytes or not absent.receive(starts, starts + nbytes, target.data_ptr() + firsts * nbytes):
        return False
    if len(found) < len(rows):  # some come more than once
        whole = target.view(len(rows), -1).view(torch.uint8)
        whole.copy_(whole[torch.as_tensor(firsts[which])])
    return True


def bringing(absent: Absent | None) -> Callable[[Sequence[torch.Tensor]], None] | None:
    """Returns `bring` for these bytes; None where all are there."""
    return None if absent is None else lambda tensors: bring(absent, tensors)


def _ranges(tensor: torch.Tensor, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the addresses where the runs of a tensor begin and end."""
    offsets, length = runs(tensor.shape, tensor.stride(), most)
    starts = tensor.data_ptr() + offsets * tensor.dtype.itemsize
    return starts, starts + length * tensor.dtype.itemsize


# --- The count of bytes that were read -------------------------------------------------------------------------------


_lock = threading.Lock()
_total = 0


def count_read(nbytes: int) -> None:
    global _total
    with _lock:
        _total += nbytes


@modes.uncompiled
def bytes_read() -> int:
    """Returns how many bytes this process has read so far through views, rows and parts of tensors.

    It counts the elements of lazy leaves and of `read_rows` each time they are used (slicing, printing or sending a
    view uses none), and the bytes that a get copies from a sharded entry or into a DTensor.
    """
    return _total
