"""Ray's object store. Values go as numpy arrays, which its documentation names for reads without a copy."""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from typing import Any, ClassVar

import torch

from tests.benchmarks.peers import Peer, needs

OBJECT_STORE_BYTES = 2 << 30


class RayObjects(Peer):
    id: ClassVar[str] = "ray"
    name: ClassVar[str] = "Ray"
    settings: ClassVar[str] = "ray.put and ray.get of numpy arrays, one node; every put makes a new object"
    overwrites: ClassVar[bool] = False

    @classmethod
    def missing(cls) -> str | None:
        return needs("ray")

    def setup(self) -> None:
        start_ray()
        import ray

        self._ray = ray
        self._refs: dict[str, Any] = {}
        # What ray.get returns is read-only, and torch says so for each tensor over it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def put(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._refs[key] = self._ray.put(value.numpy())
        else:
            self._refs[key] = self._ray.put({name: tensor.numpy() for name, tensor in value.items()})

    def get(self, key: str) -> Any:
        found = self._ray.get(self._refs[key])
        if isinstance(found, dict):
            return {name: torch.from_numpy(array) for name, array in found.items()}
        return torch.from_numpy(found)

    def drop(self, key: str) -> None:
        self._refs.pop(key, None)

    def close(self) -> None:
        self._refs = {}
        if hasattr(self, "_ray"):
            self._ray.shutdown()


def start_ray() -> None:
    """A local Ray of two workers. Its token lives in the environment alone: nothing is left in the home folder."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
