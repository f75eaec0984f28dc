"""Snapshots of memstore, and those of them that are checkpoints of torch.distributed.checkpoint.

A snapshot can have any value, with its containers, its objects, and tensors that share memory.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from memstore._wording import short
from memstore.convert.checkpoint_files import SourceFiles
from memstore.convert.leaves import Assembly, Rules, SourceValue
from memstore.convert.naming import nested
from memstore.errors import UnsupportedValueError
from memstore.formats import ByteMeter
from memstore.integrations.dcp.places import BYTES, STATE, WRAPPED, FolderCheckpoint, wrapped_name
from memstore.integrations.dcp.planners import decode_object, decode_tensor
from memstore.integrations.dcp.plans import metadata_of
from memstore.sharding import Box
from memstore.snapshot.drafts import write_values
from memstore.snapshot.manifest import ManifestTensor
from memstore.snapshot.stored import Stored, Value
from memstore.structure import DTYPES, traits

# --- Reading ---------------------------------------------------------------------------------------------------------


WHOLE = "state"  # the name in the app state of a value that is no app state


def open_snapshot(path: str, rules: Rules) -> SourceValue:
    """Opens the state dicts by their names; what `Snapshot.take` would have been given.

    Raises:
        UnsupportedValueError: ranks had different values under one name.
    """
    stored = Stored(path)
    _check_ranks(stored)
    reader = _SnapshotTensors(stored)
    values: dict[str, Any] = {}
    for key in stored.keys(stored.manifest.world_size):
        value = stored.value(0, key)
        assert value is not None  # keys() names those that a rank has
        values[key] = reader.value(value, rules)
    return SourceValue(values[WHOLE] if set(values) == {WHOLE} else values, reader.assembly.boxes)


def _check_ranks(stored: Stored) -> None:
    """Refuses what each rank had for itself: a target has one value. What was spread over ranks is one."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, values in enumerate(stored.manifest.ranks):
        for key, index in values.items():
            first, one = seen.setdefault(key, (rank, index))
            # they have one name: what differs is in them
            if one != index and stored.manifest.values[one] != stored.manifest.values[index]:
                raise UnsupportedValueError(
                    f"{stored.path}: ranks {first} and {rank} have different values under {key!r}, and a conversion "
                    "has one: restore it with as many ranks, and save it anew without"
                )


class _SnapshotTensors:
    """The tensors over the files of a snapshot; those that are one there are one here."""

    def __init__(self, stored: Stored) -> None:
        self.assembly = Assembly()
        self._stored, self._files = stored, SourceFiles(stored.path)
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
                found = SourceValue(None, self.assembly.boxes).leaf(found).whole()
            tensors.append(traits.with_traits(found, kind))
        return self._stored.build(value, tensors, allow_pickle=rules.allow_pickle)

    def tensor(self, tensor: ManifestTensor) -> torch.Tensor:
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


def open_checkpoint(path: str, rules: Rules) -> SourceValue:
    """Opens the state dict that torch.distributed.checkpoint has saved with memstore's StorageWriter."""
    checkpoint = FolderCheckpoint(path)
    metadata = metadata_of(checkpoint)
    stored, tensors = checkpoint.opened
    stored.check_files(stored.manifest.tensors)
    reader = _SnapshotTensors(stored)
    items: dict[str, Any] = {name: reader.tensor(tensor) for name, tensor in tensors[STATE].items()}
    for name, tensor in tensors[BYTES].items():
        items[name] = decode_object(name, reader.tensor(tensor).numpy().tobytes())
    for name, said in metadata.state_dict_metadata.items():
        if name in items or not isinstance(said, TensorStorageMetadata):
            continue
        if len(said.chunks) > 1:
            raise UnsupportedValueError(
                f"{path}: {short(name)} is made of several tensors, and was saved in {len(said.chunks)} parts: load it "
                "with the sharding that it was saved with"
            )
        chunk = reader.tensor(tensors[WRAPPED][wrapped_name(MetadataIndex(name, said.chunks[0].offsets))])
        items[name] = decode_tensor(name, SourceValue(None, reader.assembly.boxes).leaf(chunk).whole())
    return SourceValue(nested(items, metadata.planner_data, path), reader.assembly.boxes)


# --- Writing ---------------------------------------------------------------------------------------------------------


def app_state_of(value: Any) -> dict[str, Any]:
    """Returns a dict of dicts as it is, an app state. Another value, or one that looks like it, gets one name."""
    if type(value) is not dict:
        return {WHOLE: value}
    entries = cast("dict[Any, Any]", value)
    is_state = all(type(key) is str and isinstance(entry, dict) for key, entry in entries.items())
    return entries if is_state and set(entries) not in (set(), {WHOLE}) else {WHOLE: value}


def write_snapshot(found: SourceValue, rules: Rules, folder: str, name: str, meter: ByteMeter) -> None:
    write_values(
        folder,
        app_state_of(found.value),
        lambda tensor: found.leaf(tensor).cut(),
        durable=True,
        allow_pickle=rules.allow_pickle,
        done=meter.add,
    )
