"""Slots: the places of a module that have tensors, by the names that a state dict has for them."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from memstore.deferred_init.tensors import has_no_past, is_deferred_tensor
from memstore.deferred_init.wrappers import is_empty
from memstore.errors import UnsupportedValueError

Check = Callable[[torch.nn.Module], bool]
_CONTAINERS = (tuple, list, deque, dict, TensorDict)
_WITH_TENSORS = (torch.Tensor, *_CONTAINERS)
_TORCHS = frozenset(("_parameters", "_buffers", "_modules"))


class Slot(NamedTuple):
    """One place of a module that has a tensor: a parameter, a buffer, or an attribute that is neither.

    Attributes:
        home, key: where it is: `home[key] = tensor` puts another one there.
        name: from the root, with dots.
        is_saved: it is a parameter, or a buffer that a state dict has.
    """

    home: Any
    key: Any
    name: str
    tensor: torch.Tensor
    is_parameter: bool
    is_saved: bool

    def put(self, tensor: torch.Tensor) -> None:
        """Puts a tensor there, unless it is there already: some containers can't be changed."""
        home: Any = self.home
        kind: Any = next((kind for kind in (dict, list) if isinstance(home, kind)), None)  # a subclass isn't asked
        if kind is None or kind.__getitem__(home, self.key) is not tensor:
            home[self.key] = tensor


class _Entries:
    """Those of a TensorDict, also of one that is locked."""

    def __init__(self, home: TensorDict) -> None:
        self._home = home

    def __setitem__(self, key: str, item: Any) -> None:
        self._home._tensordict[key] = item
        self._home._erase_cache()


class _Tuple:
    """A tuple in a place: one of its items is changed by another tuple there. The place may be in a tuple, too."""

    def __init__(self, home: Any, key: Any) -> None:
        self._home, self._key = home, key

    def __getitem__(self, number: int) -> Any:
        return self._home[self._key][number]

    def __setitem__(self, number: int, item: Any) -> None:
        before = self._home[self._key]
        if before[number] is item:
            return
        cls: Any = type(before)
        items = [*before[:number], item, *before[number + 1 :]]
        self._home[self._key] = cls._make(items) if hasattr(cls, "_make") else cls(items)


def slots_of(module: torch.nn.Module, prefix: str = "") -> Iterator[Slot]:
    """All of one module, without its descendants'. Of its attributes, also those in containers."""
    inside = vars(module)
    for home, is_parameter in ((inside["_parameters"], True), (inside["_buffers"], False)):
        for key, tensor in home.items():
            if isinstance(tensor, torch.Tensor):
                is_passing = key in inside["_non_persistent_buffers_set"]
                yield Slot(home, key, prefix + key, tensor, is_parameter, not is_passing)
    for key, value in list(inside.items()):
        if isinstance(value, _WITH_TENSORS) and key not in _TORCHS and not _is_empty(value):
            yield from _within(inside, key, prefix + key, value, ())


def _is_empty(value: Any) -> bool:
    """Each module has some ten dicts of hooks, of which most are."""
    return isinstance(value, dict) and not dict.__len__(value)  # pyright: ignore[reportUnknownArgumentType]


def _within(home: Any, key: Any, name: str, value: Any, around: tuple[int, ...]) -> Iterator[Slot]:
    """Slots in an attribute.

    Args:
        around: the ids of the containers in which it is.
    """
    if isinstance(value, torch.Tensor):
        yield Slot(home, key, name, value, False, False)
        return
    if not isinstance(value, _CONTAINERS) or id(value) in around:
        return
    inner, items = _inside(home, key, value)
    for one, item in items:
        if isinstance(item, _WITH_TENSORS):
            yield from _within(inner, one, f"{name}.{one}", item, (*around, id(value)))


def _inside(home: Any, key: Any, value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Where the items of a container are put, and these by their keys."""
    if isinstance(value, tuple):
        return _Tuple(home, key), list(enumerate(value))
    if isinstance(value, TensorDict):
        return _Entries(value), list(value._tensordict.items())
    # What a class of somebody's makes of `items` isn't asked: it may load what nobody wants yet.
    return value, list(dict.items(value) if isinstance(value, dict) else enumerate(value))


def deferred_slots(root: torch.nn.Module, check: Check | None) -> list[Slot]:
    """Those of a module and its descendants with tensors that are deferred, or that nobody can make; children first."""
    return [
        slot
        for slot in _walk(root, "", check, set())
        if is_deferred_tensor(slot.tensor) or has_no_past(slot.tensor) or is_empty(slot.tensor)
    ]


def refuse_unknown(slots: Sequence[Slot]) -> None:
    """Raises UnsupportedValueError if nobody knows the values of tensors; it names them."""
    _refuse(
        [slot.name for slot in slots if has_no_past(slot.tensor)],
        "made in fake_mode, so nobody knows the values: make the module in deferred_init, or put real tensors there "
        "first",
    )
    _refuse(
        [slot.name for slot in slots if is_empty(slot.tensor)],
        "DTensors on meta, so nobody knows the values. What is done with a DTensor while it is deferred isn't "
        "recorded: convert the module before it is distributed, or when it is materialized (dtype=, device=)",
    )


def _refuse(names: Sequence[str], why: str) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UnsupportedValueError(f"{', '.join(names[:3])}{more}: {why}")


def _walk(module: torch.nn.Module, prefix: str, check: Check | None, seen: set[torch.nn.Module]) -> Iterator[Slot]:
    if module in seen:
        return
    seen.add(module)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", check, seen)
    if check is None or check(module):
        yield from slots_of(module, prefix)


def names_of(root: torch.nn.Module) -> dict[int, list[str]]:
    """All names of each tensor, by its id: one that is tied, or in a module that is there twice, has several."""
    found: dict[int, list[str]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for slot in slots_of(module, f"{prefix}." if prefix else ""):
            found.setdefault(id(slot.tensor), []).append(slot.name)
    return found
