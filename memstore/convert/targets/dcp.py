"""Checkpoints of torch.distributed.checkpoint, of one rank: in torch's files, or in memstore's.

Either way torch's own interface is followed, with plans made here: boxes of tensors, and objects as its planners have
them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from memstore.convert.leaves import Boxes, Found, Leaf, stand_in
from memstore.convert.naming import Refusals, Sharing, plain, special
from memstore.convert.nesting import Flat, flattened
from memstore.convert.rules import Rules
from memstore.convert.targets.parts import NewFile
from memstore.convert.targets.torch_save import draft_torch
from memstore.formats import Meter
from memstore.integrations.dcp import StorageWriter
from memstore.integrations.dcp.planners import encode_object
from memstore.sharding import whole

_FILE = "__0_0.distcp"  # of rank 0, its first


def items_of(found: Found, rules: Rules, refusals: Refusals) -> Flat:
    """The items that a checkpoint has of a value."""
    flat = flattened(plain(found.value, refusals), refusals)
    sharing = Sharing(refusals, untie=rules.untie)
    for name, item in flat.items.items():
        if isinstance(item, torch.Tensor):
            reason = special(item)
            if reason:
                refusals.add(flat.paths[name], reason)
            else:
                sharing.add(flat.paths[name], item)
    sharing.check()
    return flat


class _Item(NamedTuple):
    """What is written at a time: a box of a tensor, or an object."""

    item: WriteItem
    data: Any  # the tensor of the box's elements, or the object


def _items(found: Found, flat: Flat) -> list[_Item]:
    items: list[_Item] = []
    for name, value in flat.items.items():
        if not isinstance(value, torch.Tensor):
            items.append(_Item(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO), value))
            continue
        properties = TensorProperties(dtype=value.dtype, requires_grad=value.requires_grad)
        for box, tensor in _boxes(found, value):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape))
            said = TensorWriteData(chunk, properties, torch.Size(value.shape))
            items.append(_Item(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, None, said), tensor))
    return items


def _boxes(found: Found, tensor: torch.Tensor) -> Boxes:
    leaf = found.leaf(tensor)
    return leaf.cut() if leaf.nbytes else ((whole(leaf.shape), tensor.detach()),)


def _described(items: list[_Item], flat: Flat) -> Metadata:
    described: dict[str, Any] = {}
    for item, _ in items:
        said = item.tensor_data
        if said is None:
            described[item.index.fqn] = BytesStorageMetadata()
        else:
            made = described.setdefault(item.index.fqn, TensorStorageMetadata(said.properties, said.size, []))
            made.chunks.append(said.chunk)
    return Metadata(described, planner_data=dict(flat.paths))


# --- torch's files --------------------------------------------------------------------------------------------------


class _TorchWriter(FileSystemWriter):
    """Writes the metadata. Args: target: where the checkpoint is going to be."""

    def __init__(self, folder: str, target: str) -> None:
        super().__init__(folder)  # pyright: ignore[reportUnknownMemberType]
        self._target = target

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._target, save_id=self.save_id)


def write_torch_checkpoint(
    found: Found, flat: Flat, rules: Rules, target: str, folder: str, name: str, meter: Meter
) -> None:
    """Files as those of torch's FileSystemWriter. Args: target: where the folder is going to be."""
    items = _items(found, flat)
    file, frames = NewFile(), _Frames(rules)
    results: list[WriteResult] = []
    for item, data in items:
        start = file.size
        if item.tensor_data is None:
            file.add(_saved(data))
        else:
            frames.add(data, file)
        results.append(WriteResult(item.index, file.size - start, StorageInfo(_FILE, start, file.size - start)))
    file.write(folder, _FILE, meter)
    _TorchWriter(folder, target).finish(_described(items, flat), [results])


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class _Frames:
    """What torch.save writes around the bytes of a tensor by itself: the same for all of a dtype and shape."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._made: dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]] = {}

    def add(self, tensor: torch.Tensor, file: NewFile) -> None:
        """What torch.save makes of a tensor, with no more of its storage than its elements."""
        kind = tensor.dtype, tensor.shape
        if kind not in self._made:
            self._made[kind] = self._frame(*kind)
        before, after = self._made[kind]
        file.add(before)
        file.add_leaf(Leaf(tensor.dtype, tensor.shape, ((whole(tensor.shape), tensor),)))
        file.add(after)

    def _frame(self, dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
        if not shape.numel():
            made = torch.empty(shape, dtype=dtype)
            return draft_torch(Found(None), made, self._rules).around()
        made = stand_in(dtype, shape)
        return draft_torch(Found(made, {made.data_ptr(): ((whole(shape), made),)}), made, self._rules).around()


# --- memstore's files -----------------------------------------------------------------------------------------------


class _OwnWriter(StorageWriter):
    """Args: target: where the checkpoint is going to be."""

    def __init__(self, folder: str, target: str) -> None:
        super().__init__(folder)
        self._target = target

    @property
    def checkpoint_id(self) -> str:
        return self._target


class _Planner:
    """What a writer asks for: the data of an item."""

    def __init__(self, data: dict[MetadataIndex, Callable[[], Any]]) -> None:
        self._data = data

    def resolve_data(self, item: WriteItem) -> Any:
        return self._data[item.index]()


def write_own_checkpoint(found: Found, flat: Flat, target: str, folder: str, name: str, meter: Meter) -> None:
    """A snapshot, as memstore's StorageWriter makes it. Args: target: where the folder is going to be."""
    items = _items(found, flat)
    data = {item.index: _resolving(item.index.fqn, value, item) for item, value in items}
    writer = _OwnWriter(folder, target)
    writer.reset()
    writer.set_up_storage_writer(True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan([item for item, _ in items]))])
    results = cast("Any", writer.write_data(plan, cast("Any", _Planner(data)))).wait()
    writer.finish(_described(items, flat), [results])
    meter.add(sum(result.size_in_bytes for result in results))


def _resolving(name: str, value: Any, item: WriteItem) -> Callable[[], Any]:
    if item.tensor_data is not None:
        return lambda: value
    return lambda: io.BytesIO(encode_object(name, value))
