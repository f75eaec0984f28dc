"""A value, built again from its plan, its objects and the mapping of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from memstore.errors import CorruptionError, MemstoreError, UnsupportedValueError
from memstore.structure.checks import MalformedError
from memstore.structure.get.storage import finish, finish_one, tensors_of
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Memory, Plan
from memstore.structure.tree import Parts
from memstore.wording import an

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
        return plan.root.build(Parts(tensors, leaves, wanted))
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
    """As `rebuild`, but what `make_leaf(index, tensor)` makes of each leaf stands in its place.

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
                tensors[i] = finish_one(plan, i, tensor, device)
            else:
                tensors[i] = make_leaf(i, tensor)
        return plan.root.build(Parts(tensors, values, device))
    except _REFUSALS as error:
        _raise_damage(error)


def build(plan: Plan, encoded: bytes, tensors: Sequence[torch.Tensor], *, allow_pickle: bool = False) -> Any:
    """The value of these tensors, one for each leaf, as they are, and the stored objects.

    Raises:
        CorruptionError: plan, objects and tensors don't belong together.
        UnsupportedValueError: the value needs pickle, or a class that this process doesn't have.
    """
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    try:
        return plan.root.build(Parts(list(tensors), values, None))
    except _REFUSALS as error:
        _raise_damage(error)
