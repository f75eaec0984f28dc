"""Files of a checkpoint: mapped once each, for tensors over them; objects in them; and new files, put together.

Files of a source are mapped (`SourceFiles`); names in a folder lead to nothing outside of it. Objects beside the
tensors are read in torch's safe way, unless pickle is allowed (`load_object`). Files of a target are made of bytes and
of tensors that lie elsewhere (`AssembledFile`): written in parallel, each in pieces of bounded size.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from memstore import structure
from memstore._wording import first_line, short
from memstore.convert.leaves import BoxedTensor, Bytes, Rules
from memstore.engine import Mapping as FileMapping
from memstore.engine import map_file, opened
from memstore.errors import (
    CorruptionError,
    PermissionDeniedError,
    ResourceLimitError,
    UnsupportedValueError,
    lacks_told,
)
from memstore.formats import ByteMeter, Frames, PlacedTensor
from memstore.snapshot.file_storage import FileStorage
from memstore.snapshot.storage import FilePart, LateBytes
from memstore.structure import contiguous_stride, memory_of

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
