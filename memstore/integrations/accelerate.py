"""Checkpoints of Accelerate's training loops. The guide is docs/accelerate.md.

app_state       all that an Accelerator has prepared, for a CheckpointManager or a Snapshot
use_snapshots   the weights in the folders of `save_state` become snapshots
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import memstore

__all__ = ["app_state", "use_snapshots"]

_PREPARED = {  # what an Accelerator has, under names of its own: it has no public ones
    "model": "_models",
    "optimizer": "_optimizers",
    "scheduler": "_schedulers",
    "custom": "_custom_objects",
}
_WEIGHTS = "weights"  # the folder in that of `save_state`


def app_state(accelerator: Any) -> dict[str, Any]:
    """Returns the objects that make up the state of a run: what `CheckpointManager.save` and `restore` take.

    These are the models, optimizers, schedulers and the gradient scaler that `accelerator.prepare` has got, what
    `register_for_checkpointing` has, and the random state. They are listed anew by each call.

    Args:
        accelerator: an `accelerate.Accelerator`, after `prepare`; not with DeepSpeed or Megatron-LM, which write
            checkpoints of their own.
    """
    found: dict[str, Any] = {}
    for kind, prepared in _PREPARED.items():
        found |= {f"{kind}_{number}": one for number, one in enumerate(getattr(accelerator, prepared))}
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    return found | {"rng": memstore.RNGState()}


def use_snapshots(accelerator: Any, *, replicated: bool = True) -> None:
    """Makes `accelerator.save_state` write the weights of models as a snapshot, and `load_state` read them from it.

    The snapshot is `OUTPUT_DIR/weights`: all ranks write their share of it, and it is whole or not there. All else of
    the folder is Accelerate's, which isn't written at one moment: for a state that is, see `app_state`. Models that
    Accelerate saves by itself, of FSDP or DeepSpeed, stay with it.

    Args:
        accelerator: an `accelerate.Accelerator`.
        replicated: whether all ranks have the same weights, as with DDP, so that each writes a share.
    """

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if weights:
            folder = os.path.join(output_dir, _WEIGHTS)
            if accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)  # of an earlier state, which Accelerate overwrites too
            accelerator.wait_for_everyone()
            state = {f"model_{number}": memstore.StateDict(one) for number, one in enumerate(weights)}
            memstore.Snapshot.take(folder, state, replicated=["**"] if replicated else None)
            weights.clear()  # so that Accelerate writes none

    def load(models: list[Any], input_dir: str) -> None:
        folder = os.path.join(input_dir, _WEIGHTS)
        if models and os.path.isdir(folder):  # else an earlier checkpoint, without this hook
            unwrapped = {f"model_{number}": one for number, one in enumerate(models)}
            memstore.Snapshot(folder).restore(unwrapped)
            models.clear()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
