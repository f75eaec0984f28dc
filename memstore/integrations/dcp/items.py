"""What a plan of torch.distributed.checkpoint wants written, as boxes; and what it wants read, as parts."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from memstore.errors import KeyNotFoundError, StructureMismatchError, UnsupportedValueError
from memstore.integrations.dcp.places import BYTES, STATE, Part, Tensor
from memstore.sharding import Box, whole
from memstore.snapshot.planned import PlannedBox
from memstore.structure import why_not_filled
from memstore.wording import an


class Planned(NamedTuple):
    """An item of a plan, and its box. `key`: STATE or BYTES."""

    item: MetadataIndex
    key: str
    box: PlannedBox


def planned_items(plan: SavePlan, planner: SavePlanner) -> list[Planned]:
    """The items that a rank writes. The bytes of bytes items are asked for now; tensors when they are written.

    Raises:
        UnsupportedValueError: an item is no tensor and no bytes.
    """
    return [_planned(item, planner) for item in plan.items]


def _planned(item: WriteItem, planner: SavePlanner) -> Planned:
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        data = _bytes_of(name, planner.resolve_data(item))
        box = whole((len(data),))
        return Planned(
            item.index,
            BYTES,
            PlannedBox(name, torch.uint8, box.shape, box, partial(torch.frombuffer, data, dtype=torch.uint8)),
        )
    data = item.tensor_data
    if data is None:
        raise UnsupportedValueError(f"{name}: the plan has a tensor of which it says neither shape nor dtype")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    made = PlannedBox(name, data.properties.dtype, tuple(data.size), box, partial(_resolve, planner, item))
    return Planned(item.index, STATE, made)


def _bytes_of(name: str, found: Any) -> bytearray:
    if isinstance(found, io.BytesIO):
        return bytearray(found.getbuffer())
    if isinstance(found, bytes | bytearray | memoryview):
        return bytearray(found)
    raise UnsupportedValueError(f"{name}: the planner gives {an(type(found))} for a bytes item, and not a BytesIO")


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    found = planner.resolve_data(item)
    if not isinstance(found, torch.Tensor):
        raise UnsupportedValueError(f"{item.index.fqn}: the planner gives {an(type(found))} for a tensor")
    if found.is_meta:
        raise UnsupportedValueError(
            f"{item.index.fqn}: the tensor is on the meta device and has no values: leave it out of the state dict, or "
            "make it real before the save"
        )
    return settled(found)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; of one that a collective of torch is still to fill, what it fills, once it has."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


class Reading(NamedTuple):
    """An item that is read: where it goes to, and what its planner is told afterwards."""

    part: Part
    finish: Callable[[], None]


def reading_of(item: ReadItem, planner: LoadPlanner, stored: Mapping[str, Mapping[str, Tensor]]) -> Reading:
    """What is read for an item.

    Raises:
        KeyNotFoundError: the checkpoint has no such item.
        StructureMismatchError: what is wanted lies not in the stored tensor, or the target has another shape, or can't
            be filled.
    """
    name = item.storage_index.fqn
    key = BYTES if item.type == LoadItemType.BYTE_IO else STATE
    tensor = stored[key].get(name)
    if tensor is None:
        raise KeyNotFoundError(f"the checkpoint has no {name!r} among its {'bytes' if key == BYTES else 'tensors'}")
    if key == BYTES:
        data = torch.empty(tensor.shape, dtype=torch.uint8)
        part = Part(key, name, whole(tensor.shape), data)
        return Reading(part, partial(_load_bytes, planner, item, data))
    box = _box_of(item, tensor)
    found = settled(planner.resolve_tensor(item))
    why = None if box.is_empty else why_not_filled(found)
    if why is not None:
        raise StructureMismatchError(f"{item.dest_index.fqn}: {why}; nothing was loaded on this rank")
    target = found.detach()
    if tuple(target.shape) != box.shape:
        raise StructureMismatchError(
            f"{name}: the plan reads a part of shape {list(box.shape)}, and the tensor for it is of shape "
            f"{list(target.shape)}"
        )
    return Reading(Part(key, name, box, target), partial(planner.commit_tensor, item, target))


def _box_of(item: ReadItem, tensor: Tensor) -> Box:
    """Which elements of the whole tensor an item wants."""
    inner, sizes = tuple(item.storage_offsets), tuple(item.lengths)
    chunk = tuple(item.storage_index.offset or (0,) * len(inner))
    fits = len(chunk) == len(inner) == len(sizes) == len(tensor.shape) and all(
        start >= 0 and size >= 0 and start + size <= length
        for start, size, length in zip(map(sum, zip(chunk, inner, strict=True)), sizes, tensor.shape, strict=True)
    )
    if not fits:
        raise StructureMismatchError(
            f"{item.storage_index.fqn}: the plan reads {list(sizes)} elements at {list(chunk)} + {list(inner)}, and "
            f"the stored tensor is of shape {list(tensor.shape)}"
        )
    return Box(tuple(map(sum, zip(chunk, inner, strict=True))), sizes)


def _load_bytes(planner: LoadPlanner, item: ReadItem, data: torch.Tensor) -> None:
    planner.load_bytes(item, io.BytesIO(data.numpy().tobytes()))
