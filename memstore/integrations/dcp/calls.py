"""save, load and async_save: torch's functions, with memstore's storage, planners and stager."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from memstore import modes
from memstore.errors import NotAStoreError
from memstore.integrations.dcp.planners import LoadPlanner, SavePlanner
from memstore.integrations.dcp.reader import StorageReader
from memstore.integrations.dcp.stager import Stager
from memstore.integrations.dcp.writer import StorageWriter
from memstore.wording import of_no_place

StateDict = dict[str, Any]


class _Save(NamedTuple):
    """An asynchronous save of a process. It doesn't keep the future: an error refers to all that was staged."""

    pid: int
    writer: StorageWriter
    ended: threading.Event


_stager: Stager | None = None
_latest: _Save | None = None  # asynchronous save
_group: tuple[weakref.ref[Any], Any] | None = None  # the default group that it was made beside, and the group


@modes.uncompiled
def save(state_dict: StateDict, *, checkpoint_id: str | os.PathLike[str]) -> Metadata:
    """Saves a state dict of all ranks as one checkpoint, without pickle.

    If there is a default process group, all of its ranks call it. It is `torch.distributed.checkpoint.save` with
    `StorageWriter` and `SavePlanner`; call that one to pass other arguments. It waits for earlier asynchronous saves of
    this process.

    Args:
        state_dict: nested dicts and lists of tensors, DTensors, ShardedTensors and plain objects, or Statefuls.
        checkpoint_id: the folder. An earlier checkpoint stays there until the new one is complete.

    Returns:
        torch's metadata of the checkpoint.

    Raises:
        CheckpointException: torch's error, even with one rank. It is a BaseException, and its `failures` have the error
            of each rank: UnsupportedValueError for an object that can't be stored without pickle, which the message
            names; StoreFullError, PermissionDeniedError, AlreadyExistsError and ValueError as in `Snapshot.take`.

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
    _one_process_is_fine()
    writer = _InTurn(checkpoint_id, _earlier())
    return state_dict_saver.save(
        state_dict, checkpoint_id=writer.checkpoint_id, storage_writer=writer, planner=SavePlanner()
    )


@modes.uncompiled
def load(state_dict: StateDict, *, checkpoint_id: str | os.PathLike[str]) -> None:
    """Loads a checkpoint into a state dict, in place. Each rank reads only its own parts. Nothing is unpickled.

    It is `torch.distributed.checkpoint.load` with `StorageReader` and `LoadPlanner`; call that one to pass other
    arguments.

    Args:
        state_dict: the tensors to fill. They have the shapes of the saved ones, and any dtype, layout and mesh.
        checkpoint_id: the folder.

    Raises:
        NotAStoreError: there is no such folder, and no process group.
        CheckpointException: torch's error, even with one rank. Its `failures` have the error of each rank:
            CorruptionError; VersionGoneError if a save overwrote the checkpoint meanwhile (load again);
            UnsupportedValueError for objects that only pickle could read; an AssertionError, which says so, if there
            is no checkpoint or its metadata are damaged.
    """
    _one_process_is_fine()
    reader = StorageReader(checkpoint_id)
    if not _has_ranks() and not os.path.lexists(reader.checkpoint_id):  # else all ranks have to hear of it from torch
        path = os.fspath(reader.checkpoint_id)
        raise NotAStoreError(f"{path} is no checkpoint: there is no such folder{of_no_place(path)}")
    state_dict_loader.load(state_dict, storage_reader=reader, planner=LoadPlanner())


@modes.uncompiled
def async_save(state_dict: StateDict, *, checkpoint_id: str | os.PathLike[str]) -> Future[Metadata]:
    """Like `save`, but in a thread. You may change the tensors as soon as it returns.

    The threads of the ranks use a process group of their own, which the first call creates, so training can go on with
    the default one.

    You need not wait for an earlier save, also not for one to the same path. The saves of a process run one after the
    other, in the order of the calls, which is the same on all ranks. Each waits until the earlier one has ended,
    whether that succeeds or fails.

    Returns:
        A future of the metadata; its `result()` raises what `save` would.
    """
    global _stager, _latest
    _stager = _stager or Stager()
    _one_process_is_fine()
    writer = _InTurn(checkpoint_id, _earlier())
    answer = state_dict_saver.async_save(
        state_dict,
        checkpoint_id=writer.checkpoint_id,
        storage_writer=writer,
        planner=SavePlanner(),
        async_stager=_stager,
        process_group=_own_group(),
    )
    future: Future[Any] = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    _latest = _Save(os.getpid(), writer, ended)
    return future


class _InTurn(StorageWriter):
    """A writer whose save begins when an earlier one of this process has ended: all use one group for collectives.

    torch resets a writer, if there is a checkpoint_id, in the thread that saves, and before any collective.
    """

    def __init__(self, checkpoint_id: str | os.PathLike[str], earlier: _Save | None) -> None:
        super().__init__(checkpoint_id)
        self._earlier = earlier

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.ended.wait()
            earlier.writer.reset()  # so that the files of a save that failed can go, though the future has its error
        super().reset(checkpoint_id)


def _earlier() -> _Save | None:
    """The latest asynchronous save of this process; in a forked child nothing runs of those of its parent."""
    return _latest if _latest is not None and _latest.pid == os.getpid() else None


def _own_group() -> Any:
    """A group on the CPU for the collectives of saves, beside the default one, of the same ranks; None without one."""
    global _group
    distributed: Any = torch.distributed
    if not _has_ranks():
        return None
    default = distributed.group.WORLD
    if _group is None or _group[0]() is not default:
        _group = weakref.ref(default), distributed.new_group(backend="gloo")
    return _group[1]


def _has_ranks() -> bool:
    distributed: Any = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def _one_process_is_fine() -> None:
    """Turns off torch's warning that no process group is there.

    It stays off: an asynchronous save warns in torch's thread, at any time, and `warnings` has no filters of threads.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
