"""Rebuilding: a value made again of its plan, its objects and the mapping of its bytes. No leaf is copied for it.

1. `tensors_of` makes the tensors over the mapping: one storage a leaf, so that pickling a leaf costs its own bytes.
2. `finish` moves and casts them, and makes them Parameters and Buffers.
3. `plan.root.build` puts them into their containers.

Every storage of a value refers to its memory twice: by its data, through the numpy array that it was made from, and by
the attribute `_memstore_mapping`: the mapping, or the bytes of an inline value or a leaf that had to be copied.
`share_memory_` swaps the data for another's, in the same storage: then only the attribute keeps alive what
`leaf.numpy()` or a dlpack capsule still points to. (On the tensor it would not: the base of such an array is another
tensor of the same storage. And pickle and deepcopy take a tensor's attributes along, a storage's not.)

A leaf in boxes has a place of its own behind the bytes of the value, where `assemble` puts it together when a caller
wants all of it. Boxes that lie there already, one behind the other, are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from memstore import _modes as modes
from memstore._compat import make_subclass
from memstore._wording import an
from memstore.engine import Leaf, watch
from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from memstore.sharding import Box, Boxes, Shard, StoredBox, narrow_to, uncovered, whole
from memstore.structure import traits
from memstore.structure.memory import Memory, over
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Plan, Recipe, strides_of
from memstore.structure.refusals import MalformedError, require
from memstore.structure.traits import (
    DTYPES,
    NO_DEVICE,
    has_device,
    lacks_device,
    lacks_own_device,
    to_device,
    with_traits,
)
from memstore.structure.tree import TreeParts

# --- Values ----------------------------------------------------------------------------------------------------------


_in_inference_mode = torch.is_inference_mode_enabled


def rebuild(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    mapping: object | None,
    *,
    allow_pickle: bool = False,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
) -> Any:
    """Builds the value that was put. CPU leaves are not copied: they are the memory.

    Args:
        memory: writable, over the data section; its base keeps the mapping alive.
        mapping: what every leaf keeps alive, through its storage; None for values that live in their record: `memory`.
        device: where the leaves shall be, as for `Tensor.to`; None: where they were put from.
        dtype: a floating or complex one, for leaves of floating dtypes (as `Module.to` does); others stay as they are.

    Raises:
        TypeError: `dtype` is neither floating nor complex.
        CorruptionError: plan, objects and memory don't belong together.
        UnsupportedValueError: the value needs pickle, a class or a device that this process doesn't have.
    """
    if _in_inference_mode():  # tensors that are made in inference mode could never be used in training
        with torch.inference_mode(False):
            return rebuild(
                plan,
                encoded,
                memory,
                mapping,
                allow_pickle=allow_pickle,
                device=device,
                dtype=dtype,
                non_blocking=non_blocking,
            )
    wanted = None if device is None else torch.device(device)
    _check_dtype(dtype)
    leaves = decode_objects(encoded, plan.object_count, allow_pickle)
    try:
        tensors = tensors_of(plan, memory, memory if mapping is None else mapping)
    except _REFUSALS as error:
        _raise_damage(error)
    if wanted is not None or dtype is not None or plan.marked:
        finish(plan, tensors, device=wanted, dtype=dtype, non_blocking=non_blocking)
    try:
        return plan.root.build(TreeParts(tensors, leaves, wanted))
    except _REFUSALS as error:
        _raise_damage(error)


def _check_dtype(dtype: Any) -> None:
    if dtype is None or (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}, {an(type(dtype))}: a get converts to a torch.dtype, as torch.bfloat16")
    raise TypeError(
        f"dtype={dtype!r}: it converts the leaves of floating dtypes only, to another floating or complex torch.dtype; "
        f"for integers, get the value as it is and convert the leaves that are meant"
    )


# What torch and tensordict raise when they are called with numbers that were never put.
_REFUSALS = (MalformedError, RuntimeError, ValueError, TypeError, AssertionError, LookupError, OverflowError)


def _raise_damage(error: Exception) -> NoReturn:
    """Tells damage from what this process lacks: a kernel of torch, memory, levels of the stack."""
    if isinstance(error, NotImplementedError):
        raise UnsupportedValueError(f"torch can't make a leaf of the stored value here: {error}") from error
    exhausted = isinstance(error, (RecursionError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
    if exhausted or isinstance(error, MemstoreError):
        raise error
    raise CorruptionError(f"the value can't be built from its description: {error}") from error


def rebuild_lazily(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    mapping: object | None,
    make_leaf: Callable[[int, torch.Tensor], torch.Tensor],
    *,
    allow_pickle: bool = False,
    device: torch.device | None = None,
) -> Any:
    """Rebuilds a value in which what `make_leaf(index, tensor)` makes of each leaf stands in its place.

    The leaves that their containers look into (jagged and quantized tensors, numpy arrays) are as `rebuild` has them.
    """
    if _in_inference_mode():
        with torch.inference_mode(False):
            return rebuild_lazily(plan, encoded, memory, mapping, make_leaf, allow_pickle=allow_pickle, device=device)
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    keep = (memory if mapping is None else mapping) if plan.loaded else None
    try:
        tensors = tensors_of(plan, memory, keep)
        for i, tensor in enumerate(tensors):
            if i in plan.same:
                tensors[i] = tensors[plan.same[i]]
            elif i in plan.loaded:
                found = plan.traits[i]
                if device is not None and i not in plan.host:
                    tensor = to_device(tensor, device)
                elif device is None and found.device is not None:
                    tensor = _to_own_device(tensor, found.device, non_blocking=False)
                tensors[i] = with_traits(tensor, found)
            else:
                tensors[i] = make_leaf(i, tensor)
        return plan.root.build(TreeParts(tensors, values, device))
    except _REFUSALS as error:
        _raise_damage(error)


def build(plan: Plan, encoded: bytes, tensors: Sequence[torch.Tensor], *, allow_pickle: bool = False) -> Any:
    """Builds the value of these tensors, one for each leaf, as they are, and the stored objects.

    Raises:
        CorruptionError: plan, objects and tensors don't belong together.
        UnsupportedValueError: the value needs pickle, or a class that this process doesn't have.
    """
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    try:
        return plan.root.build(TreeParts(list(tensors), values, None))
    except _REFUSALS as error:
        _raise_damage(error)


# --- Tensors over a mapping ------------------------------------------------------------------------------------------


def tensors_of(plan: Plan, memory: Memory, keep: object | None) -> list[torch.Tensor]:
    """Makes the leaves as CPU tensors over `memory`, neither Parameters nor Buffers yet; see `finish`.

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
        leaf = plan.leaves[i]
        tensors[i] = torch.empty_strided(leaf.shape, strides_of(leaf), dtype=DTYPES[leaf.dtype], device="cpu")
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
    """Makes a view of a leaf over `memory` a tensor with a storage of just its bytes, and no view of anything.

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
        tensors[i] = make_subclass(torch.nn.Parameter, tensors[i], requires_grad)
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
        raise lacks_own_device(device, error) from error


# --- Leaves in boxes -------------------------------------------------------------------------------------------------


_CHECKSUM_SIZE = 8


class Checks(Protocol):
    """Compares what is to be read with its checksums. Raises CorruptionError."""

    def compare(self, i: int, /) -> None:
        """Compares all of a leaf."""

    def compare_boxes(self, i: int, boxes: Sequence[StoredBox], /) -> None:
        """Compares some of a leaf's boxes."""


def check_boxes(plan: Plan, boxes: Boxes, nbytes: int) -> None:
    """Raises CorruptionError unless they are boxes of the plan's leaves, in a data section of so many bytes."""
    sizes: dict[tuple[str, tuple[int, ...], tuple[Box, ...]], list[int]] = {}  # most leaves are cut like others
    try:
        for i, stored in boxes.items():
            require(0 <= i < len(plan.leaves), "boxes of a leaf that doesn't exist")
            leaf = plan.leaves[i]
            require(leaf.stride is None, "boxes of a leaf that isn't contiguous")
            cut = (leaf.dtype, leaf.shape, tuple([one.box for one in stored]))
            if cut not in sizes:
                for box in cut[2]:
                    _check_within(leaf, box)
                missing = uncovered(whole(leaf.shape), cut[2])
                require(not missing, f"no box of leaf {leaf.name} has all of {missing[:1]}")
                sizes[cut] = [box_bytes(leaf, one) for one in stored]
            item = DTYPES[leaf.dtype].itemsize
            for one, size in zip(stored, sizes[cut], strict=True):
                _check_place(one, size, item, nbytes)
    except MalformedError as error:
        raise CorruptionError(f"the boxes of the value are damaged: {error}") from error


def check_box(leaf: Leaf, stored: StoredBox, nbytes: int) -> None:
    """Raises MalformedError unless it is a box of the leaf, in a data section of so many bytes."""
    _check_within(leaf, stored.box)
    _check_place(stored, box_bytes(leaf, stored), DTYPES[leaf.dtype].itemsize, nbytes)


def _check_within(leaf: Leaf, box: Box) -> None:
    require(len(box.offsets) == len(box.shape) == len(leaf.shape), "a box with other dimensions than its leaf")
    require(box.fits(leaf.shape) and not box.is_empty, "a box that lies outside of its leaf")


def _check_place(stored: StoredBox, size: int, item: int, nbytes: int) -> None:
    _, place, _, checksum = stored
    if not (0 <= place <= nbytes - size and place % item == 0):
        raise MalformedError("a box that lies outside of the data")
    if not (checksum is None or len(checksum) == _CHECKSUM_SIZE):
        raise MalformedError("a checksum of another size")


def box_bytes(leaf: Leaf, stored: StoredBox) -> int:
    return traits.count(stored.box.shape) * DTYPES[leaf.dtype].itemsize


def box_tensor(leaf: Leaf, stored: StoredBox, memory: Memory) -> torch.Tensor:
    """Returns the elements of a box, where they lie."""
    start, shape, dtype = stored.place, stored.box.shape, DTYPES[leaf.dtype]
    flat = torch.from_numpy(memory[start : start + box_bytes(leaf, stored)])
    if dtype in traits.WITHOUT_COPY:
        return over(flat.untyped_storage(), dtype, 0, shape, traits.contiguous_stride(shape))
    return flat.view(dtype).view(shape)


def leaf_tensor(leaf: Leaf, memory: Memory) -> torch.Tensor:
    """Returns the place where a leaf in boxes is put together."""
    return box_tensor(leaf, StoredBox(whole(leaf.shape), leaf.offset, 0, None), memory)


def boxes_of_leaf(plan: Plan, boxes: Boxes, i: int) -> Sequence[StoredBox]:
    """Returns the boxes of a leaf, or of the one that it is the same as. Without any, it lies whole at its offset."""
    return boxes.get(plan.same.get(i, i), ())


def parts_of(plan: Plan, boxes: Boxes, i: int, tensor: torch.Tensor, memory: Memory) -> list[Shard]:
    """Returns the parts that a leaf is stored in. `tensor` has all of it, if it is one part."""
    leaf = plan.leaves[i]
    stored = boxes_of_leaf(plan, boxes, i)
    if lies_in_order(leaf, stored):
        return [Shard(whole(leaf.shape), tensor)]
    return [Shard(one.box, box_tensor(leaf, one, memory)) for one in stored]


def assemble(plan: Plan, boxes: Boxes, memory: Memory) -> int:
    """Puts every leaf together at its offset. Returns how many bytes were copied for it."""
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        leaves = ((plan.leaves[i], stored) for i, stored in boxes.items() if i not in plan.same)
        return sum(assemble_one(leaf, stored, memory) for leaf, stored in leaves)


def assemble_one(leaf: Leaf, stored: Sequence[StoredBox], memory: Memory) -> int:
    """Puts one leaf together at its offset. Returns how many bytes were copied for it."""
    if lies_in_order(leaf, stored):
        return 0
    target, copied = traits.copyable(leaf_tensor(leaf, memory)), 0
    for one in stored:
        source = traits.copyable(box_tensor(leaf, one, memory))
        narrow_to(target, one.box).copy_(source)
        copied += source.nbytes
    return copied


def lies_in_order(leaf: Leaf, stored: Sequence[StoredBox]) -> bool:
    """Returns whether all boxes of a leaf lie where the whole of it has them: then it is read without a copy."""
    item = DTYPES[leaf.dtype].itemsize
    for box, place, *_ in stored:
        first = box.run_in(leaf.shape)
        if first is None or place != leaf.offset + first * item:
            return False
    return True
