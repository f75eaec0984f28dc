"""The tensors of a state dict that can be filled in place."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.nn.parameter import is_lazy

from memstore import modes, structure
from memstore.errors import ResourceLimitError
from memstore.sharding import Shard, TensorShard, sharded_leaf, whole
from memstore.snapshot.format import StoredTensor
from memstore.structure import DTYPES, name_of, traits, why_no_memory

Name = tuple[str | int, ...]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_META = "it is on the meta device, without memory: give the module memory first, with to_empty(device=...)"


class Target(NamedTuple):
    """A tensor in a state dict, and what of it is here. `value` is what stands there; `why_not`: it can't be filled."""

    value: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    why_not: str = ""


def find_targets(state_dict: Any) -> dict[Name, Target]:
    """By the names that leaves of a stored state dict have. What is no strided tensor is left out."""
    found = list(_walk(state_dict, ()))
    counts = Counter(name for name, _ in found)
    targets = ((name, _target(value)) for name, value in found if counts[name] == 1)
    return {name: target for name, target in targets if target is not None}


def _walk(value: Any, name: Name) -> Iterator[tuple[Name, Any]]:
    if isinstance(value, TensorShard):
        yield name, value
    elif type(value) in (list, tuple, deque):
        for i, entry in enumerate(cast("list[Any]", value)):
            yield from _walk(entry, (*name, i))
    elif isinstance(value, Mapping) and not hasattr(value, "_tensordict") and not hasattr(value, "batch_size"):
        for key, entry in cast("Mapping[Any, Any]", value).items():
            inner = (*name, key if type(key) is str else name_of(key))
            if type(entry) in _PLAIN:  # which most are
                yield inner, entry
            else:
                yield from _walk(entry, inner)
    elif structure.has_wrapped_shards(value):
        leaf = sharded_leaf(value)
        for shard in () if leaf is None else leaf.shards:
            yield from _walk(shard.local, (*name, structure.box_name(shard.box)))
    elif isinstance(value, torch.Tensor) and structure.is_wrapper(type(value)) and structure.is_made_of_several(value):
        inner: Any = value
        for part in inner.__tensor_flatten__()[0]:
            yield from _walk(getattr(inner, part), (*name, part))
    else:
        yield from structure.iter_tensors(value, name)


def _target(value: Any) -> Target | None:
    if is_lazy(value):
        return None
    if type(value) not in _PLAIN:
        leaf = sharded_leaf(value)
        if leaf is not None:
            on_meta = any(shard.local.is_meta for shard in leaf.shards)
            return Target(value, leaf.dtype, leaf.shape, leaf.shards, _META if on_meta else "")
        return None
    tensor: torch.Tensor = value
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    shape = tuple(tensor.shape)
    plain = tensor.detach()
    why_not = ""
    if tensor.is_meta:
        why_not = _META
    elif tensor.is_conj() or tensor.is_neg():
        why_not = "it is a conjugated or negated view"
    elif not plain.is_contiguous() and traits.overlaps_itself(shape, tensor.stride()):
        why_not = "several of its elements are one in memory"
    elif why_no_memory(tensor) is not None:
        why_not = "its storage was freed or cut"
    shards = (Shard(whole(shape), plain),) if tensor.numel() else ()
    return Target(value, tensor.dtype, shape, shards, why_not)


def new_memory(path: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An empty tensor. Raises ResourceLimitError if there is no memory for it."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ResourceLimitError(
            f"{path}: there is no memory on {device} for a tensor of shape {list(shape)}, {dtype}: {error}"
        ) from error


def new_target(tensor: StoredTensor) -> Target:
    """A new tensor on the CPU."""
    with torch.inference_mode(False), modes.put_aside():
        made = new_memory(tensor.path, tensor.shape, DTYPES[tensor.dtype], "cpu")
    shards = (Shard(whole(tensor.shape), made),) if made.numel() else ()
    return Target(made, made.dtype, tuple(tensor.shape), shards)


def why_not_filled(tensor: StoredTensor, target: Target) -> str | None:
    """How a target differs from the tensor that is stored for it."""
    if target.shape != tensor.shape:
        return f"stored with shape {list(tensor.shape)}, here {list(target.shape)}"
    if target.dtype != DTYPES[tensor.dtype]:
        return f"stored as torch.{tensor.dtype}, here {target.dtype}"
    return f"it can't be filled: {target.why_not}" if target.why_not else None
