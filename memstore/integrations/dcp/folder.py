"""A checkpoint in a folder: a snapshot, whose manifest takes the place of an earlier one's at one moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from memstore.errors import CorruptionError, VersionGoneError
from memstore.integrations.dcp.places import BYTES, DCP, STATE, WRAPPED, Finished, Part, Tensor, Ticket, WriteOptions
from memstore.snapshot.planned import (
    Planned,
    PlannedBox,
    PlannedSnapshot,
    StoredTensor,
    Wanted,
    Whole,
    WrittenFile,
    begin,
    check_folder,
    check_others,
    new_save,
    publish_planned,
    refuse_two,
    remove_torchs,
    sweep,
    write_boxes,
)
from memstore.structure import DTYPES


class Folder:
    """A folder that is, or is to be, a checkpoint.

    Args:
        path: absolute.
        around: of the checkpoint that a rank saves by itself: the folder of all of them, where torch's writer would
            have put its own.
    """

    def __init__(self, path: str, options: WriteOptions, around: str | None = None) -> None:
        self.path, self._options, self._around = path, options, around

    @property
    def id(self) -> str:
        return self.path

    def of_rank(self, rank: int) -> Folder:
        return Folder(f"{self.path}/rank-{rank}", self._options, self.path)

    def check(self) -> None:
        if self._around is not None:
            check_others(self._around, overwrite=self._options.overwrite)
        check_folder(self.path, DCP, overwrite=self._options.overwrite)

    def missing(self) -> list[str]:
        found: list[str] = []
        path = self.path
        while not os.path.lexists(path):
            found.append(path)
            path = os.path.dirname(path)
        return found

    def announce(self, ticket: Ticket) -> None:
        """Ranks need not know: each has an id of its own for its files, and says it with them."""

    def current(self, ticket: Ticket) -> Ticket:
        return Ticket(new_save(), ticket.rank, ticket.world_size)

    def take_part(self, ticket: Ticket) -> Callable[[], None]:
        return begin(self.path, ticket.save, durable=self._options.durability == "disk").close

    def write(self, ticket: Ticket, boxes: Sequence[tuple[str, PlannedBox]]) -> WrittenFile:
        return write_boxes(
            self.path,
            [box for _, box in boxes],
            save=ticket.save,
            rank=ticket.rank,
            world_size=ticket.world_size,
            durable=self._options.durability == "disk",
            checksum=self._options.checksum,
        )

    def publish(self, finished: Finished) -> None:
        tensors: dict[str, dict[str, Whole]] = {STATE: {}, BYTES: {}}
        for key, found in finished.tensors.items():
            tensors.setdefault(key, {})
            for name, (dtype, shape, parts) in found.items():
                boxes = [(file, finished.files[file].boxes[box]) for file, box in parts]
                tensors[key][name] = Whole(dtype, shape, [(file, box) for file, box in boxes if box is not None])
        publish_planned(
            self.path,
            Planned(finished.files, tensors, {DCP: finished.objects}),
            kind=DCP,
            save=finished.save,
            durable=self._options.durability == "disk",
            overwrite=self._options.overwrite,
        )
        if self._around is not None:
            remove_torchs(self._around, durable=self._options.durability == "disk")

    def abandon(self, save: str) -> None:
        self.sweep()

    def sweep(self) -> None:
        sweep(self.path)

    def open(self) -> FolderCheckpoint:
        found = FolderCheckpoint(self.path)
        if self._around is not None:
            refuse_two(self.path, self._around)
        return found


class FolderCheckpoint:
    """One that is there. It is pickled and copied as a reference, which opens the folder when it is first used.

    Args:
        save: of a reference: the id of the checkpoint that the folder must still have.
    """

    def __init__(self, path: str, save: str | None = None) -> None:
        self._path, self._save = path, save
        self.id: str = self._opened.snapshot.id if save is None else save

    @cached_property
    def _opened(self) -> _Opened:
        snapshot = PlannedSnapshot(self._path)
        if self._save is not None and self._save != snapshot.id:
            raise VersionGoneError(f"{self._path} was overwritten while it was about to be read: load it again")
        wrapped = (WRAPPED,) if snapshot.has(WRAPPED) else ()
        return _Opened(snapshot, {key: snapshot.tensors(key) for key in (STATE, BYTES, *wrapped)})

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderCheckpoint, (self._path, self.id)

    @property
    def can_be_sent(self) -> bool:
        return True

    def tensors(self, key: str) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in self._opened.tensors.get(key, {}).items():
            chunks = [(box.offsets, box.shape) for box in tensor.boxes] or [((0,) * len(tensor.shape), tensor.shape)]
            found[name] = Tensor(DTYPES[tensor.dtype], tensor.shape, chunks)
        return found

    def objects(self) -> Any:
        return self._opened.snapshot.objects(DCP)

    def read(self, parts: Sequence[Part]) -> None:
        snapshot, stored = self._opened
        snapshot.read([Wanted(stored[part.key][part.name], part.box, part.target) for part in parts])

    def damaged(self, detail: str) -> CorruptionError:
        return self._opened.snapshot.damaged(detail)

    def share(self) -> Any:
        return self.id

    def shared(self, said: Any) -> FolderCheckpoint:
        return self if said == self.id else FolderCheckpoint(self._path, said)


class _Opened(NamedTuple):
    """A checkpoint, and its tensors by STATE, BYTES or WRAPPED and by name."""

    snapshot: PlannedSnapshot
    tensors: dict[str, Mapping[str, StoredTensor]]
