"""A snapshot that others have planned, read: its tensors by name, and boxes of them into tensors that are there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memstore import modes
from memstore.errors import CorruptionError, NotAStoreError
from memstore.sharding import Box, Shard
from memstore.snapshot.format import StoredTensor
from memstore.snapshot.progress import SILENT
from memstore.snapshot.read import Stored, Value, Want, new_memory, read_into
from memstore.structure import DTYPES

_BATCH = 1 << 28  # bytes of memory for what is stored in another dtype than that of its target


class Wanted(NamedTuple):
    """A part of a stored tensor, and where it goes: a tensor of just these elements, on any device, of any dtype."""

    tensor: StoredTensor
    box: Box
    target: torch.Tensor


class PlannedSnapshot:
    """A snapshot in a folder.

    Raises:
        NotAStoreError: there is none.
        CorruptionError, FormatVersionError: its manifest is damaged, or of a newer memstore.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._stored = Stored(os.path.abspath(path))

    @property
    def id(self) -> str:
        """Of the save that wrote it."""
        return self._stored.manifest.id

    def has(self, key: str) -> bool:
        """Whether there is a value of this name."""
        return self._stored.value(0, key) is not None

    def tensors(self, key: str) -> Mapping[str, StoredTensor]:
        """Those of a value, by name."""
        value = self._value(key)
        return {str(leaf.name[0]): tensor for leaf, tensor in zip(value.plan.leaves, value.tensors, strict=True)}

    def objects(self, key: str) -> Any:
        """A value without tensors."""
        value = self._value(key)
        if value.tensors:
            raise self._stored.damaged(f"the value {key!r} has tensors")
        return self._stored.build(value, [], allow_pickle=False)

    def _value(self, key: str) -> Value:
        value = self._stored.value(0, key)
        if value is None:
            raise NotAStoreError(
                f"{self._stored.path} has a snapshot that is no checkpoint, as it has no {key!r}: "
                "memstore.Snapshot reads it"
            )
        return value

    def damaged(self, detail: str) -> CorruptionError:
        """An error that names the manifest."""
        return self._stored.damaged(detail)

    @modes.put_aside()
    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fills the targets. Bytes are compared with their checksums, where most of a chunk of 16 MiB is read.

        Raises:
            CorruptionError: bytes are damaged, or missing. The targets then have any content.
            VersionGoneError: a later snapshot has taken the place of this one.
        """
        straight: list[Want] = []
        others: list[Wanted] = []
        for one in wanted:
            if one.box.is_empty:
                continue
            if one.target.dtype == DTYPES[one.tensor.dtype]:
                straight.append(Want(one.tensor, [Shard(one.box, one.target)]))
            else:
                others.append(one)
        self._stored.check_files([one.tensor for one in wanted])
        if straight:
            read_into(self._stored, straight, SILENT, check_narrow=False)
        self._read_cast(others)

    def _read_cast(self, wanted: Sequence[Wanted]) -> None:
        batch: list[tuple[Wanted, torch.Tensor]] = []
        nbytes = 0
        for one in wanted:
            made = new_memory(one.tensor.path, one.box.shape, DTYPES[one.tensor.dtype], "cpu")
            if batch and nbytes + made.nbytes > _BATCH:
                self._read_batch(batch)
                batch, nbytes = [], 0
            batch.append((one, made))
            nbytes += made.nbytes
        self._read_batch(batch)

    def _read_batch(self, batch: Sequence[tuple[Wanted, torch.Tensor]]) -> None:
        wants = [Want(one.tensor, [Shard(one.box, made)]) for one, made in batch]
        if wants:
            read_into(self._stored, wants, SILENT, check_narrow=False)
        with torch.no_grad():
            for one, made in batch:
                one.target.copy_(made)
