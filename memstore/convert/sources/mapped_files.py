"""The files of a folder, each mapped once, and tensors over them. Names in a folder lead to nothing outside of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np
import torch

from memstore import structure
from memstore.convert.leaves import Bytes
from memstore.engine import Mapping, map_file, opened
from memstore.errors import CorruptionError, PermissionDeniedError
from memstore.formats import Frames, PlacedTensor
from memstore.structure import contiguous_stride
from memstore.wording import short

_Result = TypeVar("_Result")


class MappedFiles:
    """The files of a checkpoint.

    Args:
        folder: that has them, and folders of them.
    """

    def __init__(self, folder: str) -> None:
        self._home = os.path.realpath(folder)
        self._mapped: dict[str, tuple[Mapping | None, Bytes]] = {}
        self._frames = Frames()

    def path(self, name: str) -> str:
        """Of a file. Raises CorruptionError and PermissionDeniedError for a name that leads out of the folder."""
        parts = name.split("/")
        if not name or "\0" in name or name.startswith("/") or ".." in parts:
            self.damaged(name, f"{short(name)} names no file of the checkpoint")
        path = os.path.realpath(os.path.join(self._home, name))
        if not path.startswith(f"{self._home}/"):
            raise PermissionDeniedError(f"{self._home}/{name} is a link out of its folder, to {path}")
        return path

    def bytes(self, name: str) -> Bytes:
        """All of a file."""
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
        """What `look` says of a file's path and descriptor."""
        path = self.path(name)
        try:
            with opened(path) as (fd, _):
                return look(path, fd)
        except (FileNotFoundError, NotADirectoryError):
            self.damaged(name, "the file is missing")

    def locate(self, name: str, start: int, size: int) -> PlacedTensor:
        """Where a tensor lies that torch.save wrote into these bytes. Raises as `Frames.read`."""
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
        """A tensor over a file.

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
