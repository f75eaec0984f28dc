"""torch's Metadata of a checkpoint, and what is stored of it beside the tensors: known types in msgpack, no pickle.

Names, dtypes, shapes and chunks of tensors stand in the manifest, or the store's record, of which the metadata is made
anew. What only torch knows is kept in two objects: a `Description`, and the planner's data where that isn't what the
planner of torch has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, cast

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from memstore.errors import CorruptionError, FormatVersionError
from memstore.integrations.dcp.places import BYTES, STATE, WRAPPED, Checkpoint, Tensor, text_of, wrapped_name
from memstore.structure import DTYPE_NAMES, DTYPES
from memstore.undecodable import UNDECODABLE
from memstore.wording import an

FORMAT = 2  # what has no wrapped tensors is written as 1, so that older versions read it
_MEMORY_FORMATS = {
    str(one): one
    for one in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}

PlannerPaths = dict[str, tuple[str | int, ...]]


class Properties(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of a tensor, as it was when it was saved; torch keeps them, and calls all of them deprecated."""

    requires_grad: bool = False
    pin_memory: bool = False
    memory_format: str = str(torch.contiguous_format)


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """torch's StorageMeta."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    modules: list[str] = []


class WrappedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that is made of several, as it shows itself. Its chunks: offsets and shape of each."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is stored of torch's metadata.

    Attributes:
        format: of this.
        version: of torch's metadata.
        paths: the planner's data, where that is where each item lies in a nested state dict.
        properties: of tensors that have other than the usual ones.
        order: the names of all items, as torch lists them.
        wrapped: tensors that are made of several.
    """

    format: int
    version: str | None
    order: list[str]
    paths: PlannerPaths | None
    properties: dict[str, Properties]
    origin: Origin | None
    wrapped: dict[str, WrappedTensor] = {}


def describe(metadata: Metadata, wrapped: Collection[str] = ()) -> dict[str, Any]:
    """Makes what is stored of it, as a value for memstore.

    Args:
        wrapped: the names of the tensors that are made of several.
    """
    properties: dict[str, Properties] = {}
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            kept = _kept(found.properties)
            if kept != Properties():
                properties[name] = kept
    paths = _paths_of(metadata.planner_data)
    origin = metadata.storage_meta
    description = Description(
        FORMAT if wrapped else 1,
        metadata.version,
        list(metadata.state_dict_metadata),
        paths,
        properties,
        None if origin is None else _origin_of(origin),
        {name: _wrapped_of(metadata.state_dict_metadata[name]) for name in wrapped},
    )
    return {
        "description": msgspec.msgpack.encode(description),
        "planner_data": metadata.planner_data if paths is None else None,
    }


def _wrapped_of(found: Any) -> WrappedTensor:
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
    return WrappedTensor(DTYPE_NAMES[found.properties.dtype], tuple(found.size), chunks)


def _kept(found: TensorProperties) -> Properties:
    return Properties(found.requires_grad, found.pin_memory, str(found.memory_format))


def _origin_of(meta: StorageMeta) -> Origin:
    place = None if meta.checkpoint_id is None else text_of(meta.checkpoint_id)
    if place is not None:  # a path may have bytes that are no UTF-8; nobody looks for the checkpoint by this
        place = os.fsencode(place).decode("utf-8", "replace")
    return Origin(place, meta.save_id, list(meta.modules))


def _paths_of(planner_data: Any) -> PlannerPaths | None:
    """The data of torch's planner, if it is that; to write it so takes a tenth of the time and of the bytes."""
    if not isinstance(planner_data, dict):
        return None
    found = cast("dict[Any, Any]", planner_data)
    fits = all(
        type(name) is str and type(path) is tuple and all(type(step) in (str, int) for step in cast("Any", path))
        for name, path in found.items()
    )
    return found if fits else None


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """torch's metadata of a checkpoint.

    Raises:
        CorruptionError: no save of memstore's wrote it.
        FormatVersionError: a newer memstore did.
    """
    objects = checkpoint.objects()
    if not isinstance(objects, dict):  # msgspec 0.23 indexes whatever can be indexed, such as tensors
        raise checkpoint.damaged(f"what torch says of it is {an(type(objects))}, and no dict")
    try:
        stored = msgspec.convert(objects, type=_Objects)
        version = msgspec.msgpack.decode(stored.description, type=_Version).format
        if not 1 <= version <= FORMAT:
            raise FormatVersionError(
                f"the checkpoint {checkpoint.id} has a description of format {version}, and this memstore reads "
                f"1 to {FORMAT}: use a newer one"
            )
        description = msgspec.msgpack.decode(stored.description, type=Description)
    except UNDECODABLE as error:
        raise checkpoint.damaged(f"what torch says of it can't be read: {error}") from None
    tensors, items = dict(checkpoint.tensors(STATE)), checkpoint.tensors(BYTES)
    stored_chunks = set(checkpoint.tensors(WRAPPED))
    for name, one in description.wrapped.items():
        names_of_chunks = {wrapped_name(MetadataIndex(name, torch.Size(offsets))) for offsets, _ in one.chunks}
        if name in tensors or one.dtype not in DTYPES or not names_of_chunks <= stored_chunks:
            raise checkpoint.damaged(f"what torch says of {name!r:.100} makes no sense")
        tensors[name] = Tensor(DTYPES[one.dtype], one.shape, one.chunks)
    names = list(dict.fromkeys(description.order))
    if len(names) != len(description.order) or set(names) != {*tensors, *items} or set(tensors) & set(items):
        raise checkpoint.damaged("what torch says of it names other tensors than it has")
    found: dict[str, STORAGE_TYPES] = {}
    for name in names:
        properties = description.properties.get(name, Properties())
        found[name] = (
            BytesStorageMetadata() if name in items else _tensor_of(tensors[name], properties, checkpoint.damaged)
        )
    origin = description.origin or Origin()
    return Metadata(
        found,
        planner_data=description.paths if stored.planner_data is None else stored.planner_data,
        storage_data=checkpoint.id,
        storage_meta=StorageMeta(origin.checkpoint_id, origin.save_id, None, origin.modules),
        version=description.version,
    )


def _tensor_of(
    tensor: Tensor, properties: Properties, damaged: Callable[[str], CorruptionError]
) -> TensorStorageMetadata:
    if properties.memory_format not in _MEMORY_FORMATS:
        raise damaged(f"what torch says of it has a memory format {properties.memory_format!r:.60}")
    return TensorStorageMetadata(
        TensorProperties(
            dtype=tensor.dtype,
            requires_grad=properties.requires_grad,
            memory_format=_MEMORY_FORMATS[properties.memory_format],
            pin_memory=properties.pin_memory,
        ),
        torch.Size(tensor.shape),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape in tensor.chunks],
    )


class _Version(msgspec.Struct, frozen=True):
    format: int


class _Objects(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    description: bytes
    planner_data: Any
