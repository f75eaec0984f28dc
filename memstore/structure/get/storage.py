"""The bytes of a mapping as tensors, without a copy: one storage a leaf, so that pickling a leaf costs its own bytes.

Every storage of a value refers to its memory twice: by its data, through the numpy array that it was made from, and by
the attribute `_memstore_mapping`: the mapping, or the bytes of an inline value or a leaf that had to be copied.
`share_memory_` swaps the data for another's, in the same storage: then only the attribute keeps alive what
`leaf.numpy()` or a dlpack capsule still points to. (On the tensor it would not: the base of such an array is another
tensor of the same storage. And pickle and deepcopy take a tensor's attributes along, a storage's not.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memstore.engine import Leaf, watch
from memstore.errors import CorruptionError, UnsupportedValueError
from memstore.structure.plans import Memory, Plan, Recipe, suits_numpy
from memstore.structure.tensors import (
    DTYPES,
    NO_DEVICE,
    NUMPY_DTYPES,
    has_device,
    lacks_device,
    over,
    to_device,
    traits,
    with_traits,
)
from memstore.structure.tree import TensorNode


def tensors_of(plan: Plan, memory: Memory, keep: object | None) -> list[torch.Tensor]:
    """The leaves as CPU tensors over `memory`, neither Parameters nor Buffers yet; see `finish`.

    Call it outside of inference mode, whose tensors could never be used in training. `keep` is what every storage
    refers to; None for tensors that no user gets.
    """
    if memory.nbytes < plan.nbytes:
        raise CorruptionError(f"the value takes {plan.nbytes} bytes, but only {memory.nbytes} are there")
    recipe = plan.recipe
    if recipe is None:
        recipe = plan.recipe = Recipe(plan.leaves, plan.traits, plan.same)
    tensors: list[Any] = [None] * recipe.count
    from_numpy = torch.from_numpy
    for dtype, shape, offset, leaves in recipe.runs:
        for i, row in zip(leaves, np.ndarray(shape, dtype, memory, offset), strict=True):
            tensors[i] = from_numpy(row)
    for i, dtype, shape, offset in recipe.alone:
        tensors[i] = from_numpy(np.ndarray(shape, dtype, memory, offset))
    frombuffer = torch.frombuffer
    for i, dtype, sizes, count, offset in recipe.buffers:
        tensors[i] = frombuffer(memory, dtype=dtype, count=count, offset=offset).resize_(*sizes)
    for start, stop, parts in recipe.storages:
        storage = from_numpy(memory[start:stop]).untyped_storage()
        for part in parts:
            tensors[part.leaf] = over(storage, part.dtype, part.offset, part.shape, part.stride)
    copies = [(part, memory[start:stop].copy()) for start, stop, (part,) in recipe.copied]
    for part, copy in copies:
        tensors[part.leaf] = over(from_numpy(copy).untyped_storage(), part.dtype, 0, part.shape, part.stride)
    for i in recipe.empty:
        tensors[i] = _empty(plan.leaves[i])
    for i, source in recipe.same:
        tensors[i] = tensors[source]
    if keep is not None:
        for storage in map(torch.Tensor.untyped_storage, tensors):
            storage._memstore_mapping = keep  # type: ignore[attr-defined]
        for part, copy in copies:
            tensors[part.leaf].untyped_storage()._memstore_mapping = copy
            watch(copy.__array_interface__["data"][0], copy)  # so that a send copies it, as it does what is mapped
    return tensors


def in_own_storage(view: torch.Tensor, memory: Memory, keep: object) -> torch.Tensor:
    """A view of a leaf over `memory` as a tensor with a storage of just its bytes, and no view of anything.

    So what is done to that storage (`share_memory_`), or to the tensor by autograd, concerns no other part of the leaf.
    Call it outside of inference mode. `keep` is as in `tensors_of`.
    """
    if not view.numel():
        return torch.empty(view.shape, dtype=view.dtype, device="cpu")
    start = view.data_ptr() - memory.__array_interface__["data"][0]
    extent = traits.reach(view.shape, view.stride()) * view.dtype.itemsize
    storage = torch.from_numpy(memory[start : start + extent]).untyped_storage()
    storage._memstore_mapping = keep  # type: ignore[attr-defined]
    # The storage has just these bytes, so what `over` looks at is known: a tenth of `dataset[a:b]`.
    return torch.empty(0, dtype=view.dtype, device="cpu").set_(storage, 0, view.shape, view.stride())


def bare_array(plan: Plan, memory: bytearray | Memory, start: int) -> np.ndarray[Any, Any] | None:
    """The array to make the value of, over the bytes from `start`, if that is a single plain tensor; else None."""
    if plan.bare is None:
        plan.bare = _dtype_and_shape(plan)
    if not plan.bare:
        return None
    dtype, shape = plan.bare
    return np.ndarray(shape, dtype, memory, start)


def _dtype_and_shape(plan: Plan) -> tuple[np.dtype[Any], tuple[int, ...]] | tuple[()]:
    """Of a value that is a single plain tensor; else nothing."""
    if type(plan.root) is not TensorNode or plan.marked or not plan.nbytes:
        return ()
    (leaf,) = plan.leaves
    return (NUMPY_DTYPES[leaf.dtype], leaf.shape) if suits_numpy(leaf) and not leaf.offset else ()


def _empty(leaf: Leaf) -> torch.Tensor:
    dtype = DTYPES[leaf.dtype]
    if leaf.stride is None:
        return torch.empty(leaf.shape, dtype=dtype, device="cpu")
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device="cpu")


def finish(
    plan: Plan,
    tensors: list[torch.Tensor],
    *,
    device: torch.device | None,
    dtype: torch.dtype | None,
    non_blocking: bool,
) -> None:
    """Moves the leaves to their devices, converts them, and makes them Parameters and Buffers as they were."""
    recipe = plan.recipe
    if recipe is None:
        raise ValueError("the tensors were not made by tensors_of")
    if device is not None or dtype is not None:
        try:
            for i, tensor in enumerate(tensors):
                casts = dtype is not None and tensor.is_floating_point() and i not in plan.fixed
                place = device if i not in plan.host else None
                tensors[i] = tensor.to(device=place, dtype=dtype if casts else tensor.dtype, non_blocking=non_blocking)
        except NO_DEVICE as error:
            if has_device(device):
                raise
            raise lacks_device(device, error) from error
    for i, requires_grad in recipe.parameters:  # with_traits, without the calls: a whole model may be here
        tensors[i] = torch.Tensor._make_subclass(torch.nn.Parameter, tensors[i], requires_grad)
    for i, found in recipe.traits:
        tensor = tensors[i]
        if device is None and found.device is not None:
            tensor = _to_own_device(tensor, found.device, non_blocking)
        tensors[i] = with_traits(tensor, found)
    for i, source in recipe.same:
        tensors[i] = tensors[source]


def _to_own_device(tensor: torch.Tensor, device: str, non_blocking: bool) -> torch.Tensor:
    try:
        return tensor.to(device, non_blocking=non_blocking)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedValueError(
            f"the value was put from the device {device!r}, which this process can't use ({error}); pass device='cpu'"
        ) from error


def finish_one(plan: Plan, i: int, tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """As `finish`, for one leaf that is not the same as another."""
    found = plan.traits[i]
    if device is not None and i not in plan.host:
        tensor = to_device(tensor, device)
    elif device is None and found.device is not None:
        tensor = _to_own_device(tensor, found.device, non_blocking=False)
    return with_traits(tensor, found)
