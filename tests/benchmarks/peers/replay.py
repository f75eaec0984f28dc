"""Replay buffers that processes share: memstore's, TorchRL's and cpprb's, of rows of so many whole numbers.

TorchRL's and cpprb's travel by inheritance: one process makes the buffer, those that it forks use it. memstore's could
be opened by name from anywhere, and is opened so in the forks too.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tests.benchmarks.peers import Peer, needs
from tests.benchmarks.report import Role

LEAF = "row"
TORCHRL_PYTHON = Path(".venv-torchrl/bin/python")  # torchrl wants other versions than memstore: `make test-torchrl`


class ReplayPeer(Peer):
    """Made once by `make`; a fork of the process that made it calls `join` before it uses it."""

    @classmethod
    def python(cls) -> str | None:
        """The interpreter that has what this peer needs; None: this one."""
        return None

    def make(self, capacity: int, width: int) -> None:
        """An empty buffer of rows of `width` int64."""
        raise NotImplementedError

    def join(self) -> None:
        """In a fork of the process that made it."""

    def ready(self, value: Any) -> Any:
        """The form in which this peer takes a batch, int64 [n, width]. Not timed."""
        return value

    def extend(self, batch: Any) -> None:
        raise NotImplementedError

    def add(self, row: Any) -> None:
        """Takes what `ready_row` has made."""
        raise NotImplementedError

    def ready_row(self, row: torch.Tensor) -> Any:
        """The form in which this peer takes one row, int64 [width]. Not timed."""
        return {LEAF: row}

    def sample(self, count: int) -> np.ndarray[Any, Any]:
        """Rows at random, int64 [count, width], in memory that nobody else writes."""
        raise NotImplementedError


class StoreBuffer(ReplayPeer):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    settings: ClassVar[str] = "ReplayBuffer, opened by name in each process"
    role: ClassVar[Role] = "memstore"

    def make(self, capacity: int, width: int) -> None:
        self._open({LEAF: ((width,), torch.int64)}, capacity)

    def join(self) -> None:
        self._open()

    def _open(self, spec: Any = None, capacity: int | None = None) -> None:
        import memstore

        self.store = memstore.open(self.root / "store")
        self.buffer = memstore.ReplayBuffer(self.store, "replay", spec, capacity=capacity)

    def ready(self, value: Any) -> Any:
        return {LEAF: value}

    def extend(self, batch: Any) -> None:
        self.buffer.extend(batch)

    def add(self, row: Any) -> None:
        self.buffer.add(row)

    def sample(self, count: int) -> np.ndarray[Any, Any]:
        return self.buffer.sample(count)[LEAF].numpy()

    def close(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class CpprbBuffer(ReplayPeer):
    id: ClassVar[str] = "cpprb"
    name: ClassVar[str] = "cpprb MPReplayBuffer"
    settings: ClassVar[str] = "inherited by fork; C++"

    @classmethod
    def missing(cls) -> str | None:
        return needs("cpprb")

    def make(self, capacity: int, width: int) -> None:
        import cpprb

        self.buffer = cpprb.MPReplayBuffer(capacity, {LEAF: {"shape": width, "dtype": np.int64}})

    def ready(self, value: Any) -> Any:
        return {LEAF: value.numpy()}

    def ready_row(self, row: torch.Tensor) -> Any:
        return {LEAF: row.numpy()}

    def extend(self, batch: Any) -> None:
        self.buffer.add(**batch)

    def add(self, row: Any) -> None:
        self.buffer.add(**row)

    def sample(self, count: int) -> np.ndarray[Any, Any]:
        return self.buffer.sample(count)[LEAF]


class TorchrlBuffer(ReplayPeer):
    """Its lock covers each extend and each sample, whole."""

    id: ClassVar[str] = "torchrl"
    name: ClassVar[str] = "TorchRL"
    settings: ClassVar[str] = "TensorDictReplayBuffer(shared=True) over a LazyMemmapStorage, inherited by fork"

    @classmethod
    def missing(cls) -> str | None:
        absent = needs("torchrl")
        return (
            None if absent is None or TORCHRL_PYTHON.exists() else f"{absent}, nor {TORCHRL_PYTHON}: make test-torchrl"
        )

    @classmethod
    def python(cls) -> str | None:
        return None if needs("torchrl") is None else os.path.abspath(TORCHRL_PYTHON)

    def make(self, capacity: int, width: int) -> None:
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        storage = LazyMemmapStorage(capacity, scratch_dir=str(self.root / "storage"))
        self.buffer = TensorDictReplayBuffer(storage=storage, shared=True)

    def ready(self, value: Any) -> Any:
        from tensordict import TensorDict

        return TensorDict({LEAF: value}, batch_size=[len(value)])

    def ready_row(self, row: torch.Tensor) -> Any:
        from tensordict import TensorDict

        return TensorDict({LEAF: row}, batch_size=[])

    def extend(self, batch: Any) -> None:
        self.buffer.extend(batch)

    def add(self, row: Any) -> None:
        self.buffer.add(row)

    def sample(self, count: int) -> np.ndarray[Any, Any]:
        return self.buffer.sample(count)[LEAF].numpy()


class TorchrlWithoutLock(TorchrlBuffer):
    """What it would be worth without the lock, if nobody minded torn rows."""

    id: ClassVar[str] = "torchrl-unlocked"
    name: ClassVar[str] = "TorchRL, its lock taken out"
    settings: ClassVar[str] = "the same after share(False), which it is not made for"

    def join(self) -> None:
        self.buffer.share(False)


class TorchrlOverStore(TorchrlBuffer):
    """TorchRL's buffer and sampler, over rows in a store: each process makes its own, by path and key."""

    id: ClassVar[str] = "torchrl-memstore"
    name: ClassVar[str] = "memstore, under TorchRL's buffer"
    settings: ClassVar[str] = "TensorDictReplayBuffer over a MemstoreStorage, with MemstoreWriter"
    role: ClassVar[Role] = "memstore"

    def make(self, capacity: int, width: int) -> None:
        self.capacity = capacity
        self.join()

    def join(self) -> None:
        from torchrl.data import TensorDictReplayBuffer

        import memstore
        from memstore.integrations.torchrl import MemstoreStorage, MemstoreWriter

        self.store = memstore.open(self.root / "store")
        storage = MemstoreStorage(self.capacity, store=self.store, key="replay")
        self.buffer = TensorDictReplayBuffer(storage=storage, writer=MemstoreWriter())

    def close(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class PlainCopy(ReplayPeer):
    """One thread's memcpy of each batch to the next place of memory that is there. Nobody can sample it."""

    id: ClassVar[str] = "memcpy"
    name: ClassVar[str] = "memcpy"
    role: ClassVar[Role] = "limit"

    def make(self, capacity: int, width: int) -> None:
        self.shape, self.rows = (capacity, width), np.empty((0, width), np.int64)

    def join(self) -> None:
        """Memory of its own: what is inherited is copied page by page."""
        self.rows = np.ones(self.shape, np.int64)
        self.next = 0

    def ready(self, value: Any) -> Any:
        return value.numpy()

    def extend(self, batch: Any) -> None:
        if not len(self.rows):
            return  # not the process that writes
        if self.next + len(batch) > len(self.rows):
            self.next = 0
        self.rows[self.next : self.next + len(batch)] = batch
        self.next += len(batch)
