"""StorageReader: what torch.distributed.checkpoint calls to load. A load goes in these steps, as torch makes them:

1. reset                            every rank   which checkpoint
2. read_metadata                    every rank   the checkpoint is opened, and stays readable
3. set_up_storage_reader            every rank
4. prepare_local_plan               every rank
5. prepare_global_plan              one rank     says in each plan which checkpoint it has opened
6. read_data                        every rank   reads of that one what its plan wants, and no more
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from memstore import modes
from memstore.errors import (
    AmbiguousCheckpointError,
    CorruptionError,
    FormatVersionError,
    MemstoreError,
    ResourceLimitError,
    lacks_told,
)
from memstore.integrations.dcp.description import metadata_of
from memstore.integrations.dcp.items import Reading, reading_of
from memstore.integrations.dcp.places import BYTES, STATE, WRAPPED, Checkpoint, Place, WriteOptions
from memstore.integrations.dcp.where import Where, is_possible

if TYPE_CHECKING:
    from memstore.store.store import Store

_BATCH = 1 << 30  # bytes: planners may make the tensors that are read into, and let them go when they are told


@modes.uncompiled_methods
class StorageReader(storage.StorageReader):
    """Loads checkpoints that `StorageWriter` has saved. Of each tensor it reads only the parts that are wanted.

    Nothing is unpickled here. (torch's DefaultLoadPlanner unpickles bytes items; memstore's `load` doesn't.)

    Each chunk of 16 MiB of a file is compared with its checksum if at least half of it is read. Narrow reads aren't
    compared, because they would have to read whole chunks. `memstore snapshot verify PATH` compares everything.

    A reader can be pickled and copied, also during a load: the copy then reads the same checkpoint. If that was
    overwritten meanwhile, reading raises a VersionGoneError, and the next load reads what is there. (With a store that
    is only read, as one that was given by its path, the copy reads what is there by then.)

    Args:
        path_or_store: as for StorageWriter.
        key: as for StorageWriter.
    """

    def __init__(self, path_or_store: str | os.PathLike[str] | Store, *, key: str | None = None) -> None:
        self._where = Where(path_or_store, key, "r")
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
        future: Future[None] = Future()
        try:
            with lacks_told(self.checkpoint_id):
                self._read(plan, planner)
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)  # pyright: ignore[reportArgumentType] - torch says the result's type
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is the path of a folder that exists, or can be created."""
        return is_possible(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The path of the folder, or the key."""
        return self._where.id

    @property
    def load_id(self) -> str:
        """The id of the present load, which is also in the metadata that it returns."""
        return self._load

    def __repr__(self) -> str:
        return f"<memstore.integrations.dcp.StorageReader {self._where}>"

    def __getstate__(self) -> dict[str, Any]:
        """Without a version of a store that was opened to read only: no lease can keep that on its way."""
        stays = self._checkpoint is not None and not self._checkpoint.can_be_sent
        return self.__dict__ | ({"_checkpoint": None} if stays else {})

    def _place(self, rank: int | None) -> Place:
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
        batch: list[Reading] = []
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
    """Where metadata couldn't be read, torch tells an AssertionError with the reason's text: here it is the reason."""
    lack = reader._damage if isinstance(reader, StorageReader) else None  # pyright: ignore[reportPrivateUsage]
    if isinstance(lack, ResourceLimitError):
        for rank, (found, trace) in list(error.failures.items()):
            if lack.message in str(found):
                error.failures[rank] = (lack, trace)


def _read_batch(checkpoint: Checkpoint, batch: list[Reading]) -> None:
    checkpoint.read([reading.part for reading in batch])
    for reading in batch:
        reading.finish()
