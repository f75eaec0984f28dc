"""An optimizer of a module in FSDP: its state by the names of the parameters, each rank's own part."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


class FSDPOptimizerAdapter:
    """A Stateful for the optimizer of a module in FSDP.

    Its state dict is torch's `get_optimizer_state_dict`: by the names of the parameters, so it can be restored with
    another number of ranks. With `fully_shard` each rank has, and saves, its own part. `FullyShardedDataParallel` gives
    all of it to each rank, as torchsnapshot's adapter does: say `replicated=["NAME/*"]`, and it is written once. All
    ranks call it, as `Snapshot.take` and `restore` do.

    Args:
        module: whose parameters the optimizer has.
        optimizer: the optimizer.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        is_flat = any(isinstance(one, FullyShardedDataParallel) for one in module.modules())
        self._options = StateDictOptions(full_state_dict=is_flat)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.module, self.optimizer, options=self._options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.module, self.optimizer, state_dict, options=self._options)
