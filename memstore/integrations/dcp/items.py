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
from memstore.integrations.dcp.places import BYTES, STATE, WRAPPED, Part, Tensor, wrapped_name
from memstore.integrations.dcp.planners import EncodedTensor, decode_tensor
from memstore.sharding import Box, whole
from memstore.snapshot.planned import PlannedBox
from memstore.structure import (
    RefusedError,
    fill_parts,
    in_memory,
    is_made_of_several,
    why_no_memory,
    why_parts_not_filled,
)
from memstore.wording import an, first_line


class Planned(NamedTuple):
    """An item of a plan, and its box. `key`: STATE, BYTES or WRAPPED."""

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
    shown = _looked_up(item, planner)
    if shown is not None and is_made_of_several(shown):
        return _wrapped(item, planner)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    made = PlannedBox(name, data.properties.dtype, tuple(data.size), box, partial(_resolve, planner, item))
    return Planned(item.index, STATE, made)


def _looked_up(item: WriteItem, planner: SavePlanner) -> torch.Tensor | None:
    """The tensor of an item, where the planner can show it without making it. Checked, if it is a plain one.

    Raises UnsupportedValueError for one without memory: now, when nothing is written yet.
    """
    look_up = getattr(planner, "lookup_object", None)
    found = None if look_up is None else look_up(item.index)
    if not isinstance(found, torch.Tensor):
        return None
    if type(found) in (torch.Tensor, torch.nn.Parameter) and not is_made_of_several(found):
        reason = why_no_memory(found)
        if reason is not None:
            raise UnsupportedValueError(f"{item.index.fqn}: {reason}")
    return found


def _wrapped(item: WriteItem, planner: SavePlanner) -> Planned:
    """A tensor that is made of several, as bytes that say how to make it again."""
    name = item.index.fqn
    found: Any = planner.resolve_data(item)
    encoded = EncodedTensor(name, found)
    box = whole((encoded.nbytes,))
    return Planned(item.index, WRAPPED, PlannedBox(wrapped_name(item.index), torch.uint8, box.shape, box, encoded.make))


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
    try:
        return in_memory(settled(found))
    except RefusedError as error:
        raise UnsupportedValueError(f"{item.index.fqn}: {error.reason}") from None


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
    if tensor is None and key == STATE:
        chunk = stored[WRAPPED].get(wrapped_name(item.storage_index))
        if chunk is not None:
            return _reading_of_several(item, planner, chunk)
    if tensor is None:
        raise KeyNotFoundError(f"the checkpoint has no {name!r} among its {'bytes' if key == BYTES else 'tensors'}")
    if key == BYTES:
        data = torch.empty(tensor.shape, dtype=torch.uint8)
        part = Part(key, name, whole(tensor.shape), data)
        return Reading(part, partial(_load_bytes, planner, item, data))
    box = _box_of(item, tensor)
    target = _target_of(item, planner, box.shape)
    if is_made_of_several(target):
        data = torch.empty(box.shape, dtype=tensor.dtype)
        return Reading(Part(key, name, box, data), partial(_fill, planner, item, target, data))
    target = target.detach()
    return Reading(Part(key, name, box, target), partial(planner.commit_tensor, item, target))


def _target_of(
    item: ReadItem, planner: LoadPlanner, shape: tuple[int, ...], takes_whole_tensors: bool = False
) -> torch.Tensor:
    target = settled(planner.resolve_tensor(item))
    is_dense = target.layout is torch.strided and not target.is_quantized
    why = None if 0 in shape or (takes_whole_tensors and not is_dense) else why_parts_not_filled(target)
    if why is not None:
        raise StructureMismatchError(f"{item.dest_index.fqn}: {why}; nothing was loaded on this rank")
    if tuple(target.shape) != shape:
        raise StructureMismatchError(
            f"{item.storage_index.fqn}: the plan reads a part of shape {list(shape)}, and the tensor for it is of "
            f"shape {list(target.shape)}"
        )
    return target


def _reading_of_several(item: ReadItem, planner: LoadPlanner, chunk: Tensor) -> Reading:
    """A part of a chunk that is stored as the tensors that it is made of: the chunk is read whole, and cut then."""
    name, sizes = item.storage_index.fqn, tuple(item.lengths)
    target = _target_of(item, planner, sizes, takes_whole_tensors=True)  # copy_ fills sparse and quantized ones
    data = torch.empty(chunk.shape, dtype=torch.uint8)

    def finish() -> None:
        found = decode_tensor(name, data)
        starts = tuple(item.storage_offsets)
        try:
            for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                if size != found.shape[dim]:
                    found = found.narrow(dim, start, size)
        except Exception as error:  # of the class's own operators
            raise UnsupportedValueError(
                f"{name}: {an(type(found))} of shape {list(found.shape)} is stored, of which this rank wants a part, "
                f"and it can't be cut: load it with the sharding that it was saved with ({first_line(error):.200})"
            ) from error
        _fill(planner, item, target, found)

    return Reading(Part(WRAPPED, wrapped_name(item.storage_index), whole(chunk.shape), data), finish)


def _fill(planner: LoadPlanner, item: ReadItem, target: torch.Tensor, found: torch.Tensor) -> None:
    """Copies what was read into a tensor, where one of the two is made of several."""
    with torch.no_grad():
        try:
            if not fill_parts(target, found):
                target.copy_(found)
        except Exception as error:  # of the class's own operators
            raise StructureMismatchError(
                f"{item.dest_index.fqn}: {an(type(found))} is stored, which can't be copied into {an(type(target))} "
                f"({first_line(error):.200})"
            ) from error
    planner.commit_tensor(item, target)


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
