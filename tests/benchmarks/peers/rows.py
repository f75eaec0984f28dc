"""Ways to gather rows of a stored data set: a TensorDict with one leaf, "frames", and a row for each sample."""

from __future__ import annotations

import json
import mmap
import os
import struct
import warnings
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

import memstore
from tests.benchmarks import pages
from tests.benchmarks.peers import Peer, needs
from tests.benchmarks.report import Role

KEY, LEAF = "data", "frames"
SMALL = 16 << 20


class RowPeer(Peer):
    """`put` writes the data set; then it is opened and shut, and rows are gathered while it is open."""

    def open(self) -> None:
        """Maps the data set. Not timed."""
        raise NotImplementedError

    def shut(self) -> None:
        """Unmaps it, so that its pages can be dropped."""
        raise NotImplementedError

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """These rows, in memory that nobody else writes until the next call."""
        raise NotImplementedError

    def row(self, i: int) -> Any:
        """One row, lazy or mapped."""
        raise NotImplementedError

    def files(self) -> Iterator[Path]:
        """Those with the rows; the others are small."""
        return (path for path in self.root.rglob("*") if path.is_file() and path.stat().st_size > SMALL)

    def close(self) -> None:
        self.shut()


class StoreRows(RowPeer):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    settings: ClassVar[str] = "read_rows(view, index, out=)"
    role: ClassVar[Role] = "memstore"
    _out: Any = None
    _view: Any = None
    _store: Any = None

    def put(self, key: str, value: Any) -> None:
        with memstore.open(self.root / "store") as store:
            store.put(KEY, value)

    def open(self) -> None:
        self._store = memstore.open(self.root / "store", "r")
        self._view = self._store.view(KEY)

    def shut(self) -> None:
        self._view = None
        if self._store is not None:
            self._store.close()

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        if self._out is None:
            shape = (len(index), *self._view[LEAF].shape[1:])
            self._out = TensorDict({LEAF: torch.empty(shape, dtype=torch.uint8)}, batch_size=[len(index)])
        return memstore.read_rows(self._view, index, out=self._out)[LEAF]

    def row(self, i: int) -> Any:
        return self._view[i]

    def new_rows(self, index: torch.Tensor) -> torch.Tensor:
        """In memory of their own, as the peers return them."""
        return memstore.read_rows(self._view, index)[LEAF]

    @property
    def segment(self) -> str:
        return self._store.info(KEY).files[0]


class MemmapRows(RowPeer):
    id: ClassVar[str] = "memmap"
    name: ClassVar[str] = "TensorDict.memmap, td[index]"
    settings: ClassVar[str] = "load_memmap"
    _data: Any = None

    def put(self, key: str, value: Any) -> None:
        value.memmap(self.root / KEY)

    def open(self) -> None:
        self._data = TensorDict.load_memmap(self.root / KEY)

    def shut(self) -> None:
        self._data = None

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self._data[index][LEAF]

    def row(self, i: int) -> Any:
        return self._data[i]


class TorchrlRows(RowPeer):
    id: ClassVar[str] = "torchrl"
    name: ClassVar[str] = "torchrl LazyMemmapStorage"
    settings: ClassVar[str] = "storage[index]"
    _storage: Any = None

    @classmethod
    def missing(cls) -> str | None:
        return needs("torchrl")

    def put(self, key: str, value: Any) -> None:
        from torchrl.data import LazyMemmapStorage

        self._storage = LazyMemmapStorage(len(value), scratch_dir=self.root / KEY)
        self._storage.set(range(len(value)), value)

    def open(self) -> None:
        """It is: what loads a stored one copies it."""

    def shut(self) -> None:
        if self._storage is not None:
            every = self._storage[:][LEAF]
            pages.unmap(every.data_ptr(), every.nbytes)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self._storage[index][LEAF]

    def close(self) -> None:
        self._storage = None


class Bytes:
    """The bytes that a segment has of the data set, read with no store around: what the machine takes."""

    def __init__(self, store: StoreRows, shape: tuple[int, ...]) -> None:
        store.open()
        self._path, self._shape = Path(store.segment), shape
        store.shut()
        with self._path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._start = 8 + length + json.loads(file.read(length))[LEAF]["data_offsets"][0]

    @property
    def path(self) -> Path:
        return self._path

    def open_mapped(self) -> torch.Tensor:
        """All rows, mapped with no fault to come."""
        with self._path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        rows = np.frombuffer(mapping, np.uint8, prod(self._shape), self._start).reshape(self._shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they can't be written
            return torch.from_numpy(rows)

    def read(self, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Names all rows to the kernel, then reads each."""
        nbytes = out[0].nbytes
        fd = os.open(self._path, os.O_RDONLY)
        try:
            starts = (self._start + index * nbytes).tolist()
            for start in starts:
                os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)
            for start, row in zip(starts, out.numpy(), strict=True):
                os.preadv(fd, [row], start)
        finally:
            os.close(fd)
        return out
