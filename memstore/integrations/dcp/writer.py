"""StorageWriter: what torch.distributed.checkpoint calls to save. A save goes in these steps, as torch makes them:

    1. reset (if there is a checkpoint_id), storage_meta, set_up_storage_writer: which checkpoint, which rank
    2. prepare_local_plan               every rank   an error if nothing may be written there
    3. prepare_global_plan              one rank     the id of the save goes into each rank's plan
    4. write_data                       every rank   its tensors are written; nobody sees them
    5. finish                           one rank     the checkpoint is there, in the place of an earlier one

A planner that caches plans may hand out a rank's plan of an earlier save in 4, with what was said there in 3. So a rank
remembers whose plans it has carried out; in a folder it then takes an id of its own, in a store it asks for the id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from memstore import modes
from memstore.arguments import flag
from memstore.errors import MemstoreError, UnsupportedValueError, lacks_told
from memstore.integrations.dcp import unfinished
from memstore.integrations.dcp.description import describe
from memstore.integrations.dcp.items import planned_items
from memstore.integrations.dcp.places import (
    STATE,
    WRAPPED,
    Finished,
    Place,
    Ticket,
    WriteOptions,
    Written,
    text_of,
    wrapped_name,
)
from memstore.integrations.dcp.where import Where, is_possible
from memstore.snapshot.planned import WrittenFile, new_save
from memstore.structure import DTYPE_NAMES, DTYPES
from memstore.wording import an

if TYPE_CHECKING:
    from memstore.store.store import Store

_VERSION = "1.0.0"  # of torch's metadata, which this writes


@modes.uncompiled_methods
class StorageWriter(storage.StorageWriter):
    """Saves checkpoints of torch.distributed.checkpoint into a folder, or under a key of a store.

    The folder is a snapshot: safetensors files and a manifest with checksums, without pickle. A checkpoint appears when
    all ranks have written, and is complete then. Until then, and if the save fails or is killed, an earlier checkpoint
    at this path stays as it is.

    A writer can be pickled, which saves in a separate process need.

    Args:
        path_or_store: the folder; or a Store; or, with a key, the folder of a store.
        key: the key in the store. With a store and None, the `checkpoint_id` of the save is the key.
        overwrite: if False, it is an error if a checkpoint exists already.
        durability: with "disk", a save that has returned is on the disk; with "process", it survives the death of
            the process, but not a crash of the host. A store uses its own setting.
        checksum: whether the files get checksums. A store uses its own setting.

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
    ) -> None:
        if durability not in ("process", "disk"):
            raise ValueError(f"durability is 'process' or 'disk', and not {durability!r}")
        self._options = WriteOptions(flag("overwrite", overwrite), durability, flag("checksum", checksum))
        self._where = Where(path_or_store, key, "a")
        self._save, self._begun = new_save(), False
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
        self._save, self._begun = new_save(), False
        for of_earlier in (self._unfinished, self._part):
            if of_earlier is not None:
                of_earlier()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes this process's rank.

        Args:
            is_coordinator: whether this rank completes the save.
            kwargs: `rank`; and `use_collectives`: if it is False, each rank saves by itself.
        """
        unfinished.end_parts()  # on all ranks: before the coordinator sweeps
        self._rank = int(kwargs.get("rank") or 0)
        self._alone = not kwargs.get("use_collectives", True)

    def storage_meta(self) -> StorageMeta | None:
        """The ids of the checkpoint and the save, for torch's planners and logs. Begins a save if `reset` didn't."""
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
            unfinished.abandon()
            place.sweep()
            self._unfinished = unfinished.coordinate(self, place, self._save)
            if not all(plan.usable for plan in plans):
                place.announce(Ticket(self._save, 0, len(plans)))
        tickets = [Ticket(self._save, rank, len(plans)) for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes a rank's items. The future has the results, or the error."""
        future: Future[list[WriteResult]] = Future()
        try:
            with lacks_told(self.checkpoint_id):
                future.set_result(self._write(plan, planner))
        except Exception as error:
            future.set_exception(error)  # pyright: ignore[reportArgumentType] - torch says the result's type
        return future

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
        files: list[WrittenFile] = []
        tensors: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...], list[tuple[int, int]]]]] = {}
        seen: set[MetadataIndex] = set()
        wrapped: set[str] = set()  # the names of tensors that are made of several
        for of_rank in results:
            for result in of_rank:
                written = _written(result)
                if written.file is not None:
                    files.append(written.file)
                if result.index in seen:
                    continue  # two ranks wrote it, where no planner left one of them out
                seen.add(result.index)
                if written.key == WRAPPED:
                    wrapped.add(result.index.fqn)
                name = wrapped_name(result.index) if written.key == WRAPPED else result.index.fqn
                _, _, parts = tensors.setdefault(written.key, {}).setdefault(
                    name, (DTYPES[written.dtype], written.shape, [])
                )
                parts.append((len(files) - 1, written.item))
        for name in wrapped & tensors.get(STATE, {}).keys():
            raise UnsupportedValueError(
                f"{name}: some of its parts are plain tensors, and others are made of several: make all of one kind"
            )
        metadata.version = _VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save)
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self._place().publish(Finished(self._save, self._planned, files, tensors, describe(metadata, wrapped)))
        if self._unfinished is not None:
            self._unfinished.detach()
        self._end_part()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is the path of a folder that exists, or can be created."""
        return is_possible(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path of the folder, or the key."""
        return self._where.id

    @property
    def save_id(self) -> str:
        """The id of the present save, which is also in the checkpoint's metadata."""
        return self._save

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_unfinished": None, "_part": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._save, self._begun = new_save(), False  # it may be unpickled for each of many saves

    # --- the steps ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<memstore.integrations.dcp.StorageWriter {self._where}>"

    def _place(self) -> Place:
        place = self._where.place(self._options)
        return place.of_rank(self._rank) if self._alone else place

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        place, ticket = self._place(), plan.storage_data
        if not isinstance(ticket, Ticket):
            raise _no_ticket(ticket, planner)
        if unfinished.carry_out((ticket.save, ticket.rank)):
            ticket = place.current(ticket)
            unfinished.carry_out((ticket.save, ticket.rank))
        items = planned_items(plan, planner)
        _wait_for_devices()
        self._part = unfinished.take_part(self, place.take_part(ticket))
        try:
            file = place.write(ticket, [(item.key, item.box) for item in items])
        except BaseException:
            self.give_up()
            raise
        results: list[WriteResult] = []
        for number, item in enumerate(items):
            box = item.box
            said = Written(number, item.key, DTYPE_NAMES[box.dtype], box.shape, None if number else file)
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


def _written(result: WriteResult) -> Written:
    found = result.storage_data
    if not isinstance(found, Written):
        raise MemstoreError(
            f"{text_of(result.index.fqn)}: a rank says {type(found).__name__} of what it wrote: all ranks of a save "
            "use memstore's StorageWriter"
        )
    return found


def _wait_for_devices() -> None:
    """What this thread has queued on GPUs: other threads, with streams of their own, copy from there."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.current_stream(device).synchronize()
