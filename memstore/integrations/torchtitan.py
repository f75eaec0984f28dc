"""torchtitan's checkpoints, in its layout of folders, written by memstore. The guide is docs/torchtitan.md.

trainer.checkpoint = CheckpointManager.Config(enable=True, interval=500, async_mode="async")
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components import checkpoint as torchtitan
from torchtitan.components.checkpointer.dcp import AsyncMode

from memstore.integrations import dcp
from memstore.snapshot import is_snapshot

__all__ = ["CheckpointManager"]


class CheckpointManager(torchtitan.CheckpointManager):
    """torchtitan's CheckpointManager, whose `step-N` folders are checkpoints of memstore: safetensors without pickle.

    A step is whole or not there, also after a kill; what a killed save has left isn't loaded. Checkpoints that
    torchtitan wrote itself are found and loaded, too, so that a run may change to this class. Those in Hugging Face's
    format, which its `last_save_in_hf` writes, stay torchtitan's. All else of the configuration works as there, except
    that `async_mode="async_with_pinned_mem"` is refused: "async" copies into memory that is kept, and is pinned where
    tensors lie on a GPU.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.CheckpointManager.Config):
        """The options of torchtitan's CheckpointManager."""

        def __post_init__(self) -> None:
            torchtitan.CheckpointManager.Config.__post_init__(self)
            if self.async_mode == "async_with_pinned_mem":
                raise ValueError('async_mode="async_with_pinned_mem" is not for memstore: say "async", which does that')

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if async_mode == AsyncMode.ASYNC:
            return dcp.async_save(state_dict, checkpoint_id=checkpoint_id, process_group=self.pg)
        return dcp.save(state_dict, checkpoint_id=checkpoint_id)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_hf or not is_snapshot(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, checkpoint_id=checkpoint_id)
        if torchtitan.MODEL in self.states:  # its tensors stand in the state dict by themselves
            self.states[torchtitan.MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        place = folder or self.folder
        found = super()._find_load_step(folder)
        for name in os.listdir(place) if os.path.isdir(place) else ():
            step = re.fullmatch(r"step-([0-9]+)", name)
            if step and is_snapshot(os.path.join(place, name)):
                found = max(found, int(step[1]))
        return found
