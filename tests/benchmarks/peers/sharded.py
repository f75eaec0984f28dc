"""Ways to hand weights from ranks that publish them to ranks of another mesh. Each rank has the peer for itself."""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

import memstore
from tests.benchmarks.peers import Peer
from tests.benchmarks.report import Role

Weights = dict[str, DTensor]
KEY = "weights"
BETWEEN_LOOKS = 0.001  # seconds, for a peer that tells nobody of what it wrote
LONGEST_WAIT = 120.0


class ShardedPeer(Peer):
    """Made in the parent process, and sent to the ranks, of which each calls `join` first."""

    def join(self, publishers: Any, followers: Any) -> None:
        """Opens on this rank. These are process groups; a rank that is not in one has `None` or torch's marker."""
        self.publishers, self.followers = publishers, followers

    def clear(self) -> None:
        """Gives back the space of what was published. One rank calls it before a lap; not timed."""

    def publish(self, step: int, weights: Weights) -> None:
        """Returns when followers can get this step. All publishers call it."""
        raise NotImplementedError

    def newest(self) -> Any:
        """Waits for a step that is newer than the last one. Returns what `fill` takes, the same on all followers."""
        raise NotImplementedError

    def fill(self, targets: Weights, found: Any = None) -> None:
        """Fills this rank's parts in place: of what `newest` found, or of what there is. All followers call it."""
        raise NotImplementedError


class StoreShards(ShardedPeer):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    settings: ClassVar[str] = "put_sharded under one key, get(out=); followers wait, and share a ref"
    role: ClassVar[Role] = "memstore"

    def join(self, publishers: Any, followers: Any) -> None:
        super().join(publishers, followers)
        self.store = memstore.open(self.root / "store")
        self._seen = 0

    def publish(self, step: int, weights: Weights) -> None:
        self.store.put_sharded(KEY, weights, process_group=self.publishers)

    def newest(self) -> Any:
        found: list[Any] = [None]
        if dist.get_rank(self.followers) == 0:
            self._seen = self.store.wait(KEY, newer_than=self._seen, timeout=LONGEST_WAIT)
            found[0] = self.store.ref(KEY)
            self._seen = found[0].version
        dist.broadcast_object_list(found, group=self.followers, group_src=0)
        return found[0]

    def fill(self, targets: Weights, found: Any = None) -> None:
        (self.store.get(KEY, out=targets) if found is None else found.get(out=targets))


class StoreShardsAnew(StoreShards):
    id: ClassVar[str] = "memstore-new"
    name: ClassVar[str] = "memstore, new key"
    settings: ClassVar[str] = "the same; what was there was deleted, and its space given back"

    def clear(self) -> None:
        self.store.delete(KEY, missing_ok=True)
        self.store.gc()


def newer_step(steps: Callable[[], list[int]], seen: int) -> int:
    """Returns the newest step, once there is one behind the last that was seen. Nobody is told: it looks."""
    deadline = time.monotonic() + LONGEST_WAIT
    while not (newer := [step for step in steps() if step > seen]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing new in {LONGEST_WAIT:g} s")
        time.sleep(BETWEEN_LOOKS)
    return newer[-1]


class DcpFolders(ShardedPeer):
    """A folder a step. Nobody is told: followers look for the file that is written last."""

    id: ClassVar[str] = "dcp"
    name: ClassVar[str] = "DCP save, load"
    settings: ClassVar[str] = (
        "a new folder each time, sync_files=False, plans cached (enable_plan_caching=True); followers look for it "
        f"every {BETWEEN_LOOKS * 1e3:g} ms"
    )

    def join(self, publishers: Any, followers: Any) -> None:
        super().join(publishers, followers)
        self._seen = 0

    def clear(self) -> None:
        for folder in self.root.iterdir():
            shutil.rmtree(folder)

    def publish(self, step: int, weights: Weights) -> None:
        dcp.save(
            dict(weights),
            storage_writer=FileSystemWriter(self._folder(step), sync_files=False),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            process_group=self.publishers,
        )

    def newest(self) -> Any:
        found: list[Any] = [None]
        if dist.get_rank(self.followers) == 0:
            found[0] = self._seen = newer_step(self._steps, self._seen)
        dist.broadcast_object_list(found, group=self.followers, group_src=0)
        return found[0]

    def fill(self, targets: Weights, found: Any = None) -> None:
        step = self._steps()[-1] if found is None else found
        reader = FileSystemReader(self._folder(step))
        dcp.load(dict(targets), storage_reader=reader, process_group=self.followers)

    def _folder(self, step: int) -> Path:
        return self.root / f"step-{step:06}"

    def _steps(self) -> list[int]:
        """Those that are whole: DCP puts the metadata in place last."""
        return sorted(int(path.parent.name.removeprefix("step-")) for path in self.root.glob("step-*/.metadata"))


class WarmCopies(ShardedPeer):
    """Each rank copies what it has into warm memory of its own, and out of it what it wants: the same bytes."""

    id: ClassVar[str] = "memcpy"
    name: ClassVar[str] = "memcpy by the same ranks"
    role: ClassVar[Role] = "limit"

    def join(self, publishers: Any, followers: Any) -> None:
        super().join(publishers, followers)
        self._kept: dict[int, torch.Tensor] = {}

    def publish(self, step: int, weights: Weights) -> None:
        for tensor in weights.values():
            self._place(tensor.to_local()).copy_(tensor.to_local())

    def newest(self) -> Any:
        return None

    def fill(self, targets: Weights, found: Any = None) -> None:
        for tensor in targets.values():
            tensor.to_local().copy_(self._place(tensor.to_local()))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Warm from the first lap on. Each tensor has its own: one for all would lie in the processor's caches."""
        key = tensor.data_ptr()
        if key not in self._kept:
            self._kept[key] = torch.ones_like(tensor, memory_format=torch.contiguous_format)
        return self._kept[key]


class TorchStore(ShardedPeer):
    """Its actors hold the weights: put copies into them, get out of them, and one copy more goes between the two."""

    id: ClassVar[str] = "torchstore"
    name: ClassVar[str] = "TorchStore"

    @classmethod
    def missing(cls) -> str | None:
        try:
            found = importlib.metadata.version("torchstore")
        except importlib.metadata.PackageNotFoundError:
            return (
                "not installed: torchstore 0.1.2 needs torch 2.9.0; the workload torchstore measures a checkout of its "
                "main branch, which TORCHSTORE_CHECKOUT names"
            )
        return f"torchstore {found} is installed, and nobody has written how to measure it"
