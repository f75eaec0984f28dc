"""Prioritized replay in one process: memstore's buffer and cpprb's, with the rows of a small control task."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from tests.benchmarks.peers import Peer, needs
from tests.benchmarks.report import Role

SHAPES = {"observation": 4, "action": 1, "reward": 1, "next": 4, "done": 1}  # float32 each
ALPHA, BETA = 0.6, 0.4
Rows = dict[str, np.ndarray[Any, Any]]


class PriorityPeer(Peer):
    def fill(self, rows: Rows, priorities: np.ndarray[Any, Any]) -> None:
        """Makes a buffer that is full with these rows, float32 [n, ...]."""
        raise NotImplementedError

    def sample(self, count: int) -> Any:
        raise NotImplementedError

    def index_of(self, sample: Any) -> np.ndarray[Any, Any]:
        """The numbers of the rows of a sample. Not timed."""
        raise NotImplementedError

    def rows_of(self, sample: Any) -> Rows:
        """The rows of a sample. Not timed."""
        return {name: np.asarray(sample[name]) for name in SHAPES}

    def update(self, index: Any, priorities: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError


class StorePriorities(PriorityPeer):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    settings: ClassVar[str] = 'ReplayBuffer(sampler="prioritized")'
    role: ClassVar[Role] = "memstore"

    def fill(self, rows: Rows, priorities: np.ndarray[Any, Any]) -> None:
        import memstore

        self.store = memstore.open(self.root / "store")
        spec = {name: ((width,), torch.float32) for name, width in SHAPES.items()}
        self.buffer = memstore.ReplayBuffer(
            self.store, "replay", spec, capacity=len(priorities), sampler="prioritized", alpha=ALPHA, beta=BETA
        )
        self.buffer.extend(rows, priority=priorities)

    def sample(self, count: int) -> Any:
        return self.buffer.sample(count)

    def index_of(self, sample: Any) -> np.ndarray[Any, Any]:
        return sample["index"].numpy()

    def update(self, index: Any, priorities: np.ndarray[Any, Any]) -> None:
        self.buffer.update_priority(index, priorities)

    def close(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class CpprbPriorities(PriorityPeer):
    id: ClassVar[str] = "cpprb-mp"
    name: ClassVar[str] = "cpprb MPPrioritizedReplayBuffer"
    settings: ClassVar[str] = "C++; shared by inheritance"
    kind: ClassVar[str] = "MPPrioritizedReplayBuffer"

    @classmethod
    def missing(cls) -> str | None:
        return needs("cpprb")

    def fill(self, rows: Rows, priorities: np.ndarray[Any, Any]) -> None:
        import cpprb

        spec = {name: {"shape": width} for name, width in SHAPES.items()}
        self.buffer = getattr(cpprb, self.kind)(len(priorities), spec, alpha=ALPHA)
        self.buffer.add(**rows, priorities=priorities)

    def sample(self, count: int) -> Any:
        return self.buffer.sample(count, beta=BETA)

    def index_of(self, sample: Any) -> np.ndarray[Any, Any]:
        return sample["indexes"]

    def update(self, index: Any, priorities: np.ndarray[Any, Any]) -> None:
        self.buffer.update_priorities(index, priorities)


class CpprbAlone(CpprbPriorities):
    id: ClassVar[str] = "cpprb"
    name: ClassVar[str] = "cpprb PrioritizedReplayBuffer"
    settings: ClassVar[str] = "C++; of one process"
    kind: ClassVar[str] = "PrioritizedReplayBuffer"
