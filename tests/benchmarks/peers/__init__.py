"""What memstore is compared with: one small module each, all by the interface below.

A peer is used as its documentation says, with the settings that it recommends for this; `settings` names them and is
printed. A peer that is not installed, or can't run here, says why and is listed, not dropped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase

from tests.benchmarks.report import Role

Value = torch.Tensor | dict[str, torch.Tensor]


class Peer:
    """A way to hand tensors from one process to another. Lives in its own folder, which is removed after `close`."""

    id: ClassVar[str]
    name: ClassVar[str]
    settings: ClassVar[str] = ""
    role: ClassVar[Role] = "peer"
    overwrites: ClassVar[bool] = True  # whether a second put under a key differs from the first

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def missing(cls) -> str | None:
        """Why this peer can't be used here, or None."""
        return None

    def setup(self) -> None:
        """Starts servers and processes. Not timed."""

    def ready(self, value: Value) -> Any:
        """The form in which this peer takes a value, made before each put. Not timed."""
        return value

    def put(self, key: str, value: Any) -> None:
        """Returns when another process can get the value and the caller may change its tensors."""
        raise NotImplementedError

    def before_get(self, key: str) -> None:
        """Waits for what a get needs. Not timed."""

    def get(self, key: str) -> Any:
        """The value as tensors."""
        raise NotImplementedError

    def drop(self, key: str) -> None:
        """Gives back the space of a value, so that the next put has to take new space. Not timed."""

    def close(self) -> None:
        """Ends what setup started, also where setup failed halfway."""


def needs(*modules: str) -> str | None:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def same(found: Any, put: Value) -> bool:
    """Whether what was got equals what was put, bit for bit, whichever container the peer uses."""
    if isinstance(put, torch.Tensor):
        if isinstance(found, Mapping | TensorDictBase) and len(found.keys()) == 1:
            found = next(iter(found.values()))
        return _same_tensor(found, put)
    return set(found.keys()) == set(put) and all(_same_tensor(found[name], tensor) for name, tensor in put.items())


def _same_tensor(found: torch.Tensor, put: torch.Tensor) -> bool:
    return found.dtype == put.dtype and found.shape == put.shape and torch.equal(found, put)
