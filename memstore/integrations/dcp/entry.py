"""A checkpoint under a key of a store: a sharded entry, whose last part has what torch says of it.

With N ranks a save is an attempt of N + 1 parts: each rank puts what it writes, and returns; the rank that finishes the
checkpoint puts the last part, which publishes all of them. Until then, and if that never comes, the key has its earlier
version.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    KeyNotFoundError,
    MemstoreError,
    VersionGoneError,
)
from memstore.integrations.dcp.places import BYTES, DCP, STATE, Finished, Part, Tensor, Ticket, WriteOptions
from memstore.sharding import TensorShards
from memstore.snapshot.planned import PlannedBox, WrittenFile
from memstore.view import StoredTensor
from memstore.wording import an

if TYPE_CHECKING:
    from memstore.store.ref import Ref
    from memstore.store.store import Store

_LEASE = 1800.0  # seconds that a part waits for the other ranks


class Entry:
    """A key that has, or is to have, a checkpoint."""

    def __init__(self, store: Store, key: str, options: WriteOptions) -> None:
        self._store, self._key, self._options = store, key, options

    @property
    def id(self) -> str:
        return self._key

    def of_rank(self, rank: int) -> Entry:
        return Entry(self._store, f"{self._key}/rank-{rank}", self._options)

    def check(self) -> None:
        if not self._options.overwrite and self._key in self._store:
            raise AlreadyExistsError(
                f"Checkpoint already exists under {self._key!r}, and overwrite is False: save to another key, or "
                "delete it",
                key=self._key,
            )

    def missing(self) -> list[str]:
        return []

    def announce(self, ticket: Ticket) -> None:
        self._store.put(self._note, {"save": ticket.save, "world_size": ticket.world_size})

    def current(self, ticket: Ticket) -> Ticket:
        said = self._store.get(self._note)
        return Ticket(said["save"], ticket.rank, said["world_size"])

    @property
    def _note(self) -> str:
        """A key beside the checkpoint's, while a save runs whose planner caches plans."""
        return f"{self._key}/dcp-save"

    def take_part(self, ticket: Ticket) -> Callable[[], None]:
        return _nothing  # the store keeps parts for a time, whoever lives

    def write(self, ticket: Ticket, boxes: Sequence[tuple[str, PlannedBox]]) -> WrittenFile:
        parts: dict[tuple[str, str], list[PlannedBox]] = defaultdict(list)
        for key, box in boxes:
            parts[key, box.path].append(box)
        value: dict[str, dict[str, Any]] = {STATE: {}, BYTES: {}}
        for (key, name), found in parts.items():
            value.setdefault(key, {})
            made = tuple((box.box.offsets, _made(box)) for box in found)
            value[key][name] = TensorShards(found[0].dtype, found[0].shape, made)
        self._store.put_sharded(
            self._key,
            value,
            attempt=ticket.save,
            rank=ticket.rank,
            world_size=ticket.world_size + 1,
            expect_version=self._expected,
            wait=False,
            lease=_LEASE,
        )
        return WrittenFile(ticket.save, None, (None,) * len(boxes))

    def publish(self, finished: Finished) -> None:
        self._store.put_sharded(
            self._key,
            {DCP: finished.objects},
            attempt=finished.save,
            rank=finished.world_size,
            world_size=finished.world_size + 1,
            expect_version=self._expected,
        )
        self._store.delete(self._note, missing_ok=True)

    def abandon(self, save: str) -> None:
        with contextlib.suppress(MemstoreError):  # the store is closed or gone, or the attempt has ended
            self._store.abort(self._key, save)
        with contextlib.suppress(MemstoreError):
            said = self._store.get(self._note)
            if isinstance(said, dict) and cast("dict[Any, Any]", said).get("save") == save:
                self._store.delete(self._note, missing_ok=True)

    def sweep(self) -> None:
        """The store frees what dead processes have left."""

    @property
    def _expected(self) -> int | None:
        return None if self._options.overwrite else 0

    def open(self) -> EntryCheckpoint:
        *_, writable = self._store.lend_root(self._key)
        return EntryCheckpoint(self._store.ref(self._key), can_be_sent=writable)


def _nothing() -> None: ...


def _made(box: PlannedBox) -> torch.Tensor:
    made = torch.empty(box.box.shape, dtype=box.dtype) if box.box.is_empty else box.make().detach()
    return made if made.dtype == box.dtype else made.to(box.dtype)


class EntryCheckpoint:
    """One that is there: a version of a key, which stays readable as long as this lives.

    Args:
        can_be_sent: whether the reference can: from a store that was only opened to read it can't, for want of a lease.
    """

    def __init__(self, ref: Ref, *, can_be_sent: bool = True) -> None:
        self._ref, self.can_be_sent = ref, can_be_sent
        self._view: Any = ref.view()
        if not (isinstance(self._view, dict) and DCP in self._view):
            raise KeyNotFoundError(f"{ref.key!r} has a value that is no checkpoint: store.get reads it", key=ref.key)

    @property
    def id(self) -> str:
        return f"{self._ref.key} version {self._ref.version}"

    def tensors(self, key: str) -> Mapping[str, Tensor]:
        value = self._view.get(key, {})
        if not isinstance(value, dict):
            raise self.damaged(f"its {key!r} is {an(type(value))}, and no dict of tensors")
        found: dict[str, Tensor] = {}
        for name, leaf in cast("dict[Any, Any]", value).items():
            if not (isinstance(name, str) and isinstance(leaf, StoredTensor)):
                raise self.damaged(f"its {key!r} has {an(type(leaf))} at {name!r:.100}, and no tensor with a name")
            shape = tuple(leaf.shape)
            found[name] = Tensor(leaf.dtype, shape, [((0,) * len(shape), shape)])
        return found

    def objects(self) -> Any:
        return self._view[DCP]

    def read(self, parts: Sequence[Part]) -> None:
        with torch.no_grad():
            for part in parts:
                if not part.box.is_empty:
                    part.target.copy_(self._view[part.key][part.name][part.box.slices])

    def damaged(self, detail: str) -> CorruptionError:
        return CorruptionError(key=self._ref.key, detail=detail)

    def share(self) -> Any:
        return self._ref if self.can_be_sent else (self._ref.key, self._ref.version)

    def shared(self, said: Any) -> EntryCheckpoint:
        if said in (self._ref, (self._ref.key, self._ref.version)):
            return self
        key, version = said if isinstance(said, tuple) else (said.key, said.version)
        if key != self._ref.key:
            raise VersionGoneError(f"the ranks read {self._ref.key!r} and {key!r}: give all of them one key")
        if isinstance(said, tuple):
            versions = f"{version} and {self._ref.version}"
            raise VersionGoneError(
                f"{key!r} was overwritten while the ranks opened it; they have versions {versions}: load again", key=key
            )
        return EntryCheckpoint(said)
