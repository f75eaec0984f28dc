"""save, load and async_save: torch's functions, with memstore's storage, planners and stager."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from memstore.integrations.dcp.planners import LoadPlanner, SavePlanner
from memstore.integrations.dcp.reader import StorageReader
from memstore.integrations.dcp.stager import Stager
from memstore.integrations.dcp.writer import StorageWriter

StateDict = dict[str, Any]
_stager: Stager | None = None
_group: tuple[weakref.ref[Any], Any] | None = None  # the default group that it was made beside, and the group


def save(state_dict: StateDict, *, checkpoint_id: str | os.PathLike[str]) -> Metadata:
    """Saves a state dict of all ranks as one checkpoint, without pickle.

    If there is a default process group, all of its ranks call it. It is `torch.distributed.checkpoint.save` with
    `StorageWriter` and `SavePlanner`; call that one to pass other arguments.

    Args:
        state_dict: nested dicts and lists of tensors, DTensors, ShardedTensors and plain objects, or Statefuls.
        checkpoint_id: the folder. An earlier checkpoint stays there until the new one is complete.

    Returns:
        torch's metadata of the checkpoint.

    Raises:
        UnsupportedValueError: an object can't be stored without pickle; the message names it.
        StoreFullError, PermissionDeniedError, AlreadyExistsError: as in `Snapshot.take`.
        CheckpointException: torch's error with several ranks; it has the errors of each rank.

    Example:
        >>> import tempfile, torch
        >>> from memstore.integrations import dcp
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> metadata = dcp.save({"w": torch.ones(3), "epoch": 4}, checkpoint_id=path)
        >>> state = {"w": torch.zeros(3), "epoch": 0}
        >>> dcp.load(state, checkpoint_id=path)
        >>> state
        {'w': tensor([1., 1., 1.]), 'epoch': 4}
    """
    with _one_process_is_fine():
        return state_dict_saver.save(state_dict, storage_writer=StorageWriter(checkpoint_id), planner=SavePlanner())


def load(state_dict: StateDict, *, checkpoint_id: str | os.PathLike[str]) -> None:
    """Loads a checkpoint into a state dict, in place. Each rank reads only its own parts. Nothing is unpickled.

    It is `torch.distributed.checkpoint.load` with `StorageReader` and `LoadPlanner`; call that one to pass other
    arguments.

    Args:
        state_dict: the tensors to fill. They have the shapes of the saved ones, and any dtype, layout and mesh.
        checkpoint_id: the folder.

    Raises:
        CheckpointException: torch's error, even with one rank. Its `failures` have the error of each rank:
            CorruptionError; VersionGoneError if a save overwrote the checkpoint meanwhile (load again);
            UnsupportedValueError for objects that only pickle could read; an AssertionError, which says so, if there
            is no checkpoint or its metadata are damaged.
    """
    with _one_process_is_fine():
        state_dict_loader.load(state_dict, storage_reader=StorageReader(checkpoint_id), planner=LoadPlanner())


def async_save(state_dict: StateDict, *, checkpoint_id: str | os.PathLike[str]) -> Future[Metadata] | AsyncSaveResponse:
    """Like `save`, but in a thread. You may change the tensors as soon as it returns.

    The threads of the ranks use a process group of their own, which the first call creates, so training can go on with
    the default one.

    Returns:
        A future of the metadata; its `result()` raises what `save` would.
    """
    global _stager
    _stager = _stager or Stager()
    with _one_process_is_fine():
        return state_dict_saver.async_save(
            state_dict,
            storage_writer=StorageWriter(checkpoint_id),
            planner=SavePlanner(),
            async_stager=_stager,
            process_group=_own_group(),
        )


def _own_group() -> Any:
    """A group on the CPU for the collectives of saves, beside the default one, of the same ranks; None without one."""
    global _group
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    default = distributed.group.WORLD
    if _group is None or _group[0]() is not default:
        _group = weakref.ref(default), distributed.new_group(backend="gloo")
    return _group[1]


@contextmanager
def _one_process_is_fine() -> Generator[None]:
    """Without torch's warning that no process group is there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
