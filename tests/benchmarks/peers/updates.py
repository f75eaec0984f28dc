"""Ways to hand a trainer's weights to a worker that serves the model: one rank each. `sharded` has others."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.benchmarks.peers import needs
from tests.benchmarks.peers.ray_objects import start_ray
from tests.benchmarks.peers.sharded import BETWEEN_LOOKS, ShardedPeer, Weights, newer_step


class SafetensorsFiles(ShardedPeer):
    """A file that is replaced. Nobody is told: the worker looks for another file of that name."""

    id: ClassVar[str] = "safetensors"
    name: ClassVar[str] = "safetensors"
    settings: ClassVar[str] = (
        f"save_file and os.replace in /dev/shm, load_file and copy_; the worker looks every {BETWEEN_LOOKS * 1e3:g} ms"
    )

    @classmethod
    def missing(cls) -> str | None:
        return needs("safetensors")

    def join(self, publishers: Any, followers: Any) -> None:
        super().join(publishers, followers)
        import safetensors.torch as library

        self._library, self._seen = library, 0

    def publish(self, step: int, weights: Weights) -> None:
        new = self.root / "new"
        self._library.save_file({name: tensor.to_local() for name, tensor in weights.items()}, new)
        os.replace(new, self.root / f"weights-{step}")
        (self.root / f"weights-{step - 1}").unlink(missing_ok=True)

    def newest(self) -> Any:
        self._seen = newer_step(self._steps, self._seen)
        return self._seen

    def fill(self, targets: Weights, found: Any = None) -> None:
        self._seen = self._steps()[-1] if found is None else found
        for name, tensor in self._library.load_file(self.root / f"weights-{self._seen}").items():
            targets[name].to_local().copy_(tensor)

    def _steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("weights-")) for path in self.root.glob("weights-*"))


class GlooBroadcast(ShardedPeer):
    """Both take part in each call: a worker that is late, or gone, holds up the trainer."""

    id: ClassVar[str] = "gloo"
    name: ClassVar[str] = "torch.distributed broadcast"
    settings: ClassVar[str] = "gloo, a tensor a call, into the tensors that are there"

    def publish(self, step: int, weights: Weights) -> None:
        for tensor in weights.values():
            dist.broadcast(tensor.to_local(), 0)

    def newest(self) -> Any:
        return None

    def fill(self, targets: Weights, found: Any = None) -> None:
        for tensor in targets.values():
            dist.broadcast(tensor.to_local(), 0)


class RayStore(ShardedPeer):
    """Ray's object store. An actor knows the newest object, and answers whoever waits for it."""

    id: ClassVar[str] = "ray"
    name: ClassVar[str] = "Ray"
    settings: ClassVar[str] = "ray.put of numpy arrays, ray.get and copy_; an asyncio actor hands over the reference"

    @classmethod
    def missing(cls) -> str | None:
        return needs("ray")

    def setup(self) -> None:
        start_ray()
        import ray

        self._address: str = ray.get_runtime_context().gcs_address

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "_address": self._address}

    def join(self, publishers: Any, followers: Any) -> None:
        super().join(publishers, followers)
        import ray

        ray.init(address=self._address, namespace="benchmark", log_to_driver=False, logging_level=logging.ERROR)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        self._ray, self._seen = ray, 0
        options = {"name": "newest", "get_if_exists": True, "max_concurrency": 4, "num_cpus": 0}
        self._newest: Any = ray.remote(**options)(_Newest).remote()
        ray.get(self._newest.known.remote())

    def publish(self, step: int, weights: Weights) -> None:
        found = self._ray.put({name: tensor.to_local().numpy() for name, tensor in weights.items()})
        self._ray.get(self._newest.tell.remote(step, [found]))

    def newest(self) -> Any:
        self._seen, found = self._ray.get(self._newest.newer.remote(self._seen))
        return found

    def fill(self, targets: Weights, found: Any = None) -> None:
        if found is None:
            self._seen, found = self._ray.get(self._newest.newer.remote(0))
        for name, array in self._ray.get(found[0]).items():
            targets[name].to_local().copy_(torch.from_numpy(array))

    def close(self) -> None:
        import ray

        ray.shutdown()


class _Newest:
    """The actor: the reference of the newest object."""

    def __init__(self) -> None:
        import asyncio

        self._step, self._found, self._told = 0, list[Any](), asyncio.Condition()

    async def known(self) -> int:
        return self._step

    async def tell(self, step: int, found: list[Any]) -> None:
        async with self._told:
            self._step, self._found = step, found
            self._told.notify_all()

    async def newer(self, seen: int) -> tuple[int, list[Any]]:
        async with self._told:
            await self._told.wait_for(lambda: self._step > seen)
            return self._step, self._found
