"""Checkpoints of Lightning's Trainer as snapshots, and its weights in a store. The guide is docs/lightning.md.

SnapshotIO      a CheckpointIO plugin: each checkpoint is a snapshot, written while training goes on
StoreCallback   publishes the module's weights to a store, and keeps the random state in checkpoints
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback

import memstore

__all__ = ["SnapshotIO", "StoreCallback"]

_NAME = "checkpoint"  # of Lightning's dict in a snapshot


class SnapshotIO(CheckpointIO):
    """Lightning's checkpoints as snapshots: folders of safetensors, each whole or not there, without pickle.

    Files that Lightning saved without this plugin are loaded, too.

    Args:
        async_: whether training goes on while a checkpoint is written. A separate process writes it, which completes it
            if the trainer is killed. An earlier checkpoint that Lightning removes stays until the new one is whole.
        allow_pickle: store objects that need it (in hyperparameters, or in states of callbacks) with pickle.
    """

    def __init__(self, *, async_: bool = True, allow_pickle: bool = False) -> None:
        self._is_async, self._allow_pickle = async_, allow_pickle
        self._pending: memstore.PendingSnapshot | None = None
        self._obsolete: list[str] = []  # what goes once the pending snapshot is whole
        self._alone: Any = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint; rank 0 calls it. Raises what failed in the last one."""
        if storage_options is not None:
            raise TypeError("storage_options is not for SnapshotIO: leave it out")
        self._settle()
        target = os.path.abspath(os.fspath(path))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        app_state = {_NAME: memstore.StateDict(checkpoint)}
        group, allow_pickle = self._group(), self._allow_pickle
        if os.path.lexists(target):  # such as last.ckpt: the old one stays until the new one is whole
            beside = _beside(target, "new")
            memstore.Snapshot.take(beside, app_state, group, allow_pickle=allow_pickle)
            _remove(target)
            os.rename(beside, target)
        elif self._is_async:
            self._pending = memstore.Snapshot.async_take(target, app_state, group, allow_pickle=allow_pickle)
        else:
            memstore.Snapshot.take(target, app_state, group, allow_pickle=allow_pickle)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint, into new memory on the CPU. Each rank calls it."""
        self._settle()
        target = os.path.abspath(os.fspath(path))
        if os.path.isfile(target):
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        options = {"allow_pickle": self._allow_pickle}
        return memstore.Snapshot(target, self._group(), storage_options=options).get_state_dict_for_key(_NAME)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint: at once, or when the one that is being written is whole."""
        self._obsolete.append(os.path.abspath(os.fspath(path)))
        if self._pending is None or self._pending.done():
            self._settle()

    def teardown(self) -> None:
        """Waits until the last checkpoint is whole."""
        self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        while self._obsolete:
            _remove(self._obsolete.pop())

    def _group(self) -> Any:
        """Returns the process group of this rank alone: Lightning's ranks don't call a CheckpointIO together."""
        distributed: Any = torch.distributed
        if self._alone is None and distributed.is_available() and distributed.is_initialized():
            rank = distributed.get_rank()
            self._alone = distributed.new_group([rank], backend="gloo", use_local_synchronization=True)
        return self._alone


def _beside(path: str, ending: str) -> str:
    folder, name = os.path.split(path)
    return f"{folder}/.{name}.{uuid.uuid4().hex}.{ending}"


def _remove(path: str) -> None:
    """Removes a checkpoint, which is gone at one moment."""
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
        return
    with contextlib.suppress(FileNotFoundError):
        beside = _beside(path, "old")
        os.rename(path, beside)
        shutil.rmtree(beside, ignore_errors=True)


class StoreCallback(Callback):
    """Publishes the module's weights to a store, and keeps the random state in Lightning's checkpoints.

    Lightning keeps no random state. With it, a run that continues from a checkpoint at the end of an epoch draws the
    same numbers as one that wasn't interrupted.

    Args:
        store: a store, or None: only the random state is kept.
        key: where the weights are put, as by `Store.save_model`: each rank calls it.
        every: so many steps of the optimizer lie between two versions. The first one is there when the training begins.
        dtype: floating-point weights are cast to it, as in `put`.
    """

    def __init__(
        self,
        store: memstore.Store | None = None,
        key: str | None = None,
        *,
        every: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        if (store is None) != (key is None):
            raise TypeError("store and key come together: say both, or neither")
        if every < 1:
            raise ValueError(f"every is a number of steps, 1 or more, and not {every}")
        self._store, self._key, self._every, self._dtype = store, key, every, dtype
        self._published = 0  # the last step
        self._random: dict[str, Any] | None = None  # what a checkpoint has, until training begins

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step: int = trainer.global_step
        is_due = step != self._published and step % self._every == 0
        if is_due:
            self._published = step
            self._publish(pl_module)

    def _publish(self, module: torch.nn.Module) -> None:
        if self._store is not None and self._key is not None:
            self._store.save_model(self._key, module, dtype=self._dtype)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Before Lightning makes the loader's iterator, which draws from it where rows are shuffled.
        random, self._random = self._random, None
        if random is not None:
            memstore.RNGState().load_state_dict(random)
        self._publish(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return memstore.RNGState().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._random = state_dict
