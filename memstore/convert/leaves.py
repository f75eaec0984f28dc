"""Leaves: tensors whose bytes lie in files, in one place or in several boxes, read in pieces of bounded size.

A value that is being converted is an ordinary one, of tensors over mapped files. A tensor that lies in several boxes is
a *stand-in* there: it has address, dtype and shape, and no memory; `SourceValue` knows its boxes. `compare` compares
every leaf of what was written with what was to be written.

Files of a source are mapped once each (`SourceFiles`); names in a folder lead to nothing outside of it. Objects beside
the tensors are read in torch's safe way, unless pickle is allowed (`load_object`). Files of a target are made of bytes
and of tensors that lie elsewhere (`AssembledFile`): written in parallel, each in pieces of bounded size.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from memstore import structure
from memstore._wording import first_line, short
from memstore.engine import Mapping as FileMapping
from memstore.engine import Path, map_file, opened
from memstore.errors import (
    CorruptionError,
    PermissionDeniedError,
    ResourceLimitError,
    UnsupportedValueError,
    lacks_told,
)
from memstore.formats import ByteMeter, Frames, PlacedTensor
from memstore.sharding import Box, BoxIndex, cover_of, narrow_to, slabs, whole
from memstore.snapshot import in_parallel
from memstore.snapshot.chunks import FilePart, LateBytes
from memstore.snapshot.storage import FileStorage
from memstore.structure import MOST_EXPANDED, RefusedError, Walk, contiguous_stride, memory_of

# --- What a caller allows --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """The permissions of a caller.

    Attributes:
        allow_pickle: objects that only pickle can read or write.
        untie: tensors that share memory are stored one by one, where the target can't keep them together.
        max_expanded: bytes that all tensors together may take in the target beyond those that they have in the source.
    """

    allow_pickle: bool = False
    untie: bool = False
    max_expanded: int = MOST_EXPANDED


# --- Tensors in boxes ------------------------------------------------------------------------------------------------


PIECE = 4 << 20  # bytes that are put together at a time, where a tensor doesn't lie in order

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Boxes = tuple[tuple[Box, torch.Tensor], ...]


class LeafPiece(NamedTuple):
    """Some bytes of a tensor in C order, from `start` on."""

    start: int
    nbytes: int
    box: Box | None  # None: they lie side by side in memory


class BoxedTensor:
    """A tensor, and where its elements are.

    Args:
        boxes: they cover it, each element once.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], boxes: Boxes) -> None:
        self.dtype, self.shape, self.boxes = dtype, tuple(shape), boxes
        self.nbytes = math.prod(self.shape) * dtype.itemsize
        self._index: BoxIndex | None = None

    @property
    def lies_in_order(self) -> bool:
        """Returns whether its bytes are side by side in memory, in C order."""
        return not self.nbytes or (len(self.boxes) == 1 and self.boxes[0][1].is_contiguous())

    def cut(self) -> Boxes:
        """Returns its boxes, cut so that each lies in order, or takes little memory when it is put in order."""
        found: list[tuple[Box, torch.Tensor]] = []
        for box, tensor in self.boxes:
            if tensor.is_contiguous() or tensor.numel() * self.dtype.itemsize <= PIECE:
                found.append((box, tensor))
                continue
            found += [(slab.moved(box.offsets), narrow_to(tensor, slab)) for slab in self._slabs(box.shape)]
        return tuple(found)

    def pieces(self, most: int = PIECE) -> Iterator[LeafPiece]:
        """Yields all of its bytes, in order."""
        if self.lies_in_order:
            for start in range(0, self.nbytes, most):
                yield LeafPiece(start, min(most, self.nbytes - start), None)
            return
        at = 0
        for box in self._slabs(self.shape):
            nbytes = math.prod(box.shape) * self.dtype.itemsize
            yield LeafPiece(at, nbytes, box)
            at += nbytes

    def _slabs(self, shape: Sequence[int]) -> Iterator[Box]:
        return slabs(shape, max(PIECE // self.dtype.itemsize, 1))

    def read(self, piece: LeafPiece) -> Bytes:
        """Returns the bytes of a piece: those in memory, or a copy that is put together."""
        if piece.box is None:
            return memory_of(self.boxes[0][1])[piece.start : piece.start + piece.nbytes]
        # Not by malloc, which keeps tens of megabytes a thread for such pieces, since other threads free them.
        memory: Bytes = np.asarray(map_file(None, piece.nbytes))
        flat = torch.from_numpy(memory)  # pyright: ignore[reportUnknownMemberType]
        made = flat.view(*piece.box.shape, self.dtype.itemsize)
        if self._index is None:
            self._index = BoxIndex([box for box, _ in self.boxes])
        for number, meet in self._index.meeting(piece.box):
            box, tensor = self.boxes[number]
            narrow_to(made, meet.within(piece.box)).copy_(narrow_to(as_bytes(tensor), meet.within(box)))
        return memory

    def whole(self) -> torch.Tensor:
        """Returns the tensor itself, in memory if it doesn't lie in order."""
        if len(self.boxes) == 1:
            return self.boxes[0][1]
        made = torch.empty(self.shape, dtype=self.dtype)
        memory = memory_of(made)
        for piece in self.pieces():
            memory[piece.start : piece.start + piece.nbytes] = self.read(piece)
        return made


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory, with a last dimension of the bytes of an element: so every dtype can be copied."""
    size = tensor.itemsize
    return structure.over(
        tensor.untyped_storage(),
        torch.uint8,
        int(tensor.storage_offset()) * size,
        (*tensor.shape, size),
        (*(step * size for step in tensor.stride()), 1),
    )


def stand_in(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor of zeros that takes no memory as long as nobody looks at it. It has elements."""
    mapping = map_file(None, math.prod(shape) * dtype.itemsize)
    memory: Bytes = np.asarray(mapping)
    storage = torch.from_numpy(memory).untyped_storage()  # pyright: ignore[reportUnknownMemberType]
    storage._memstore_mapping = mapping  # pyright: ignore[reportAttributeAccessIssue] - which keeps it mapped
    return structure.over(storage, dtype, 0, shape, contiguous_stride(shape))


class SourceValue:
    """The value that was found in a source.

    Args:
        value: as a load of the source would give it, its tensors over mapped files, or stand-ins.
        boxes: of the stand-ins, by their addresses.
        metadata: texts that files have beside their tensors (`__metadata__` of safetensors), by the files' paths.
    """

    def __init__(
        self,
        value: Any,
        boxes: Mapping[int, Boxes] | None = None,
        metadata: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.value = value
        self.metadata: Mapping[str, Mapping[str, str]] = metadata or {}
        self._boxes: Mapping[int, Boxes] = boxes or {}

    def leaf(self, tensor: torch.Tensor) -> BoxedTensor:
        """Returns where a tensor of the value has its bytes."""
        plain = tensor.detach().resolve_conj().resolve_neg()
        boxes = self._boxes.get(plain.data_ptr()) if plain.numel() else None
        if boxes is None:
            boxes = ((whole(plain.shape), plain),)
        return BoxedTensor(plain.dtype, plain.shape, boxes)

    def is_stand_in(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.numel()) and tensor.data_ptr() in self._boxes

    def with_value(self, value: Any) -> SourceValue:
        """Returns another value of the same tensors."""
        return SourceValue(value, self._boxes)


def why_not_whole(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Returns why boxes don't make up a tensor; None if they cover it, each element once."""
    found = cover_of(shape, boxes)
    if found.outside is not None:
        has_as_many = len(boxes[found.outside].shape) == len(shape)
        return f"reach beyond its shape {list(shape)}" if has_as_many else "have other dimensions"
    if found.pair is not None:
        return "overlap"
    return f"lack the elements {found.missing[0]}: a part is missing" if found.missing else None


class Assembly:
    """The tensors of a value, made of boxes in files, and the boxes of those that need a stand-in."""

    def __init__(self) -> None:
        self.boxes: dict[int, Boxes] = {}

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], boxes: Boxes) -> torch.Tensor:
        """Returns a tensor of these boxes, which cover it."""
        if not math.prod(shape):
            return torch.empty(tuple(shape), dtype=dtype)
        if len(boxes) == 1:
            return boxes[0][1]
        made = stand_in(dtype, shape)
        self.boxes[made.data_ptr()] = boxes
        return made


# --- Comparison of all leaves that were written, as the format's reader has them, with what was to be written --------


_COMPARED = 4 << 20  # bytes that are compared at a time


class _ComparingWalk(Walk):
    """A walk that compares streams too, which are items of memstore's checkpoints."""

    def write_leaf(self, value: Any) -> Any:
        if type(value) is io.BytesIO:
            return [value.getvalue(), value.tell()]
        return super().write_leaf(value)


class NamedLeaves(NamedTuple):
    """A value, taken apart: its tensors by name, and how all else is written."""

    tensors: Mapping[Path, torch.Tensor]
    objects: Mapping[Path, Any]


def take_apart(value: Any, rules: Rules) -> NamedLeaves:
    """Raises UnsupportedValueError for what memstore can't look into."""
    try:
        tree, walk, _, _ = structure.take_apart(value, lambda careful: _ComparingWalk(rules.allow_pickle, careful))
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None
    names = structure.tree_names(tree)
    tensors = dict(zip(names.tensors, walk.tensors, strict=True))
    objects = {
        name: written for name, written in zip(names.objects, walk.objects, strict=True) if "__dict__" not in name
    }
    return NamedLeaves(tensors, objects)


def compare(
    path: str, wanted: SourceValue, metadata: Mapping[str, str], written: SourceValue, rules: Rules, meter: ByteMeter
) -> None:
    """Raises CorruptionError, naming a leaf, if what was written is not what was wanted.

    Args:
        path: where it is, for the error.
        metadata: of each file that was written, if its format has any.
    """
    for said in written.metadata.values():
        if said != metadata:
            raise _differs(path, f"its __metadata__ was written as {short(said)}, and is {short(metadata)}")
    want, have = take_apart(wanted.value, rules), take_apart(written.value, rules)
    missing = sorted(map(str, {*want.tensors, *want.objects} ^ {*have.tensors, *have.objects}))
    if missing or set(want.tensors) != set(have.tensors):
        raise _differs(path, f"what was written has other leaves than the source: {', '.join(missing[:5])}")
    for name, said in want.objects.items():
        if msgspec.msgpack.encode(said) != msgspec.msgpack.encode(have.objects[name]):
            raise _differs(path, f"{name} was written as another value")
    pairs: list[_Pair] = []
    for name, tensor in want.tensors.items():
        one, two = wanted.leaf(tensor), written.leaf(have.tensors[name])
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            raise _differs(path, f"{name} was written as {two.dtype}{list(two.shape)}, and is {one.dtype}{one.shape}")
        pairs += _pairs(name, one, two)
    in_parallel(lambda pair: _compare_pair(path, pair), pairs, lambda pair: meter.add(pair.nbytes))


class _Pair(NamedTuple):
    """The same bytes of a tensor in the source and in what was written."""

    name: Path
    one: BoxedTensor
    two: BoxedTensor
    first: LeafPiece
    second: LeafPiece

    @property
    def nbytes(self) -> int:
        return self.first.nbytes


def _pairs(name: Path, one: BoxedTensor, two: BoxedTensor) -> list[_Pair]:
    if one.lies_in_order and two.lies_in_order:
        return [_Pair(name, one, two, piece, piece) for piece in one.pieces(_COMPARED)]
    slabs = list((two if one.lies_in_order else one).pieces())
    found: list[_Pair] = []
    for piece in slabs:
        flat = LeafPiece(piece.start, piece.nbytes, None)
        found.append(_Pair(name, one, two, flat if one.lies_in_order else piece, flat if two.lies_in_order else piece))
    return found


def _compare_pair(path: str, pair: _Pair) -> None:
    sums = [
        xxhash.xxh3_64_digest(leaf.read(piece).data)
        for leaf, piece in ((pair.one, pair.first), (pair.two, pair.second))
    ]
    if sums[0] != sums[1]:
        raise _differs(
            path,
            f"{pair.name}: the bytes from {pair.first.start:,} on that were read back don't fit the checksum of the "
            "source: the disk or the memory is faulty, or the source changed meanwhile",
        )


def _differs(path: str, detail: str) -> CorruptionError:
    return CorruptionError(path=path, detail=detail)


# --- Mapped files of a source ----------------------------------------------------------------------------------------


_Result = TypeVar("_Result")


class SourceFiles:
    """The files of a checkpoint.

    Args:
        folder: that has them, and folders of them.
    """

    def __init__(self, folder: str) -> None:
        self._home = os.path.realpath(folder)
        self._mapped: dict[str, tuple[FileMapping | None, Bytes]] = {}
        self._frames = Frames()

    def path(self, name: str) -> str:
        """Returns the path of a file. Raises CorruptionError or PermissionDeniedError if it leads out of the folder."""
        parts = name.split("/")
        if not name or "\0" in name or name.startswith("/") or ".." in parts:
            self.damaged(name, f"{short(name)} names no file of the checkpoint")
        path = os.path.realpath(os.path.join(self._home, name))
        if not path.startswith(f"{self._home}/"):
            raise PermissionDeniedError(f"{self._home}/{name} is a link out of its folder, to {path}")
        return path

    def bytes(self, name: str) -> Bytes:
        """Returns all of a file."""
        if name not in self._mapped:
            path = self.path(name)
            try:
                with opened(path) as (fd, found):
                    mapping = map_file(fd, found.st_size) if found.st_size else None
            except (FileNotFoundError, NotADirectoryError):
                self.damaged(name, "the file is missing")
            self._mapped[name] = mapping, np.zeros(0, np.uint8) if mapping is None else np.asarray(mapping)
        return self._mapped[name][1]

    def with_file(self, name: str, look: Callable[[str, int], _Result]) -> _Result:
        """Returns what `look` says of a file's path and descriptor."""
        path = self.path(name)
        try:
            with opened(path) as (fd, _):
                return look(path, fd)
        except (FileNotFoundError, NotADirectoryError):
            self.damaged(name, "the file is missing")

    def locate(self, name: str, start: int, size: int) -> PlacedTensor:
        """Finds where a tensor lies that torch.save wrote into these bytes. Raises as `Frames.read`."""
        found = self._frames.locate(self.bytes(name).data, start, size)
        if found is None:
            found = self.with_file(name, lambda path, fd: self._frames.read(path, fd, start, size))
        return found

    def tensor(
        self,
        name: str,
        start: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        offset: int = 0,
    ) -> torch.Tensor:
        """Returns a tensor over a file.

        Args:
            start: of its storage, in bytes.
            stride, offset: in elements; None: contiguous.
        """
        stride = contiguous_stride(shape) if stride is None else stride
        if not math.prod(shape):
            return torch.empty(tuple(shape), dtype=dtype)
        reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        stop = start + reach * dtype.itemsize
        memory = self.bytes(name)
        if start < 0 or stop > len(memory):
            self.damaged(name, f"it has {len(memory):,} bytes, and a tensor reaches to {stop:,}: it is truncated")
        storage = torch.from_numpy(memory[start:stop]).untyped_storage()  # pyright: ignore[reportUnknownMemberType]
        storage._memstore_mapping = self._mapped[name][0]  # pyright: ignore[reportAttributeAccessIssue] - keeps it
        return structure.over(storage, dtype, offset, shape, stride)

    def damaged(self, name: str, detail: str) -> NoReturn:
        raise CorruptionError(path=f"{self._home}/{name}"[:4096], detail=detail)


# --- Objects ---------------------------------------------------------------------------------------------------------


def load_object(what: str, data: bytes, rules: Rules) -> Any:
    """Loads what torch.save has written.

    Args:
        what: is read, for errors.

    Raises:
        UnsupportedValueError: only pickle can read it, or it is damaged.
    """
    try:
        with lacks_told(what):
            return torch.load(io.BytesIO(data), weights_only=not rules.allow_pickle, map_location="cpu")
    except ResourceLimitError:
        raise
    except Exception as error:  # torch documents none of those that it raises for foreign bytes
        detail = first_line(error)
        hint = (
            ""
            if rules.allow_pickle
            else ", which can run code: convert it with allow_pickle=True if you trust who saved it"
        )
        raise UnsupportedValueError(
            f"{what} can't be read{' without pickle' if hint else ''} ({detail:.200}){hint}"
        ) from error


# --- New files of a target -------------------------------------------------------------------------------------------


class AssembledFile:
    """A file, put together from its start on."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[FilePart] = []

    def add(self, data: bytes) -> None:
        self._parts.append(FilePart(self.size, data))
        self.size += len(data)

    def add_leaf(self, leaf: BoxedTensor) -> None:
        """Adds all of a tensor, in C order."""
        for part in leaf_parts(leaf, self.size):
            self._parts.append(part)
        self.size += leaf.nbytes

    def around(self) -> tuple[bytes, bytes]:
        """Returns the bytes before its one tensor, and those after; of a file without one, all and none."""
        at = next((i for i, part in enumerate(self._parts) if not isinstance(part.memory, bytes)), len(self._parts))
        after = [part.memory for part in self._parts[at:] if isinstance(part.memory, bytes)]
        return b"".join(part.memory for part in self._parts[:at]), b"".join(after)

    def write(self, folder: str, name: str, meter: ByteMeter) -> None:
        """Makes the file in a folder. Raises StoreFullError, and other errors of the file system."""
        storage = FileStorage(folder, file_mode=0o666)
        storage.write(name, self.size, self._parts, durable=True, done=meter.add)


def leaf_parts(leaf: BoxedTensor, start: int) -> Iterator[FilePart]:
    """Yields where in a file, from `start` on, the bytes of a tensor come from."""
    if not leaf.nbytes:
        return
    if leaf.lies_in_order:
        yield FilePart(start, memory_of(leaf.boxes[0][1]))
        return
    for piece in leaf.pieces():
        yield FilePart(start + piece.start, LateBytes(piece.nbytes, partial(leaf.read, piece)))
