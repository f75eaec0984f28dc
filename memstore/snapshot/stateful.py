"""State dicts: the objects that give and take them, and how one is taken apart before it is saved.

`Stateful` is the protocol; `StateDict` and `RNGState` wrap what has no state dict of its own. `ask_state_dicts` asks
all objects of an app state, in one order on all ranks. `StateWalker` takes a state dict apart: its structure, its
objects, and what this rank holds of each of its tensors.
"""

from __future__ import annotations

import fnmatch
import inspect
import random
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch

from memstore import _modes as modes
from memstore import structure
from memstore._compat import PARAMETER_MARK
from memstore._threads import collect_later
from memstore._wording import an
from memstore.engine import Leaf
from memstore.errors import UnsupportedValueError
from memstore.sharding import Shard, ShardedLeaf, TensorShard, sharded_leaf, whole
from memstore.snapshot.manifest import ManifestValue, path_of
from memstore.snapshot.ranks import RankGroup
from memstore.structure import DTYPE_NAMES, RefusedError, Tree, Walk, traits


@runtime_checkable
class Stateful(Protocol):
    """An object with a state: modules, optimizers, learning-rate schedulers, and whatever has these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state: nested dicts, lists and tuples of tensors and plain objects."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes the state that `state_dict` gave."""
        ...


AppState = dict[str, Any]  # Statefuls by name


class StateDict(dict[str, Any]):
    """A dict that can be saved: for numbers, tensors and other values that aren't Statefuls by themselves.

    Example:
        >>> progress = StateDict(epoch=0, losses=[])
        >>> progress.load_state_dict({"epoch": 3})
        >>> progress
        {'epoch': 3, 'losses': []}
    """

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Sets the entries of `state_dict`; others stay."""
        self.update(state_dict)


_WORDS = 625  # of the Mersenne Twister, with its position


@modes.uncompiled_methods
class RNGState:
    """The random state of the process: of torch (CPU and CUDA), of Python's `random`, and of numpy's global generator.

    In an app state it is restored last, and `Snapshot.take` doesn't change it. So the random numbers after a restore
    are the same as those after the take.
    """

    def __repr__(self) -> str:
        return "memstore.RNGState()"

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "rng_state": torch.get_rng_state(),
            "python": _python_state(),
            "numpy": np.random.get_state(legacy=False),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = list(torch.cuda.get_rng_state_all())
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Sets the states that are there; those of CUDA as far as there are devices."""
        torch.set_rng_state(state_dict["rng_state"].cpu())
        if "python" in state_dict:
            _set_python_state(state_dict["python"])
        if "numpy" in state_dict:
            np.random.set_state(state_dict["numpy"])
        if "cuda" in state_dict and torch.cuda.is_available():
            for device, state in zip(range(torch.cuda.device_count()), state_dict["cuda"], strict=False):
                torch.cuda.set_rng_state(state.cpu(), device)


def _python_state() -> torch.Tensor:
    """Returns the state of `random` as one tensor: version, words, and the number that `gauss` may have left."""
    version, words, gauss = random.getstate()
    left = [] if gauss is None else [int(np.float64(gauss).view(np.int64))]
    return torch.tensor([version, *words, *left], dtype=torch.int64, device="cpu")


def _set_python_state(state: Any) -> None:
    if isinstance(state, torch.Tensor):
        version, *words = state.tolist()
        gauss = float(np.int64(words.pop()).view(np.float64)) if len(words) > _WORDS else None
    else:  # of snapshots before memstore kept it so; torch makes lists of tuples
        version, words, gauss = state
    random.setstate((version, tuple(words), gauss))


def check_app_state(app_state: Any) -> AppState:
    """Returns the app state. Raises TypeError or ValueError if it is none."""
    if not isinstance(app_state, dict):
        raise TypeError(f"app_state is a dict of Statefuls by name, and not {an(type(app_state))}")
    checked = cast("dict[Any, Any]", app_state)
    for key, value in checked.items():
        if not isinstance(key, str) or not key or "\0" in key:
            raise TypeError(f"the names in app_state are texts that aren't empty, and not {key!r}")
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"app_state has the name {key!r}: a lone surrogate is no Unicode text") from None
        if isinstance(value, type) and inspect.isfunction(inspect.getattr_static(value, "state_dict", None)):
            raise TypeError(f"app_state[{key!r}] is the class {value.__qualname__}: give an instance of it")
        if not isinstance(value, Stateful):
            raise TypeError(
                f"app_state[{key!r}] is {an(type(value))}, which has no state_dict and load_state_dict: wrap it "
                "in memstore.StateDict"
            )
    if len([value for value in checked.values() if isinstance(value, RNGState)]) > 1:
        raise ValueError("app_state has several RNGStates: there is one random state in a process")
    return checked


# --- The objects of an app state are asked for their state dicts, by all ranks in one order --------------------------


def ask_state_dicts(ranks: RankGroup, keys: Iterable[str], app_state: AppState) -> dict[str, Any]:
    """Asks for the state dicts, and returns them by name.

    The random state comes first, and stays what it was: other state dicts may draw numbers. These come one after the
    other on all ranks, since they may have collectives inside: a rank whose state dict fails keeps none of the others
    waiting in the next one's.

    Args:
        keys: what any rank has, the same on all of them.
        app_state: what this rank has.

    Raises:
        Exception: what a state_dict raised here, or on another rank, which is named.
    """
    random_state = RNGState()
    before = random_state.state_dict()
    found = {key: value.state_dict() for key, value in app_state.items() if isinstance(value, RNGState)}
    try:
        for key in sorted(keys):
            with ranks.together():
                if key in app_state and key not in found:
                    found[key] = app_state[key].state_dict()
    finally:
        random_state.load_state_dict(before)
    return found


# --- Tensors that all ranks have alike: by the caller's patterns, and by DistributedDataParallel ---------------------


def matches_globs(path: str, globs: Iterable[str], rank: int) -> bool:
    """Returns whether a pattern matches the path: without a rank, as in torchsnapshot, or with it."""
    return any(fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(f"{rank}/{path}", glob) for glob in globs)


def is_replicating(value: Any) -> bool:
    return isinstance(value, torch.nn.parallel.DistributedDataParallel)


def globs_of_ddp(app_state: AppState) -> list[str]:
    """Returns the patterns of what DistributedDataParallel keeps equal on all ranks."""
    globs: list[str] = []
    for key, value in app_state.items():
        if is_replicating(value):
            ignored = set(getattr(value, "parameters_to_ignore", ()))
            if not ignored:
                globs.append(f"{_escaped(key)}/*")
                continue
            names = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
            globs += [
                f"{_escaped(key)}/{_escaped(name)}"
                for name in names
                if name not in ignored and name.removeprefix("module.") not in ignored
            ]
    return globs


def _escaped(text: str) -> str:
    """Returns a pattern that matches just this path."""
    escaped = text.replace("%", "%25").replace("/", "%2F")
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in escaped)


# --- A state dict taken apart: structure, objects, and what this rank holds of each tensor ---------------------------


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class HeldTensor(NamedTuple):
    """A tensor, and what this rank holds of it.

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


class _StateWalk(Walk):
    """A walk that finds tensors of which this rank has only parts; tensors without memory stand in for them."""

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
                kind = traits.PARAMETER if getattr(value, PARAMETER_MARK, False) else found.kind
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
    """The tensors of one app state, whose state dicts it takes apart. Tensors that are one in memory are one here."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._first_at: dict[int, tuple[torch.Tensor, int]] = {}  # the first tensor at each address, and its number
        self._known: dict[Any, int] = {}
        self._paths: set[str] = set()
        self.tensors: list[HeldTensor] = []

    @collect_later()
    def add(self, key: str, state_dict: Any) -> ManifestValue:
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
        # without the device: what is restored goes to where its object has it
        kinds = [one._replace(device=None) if one.kind or one.requires_grad else traits.PLAIN for one in found]
        plan = structure.describe_external_tree(tree, leaves, walk.objects, kinds, same)
        places = [
            self._place(key, leaf.name, tensor, walk.sharded.get(i), address)
            for i, (leaf, tensor, address) in enumerate(zip(plan.plan.leaves, walk.tensors, addresses, strict=True))
        ]
        return ManifestValue(key, plan.plan.description, plan.objects, tuple(places))

    def _place(
        self, key: str, name: tuple[str | int, ...], tensor: torch.Tensor, leaf: ShardedLeaf | None, address: int
    ) -> int:
        shape = tuple(tensor.shape)
        if leaf is None:
            first = self._first_at.setdefault(address, (tensor, len(self.tensors)))
            if first[1] < len(self.tensors):  # few have the address of an earlier one
                self._known.setdefault((address, *_layout_of(first[0])), first[1])
                known = self._known.setdefault((address, *_layout_of(tensor)), len(self.tensors))
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
            reason = None if shard.local.is_contiguous() else traits.why_too_expanded(shard.local)
            if reason is not None:
                raise UnsupportedValueError(f"{path}: {reason}: save what it is expanded from")
        while path in self._paths:  # the keys 1 and "1" make one path
            path += "~"
        self._paths.add(path)
        self.tensors.append(HeldTensor(path, name, tensor.dtype, shape, shards, leaf is not None))
        return len(self.tensors) - 1


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what two tensors at one address differ in, if they aren't one."""
    dtype, shape, stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
    return dtype, shape, stride, tensor.is_neg(), tensor.is_conj(), tensor.device
