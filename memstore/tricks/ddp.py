"""A module that isn't wrapped, for the state of one that DistributedDataParallel wraps."""

from __future__ import annotations

from typing import Any

import torch

_PREFIX = "module."  # that DistributedDataParallel has before each name


class DistributedDataParallelAdapter:
    """A Stateful that restores into a plain module what was saved of one in `DistributedDataParallel`.

    Args:
        module: the plain module.

    Example:
        >>> import memstore, tempfile, torch
        >>> from memstore.tricks.ddp import DistributedDataParallelAdapter
        >>> path, model = tempfile.mkdtemp() + "/step-1", torch.nn.Linear(2, 2)
        >>> wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}  # as of DDP(model)
        >>> snapshot = memstore.Snapshot.take(path, {"model": memstore.StateDict(wrapped)})
        >>> other = torch.nn.Linear(2, 2)
        >>> snapshot.restore({"model": DistributedDataParallelAdapter(other)})
        >>> torch.equal(other.weight, model.weight)
        True
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict({name.removeprefix(_PREFIX): value for name, value in state_dict.items()})
