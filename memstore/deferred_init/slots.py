"""Slots: the places of a module that have tensors, by the names that a state dict has for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memstore.deferred_init.tensors import is_deferred_tensor

Check = Callable[[torch.nn.Module], bool]


class Slot(NamedTuple):
    """One place of a module that has a tensor: a parameter, a buffer, or an attribute that is neither.

    Attributes:
        home, key: where it is.
        name: from the root, with dots.
        is_saved: it is a parameter, or a buffer that a state dict has.
    """

    home: dict[str, Any]
    key: str
    name: str
    tensor: torch.Tensor
    is_parameter: bool
    is_saved: bool


def slots_of(module: torch.nn.Module, prefix: str = "") -> Iterator[Slot]:
    """All of one module, without its descendants'."""
    inside = vars(module)
    for home, kind in ((inside["_parameters"], "parameter"), (inside["_buffers"], "buffer"), (inside, "attribute")):
        for key, tensor in home.items():
            if isinstance(tensor, torch.Tensor):
                passing = kind == "attribute" or key in inside["_non_persistent_buffers_set"]
                yield Slot(home, key, prefix + key, tensor, kind == "parameter", not passing)


def deferred_slots(root: torch.nn.Module, check: Check | None) -> list[Slot]:
    """Those of a module and its descendants that have deferred tensors; children first."""
    return [slot for slot in _walk(root, "", check, set()) if is_deferred_tensor(slot.tensor)]


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
