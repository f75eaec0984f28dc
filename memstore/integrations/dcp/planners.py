"""torch's planners, with bytes items that are neither pickled nor unpickled.

Objects that aren't tensors are stored as in a store: containers, numbers, texts, arrays, dataclasses and more. An item
that was saved in this way starts with a mark, by which a loader recognises it.
"""

from __future__ import annotations

import io
import struct
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType
from torch.nn.parameter import is_lazy

from memstore import _modes as modes
from memstore import structure
from memstore._compat import is_sharded_tensor
from memstore._parsing import UNDECODABLE
from memstore._wording import an, first_line
from memstore.errors import (
    CorruptionError,
    ResourceLimitError,
    StructureMismatchError,
    UnsupportedValueError,
    lacks_told,
)
from memstore.structure import traits

_MARK, _STREAM = b"memstore object 1\n", b"memstore stream 1\n"
_POSITION = struct.Struct("<Q")
_TENSOR, _LENGTHS = b"memstore tensor 1\n", struct.Struct("<QQ")
_ALIGNMENT = 64
_ANY_SIZE = 1 << 62
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class _Object(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value: its structure and the objects in it, as records have them, and the bytes of its tensors."""

    structure: bytes
    objects: bytes
    memory: bytes


@modes.uncompiled_methods
class SavePlanner(DefaultSavePlanner):
    """torch's DefaultSavePlanner, with the same arguments. Objects that aren't tensors are stored without pickle."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Raises UnsupportedValueError for a state dict without an end, or a tensor that is expanded beyond measure."""
        structure.check_nesting(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for name, item in self.state_dict.items():
            reason = traits.why_too_expanded(item) if type(item) in _PLAIN else None
            if reason:
                raise UnsupportedValueError(f"{name}: {reason}: save what it is expanded from")

    def create_local_plan(self) -> SavePlan:
        """Raises UnsupportedValueError, which names the item, for a tensor that no plan can describe."""
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and not is_sharded_tensor(value):
                _check_plannable(name, value)
        return super().create_local_plan()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Raises UnsupportedValueError, which names the item, for an object that can't be stored."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(encode_object(write_item.index.fqn, object))
        return super().transform_object(write_item, object)


@modes.uncompiled_methods
class LoadPlanner(DefaultLoadPlanner):
    """torch's DefaultLoadPlanner, with the same arguments, but without unpickling.

    Bytes items that torch's planner has saved are read with `weights_only=True`, which allows plain types only.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Raises StructureMismatchError for tensors that torch can't plan for; it names them."""
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        for path, tensor in structure.iter_tensors(state_dict):
            # With a process group, torch puts tensors on its device in the place of meta tensors.
            if is_lazy(tensor) or (tensor.is_meta and not has_group):
                name, why = ".".join(map(str, path)), structure.why_not_filled(tensor)
                raise StructureMismatchError(f"{name}: {why}; nothing was loaded on this rank")
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises UnsupportedValueError for an item that only pickle could read, CorruptionError for a damaged one."""
        name = read_item.dest_index.fqn
        found = decode_object(name, value.getvalue())
        place: Any = self.original_state_dict
        if not self.flatten_state_dict:
            self.state_dict[name] = self.original_state_dict[name] = found  # the first may be a copy of the second
            return
        *path, last = self.mappings[name]
        for step in path:
            place = place[_key(place, step)]
        place[_key(place, last)] = found


def _key(place: Any, step: str | int) -> Any:
    """Returns what torch calls `step`: it has the keys of dicts as texts, those that are numbers, too."""
    if isinstance(place, dict) and step not in place:
        keys = [key for key in cast("dict[Any, Any]", place) if str(key) == step]
        return keys[0] if keys else step
    return step


def encode_object(name: str, value: Any) -> bytes:
    """Encodes a value for a bytes item. A BytesIO, into which trainers pickle themselves, is kept."""
    if type(value) is io.BytesIO:
        return _STREAM + _POSITION.pack(value.tell()) + value.getvalue()
    try:
        flat = structure.flatten(value, inline_limit=_ANY_SIZE)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(
            f"{name}: {error.message}: memstore's planner doesn't pickle; torch's DefaultSavePlanner does"
        ) from None
    return _MARK + msgspec.msgpack.encode(_Object(flat.plan.description, flat.objects, structure.contents(flat)))


def _check_plannable(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedValueError for a tensor of which torch's plans can't say what it is."""
    if tensor.is_nested:
        raise UnsupportedValueError(
            f"{name}: a nested tensor, of which torch.distributed.checkpoint can't say the shape: save its values() "
            "and offsets(), or its unbind()"
        )
    if tensor.dtype in structure.traits.WITHOUT_COPY:
        raise UnsupportedValueError(
            f"{name}: a tensor of {tensor.dtype}, which torch.distributed.checkpoint can't save: save its "
            "view(torch.uint8)"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        try:
            tensor.is_pinned()  # which torch's plans say
        except Exception as error:  # of the class's own operators
            raise UnsupportedValueError(
                f"{name}: {an(type(tensor))} whose class lacks what torch.distributed.checkpoint asks it for: "
                f"{first_line(error):.200}"
            ) from error
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not structure.is_made_of_several(tensor):
        reason = structure.why_no_memory(tensor)
        if reason is not None:
            raise UnsupportedValueError(f"{name}: {reason}")


class EncodedTensor:
    """A tensor that is made of several, as bytes; they are made when they are wanted.

    A mark, the length of a head and where the memory starts, the head, and from a multiple of 64 on the memory.

    Attributes:
        nbytes: of all.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        """Raises UnsupportedValueError, which names the item, if it can't be stored."""
        try:
            self._flat = structure.flatten(tensor, inline_limit=0)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(f"{name}: {error.message.removeprefix('value: ')}") from None
        head = msgspec.msgpack.encode((self._flat.plan.description, self._flat.objects))
        before = len(_TENSOR) + _LENGTHS.size + len(head)
        self._start = -(-before // _ALIGNMENT) * _ALIGNMENT
        self._head = _TENSOR + _LENGTHS.pack(len(head), self._start) + head
        self.nbytes = self._start + self._flat.plan.nbytes

    def make(self) -> torch.Tensor:
        memory = np.zeros(self.nbytes, np.uint8)
        memory[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        structure.fill(self._flat, memory[self._start :])
        return torch.from_numpy(memory)


def decode_tensor(name: str, data: torch.Tensor) -> torch.Tensor:
    """Makes the tensor that `EncodedTensor` was made of, over the memory of `data`. Raises CorruptionError."""
    memory = data.numpy()
    try:
        lengths = memory[len(_TENSOR) : len(_TENSOR) + _LENGTHS.size].tobytes()
        if memory[: len(_TENSOR)].tobytes() != _TENSOR or len(lengths) != _LENGTHS.size:
            raise CorruptionError(detail="it is no tensor")
        length, start = _LENGTHS.unpack(lengths)
        head = memory[len(_TENSOR) + _LENGTHS.size :][:length].tobytes()
        description, objects = msgspec.msgpack.decode(head, type=tuple[bytes, bytes])
        plan = structure.plan_of(description)
        if plan.nbytes > len(memory) - start:
            raise CorruptionError(detail=f"it needs {plan.nbytes:,} bytes, and has {len(memory) - start:,}")
        found = structure.rebuild(plan, objects, memory[start:], None)
    except UNDECODABLE as error:
        raise CorruptionError(detail=f"the tensor {name!r:.100} can't be read: {error}") from None
    except CorruptionError as error:
        raise CorruptionError(detail=f"the tensor {name!r:.100} can't be read: {error.detail}") from None
    if not isinstance(found, torch.Tensor):
        raise CorruptionError(detail=f"the tensor {name!r:.100} can't be read: it is no tensor")
    return found


def decode_object(name: str, data: bytes) -> Any:
    """Returns what `encode_object` was given; or what torch's planner has saved, if no class stands in it."""
    if data.startswith(_STREAM):
        return _stream_of(name, data[len(_STREAM) :])
    if not data.startswith(_MARK):
        return _read_torch(name, data)
    try:
        found = msgspec.msgpack.decode(memoryview(data)[len(_MARK) :], type=_Object)
    except UNDECODABLE as error:
        raise CorruptionError(detail=f"the bytes item {name!r:.100} can't be read: {error}") from None
    try:
        plan = structure.plan_of(found.structure)
        if plan.nbytes > len(found.memory):
            raise CorruptionError(detail=f"it needs {plan.nbytes:,} bytes, and has {len(found.memory):,}")
        return structure.rebuild(plan, found.objects, np.frombuffer(bytearray(found.memory), np.uint8), None)
    except CorruptionError as error:
        raise CorruptionError(detail=f"the bytes item {name!r:.100} can't be read: {error.detail}") from None


def _stream_of(name: str, data: bytes) -> io.BytesIO:
    if len(data) < _POSITION.size:
        raise CorruptionError(detail=f"the bytes item {name!r:.100} can't be read: it is cut")
    stream = io.BytesIO(data[_POSITION.size :])
    stream.seek(min(_POSITION.unpack_from(data)[0], len(data) - _POSITION.size))
    return stream


def _read_torch(name: str, data: bytes) -> Any:
    try:
        with lacks_told(name):
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except ResourceLimitError:
        raise
    except Exception as error:  # torch documents none of those that it raises for foreign bytes
        raise UnsupportedValueError(
            f"the bytes item {name!r:.100} was saved by another planner, with pickle, and isn't read without: if you "
            f"trust who saved it, load with torch's DefaultLoadPlanner ({first_line(error):.200})"
        ) from None
