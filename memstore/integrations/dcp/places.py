"""Where a checkpoint is: a folder, or a key of a store. What the writer and the reader ask of either."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from memstore.errors import CorruptionError
from memstore.sharding import Box
from memstore.snapshot.planned import PlannedBox, WrittenFile

# The values of a checkpoint: tensors, bytes items, tensors that are made of several (each chunk as bytes; only where
# there are any), and what torch says.
STATE, BYTES, WRAPPED, DCP = "state", "bytes", "wrapped", "dcp"


def wrapped_name(index: MetadataIndex) -> str:
    """The name in WRAPPED of a chunk of a tensor that is made of several."""
    return f"{text_of(index.fqn)}@{','.join(map(str, index.offset or ()))}"


class Ticket(msgspec.Struct, frozen=True):
    """What a rank must know to write its part: the `storage_data` of its plan.

    A planner that caches plans hands out that of an earlier save.
    """

    save: str
    rank: int
    world_size: int


class Written(msgspec.Struct, frozen=True):
    """What a rank says of an item that it has written: the `storage_data` of its result.

    Attributes:
        item: its place among the rank's items.
        key: STATE, BYTES or WRAPPED.
        dtype: its name; what was stored.
        shape: of the whole tensor.
        file: what the rank has written in all; said with its first item only.
    """

    item: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    file: WrittenFile | None = None


class Tensor(NamedTuple):
    """A tensor of a checkpoint: what is known of it before it is written, or once it is read.

    Attributes:
        chunks: offsets and shape of each.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


class Part(NamedTuple):
    """A part of a tensor, and the tensor of just its elements that it is read into, of any dtype, on any device."""

    key: str  # STATE, BYTES or WRAPPED
    name: str
    box: Box
    target: torch.Tensor


class Finished(NamedTuple):
    """What all ranks have written.

    Attributes:
        files: of each rank that has written an item.
        tensors: by STATE, BYTES or WRAPPED and by name: dtype, shape, and the parts: which file, and which box of it.
        objects: for DCP.
    """

    save: str
    world_size: int
    files: Sequence[WrittenFile]
    tensors: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...], Sequence[tuple[int, int]]]]]
    objects: Any


class Checkpoint(Protocol):
    """One that is there.

    Attributes:
        id: tells it from any other that is or was in this place.
    """

    @property
    def id(self) -> str: ...

    def tensors(self, key: str) -> Mapping[str, Tensor]:
        """Returns the tensors of STATE, or the items of BYTES or WRAPPED as tensors of uint8."""
        ...

    def objects(self) -> Any:
        """What DCP has."""
        ...

    def read(self, parts: Sequence[Part]) -> None:
        """Fills the targets. Raises CorruptionError where bytes are damaged, VersionGoneError if it was overwritten."""
        ...

    def damaged(self, detail: str) -> CorruptionError: ...

    @property
    def can_be_sent(self) -> bool:
        """Whether it can be pickled."""
        ...

    def share(self) -> Any:
        """What other ranks need to read this very checkpoint; it pickles."""
        ...

    def shared(self, said: Any) -> Checkpoint:
        """The checkpoint that another rank shares, if it is not this one. Raises if it is gone."""
        ...


class Place(Protocol):
    """Where a checkpoint is, or is to be."""

    @property
    def id(self) -> str:
        """torch's checkpoint_id."""
        ...

    def of_rank(self, rank: int) -> Place:
        """Where a rank's own checkpoint is, which knows of no other rank."""
        ...

    def check(self) -> None:
        """Raises AlreadyExistsError if nothing may be written here."""
        ...

    def missing(self) -> list[str]:
        """Folders that a save will make here, the innermost first."""
        ...

    def announce(self, ticket: Ticket) -> None:
        """Tells ranks whose plans are cached which save they write for; called before `current`."""
        ...

    def current(self, ticket: Ticket) -> Ticket:
        """The ticket of the present save, for a rank that has one of an earlier save."""
        ...

    def take_part(self, ticket: Ticket) -> Callable[[], None]:
        """Before `write`: this process takes part in the save until it calls what is returned."""
        ...

    def write(self, ticket: Ticket, boxes: Sequence[tuple[str, PlannedBox]]) -> WrittenFile:
        """Writes a rank's part. Each box comes with STATE, BYTES or WRAPPED."""
        ...

    def publish(self, finished: Finished) -> None:
        """Makes the parts of all ranks a checkpoint, in the place of an earlier one."""
        ...

    def abandon(self, save: str) -> None:
        """Gives back what the ranks have written for a save that failed."""
        ...

    def sweep(self) -> None:
        """Before a save: gives back what earlier ones have left here, of any process, that nobody takes part in."""
        ...

    def open(self) -> Checkpoint:
        """The checkpoint that is there. Raises NotAStoreError or KeyNotFoundError if there is none."""
        ...


class WriteOptions(NamedTuple):
    """As the arguments of StorageWriter."""

    overwrite: bool = True
    durability: str = "disk"
    checksum: bool = True


def text_of(checkpoint_id: str | os.PathLike[str]) -> str:
    found = os.fspath(checkpoint_id)
    if not isinstance(found, str):  # pyright: ignore[reportUnnecessaryIsInstance] - bytes
        raise TypeError(f"a checkpoint id is a text or a path, and not {checkpoint_id!r}")
    return found


def folder_of(checkpoint_id: str | os.PathLike[str]) -> str:
    """The absolute path that a checkpoint id is. Raises ValueError for an address of some other storage."""
    found = text_of(checkpoint_id)
    if not found or "\0" in found or "://" in found:
        raise ValueError(f"{found!r} is no path of a folder: memstore's checkpoints are folders, or keys of a store")
    return os.path.abspath(found)
