"""TensorDict's boxes for a value that is no tensor: NonTensorData and MetaData. Imported with tensordicts.

["nontensor", batch size, device, names, locked, entry]              NonTensorData;  "metadata": MetaData
["metadata_of", type, batch size, device, names, locked, entry]      MetaData[type]
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch
from tensordict import MetaData, NonTensorData, TensorDict

from memstore.engine import Path
from memstore.structure.checks import require, sizes, unpack
from memstore.structure.objects import class_name, find_class, short
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import need_device, read_device
from memstore.structure.tree import Node, Parts, Reader, Tree, register
from memstore.structure.walk import Flattener, Walk, flattens, rule


def read_batch(
    batch: Any, device: Any, names: Any
) -> tuple[torch.Size, torch.device | str | None, list[str | None] | None]:
    """Batch size, device and names of dimensions, checked."""
    shape = torch.Size(sizes(batch))
    if names is not None:
        require(
            len(names) == len(shape) and all(name is None or type(name) is str for name in names), "malformed names"
        )
    return shape, None if device is None else read_device(device), names


# -- NonTensorData, MetaData -----------------------------------------------------------------------------------------


@flattens(NonTensorData, MetaData)
def flatten_non_tensor(value: NonTensorData | MetaData, walk: Walk) -> Tree:
    inner: Any = vars(value)["_tensordict"]
    if type(inner) is not TensorDict or inner._tensordict:
        raise RefusedError(f"a {type(value).__name__} over a {type(inner).__name__}; only plain ones are stored")
    names = inner._td_dim_names
    return (
        "nontensor" if type(value) is NonTensorData else "metadata",
        inner._batch_size,
        inner._device,
        None if names is None else tuple(names),
        bool(inner._is_locked),
        walk.visit(value.data),
    )


def make_non_tensor(kind: Any, data: Any, inner: TensorDict) -> Any:
    """As the constructor makes it, except that the data, whatever it is, stays as it is."""
    built = kind.__new__(kind)
    built.__dict__["_tensordict"] = inner
    built.__dict__["_non_tensordict"] = {"data": data, "_metadata": None, "_is_non_tensor": True}
    return built


@register
class NonTensorNode(Node):
    __slots__ = ("batch", "device", "entry", "lock", "names")
    kind = "nontensor"
    cls: Any = NonTensorData

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        batch, device, names, locked, tree = unpack(payload, list, (NoneType, str), (NoneType, list), bool, (int, list))
        node = cls()
        node.batch, node.device, node.names = read_batch(batch, device, names)
        node.lock = locked and not reader.locked
        node.entry = reader.node(tree)
        return node

    def build(self, parts: Parts) -> Any:
        device = need_device(self.device, instead=parts.device)
        names = None if self.names is None else list(self.names)
        inner = TensorDict._new_unsafe({}, batch_size=self.batch, device=device, names=names)
        built = make_non_tensor(self.make_class(), self.entry.build(parts), inner)
        return built.lock_() if self.lock else built

    def make_class(self) -> Any:
        return self.cls

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.entry

    def describe(self) -> str:
        return self.cls.__name__


@register
class MetaDataNode(NonTensorNode):
    __slots__ = ()
    kind = "metadata"
    cls = MetaData


# -- MetaData of one type --------------------------------------------------------------------------------------------


def _flatten_metadata_of(value: Any, walk: Walk) -> Tree:
    return ("metadata_of", class_name(type(value)._expected_type), *flatten_non_tensor(value, walk)[1:])


@register
class MetaDataOfNode(NonTensorNode):
    __slots__ = ("name",)
    kind = "metadata_of"

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        require(len(payload) > 0 and type(payload[0]) is str, "a malformed MetaData")
        node: Any = super().read(payload[1:], reader)
        node.name = payload[0]
        return node

    def make_class(self) -> Any:
        return MetaData[find_class(self.name, lambda kind: True, "a class")]

    def describe(self) -> str:
        return f"MetaData[{short(self.name)}]"


@rule
def _metadata_of_rule(kind: type) -> Flattener | None:
    expected = vars(kind).get("_expected_type")
    if issubclass(kind, MetaData) and isinstance(expected, type) and MetaData[expected] is kind:
        return _flatten_metadata_of
    return None
