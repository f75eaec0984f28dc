"""Ways to write rows into a data set that others see: in place, and behind the rows that are there. One leaf, uint8."""

from __future__ import annotations

import mmap
import os
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from tests.benchmarks.peers import Peer
from tests.benchmarks.report import Role

KEY, LEAF = "rows", "frames"


class WritingPeer(Peer):
    extends: ClassVar[bool] = False  # whether `renew` and `extend` are there

    def make(self, rows: int, shape: tuple[int, ...]) -> None:
        """A data set of so many rows, to be written in place."""
        raise NotImplementedError

    def write(self, start: int, batch: torch.Tensor) -> None:
        raise NotImplementedError

    def read(self, start: int, stop: int) -> torch.Tensor:
        """What stands there. Not timed."""
        raise NotImplementedError

    def renew(self, capacity: int, shape: tuple[int, ...]) -> None:
        """A data set without rows, with room reserved for so many. Not timed."""
        raise NotImplementedError

    def extend(self, batch: torch.Tensor) -> None:
        raise NotImplementedError


class StoreWrites(WritingPeer):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    settings: ClassVar[str] = "a Dataset: ds[i:j] = batch, ds.extend(batch)"
    role: ClassVar[Role] = "memstore"
    extends: ClassVar[bool] = True

    def setup(self) -> None:
        import memstore

        self.store = memstore.open(self.root / "store")

    def make(self, rows: int, shape: tuple[int, ...]) -> None:
        self.data = self.store.create_dataset(KEY, {LEAF: (shape, torch.uint8)}, capacity=rows, length=rows)

    def write(self, start: int, batch: torch.Tensor) -> None:
        self.data[start : start + len(batch)] = {LEAF: batch}

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.data[start:stop][LEAF]

    def renew(self, capacity: int, shape: tuple[int, ...]) -> None:
        self.store.delete(KEY, missing_ok=True)
        del self.data
        self.store.gc()
        self.data = self.store.create_dataset(KEY, {LEAF: (shape, torch.uint8)}, capacity=capacity)

    def extend(self, batch: torch.Tensor) -> None:
        self.data.extend({LEAF: batch})

    def close(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class MemmapWrites(WritingPeer):
    id: ClassVar[str] = "memmap"
    name: ClassVar[str] = "TensorDict.memmap, td[i:j] = batch"
    settings: ClassVar[str] = "memmap_like of an expanded row; nothing tells readers what is there"

    def make(self, rows: int, shape: tuple[int, ...]) -> None:
        one = TensorDict({LEAF: torch.zeros(shape, dtype=torch.uint8)})
        self.data = one.expand(rows).memmap_like(self.root / KEY)

    def write(self, start: int, batch: torch.Tensor) -> None:
        self.data[start : start + len(batch)] = TensorDict({LEAF: batch}, [len(batch)])

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.data[start:stop][LEAF]


class PlainMapping(WritingPeer):
    """A file that is reserved and mapped: one thread's memcpy into it."""

    id: ClassVar[str] = "mapping"
    name: ClassVar[str] = "memcpy into a mapped file"
    settings: ClassVar[str] = "posix_fallocate, mmap"
    role: ClassVar[Role] = "limit"
    extends: ClassVar[bool] = True

    def make(self, rows: int, shape: tuple[int, ...]) -> None:
        self.renew(rows, shape)

    def write(self, start: int, batch: torch.Tensor) -> None:
        self.rows[start : start + len(batch)] = batch.numpy()

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[start:stop])

    def renew(self, capacity: int, shape: tuple[int, ...]) -> None:
        self.rows: np.ndarray[Any, Any] = np.empty(0, np.uint8)  # gives the last file back
        path, nbytes = self.root / KEY, capacity * int(np.prod(shape))
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            self.rows = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8).reshape(capacity, *shape)
        finally:
            os.close(fd)
        self.next = 0

    def extend(self, batch: torch.Tensor) -> None:
        self.write(self.next, batch)
        self.next += len(batch)
