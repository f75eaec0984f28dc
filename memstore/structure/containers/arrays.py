"""numpy arrays, whose bytes are a tensor's (["ndarray", tensor]), and the rules for tensors that are not plain ones.

An array comes back writable, also if the one that was put was not: its memory is the getter's own. Its strides are kept
where a tensor's are, if they are whole elements and not negative; else it comes back in C order. So do arrays of other
dtypes (text, dates, foreign byte order), which are stored as objects.

Plain tensors come here only in a careful walk, which looks at each of them to name the one that can't be stored.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memstore.engine import Path
from memstore.sharding import TensorShard
from memstore.structure.checks import unpack
from memstore.structure.containers.nested import flatten_jagged, flatten_nested, flatten_quantized
from memstore.structure.containers.sparse import flatten_sparse, is_sparse
from memstore.structure.containers.wrappers import flatten_wrapper, is_wrapper
from memstore.structure.refusals import RefusedError
from memstore.structure.tensors import NUMPY_DTYPES
from memstore.structure.tree import TENSOR, Node, Parts, Reader, Tree, register
from memstore.structure.walk import Flattener, Walk, flattener, flattens, refuse, refuse_unless_pickled, rule
from memstore.wording import first_line

# -- numpy -----------------------------------------------------------------------------------------------------------

_ARRAY_DTYPES = frozenset(NUMPY_DTYPES.values())


class _WritableView:
    """The memory of an array, claimed to be writable: torch warns about arrays that are not. It is only read here."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


@flattens(np.ndarray)
def _flatten_array(value: np.ndarray[Any, Any], walk: Walk) -> Tree:
    tensor = tensor_of_array(value)
    if tensor is None:
        return walk.object(value)
    if walk.in_place and not _is_writable(value):
        raise RefusedError("a numpy array that can't be written, or not through a tensor")
    walk.tensors.append(tensor)
    return ("ndarray", TENSOR)


def tensor_of_array(value: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """The array's values, to be read: over its memory, where torch has such strides. None: torch has no such dtype."""
    if value.dtype not in _ARRAY_DTYPES or not value.dtype.isnative:
        return None
    if any(step < 0 or step % value.itemsize for step in value.strides) or not value.size:
        value = value.copy()
    if not value.flags.writeable:
        value = np.asarray(_WritableView(value))
    return torch.from_numpy(value)


def _is_writable(value: np.ndarray[Any, Any]) -> bool:
    return value.flags.writeable and all(step >= 0 and step % value.itemsize == 0 for step in value.strides)


@register
class ArrayNode(Node):
    __slots__ = ("entry",)
    kind = "ndarray"
    reads_leaves = True

    def __init__(self, entry: Node) -> None:
        self.entry = entry

    @classmethod
    def read(cls, payload: list[Any], reader: Reader) -> Node:
        (tree,) = unpack(payload, int)
        return cls(reader.host_tensor(tree))

    def build(self, parts: Parts) -> Any:
        return self.entry.build(parts).detach().numpy()

    def children(self) -> Iterator[tuple[Path, Node]]:
        yield (), self.entry

    def describe(self) -> str:
        return "numpy array"


# -- tensors by themselves -------------------------------------------------------------------------------------------


@flattens(torch.Tensor, torch.nn.Parameter)
def _flatten_carefully(value: torch.Tensor, walk: Walk) -> Tree:
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # pyright: ignore[reportAttributeAccessIssue]
        raise RefusedError(
            "a tensor inside vmap, grad or another transform of torch.func: it has no bytes of its own: return it from "
            "the function, and use the result"
        )
    if value.device.type == "meta":
        raise RefusedError("a meta tensor: it has a shape, but no bytes: put a real one")
    if value.is_nested:
        return flatten_nested(value, walk)
    if is_sparse(value):
        return flatten_sparse(value, walk)
    if value.layout is not torch.strided:
        raise RefusedError(f"a {value.layout} tensor; put its to_dense()")
    if value.is_quantized:
        return flatten_quantized(value, walk)
    try:
        value.data_ptr()
    except RuntimeError as error:
        raise RefusedError(f"a tensor that has no plain memory ({first_line(error)})") from None
    walk.tensors.append(value)
    return TENSOR


def is_made_of_several(tensor: torch.Tensor) -> bool:
    """Whether a value stores it as several tensors: one that wraps others, a sparse, nested or quantized one."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return tensor.is_nested or tensor.is_quantized or is_sparse(tensor)
    return flattener(kind) in (flatten_wrapper, flatten_jagged)


@flattens(TensorShard)
def _flatten_shard(value: TensorShard, walk: Walk) -> Tree:
    raise RefusedError("a TensorShard, which only a sharded put can store")


_REFUSED_SUBCLASSES = {
    "FakeTensor": "a fake tensor: it has a shape, but no bytes: give a real one, "
    "which materialize_module makes of a deferred one",
    "DTensor": "a DTensor, which only a sharded put can store; put its to_local() or full_tensor()",
    "ShardedTensor": "a ShardedTensor, which only a sharded put can store",
    "AsyncCollectiveTensor": "a result of a collective that may still be on its way; put its wait()",
    "UninitializedTensorMixin": "a parameter or buffer that is not initialized yet",
    "FunctionalTensor": "a tensor inside a transform of torch.func: it has no bytes of its own",
}


@rule
def _tensor_rule(kind: type) -> Flattener | None:
    if not issubclass(kind, torch.Tensor):
        return None
    bases = {base.__name__: base.__module__ for base in kind.__mro__}
    if bases.get("NestedTensor", "").startswith("torch.nested."):
        return flatten_jagged
    if bases.get("MemoryMappedTensor", "").startswith("tensordict."):
        return _flatten_memory_mapped
    for name, reason in _REFUSED_SUBCLASSES.items():
        if bases.get(name, "").startswith(("torch.", "memstore.fake.")):
            return refuse(reason)
    if is_wrapper(kind):
        return flatten_wrapper
    name = f"{kind.__module__}.{kind.__qualname__}"
    return refuse_unless_pickled(f"a {name}, an unknown subclass of torch.Tensor (put its as_subclass(torch.Tensor))")


def _flatten_memory_mapped(value: torch.Tensor, walk: Walk) -> Tree:
    # where its bytes lie is no part of the value: it comes back as a plain tensor, over the store's memory
    return walk.visit(value.as_subclass(torch.Tensor))
