"""The ranks of a sharded put: who this process is among them, and the name that they give to their attempt.

With torch.distributed, rank 0 chooses the name and tells the others through the process group's store, since
collectives know no timeout. All ranks make their sharded puts in the same order, as they do their collectives; each
counts them, so that the ranks of one put meet under one number.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import json
import threading
import uuid
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from memstore.engine import Path
from memstore.errors import StoreTimeoutError

_counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of the puts of each process group
_lock = threading.Lock()


class Agreement(NamedTuple):
    """What the ranks of a put know of each other."""

    attempt: str
    plain: tuple[Path, ...] = ()  # plain leaves that rank 0 writes, so that the others need not


class Place:
    """A rank, whose attempt the caller has named."""

    def __init__(self, attempt: str, rank: int, world_size: int) -> None:
        if not (isinstance(attempt, str) and attempt):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"attempt is a text that is not empty, and not {attempt!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: ranks count from 0 to world_size - 1")
        self._attempt, self.rank, self.world_size = attempt, rank, world_size

    def agree(self, plain: tuple[Path, ...], timeout: float) -> Agreement:
        """`plain` are the plain leaves that this rank holds."""
        return Agreement(self._attempt)


class DistributedPlace(Place):
    """A rank of torch.distributed."""

    def __init__(self, process_group: Any, key: str) -> None:
        group: Any = process_group if process_group is not None else dist.group.WORLD
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._key = key
        with _lock:  # before anything can fail: the ranks' counts stay the same
            number = _counts[group] = _counts.get(group, 0) + 1
        self._name = f"memstore/{number}"
        super().__init__(uuid.uuid4().hex, dist.get_rank(group), dist.get_world_size(group))

    def agree(self, plain: tuple[Path, ...], timeout: float) -> Agreement:
        """Raises StoreTimeoutError if rank 0 says nothing."""
        if self.rank:
            return self._hear(timeout)
        own = Agreement(self._attempt, plain)
        if self.world_size > 1:
            self._store.set(self._name, json.dumps(own))
        return own

    def _hear(self, timeout: float) -> Agreement:
        try:
            self._store.wait([self._name], timedelta(seconds=min(max(timeout, 0.001), 1e6)))
            attempt, plain = json.loads(self._store.get(self._name))
            if self._store.add(f"{self._name}/heard", 1) == self.world_size - 1:  # the last one tidies up
                for name in (self._name, f"{self._name}/heard"):
                    self._store.delete_key(name)
        except (dist.DistError, RuntimeError) as error:
            why = f"rank {self.rank} waited {timeout:g} s for rank 0 to begin its put: {error}"
            raise StoreTimeoutError(f"{self._key!r}: {why}", key=self._key) from None
        return Agreement(attempt, tuple(tuple(name) for name in plain))


def find_place(attempt: str | None, rank: int | None, world_size: int | None, process_group: Any, key: str) -> Place:
    """Raises TypeError unless torch.distributed, or the caller, says who this rank is."""
    if attempt is not None and rank is not None and world_size is not None:
        return Place(attempt, rank, world_size)
    if attempt is not None or rank is not None or world_size is not None:
        raise TypeError(f"{key!r}: a sharded put takes attempt=, rank= and world_size= together, or none of them")
    if not dist.is_available() or not dist.is_initialized():
        raise TypeError(
            f"{key!r}: the value is sharded, and this process is no rank of torch.distributed: call put_sharded with "
            "attempt= (a text that all ranks of this put share, and no other put has), rank= and world_size="
        )
    return DistributedPlace(process_group, key)
