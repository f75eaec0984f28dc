"""save, load and async_save: torch's functions, with memstore's storage, planners and stager.

`Stager` copies a state dict into warm memory, so that an asynchronous save may go on while training does. The memory is
that of asynchronous snapshots: blocks that are filled at the speed of memory, pinned where a tensor lies on a GPU, and
used again when nothing refers to what was staged any more.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint import planner as planners
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver, storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from memstore import _modes as modes
from memstore import structure
from memstore._compat import local_shards_wrapper, set_local_shards
from memstore._wording import an, of_no_place
from memstore.engine import Path
from memstore.errors import NotAStoreError, UnsupportedValueError, lacks_told
from memstore.integrations.dcp.planners import LoadPlanner, SavePlanner
from memstore.integrations.dcp.plans import settled
from memstore.integrations.dcp.storage import StorageReader, StorageWriter, tell_lack
from memstore.snapshot.buckets import is_url
from memstore.snapshot.manifest import is_snapshot
from memstore.snapshot.staging import stage
from memstore.structure import over, traits
from memstore.view import StoredTensor

# --- Staging ---------------------------------------------------------------------------------------------------------


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@modes.uncompiled_methods
class Stager(AsyncStager):
    """Staging for `torch.distributed.checkpoint.async_save`: `async_stager=Stager()`.

    Use one stager for all saves. A staged copy takes memory until its save is over; later saves reuse this memory. If
    more than a quarter of the machine's memory would be staged at a time, a save waits for earlier ones.

    Example:
        >>> import torch
        >>> state = {"w": torch.ones(3)}
        >>> staged = Stager().stage(state)
        >>> state["w"].zero_()
        tensor([0., 0., 0.])
        >>> staged
        {'w': tensor([1., 1., 1.])}
    """

    _synchronize_after_execute = False  # as torch calls it: when `stage` returns, all is copied

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Copies to the CPU: tensors, DTensors and ShardedTensors in dicts, lists and tuples, and objects.

        Raises:
            UnsupportedValueError: a tensor has no plain memory (sparse, nested, or of an unknown subclass), or is
                expanded far beyond it, or a container contains itself.
            StoreTimeoutError: earlier saves still take too much memory.
            ResourceLimitError: the machine doesn't have enough memory.
        """
        structure.check_nesting(state_dict)
        with modes.put_aside(), torch.no_grad():
            walk = _StagingWalk()
            made = walk.visit(state_dict)
            held = stage(walk.tensors, names=walk.names)
            # An array of its own, by whose end it is known that nothing is needed any more.
            memory = held.block.bytes[:]
            weakref.finalize(memory, held.release).atexit = False
            return made([_over(memory, *one) for one in zip(walk.tensors, held.places, strict=True)])

    def close(self) -> None:
        """Does nothing: memory is freed when nothing refers to it."""


def _over(memory: Any, tensor: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
    """Returns the copy of a tensor, which keeps the memory alive.

    It has a storage of its own: a DTensor takes over the offset of its local tensor, and has no memory; torch can't
    pickle it then, unless the offset is 0.
    """
    start, nbytes = place
    if not nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    part = np.frombuffer(memoryview(memory)[start : start + nbytes], np.uint8)  # a slice would not refer to `memory`
    stride = traits.contiguous_stride(tensor.shape)
    return over(torch.from_numpy(part).untyped_storage(), tensor.dtype, 0, tensor.shape, stride)


_Maker = Callable[[list[torch.Tensor]], Any]


class _StagingWalk:
    """A walk that finds the tensors of a state dict. `visit` returns what makes it again, of copies of these."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []  # of these, as errors have them
        self._known: dict[int, tuple[int, torch.Tensor]] = {}  # by id, and the tensor, which keeps that its own

    def visit(self, value: Any, path: Path = ()) -> _Maker:
        """Returns what makes the value again.

        Args:
            path: the keys that lead to it, for errors.
        """
        if isinstance(value, torch.Tensor):
            return self._visit_tensor(value, path)
        if isinstance(value, Mapping):
            entries = cast("Mapping[Any, Any]", value).items()
            of_keys = {key: self.visit(entry, (*path, key)) for key, entry in entries}
            return lambda copies: {key: make(copies) for key, make in of_keys.items()}
        if type(value) in (list, tuple):
            makers = [self.visit(entry, (*path, i)) for i, entry in enumerate(cast("list[Any]", value))]
            kind = type(value)
            return lambda copies: kind(make(copies) for make in makers)
        kept = copy.deepcopy(value)
        return lambda _: kept

    def _visit_tensor(self, value: torch.Tensor, path: Path) -> _Maker:
        value = settled(value)
        if type(value) in _PLAIN:
            if structure.is_made_of_several(value):
                kept = value.detach().clone()
                return lambda _: kept
            self._check(value, path)
            number, _ = self._known.setdefault(id(value), (len(self.tensors), value))
            if number == len(self.tensors):
                self.tensors.append(value.detach())
                self.names.append(structure.render_path(path))
            return lambda copies: copies[number]
        if isinstance(value, StoredTensor):  # it never changes: what is written is read of it
            return lambda _: value
        wrapper = local_shards_wrapper(value)
        if wrapper is not None:  # the local tensor of an embedding table's DTensor
            several: Any = value
            makers = [self.visit(shard, path) for shard in several.local_shards()]
            offsets = [tuple(offset) for offset in several.local_offsets()]
            return lambda copies: wrapper([make(copies) for make in makers], offsets)
        if hasattr(value, "local_shards"):
            return self._visit_sharded(value, path)
        if structure.is_wrapper(type(value)):
            return self._visit_wrapper(value, path)
        self._check(value, path)
        raise UnsupportedValueError(f"{structure.render_path(path)}: {an(type(value))} can't be staged")

    def _check(self, value: torch.Tensor, path: Path) -> None:
        reason = structure.why_no_memory(value)
        if reason is not None:
            raise UnsupportedValueError(f"{structure.render_path(path)}: {reason}")
        reason = traits.why_too_expanded(value)
        if reason is not None:
            raise UnsupportedValueError(f"{structure.render_path(path)}: {reason}: save what it is expanded from")

    def _visit_wrapper(self, value: torch.Tensor, path: Path) -> _Maker:
        names, context = cast("Any", value).__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        makers = {
            name: self.visit(part, (*path, name)) for name, part in parts.items() if isinstance(part, torch.Tensor)
        }
        kind, size, stride = cast("Any", type(value)), value.size(), value.stride()

        def make(copies: list[torch.Tensor]) -> Any:
            copied = {name: maker(copies) for name, maker in makers.items()}
            return kind.__tensor_unflatten__(parts | copied, context, size, stride)  # a mesh stays the same one

        return make

    def _visit_sharded(self, value: Any, path: Path) -> _Maker:
        makers = [self.visit(shard.tensor, path) for shard in value.local_shards()]

        def make(copies: list[torch.Tensor]) -> Any:
            made = copy.copy(value)
            shards = [copy.copy(shard) for shard in value.local_shards()]
            for shard, maker in zip(shards, makers, strict=True):
                shard.tensor = maker(copies)
            set_local_shards(made, shards)
            return made

        return make


# --- Calls -----------------------------------------------------------------------------------------------------------


StateDict = dict[str, Any]


class _Save(NamedTuple):
    """An asynchronous save of a process. It doesn't keep the future: an error refers to all that was staged."""

    pid: int
    writer: StorageWriter | None  # that was made for this save
    ended: threading.Event


_stager: Stager | None = None
_latest: _Save | None = None  # asynchronous save in a thread
_group: tuple[weakref.ref[Any], Any] | None = None  # the default group that it was made beside, and the group


@modes.uncompiled
def save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: storage.StorageWriter | None = None,
    planner: planners.SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Saves a state dict of all ranks as one checkpoint, without pickle.

    If there is a default process group, all of its ranks call it. It is `torch.distributed.checkpoint.save` with the
    same arguments, and with `StorageWriter` and `SavePlanner` where none are given. It waits for earlier asynchronous
    saves of this process. A save that fails leaves neither files nor a folder that it has made.

    Args:
        state_dict: nested dicts and lists of tensors, DTensors, ShardedTensors and plain objects, or Statefuls.
        checkpoint_id: the folder; with a `storage_writer` for a store, the key. An earlier checkpoint stays there until
            the new one is complete.
        storage_writer: where to save, and how. Another library's comes with torch's planner if you give none.
        planner: what to save of the state dict, and by which rank.
        process_group: the ranks that save together; None: those of the default group.
        no_dist: save what this process has, and ask no other rank.
        use_collectives: if False, each rank saves a checkpoint of its own, without waiting for others.

    Returns:
        torch's metadata of the checkpoint.

    Raises:
        CheckpointException: torch's error, even with one rank (not with `use_collectives=False`). It is a
            BaseException, and its `failures` have the error of each rank: UnsupportedValueError for an object that
            can't be stored without pickle, which the message names; StoreFullError, PermissionDeniedError,
            AlreadyExistsError and ValueError as in `Snapshot.take`.
        TypeError, ValueError: neither `checkpoint_id` nor `storage_writer` is given, one is of the wrong type, or
            `process_group` and `no_dist` exclude each other.

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
    place = _place("save", storage_writer, checkpoint_id, process_group, no_dist)
    _end_of(_earlier())
    writer = storage_writer or StorageWriter(place)
    try:
        return state_dict_saver.save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=_planner_for(writer, planner),
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    except BaseException:
        if isinstance(writer, StorageWriter):
            writer.give_up()
        raise


@modes.uncompiled
def load(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: storage.StorageReader | None = None,
    planner: planners.LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Loads a checkpoint into a state dict, in place. Each rank reads only its own parts. Nothing is unpickled.

    It is `torch.distributed.checkpoint.load` with the same arguments, and with `StorageReader` and `LoadPlanner` where
    none are given.

    Args:
        state_dict: the tensors to fill. They have the shapes of the saved ones, and any dtype, layout and mesh.
        checkpoint_id: the folder; with a `storage_reader` for a store, the key.
        storage_reader: where to load from.
        planner: what to load of the checkpoint. torch's DefaultLoadPlanner unpickles what torch has saved.
        process_group: the ranks that load together; None: those of the default group.
        no_dist: load into this process's state dict, and ask no other rank.

    Raises:
        NotAStoreError: there is no such folder, no `storage_reader`, and no other rank.
        CheckpointException: torch's error, even with one rank. Its `failures` have the error of each rank:
            CorruptionError; VersionGoneError if a save overwrote the checkpoint meanwhile (load again);
            UnsupportedValueError for objects that only pickle could read; an AssertionError, which says so, if there
            is no checkpoint, its metadata are damaged, or another library has saved to the folder, too.
        TypeError, ValueError: as in `save`.
    """
    place = _place("load", storage_reader, checkpoint_id, process_group, no_dist)
    reader = storage_reader
    if reader is None:
        reader = StorageReader(place)
        alone = no_dist or not _has_ranks()  # else all ranks have to hear of it from torch
        path = os.fspath(reader.checkpoint_id)
        if alone and is_url(path):
            if not is_snapshot(path):
                raise NotAStoreError(f"{path} is no checkpoint: there is none at this URL")
        elif alone and not os.path.lexists(path):
            raise NotAStoreError(f"{path} is no checkpoint: there is no such folder{of_no_place(path)}")
    try:
        state_dict_loader.load(
            state_dict,
            checkpoint_id=None if storage_reader is None else checkpoint_id,
            storage_reader=reader,
            planner=LoadPlanner() if planner is None else planner,
            process_group=process_group,
            no_dist=no_dist,
        )
    except CheckpointException as error:
        tell_lack(reader, error)
        raise


@modes.uncompiled
def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: storage.StorageWriter | None = None,
    planner: planners.SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata]:
    """Saves like `save`, but in a thread. You may change the tensors as soon as it returns.

    The threads of the ranks use a process group of their own, which the first call creates, so training can go on with
    the default one. (If you give a `process_group`, they use that; with `use_collectives=False` and in a separate
    process they need none.)

    You need not wait for an earlier save, also not for one to the same path. The saves of a process in threads run one
    after the other, in the order of the calls, which is the same on all ranks. Each waits until the earlier one has
    ended, whether that succeeds or fails. With a `storage_writer` of yours, or in a separate process, the call waits
    for the earlier save before it stages anything.

    Args:
        state_dict: as of `save`.
        checkpoint_id: as of `save`.
        storage_writer: as of `save`.
        planner: as of `save`.
        process_group: as of `save`. It has a CPU backend.
        async_checkpointer_type: save in a thread, or in a separate process, as torch has it.
        async_stager: copies the state dict; None: memstore's `Stager`.
        no_dist: as of `save`.
        use_collectives: as of `save`.

    Returns:
        A future of the metadata; its `result()` raises what `save` would. With an `async_stager` that returns a future
        itself, torch's AsyncSaveResponse, which has both.
    """
    global _stager, _latest
    place = _place("async_save", storage_writer, checkpoint_id, process_group, no_dist)
    in_thread = async_checkpointer_type is AsyncCheckpointerType.THREAD
    writer: storage.StorageWriter
    if storage_writer is None and in_thread:
        writer = _SerialWriter(place, _earlier())  # which waits there
    elif isinstance(storage_writer, _SerialWriter):
        writer = storage_writer
    else:
        _end_of(_earlier())
        writer = storage_writer or StorageWriter(place)
    if async_stager is None and isinstance(writer, StorageWriter):
        async_stager = _stager = _stager or Stager()
    if process_group is None and in_thread and use_collectives and not no_dist:
        process_group = _own_group()
    with lacks_told(checkpoint_id or f"{writer!r}"):
        answer = state_dict_saver.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=_planner_for(writer, planner),
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    future: Future[Any] = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
    ended = threading.Event()
    give_up = writer.give_up if isinstance(writer, StorageWriter) else None

    def end(done: Future[Any]) -> None:
        try:
            if give_up is not None and (done.cancelled() or done.exception() is not None):
                give_up()
        finally:
            ended.set()

    future.add_done_callback(end)
    if in_thread:
        _latest = _Save(os.getpid(), writer if isinstance(writer, _SerialWriter) else None, ended)
    return cast("Future[Metadata]", answer)


def _planner_for(writer: storage.StorageWriter, given: planners.SavePlanner | None) -> planners.SavePlanner | None:
    """Returns the planner that was given, or memstore's: torch's reads the objects in another library's storage."""
    return SavePlanner() if given is None and isinstance(writer, StorageWriter) else given


def _place(call: str, given: Any, checkpoint_id: Any, process_group: Any, no_dist: bool) -> Any:
    """Checks the arguments that all calls have, before torch does anything. Returns the checkpoint's id.

    Raises TypeError or ValueError. It also turns off torch's warning that no process group is there. That stays off: an
    asynchronous save warns in torch's thread, at any time, and `warnings` has no filters of threads.
    """
    kind, name = storage.StorageWriter, "storage_writer"
    if call == "load":
        kind, name = storage.StorageReader, "storage_reader"
    if given is None and checkpoint_id is None:
        raise ValueError(f"{call} needs a place: give checkpoint_id=, the path of a folder, or {name}=")
    if given is not None and not isinstance(given, kind):
        raise TypeError(
            f"{name} is a {kind.__name__}, as memstore.integrations.dcp and torch.distributed.checkpoint have them, "
            f"and not {an(type(given))}"
        )
    if no_dist and process_group is not None:
        raise ValueError("process_group= and no_dist=True exclude each other: with no_dist no other rank takes part")
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    return checkpoint_id


def async_save_to_tiers(
    state_dict: StateDict, tiers: Sequence[str], *, base: str | None, options: Callable[[str], Mapping[str, Any] | None]
) -> list[Future[Metadata]]:
    """Saves to several places, one after the other, from one copy of the tensors. All ranks call it.

    Args:
        tiers: paths or URLs.
        base: as of `StorageWriter`.
        options: gives the `storage_options` of a tier.
    """
    staged = Stager().stage(state_dict)
    return [
        async_save(
            staged,
            checkpoint_id=place,
            storage_writer=_SerialWriter(place, _earlier(), base=base, storage_options=options(place)),
            async_stager=_Staged(),
        )
        for place in tiers
    ]


class _Staged(AsyncStager):
    """Staging of what is staged already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return state_dict

    def close(self) -> None:
        pass


class _SerialWriter(StorageWriter):
    """A writer whose save begins when an earlier one of this process has ended: all use one group for collectives.

    torch resets a writer, if there is a checkpoint_id, in the thread that saves, and before any collective.
    """

    def __init__(self, checkpoint_id: str | os.PathLike[str], earlier: _Save | None, **given: Any) -> None:
        super().__init__(checkpoint_id, **given)
        self._earlier = earlier

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        earlier, self._earlier = self._earlier, None
        _end_of(earlier)
        super().reset(checkpoint_id)


def _end_of(earlier: _Save | None) -> None:
    """Waits until a save has ended."""
    if earlier is not None:
        earlier.ended.wait()
        if earlier.writer is not None:
            earlier.writer.reset()  # so that the files of a save that failed can go, though the future has its error


def _earlier() -> _Save | None:
    """Returns the latest asynchronous save of this process; in a forked child those of its parent don't run."""
    return _latest if _latest is not None and _latest.pid == os.getpid() else None


def _own_group() -> Any:
    """Returns a CPU group for the collectives of saves, of the default group's ranks; None without a default one."""
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
