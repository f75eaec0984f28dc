"""StorageWriter and StorageReader: what torch.distributed.checkpoint calls to save and to load.

A save goes in these steps, as torch makes them:

    1. reset (if there is a checkpoint_id), storage_meta, set_up_storage_writer: which checkpoint, which rank
    2. prepare_local_plan               every rank   an error if nothing may be written there
    3. prepare_global_plan              one rank     the id of the save goes into each rank's plan
    4. write_data                       every rank   its tensors are written; nobody sees them
    5. finish                           one rank     the checkpoint is there, in the place of an earlier one

A planner that caches plans may hand out a rank's plan of an earlier save in 4, with what was said there in 3. So a rank
remembers whose plans it has carried out; in a folder it then takes an id of its own, in a store it asks for the id.

torch tells a storage neither that another rank has failed, nor that a save is over on a rank which doesn't coordinate.
So a save is taken for over if its writer is gone or begins another save, or if the thread in which it ran has ended or
begins another save (`coordinate_save`, `take_part_in_save`).

A load goes in these steps:

    1. reset                            every rank   which checkpoint
    2. read_metadata                    every rank   the checkpoint is opened, and stays readable
    3. set_up_storage_reader            every rank
    4. prepare_local_plan               every rank
    5. prepare_global_plan              one rank     says in each plan which checkpoint it has opened
    6. read_data                        every rank   reads of that one what its plan wants, and no more
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from memstore import _modes as modes
from memstore._arguments import flag
from memstore._wording import an
from memstore.errors import (
    AmbiguousCheckpointError,
    CorruptionError,
    FormatVersionError,
    MemstoreError,
    ResourceLimitError,
    UnsupportedValueError,
    lacks_told,
)
from memstore.integrations.dcp.places import (
    BYTES,
    STATE,
    WRAPPED,
    Checkpoint,
    CheckpointPlace,
    FinishedSave,
    GivenPlace,
    SaveTicket,
    WriteOptions,
    WrittenItem,
    is_possible,
    text_of,
    wrapped_name,
)
from memstore.integrations.dcp.plans import ItemRead, describe, metadata_of, planned_item, reading_of
from memstore.snapshot.buckets import path_or_url
from memstore.snapshot.drafts import PlannedTensor, WrittenFiles
from memstore.snapshot.increments import LATEST
from memstore.snapshot.publishing import new_id
from memstore.structure import DTYPE_NAMES, DTYPES

if TYPE_CHECKING:
    from memstore.store.store import Store


ResultT = TypeVar("ResultT")


class _Located:
    """What a writer and a reader have in common: the place of their checkpoints."""

    _where: GivenPlace

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether it is the path of a folder that exists, or can be created, or the URL of a bucket."""
        return is_possible(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Returns the path of the folder, or the key."""
        return self._where.id

    def _now(self, call: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        """Calls, and returns a future that has the result, or the error."""
        future: Future[ResultT] = Future()
        try:
            with lacks_told(self.checkpoint_id):
                future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)  # pyright: ignore[reportArgumentType] - torch says the result's type
        return future


# --- Saving ----------------------------------------------------------------------------------------------------------


_VERSION = "1.0.0"  # of torch's metadata, which this writes


@modes.uncompiled_methods
class StorageWriter(_Located, storage.StorageWriter):
    """A storage that saves checkpoints of torch.distributed.checkpoint in a folder, or under a key of a store.

    The folder is a snapshot: safetensors files and a manifest with checksums, without pickle. A checkpoint appears when
    all ranks have written, and is complete then. Until then, and if the save fails or is killed, an earlier checkpoint
    at this path stays as it is.

    A writer can be pickled, which saves in a separate process need.

    Args:
        path_or_store: the folder, or a URL (s3://, gs://, az://); or a Store; or, with a key, the folder of a store.
        key: the key in the store. With a store and None, the `checkpoint_id` of the save is the key.
        overwrite: if False, it is an error if a checkpoint exists already.
        durability: with "disk", a save that has returned is on the disk; with "process", it survives the death of
            the process, but not a crash of the host. A store uses its own setting.
        checksum: whether the files get checksums. A store uses its own setting; in a bucket there always are some.
        base: an earlier checkpoint that this writer saved, of which the new one shares the files of tensors that
            haven't changed, and writes the others: its path or URL, or "latest" for the newest one in the folder that
            the path lies in, or at the path itself. It may be removed, or overwritten, at any time. Not for a store.
        storage_options: for a bucket, as of `memstore.Snapshot`.

    Example:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from memstore.integrations.dcp import StorageReader, StorageWriter
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> metadata = dcp.save({"w": torch.ones(2, 3)}, storage_writer=StorageWriter(path), no_dist=True)
        >>> state = {"w": torch.zeros(2, 3)}
        >>> dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
        >>> state["w"].sum()
        tensor(6.)
    """

    def __init__(
        self,
        path_or_store: str | os.PathLike[str] | Store,
        *,
        key: str | None = None,
        overwrite: bool = True,
        durability: str = "disk",
        checksum: bool = True,
        base: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if durability not in ("process", "disk"):
            raise ValueError(f"durability is 'process' or 'disk', and not {durability!r}")
        if base is not None and not flag("checksum", checksum):
            raise ValueError(
                "an increment compares checksums with its base's: give no base=, or leave out checksum=False"
            )
        self._where = GivenPlace(path_or_store, key, "a", storage_options)
        if base is not None and self._where.in_store:
            raise ValueError("base= is for checkpoints in folders and buckets: leave it out for a store")
        found = LATEST if base == LATEST else None if base is None else path_or_url(base)
        self._options = WriteOptions(flag("overwrite", overwrite), durability, flag("checksum", checksum), found)
        self._save, self._begun = new_id(), False
        self._unfinished: weakref.finalize[..., Any] | None = None
        self._part: weakref.finalize[..., Any] | None = None
        self._rank, self._alone = 0, False  # alone: each rank has a checkpoint of its own, without the others
        self._planned = 0  # ranks
        self._missing: list[str] = []  # folders that were not there before this save, the innermost first

    # --- as torch calls them, in this order ---------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save.

        Args:
            checkpoint_id: the path or key of the checkpoint; None keeps the present one.
        """
        if checkpoint_id:
            self._where.move(checkpoint_id)
        self._save, self._begun = new_id(), False
        for of_earlier in (self._unfinished, self._part):
            if of_earlier is not None:
                of_earlier()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes this process's rank.

        Args:
            is_coordinator: whether this rank completes the save.
            kwargs: `rank`; and `use_collectives`: if it is False, each rank saves by itself.
        """
        end_parts_of_saves()  # on all ranks: before the coordinator sweeps
        self._rank = int(kwargs.get("rank") or 0)
        self._alone = not kwargs.get("use_collectives", True)

    def storage_meta(self) -> StorageMeta | None:
        """Returns the ids of checkpoint and save, for torch's planners and logs. Begins a save if `reset` didn't."""
        if self._begun:
            self.reset()
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raises AlreadyExistsError if a checkpoint exists and `overwrite` is False."""
        with lacks_told(self.checkpoint_id):
            place = self._place()
            place.check()
            self._missing = place.missing()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Writes the ids of the save and of the rank into each plan."""
        self._planned, self._begun = len(plans), True
        with lacks_told(self.checkpoint_id):
            place = self._place()
            abandon_saves()
            place.sweep()
            self._unfinished = coordinate_save(self, place, self._save)
            if not all(plan.usable for plan in plans):
                place.announce(SaveTicket(self._save, 0, len(plans)))
        tickets = [SaveTicket(self._save, rank, len(plans)) for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes a rank's items. The future has the results, or the error."""
        return self._now(self._write, plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes what all ranks have written, and completes `metadata` as torch expects it."""
        try:
            with lacks_told(self.checkpoint_id):
                self._finish(metadata, results)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Ends this rank's part in a save that has failed, and removes what nobody needs any more.

        Calls of this module do that by themselves. Files that another rank may still be writing stay, until that rank
        gives up too, or until the next save. Best effort: what can't be removed stays, and harms nobody.
        """
        self._end_part()
        with contextlib.suppress(MemstoreError, OSError, ValueError):
            place = self._place()
            if self._unfinished is not None and self._unfinished.detach() is not None:
                place.abandon(self._save)
            else:
                place.sweep()
        with contextlib.suppress(OSError):  # also where there was no descriptor to look into it
            for folder in self._missing:
                os.rmdir(folder)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: list[WrittenFiles] = []
        tensors: dict[str, dict[str, PlannedTensor]] = {STATE: {}, BYTES: {}}
        seen: set[MetadataIndex] = set()
        wrapped: set[str] = set()  # the names of tensors that are made of several
        for of_rank in results:
            for result in of_rank:
                written = _written(result)
                if written.files is not None:
                    files.append(written.files)
                if result.index in seen:
                    continue  # two ranks wrote it, where no planner left one of them out
                seen.add(result.index)
                if written.key == WRAPPED:
                    wrapped.add(result.index.fqn)
                name = wrapped_name(result.index) if written.key == WRAPPED else result.index.fqn
                of_key = tensors.setdefault(written.key, {})
                tensor = of_key.setdefault(name, PlannedTensor(DTYPES[written.dtype], written.shape, []))
                tensor.parts.append((len(files) - 1, written.item))
        for name in wrapped & tensors[STATE].keys():
            raise UnsupportedValueError(
                f"{name}: some of its parts are plain tensors, and others are made of several: make all of one kind"
            )
        metadata.version = _VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save)
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self._place().publish(FinishedSave(self._save, self._planned, files, tensors, describe(metadata, wrapped)))
        if self._unfinished is not None:
            self._unfinished.detach()
        self._end_part()

    @property
    def save_id(self) -> str:
        """Returns the id of the present save, which is also in the checkpoint's metadata."""
        return self._save

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_unfinished": None, "_part": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._save, self._begun = new_id(), False  # it may be unpickled for each of many saves

    # --- the steps ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<memstore.integrations.dcp.StorageWriter {self._where}>"

    def _place(self) -> CheckpointPlace:
        place = self._where.place(self._options)
        return place.of_rank(self._rank) if self._alone else place

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        place, ticket = self._place(), plan.storage_data
        if not isinstance(ticket, SaveTicket):
            raise _no_ticket(ticket, planner)
        if carry_out_plan((ticket.save, ticket.rank)):
            ticket = place.current(ticket)
            carry_out_plan((ticket.save, ticket.rank))
        items = [planned_item(item, planner) for item in plan.items]
        _wait_for_devices()
        self._part = take_part_in_save(self, place.take_part(ticket))
        try:
            files = place.write(ticket, [(item.key, item.box) for item in items])
        except BaseException:
            self.give_up()
            raise
        results: list[WriteResult] = []
        for number, item in enumerate(items):
            box = item.box
            said = WrittenItem(number, item.key, DTYPE_NAMES[box.dtype], box.shape, None if number else files)
            size = box.dtype.itemsize * torch.Size(box.box.shape).numel()
            results.append(WriteResult(item.item, size, said))
        return results

    def _end_part(self) -> None:
        if self._part is not None:
            self._part()


def _no_ticket(found: Any, planner: SavePlanner) -> MemstoreError:
    if found is None:
        return MemstoreError("the plan has no storage_data: the planner dropped what the storage writer put there")
    kind = type(planner).__name__
    return MemstoreError(
        f"the plan's storage_data is {an(type(found))}, of another storage: a planner that caches plans "
        f"(enable_plan_caching) gives out those of an earlier save with that storage, for all planners called {kind}; "
        "use a planner without a cache, or of another class, for each storage"
    )


def _written(result: WriteResult) -> WrittenItem:
    found = result.storage_data
    if not isinstance(found, WrittenItem):
        raise MemstoreError(
            f"{text_of(result.index.fqn)}: a rank says {type(found).__name__} of what it wrote: all ranks of a save "
            "use memstore's StorageWriter"
        )
    return found


def _wait_for_devices() -> None:
    """Waits for what this thread has queued on GPUs: other threads, with streams of their own, copy from there."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.current_stream(device).synchronize()


# --- Saves that may be over ------------------------------------------------------------------------------------------


_REMEMBERED_PLANS = 4096
_abandoned_saves: list[tuple[CheckpointPlace, str]] = []  # saves that this process coordinated, and that have no end
_parts_in_saves: dict[
    weakref.finalize[..., Any], weakref.ref[threading.Thread]
] = {}  # what ends each, and where it runs
_carried_out_plans: dict[Hashable, None] = {}  # plans that this process has carried out; the last ones


def coordinate_save(writer: Any, place: CheckpointPlace, save: str) -> weakref.finalize[..., Any]:
    """Notes that a writer coordinates a save: unless what is returned is detached, the save is abandoned by the next.

    A finalizer may come at any time, so it does no more than note that.
    """
    unfinished = weakref.finalize(writer, _abandoned_saves.append, (place, save))
    unfinished.atexit = False
    return unfinished


def abandon_saves() -> None:
    """Gives back what saves have left that were over before their end."""
    while True:
        try:
            place, save = _abandoned_saves.pop()
        except IndexError:
            return
        place.abandon(save)


def take_part_in_save(writer: Any, end: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Calls `end` once the save is over for this rank: at any time, in any thread."""
    part = weakref.finalize(writer, end)
    part.atexit = False
    _parts_in_saves[part] = weakref.ref(threading.current_thread())
    return part


def end_parts_of_saves() -> None:
    """Ends this process's parts in saves that are over: called by a thread that begins a save."""
    for part, runs_in in list(_parts_in_saves.items()):
        thread = runs_in()
        if not part.alive or thread is None or thread is threading.current_thread() or not thread.is_alive():
            part()
            _parts_in_saves.pop(part, None)


def carry_out_plan(plan: Hashable) -> bool:
    """Notes that this process carries out a plan. Whether it has done so before."""
    is_again = _carried_out_plans.pop(plan, 0) is None
    _carried_out_plans[plan] = None
    for old in list(_carried_out_plans)[:-_REMEMBERED_PLANS] if len(_carried_out_plans) > _REMEMBERED_PLANS else ():
        _carried_out_plans.pop(old, None)
    return is_again


# --- Loading ---------------------------------------------------------------------------------------------------------


_BATCH = 1 << 30  # bytes: planners may make the tensors that are read into, and let them go when they are told


@modes.uncompiled_methods
class StorageReader(_Located, storage.StorageReader):
    """A storage that loads what `StorageWriter` has saved. Of each tensor it reads only the parts that are wanted.

    Nothing is unpickled here. (torch's DefaultLoadPlanner unpickles bytes items; memstore's `load` doesn't.)

    Each chunk of 16 MiB of a file is compared with its checksum if at least half of it is read. Narrow reads aren't
    compared, because they would have to read whole chunks. `memstore snapshot verify PATH` compares everything.

    A reader can be pickled and copied, also during a load: the copy then reads the same checkpoint. If that was
    overwritten meanwhile, reading raises a VersionGoneError, and the next load reads what is there. (With a store that
    is only read, as one that was given by its path, the copy reads what is there by then.)

    Args:
        path_or_store: as for StorageWriter.
        key: as for StorageWriter.
        storage_options: as for StorageWriter.
    """

    def __init__(
        self,
        path_or_store: str | os.PathLike[str] | Store,
        *,
        key: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._where = GivenPlace(path_or_store, key, "r", storage_options)
        self._checkpoint: Checkpoint | None = None
        self._damage: MemstoreError | None = None  # of what is there, or what is lacking to read it
        self._rank: int | None = None  # of whom this reads the checkpoint that it has saved by itself
        self._load = uuid.uuid4().hex

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load.

        Args:
            checkpoint_id: the path or key of the checkpoint; None keeps the present one.
        """
        if checkpoint_id:
            self._where.move(checkpoint_id)
        self._checkpoint = self._damage = self._rank = None
        self._load = uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns torch's metadata of the checkpoint.

        Args:
            kwargs: `rank`, to read the checkpoint that this rank saved by itself.

        Raises:
            NotAStoreError, KeyNotFoundError: there is no checkpoint.
            CorruptionError, FormatVersionError: it is damaged, or was written by a newer memstore.
            AmbiguousCheckpointError: torch's own writer has saved to the folder, too.
        """
        rank = None if kwargs.get("rank") is None else int(kwargs["rank"])
        if rank is not None and self._damage is not None:
            raise self._damage.with_traceback(None)  # torch would load what this rank saved by itself, some time ago
        self._damage = None
        place = self._place(rank)
        try:
            with lacks_told(self.checkpoint_id):
                checkpoint = place.open()
                metadata = metadata_of(checkpoint)
        except (CorruptionError, FormatVersionError, AmbiguousCheckpointError, ResourceLimitError) as error:
            self._damage = error
            raise
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self._load
        self._checkpoint, self._rank = checkpoint, rank
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Opens the checkpoint if another reader has read the metadata.

        Args:
            metadata: as `read_metadata` returns it.
            is_coordinator: has no effect.
            kwargs: `use_collectives`; if it is False, `rank` loads what it has saved by itself.
        """
        if self._checkpoint is None:
            self._rank = None if kwargs.get("use_collectives", True) else int(kwargs.get("rank") or 0)
            with lacks_told(self.checkpoint_id):
                self._checkpoint = self._place(self._rank).open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Writes into each plan which checkpoint to read, because it may be overwritten between two ranks' reads."""
        if self._rank is not None:
            return plans
        said = self._opened().share()
        return [dataclasses.replace(plan, storage_data=said) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads a rank's items. The future has the error, if there is one."""
        return self._now(self._read, plan, planner)

    @property
    def load_id(self) -> str:
        """Returns the id of the present load, which is also in the metadata that it returns."""
        return self._load

    def __repr__(self) -> str:
        return f"<memstore.integrations.dcp.StorageReader {self._where}>"

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without a version of a store that is only read: no lease can keep that on its way."""
        stays = self._checkpoint is not None and not self._checkpoint.can_be_sent
        return self.__dict__ | ({"_checkpoint": None} if stays else {})

    def _place(self, rank: int | None) -> CheckpointPlace:
        place = self._where.place(WriteOptions())
        return place if rank is None else place.of_rank(rank)

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            self.read_metadata(rank=self._rank)
        assert self._checkpoint is not None
        return self._checkpoint

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        checkpoint = self._opened()
        if plan.storage_data is not None:
            checkpoint = checkpoint.shared(plan.storage_data)
        stored = {key: checkpoint.tensors(key) for key in (STATE, BYTES, WRAPPED)}
        batch: list[ItemRead] = []
        nbytes, kept = 0, len(plan.items)
        for number, item in enumerate(plan.items):  # all are looked at before the first is written to
            reading = reading_of(item, planner, stored)
            if nbytes < _BATCH:
                batch.append(reading)
                nbytes += reading.part.target.nbytes
                kept = number + 1
        for item in plan.items[kept:]:
            if nbytes >= _BATCH:
                _read_batch(checkpoint, batch)
                batch, nbytes = [], 0
            batch.append(reading_of(item, planner, stored))
            nbytes += batch[-1].part.target.nbytes
        _read_batch(checkpoint, batch)


def tell_lack(reader: storage.StorageReader, error: CheckpointException) -> None:
    """Puts the reason in the place of the AssertionError with its text that torch tells for unreadable metadata."""
    lack = reader._damage if isinstance(reader, StorageReader) else None  # pyright: ignore[reportPrivateUsage]
    if isinstance(lack, ResourceLimitError):
        for rank, (found, trace) in list(error.failures.items()):
            if lack.message in str(found):
                error.failures[rank] = (lack, trace)


def _read_batch(checkpoint: Checkpoint, batch: list[ItemRead]) -> None:
    checkpoint.read([reading.part for reading in batch])
    for reading in batch:
        reading.finish()
