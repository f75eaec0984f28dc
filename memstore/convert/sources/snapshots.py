"""memstore's snapshots; and those of them that are checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from memstore.convert.leaves import Assembly, Found
from memstore.convert.nesting import nested
from memstore.convert.rules import Rules
from memstore.convert.sources.mapped_files import MappedFiles
from memstore.errors import UnsupportedValueError
from memstore.integrations.dcp import StorageReader
from memstore.integrations.dcp.places import WRAPPED, wrapped_name
from memstore.integrations.dcp.planners import decode_object, decode_tensor
from memstore.sharding import Box
from memstore.snapshot.read import Stored, StoredTensor, Value
from memstore.structure import DTYPES, traits
from memstore.wording import short

WHOLE = "state"  # the name in the app state of a value that is no app state


def open_snapshot(path: str, rules: Rules) -> Found:
    """The state dicts by their names; what `Snapshot.take` would have been given.

    Raises:
        UnsupportedValueError: ranks had different values under one name.
    """
    stored = Stored(path)
    _check_ranks(stored)
    reader = _Reader(stored)
    values = {key: reader.value(_value(stored, key), rules) for key in stored.keys(stored.manifest.world_size)}
    return Found(values[WHOLE] if set(values) == {WHOLE} else values, reader.assembly.boxes)


def _check_ranks(stored: Stored) -> None:
    """What was spread over ranks is one value; what each had for itself is several, and there is one in a target."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, values in enumerate(stored.manifest.ranks):
        for key, index in values.items():
            first, one = seen.setdefault(key, (rank, index))
            if one != index and not _are_alike(stored, one, index):
                raise UnsupportedValueError(
                    f"{stored.path}: ranks {first} and {rank} have different values under {key!r}, and a conversion "
                    "has one: restore it with as many ranks, and save it anew without"
                )


def _are_alike(stored: Stored, one: int, other: int) -> bool:
    first, second = stored.manifest.values[one], stored.manifest.values[other]
    return (first.structure, first.objects, first.tensors) == (second.structure, second.objects, second.tensors)


def _value(stored: Stored, key: str) -> Value:
    found = stored.value(0, key)
    assert found is not None  # keys() names those that a rank has
    return found


class _Reader:
    """Makes tensors over the files of a snapshot; those that are one there are one here."""

    def __init__(self, stored: Stored) -> None:
        self.assembly = Assembly()
        self._stored, self._files = stored, MappedFiles(stored.path)
        self._made: dict[int, torch.Tensor] = {}

    def value(self, value: Value, rules: Rules) -> Any:
        self._stored.check_files(value.tensors)
        tensors: list[torch.Tensor] = []
        for i, (tensor, kind) in enumerate(zip(value.tensors, value.plan.traits, strict=True)):
            if i in value.plan.same:
                tensors.append(tensors[value.plan.same[i]])
                continue
            found = self.tensor(tensor)
            if i in value.plan.loaded:  # a container looks into it: offsets of a jagged tensor
                found = Found(None, self.assembly.boxes).leaf(found).whole()
            tensors.append(traits.with_traits(found, kind))
        return self._stored.build(value, tensors, allow_pickle=rules.allow_pickle)

    def tensor(self, tensor: StoredTensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            dtype, files = DTYPES[tensor.dtype], self._stored.manifest.files
            boxes = tuple(
                (
                    Box(box.offsets, box.shape),
                    self._files.tensor(files[box.file].name, box.offset, dtype, box.shape),
                )
                for box in tensor.boxes
            )
            self._made[id(tensor)] = self.assembly.tensor(dtype, tensor.shape, boxes)
        return self._made[id(tensor)]


def open_checkpoint(path: str, rules: Rules) -> Found:
    """The state dict that torch.distributed.checkpoint has saved with memstore's StorageWriter."""
    metadata = StorageReader(path).read_metadata()
    stored = Stored(path)
    reader = _Reader(stored)
    items: dict[str, Any] = {}
    for key in ("state", "bytes"):
        value = _value(stored, key)
        stored.check_files(value.tensors)
        for leaf, tensor in zip(value.plan.leaves, value.tensors, strict=True):
            found = reader.tensor(tensor)
            name = str(leaf.name[0])
            items[name] = found if key == "state" else decode_object(name, found.numpy().tobytes())
    for name, chunks in _wrapped_chunks(stored, metadata).items():
        if len(chunks) > 1:
            raise UnsupportedValueError(
                f"{path}: {short(name)} is made of several tensors, and was saved in {len(chunks)} parts: load it with "
                "the sharding that it was saved with"
            )
        items[name] = decode_tensor(name, Found(None, reader.assembly.boxes).leaf(reader.tensor(chunks[0])).whole())
    return Found(nested(items, metadata.planner_data, path), reader.assembly.boxes)


def _wrapped_chunks(stored: Stored, metadata: Metadata) -> dict[str, list[StoredTensor]]:
    """The chunks of each tensor that is made of several."""
    value = stored.value(0, WRAPPED)
    if value is None:
        return {}
    stored.check_files(value.tensors)
    chunks = {str(leaf.name[0]): tensor for leaf, tensor in zip(value.plan.leaves, value.tensors, strict=True)}
    found: dict[str, list[StoredTensor]] = {}
    for name, said in metadata.state_dict_metadata.items():
        if isinstance(said, TensorStorageMetadata):
            own = [wrapped_name(MetadataIndex(name, chunk.offsets)) for chunk in said.chunks]
            if own and own[0] in chunks:
                found[name] = [chunks[one] for one in own]
    return found
