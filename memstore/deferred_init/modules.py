"""materialize_module: real tensors in a module's places."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from memstore.deferred_init.tensors import is_deferred_tensor, materialize


class Slot(NamedTuple):
    """One place of a module that has a tensor: a parameter, a buffer, or an attribute that is neither."""

    home: dict[str, Any]
    name: str
    tensor: torch.Tensor
    is_parameter: bool
    is_attribute: bool


def slots_of(module: torch.nn.Module) -> Iterator[Slot]:
    """All of one module, without its descendants'."""
    for home, is_parameter, is_attribute in (
        (vars(module)["_parameters"], True, False),
        (vars(module)["_buffers"], False, False),
        (vars(module), False, True),
    ):
        for name, tensor in home.items():
            if isinstance(tensor, torch.Tensor):
                yield Slot(home, name, tensor, is_parameter, is_attribute)


def materialize_module(
    module: torch.nn.Module, buffers_only: bool = False, check_fn: Callable[[torch.nn.Module], bool] | None = None
) -> None:
    """Makes the tensors of a module and its descendants real, in place.

    Args:
        module: what `deferred_init` returned, or a part of it. One that is real already stays as it is.
        buffers_only: leave parameters as they are.
        check_fn: which modules to materialize; it is called for each, children first.

    Raises:
        UnsupportedValueError: a tensor can't be replayed; the message names the operator. The module is as it was.
    """
    chosen = [slot for slot in _chosen(module, check_fn, set()) if not (buffers_only and slot.is_parameter)]
    for slot, made in zip(chosen, materialize(slot.tensor for slot in chosen), strict=True):
        slot.home[slot.name] = made


def _chosen(module: torch.nn.Module, check_fn: Any, seen: set[torch.nn.Module]) -> Iterator[Slot]:
    """The deferred tensors of a module and its descendants, children first."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _chosen(child, check_fn, seen)
    if check_fn is None or check_fn(module):
        yield from (slot for slot in slots_of(module) if is_deferred_tensor(slot.tensor))
