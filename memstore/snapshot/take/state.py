"""A state dict, taken apart: its structure, its objects, and what this rank holds of each of its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memstore import structure
from memstore.engine import Leaf
from memstore.errors import UnsupportedValueError
from memstore.sharding import Shard, ShardedLeaf, TensorShard, sharded_leaf, whole
from memstore.snapshot.format import path_of
from memstore.structure import DTYPE_NAMES, RefusedError, Tree, Walk, traits

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class HeldTensor(NamedTuple):
    """What this rank holds of a tensor.

    Attributes:
        path: of the first leaf that it is.
        parts: the keys of that leaf, from the state dict on.
        shape: of the whole tensor.
        shards: the parts of it that are here; all of a plain tensor is one.
    """

    path: str
    parts: tuple[str | int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    is_sharded: bool


class State(NamedTuple):
    """A state dict. `tensors` has, for each leaf, its place in the list of all tensors of the app state."""

    key: str
    structure: bytes
    objects: bytes
    tensors: tuple[int, ...]


class _StateWalk(Walk):
    """Finds tensors of which this rank has only parts; plain tensors without memory stand in for them."""

    __slots__ = ("sharded",)

    def __init__(self, allow_pickle: bool, careful: bool) -> None:
        super().__init__(allow_pickle, careful)
        self.sharded: dict[int, ShardedLeaf] = {}

    def visit(self, value: Any) -> Tree:
        if isinstance(value, (torch.Tensor, TensorShard)) and type(value) not in _PLAIN:
            try:
                leaf = sharded_leaf(value)
            except UnsupportedValueError as error:
                raise RefusedError(error.message) from None
            if leaf is not None:
                found = traits.traits_of(value) if isinstance(value, torch.Tensor) else traits.PLAIN
                kind = traits.PARAMETER if getattr(value, "_is_param", False) else found.kind
                flags = traits.to_flags(kind, found.requires_grad)
                wrapped = structure.flatten_wrapped_shards(value, leaf, flags, self)
                if wrapped is not None:
                    return wrapped
                leaf = structure.held_in_memory(leaf)
                self.sharded[len(self.tensors)] = leaf
                self.tensors.append(torch.empty((), dtype=leaf.dtype, device="cpu").expand(leaf.shape))
                return structure.TENSOR
        return super().visit(value)


class StateWalker:
    """Takes the state dicts of one app state apart. Tensors that are one in memory become one of `tensors`."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._known: dict[Any, int] = {}
        self._paths: set[str] = set()
        self.tensors: list[HeldTensor] = []

    def add(self, key: str, state_dict: Any) -> State:
        """Raises UnsupportedValueError, naming the leaf, for what can't be saved."""

        def walk_with(careful: bool) -> _StateWalk:
            return _StateWalk(self._allow_pickle, careful)

        try:
            tree, walk, facts, addresses = structure.take_apart(state_dict, walk_with)
        except RefusedError as error:
            raise UnsupportedValueError(f"app_state[{key!r}]: {error.message()}") from None
        leaves: list[Leaf] = []
        found = facts.traits or (traits.PLAIN,) * len(walk.tensors)
        same: dict[int, int] = {}
        firsts: dict[int, int] = {}
        for i, tensor in enumerate(walk.tensors):
            first = firsts.setdefault(id(tensor), i)
            if first != i:
                same[i] = first
            shape, dtype = tuple(facts.shapes[i]), facts.dtypes[i]
            nbytes = traits.count(shape) * dtype.itemsize
            leaves.append(Leaf((), DTYPE_NAMES[dtype], shape, None, 0, nbytes))
        plan = structure.describe_external_tree(tree, leaves, walk.objects, [_anywhere(trait) for trait in found], same)
        places = [
            self._place(key, leaf.name, tensor, walk.sharded.get(i), address)
            for i, (leaf, tensor, address) in enumerate(zip(plan.plan.leaves, walk.tensors, addresses, strict=True))
        ]
        return State(key, plan.plan.description, plan.objects, tuple(places))

    def _place(
        self, key: str, name: tuple[str | int, ...], tensor: torch.Tensor, leaf: ShardedLeaf | None, address: int
    ) -> int:
        shape = tuple(tensor.shape)
        if leaf is None:
            same = (address, tensor.dtype, shape, tensor.stride(), tensor.is_neg(), tensor.is_conj(), tensor.device)
            known = self._known.setdefault(same, len(self.tensors))
            if known < len(self.tensors):
                return known
            shards = (Shard(whole(shape), tensor),) if tensor.numel() else ()
        else:
            shards = leaf.shards
        path = path_of((key, *name))
        for shard in shards:
            reason = structure.why_no_memory(shard.local)
            if reason is not None:
                raise UnsupportedValueError(f"{path}: {reason}")
            reason = traits.why_too_expanded(shard.local)
            if reason is not None:
                raise UnsupportedValueError(f"{path}: {reason}: save what it is expanded from")
        while path in self._paths:  # the keys 1 and "1" make one path
            path += "~"
        self._paths.add(path)
        self.tensors.append(HeldTensor(path, name, tensor.dtype, shape, shards, leaf is not None))
        return len(self.tensors) - 1


def _anywhere(found: traits.Traits) -> traits.Traits:
    """Without the device: what is restored goes to where its object has it."""
    return traits.PLAIN if not found.kind and not found.requires_grad else found._replace(device=None)


def cut(shard: Shard, box: Any) -> torch.Tensor:
    """The elements of `box` out of a shard that has them."""
    return shard.local[box.within(shard.box).slices]
