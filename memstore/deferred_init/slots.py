"""Slots: the places of a module that have tensors, and what is to be put there.

`slots_of` lists the places by the names of a state dict. `MaterializeOptions` says of each which device, dtype and
placements the real tensor is to have. `distribute` makes this rank's part of a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict

from memstore._compat import MODULE_DICTS, entries_of, module_dicts, set_entry
from memstore._wording import first_of, short
from memstore.deferred_init.tensors import has_no_past, is_deferred_tensor, is_empty, is_wrapper
from memstore.errors import StructureMismatchError, UnsupportedValueError

# --- Slots of a module -----------------------------------------------------------------------------------------------


Check = Callable[[torch.nn.Module], bool]
_CONTAINERS = (tuple, list, deque, dict, TensorDict)
_WITH_TENSORS = (torch.Tensor, *_CONTAINERS)


class TensorSlot(NamedTuple):
    """Place of a module that has a tensor: a parameter, a buffer, or an attribute that is neither.

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
    """Entries of a TensorDict, also of one that is locked."""

    def __init__(self, home: TensorDict) -> None:
        self._home = home

    def __setitem__(self, key: str, item: Any) -> None:
        set_entry(self._home, key, item)


class _Tuple:
    """Tuple in a place: one of its items is changed by another tuple there. The place may be in a tuple, too."""

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


def slots_of(module: torch.nn.Module, prefix: str = "") -> Iterator[TensorSlot]:
    """Yields the slots of one module, without its descendants'.

    Tensors in containers among its attributes count too.
    """
    inside, dicts = vars(module), module_dicts(module)
    for home, is_parameter in ((dicts.parameters, True), (dicts.buffers, False)):
        for key, tensor in home.items():
            if isinstance(tensor, torch.Tensor):
                yield TensorSlot(home, key, prefix + key, tensor, is_parameter, key not in dicts.passing)
    for key, value in list(inside.items()):
        if not isinstance(value, _WITH_TENSORS) or key in MODULE_DICTS:
            continue
        if not isinstance(value, dict) or dict.__len__(value):  # each module has some ten dicts of hooks, mostly empty
            yield from _within(inside, key, prefix + key, value, ())


def _within(home: Any, key: Any, name: str, value: Any, around: tuple[int, ...]) -> Iterator[TensorSlot]:
    """Yields the slots in an attribute.

    Args:
        around: the ids of the containers in which it is.
    """
    if isinstance(value, torch.Tensor):
        yield TensorSlot(home, key, name, value, False, False)
        return
    if not isinstance(value, _CONTAINERS) or id(value) in around:
        return
    inner, items = _inside(home, key, value)
    for one, item in items:
        if isinstance(item, _WITH_TENSORS):
            yield from _within(inner, one, f"{name}.{one}", item, (*around, id(value)))


def _inside(home: Any, key: Any, value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Says where the items of a container are put, and returns them by their keys."""
    if isinstance(value, tuple):
        return _Tuple(home, key), list(enumerate(value))
    if isinstance(value, TensorDict):
        return _Entries(value), list(entries_of(value).items())
    # What a class of somebody's makes of `items` isn't asked: it may load what nobody wants yet.
    return value, list(dict.items(value) if isinstance(value, dict) else enumerate(value))


def deferred_slots(root: torch.nn.Module, check: Check | None) -> list[TensorSlot]:
    """Returns the slots of a module with tensors that are deferred, or that nobody can make. Children come first."""
    return [
        slot
        for slot in _walk(root, "", check, set())
        if is_deferred_tensor(slot.tensor) or has_no_past(slot.tensor) or is_empty(slot.tensor)
    ]


def refuse_unknown(slots: Sequence[TensorSlot]) -> None:
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
        raise UnsupportedValueError(f"{first_of(names, 3)}: {why}")


def _walk(
    module: torch.nn.Module, prefix: str, check: Check | None, seen: set[torch.nn.Module]
) -> Iterator[TensorSlot]:
    if module in seen:
        return
    seen.add(module)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", check, seen)
    if check is None or check(module):
        yield from slots_of(module, prefix)


def names_of(root: torch.nn.Module) -> dict[int, list[str]]:
    """Returns all names of each tensor, by its id. A tensor that is tied, or whose module is, has several."""
    found: dict[int, list[str]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for slot in slots_of(module, f"{prefix}." if prefix else ""):
            found.setdefault(id(slot.tensor), []).append(slot.name)
    return found


# --- Options of one call ---------------------------------------------------------------------------------------------


Names = Mapping[int, Sequence[str]]


class MaterializeOptions(NamedTuple):
    """Options for real tensors. Where one is None, the deferred tensors say it.

    Attributes:
        names: all names of each tensor of the module, by its id.
    """

    device: torch.device | None
    dtype: torch.dtype | None
    mesh: Any
    placements: Any
    names: Names

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return tensor.dtype if self.dtype is None or not tensor.dtype.is_floating_point else self.dtype

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        if self.device is not None:
            return self.device
        return tensor.device if self.mesh is None else torch.device(self.mesh.device_type)

    def spread_of(self, slot: TensorSlot) -> Spread | None:
        """Says how a slot's tensor is spread: as it is wanted, or as it is already."""
        if is_wrapper(slot.tensor):
            return spread_as(slot.tensor)
        if self.mesh is None:
            return None
        chosen: Any = self.placements
        placements: Any
        if callable(chosen):
            placements = chosen(slot.name, slot.tensor)
        elif isinstance(chosen, Mapping):  # which may have any name of a tied tensor
            placements = next((chosen[one] for one in self.names[id(slot.tensor)] if one in chosen), None)
        else:
            placements = chosen if slot.is_parameter else None
        return None if placements is None else Spread(self.mesh, placements)

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Returns whether what is real can share the memory that a deferred tensor shares."""
        if self.mesh is not None or (self.device is not None and not is_on(tensor.device, self.device)):
            return False
        return self.dtype is None or self.dtype_of(tensor) == tensor.dtype


def is_on(device: torch.device, wanted: torch.device) -> bool:
    """Returns whether a device is the wanted one; without an index it is any of its type."""
    if device.type != wanted.type:
        return False
    index = cast("int | None", wanted.index)  # torch says that it is never None
    return index is None or device.type == "cpu" or device.index == index


# --- Parts of ranks --------------------------------------------------------------------------------------------------


Placements = Sequence[Any] | Mapping[str, Any] | Callable[[str, torch.Tensor], Any]


class Spread(NamedTuple):
    """DeviceMesh, and torch's placements on it."""

    mesh: Any
    placements: Sequence[Any]


def check_placements(chosen: Any, names: Iterable[Sequence[str]]) -> None:
    """Checks placements that a caller gives by name.

    Args:
        names: of each tensor, all its names.

    Raises:
        StructureMismatchError: a dict has names that no tensor has, or says different things of a tied one.
    """
    if not isinstance(chosen, Mapping):
        return
    groups = list(names)
    known = {name for group in groups for name in group}
    unknown = [str(name) for name in chosen if name not in known]
    if unknown:
        raise StructureMismatchError(
            f"placements has names that the module lacks: {_few(unknown)}; the module has {_few(sorted(known))}"
        )
    for group in groups:
        found = [name for name in group if name in chosen]
        if any(_listed(chosen[name]) != _listed(chosen[found[0]]) for name in found):
            raise StructureMismatchError(
                f"{_few(found)} are names of one tensor, and placements has different ones for them: name it once"
            )


def _listed(placements: Any) -> Any:
    return list(placements) if isinstance(placements, (list, tuple)) else placements


def _few(names: Sequence[str]) -> str:
    return ", ".join(short(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")


def spread_as(wrapper: Any) -> Spread | None:
    """Says how a DTensor is spread; None if the tensor wraps others for another reason."""
    mesh, placements = getattr(wrapper, "device_mesh", None), getattr(wrapper, "placements", None)
    return None if mesh is None or placements is None else Spread(mesh, placements)
