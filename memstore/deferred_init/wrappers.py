"""Tensors that wrap deferred ones: DTensors, and other subclasses with `__tensor_flatten__`.

Outside of `deferred_init` no mode is on, so nobody sees how a wrapper is made, nor what is done with it. But torch
calls a hook for each parameter that a module gets. That is the moment at which its parts become of the class that says
what is done with them, so that they can be distributed further. What is done with the wrapper itself stays unseen.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from memstore.errors import UnsupportedValueError
from memstore.fake import become_fake, mark_of
from memstore.wording import an

_VERSION = "_memstore_version"  # of a wrapper: how often it had been written when it was noted

_is_class_of_wrappers = functools.cache(is_traceable_wrapper_subclass_type)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others."""
    return _is_class_of_wrappers(type(tensor))


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """The tensors that a wrapper is made of, and those of them that wrap others again."""
    found: list[torch.Tensor] = []
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor names its mesh too
            found.extend(parts_of(part) if is_wrapper(part) else [part])
    return found


def all_within(tensor: Any) -> list[torch.Tensor]:
    """The tensors that a wrapper is made of, and what these are made of, at all depths."""
    if not is_wrapper(tensor):
        return []
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    parts = [one for one in parts if isinstance(one, torch.Tensor)]
    return [*parts, *(one for part in parts for one in all_within(part))]


def note_wrapper(tensor: torch.Tensor) -> None:
    """What was done with it so far was seen. Does nothing with a tensor that wraps no deferred one."""
    if not is_wrapper(tensor):
        return
    with torch._C.DisableTorchFunction():
        parts = [one for one in parts_of(tensor) if mark_of(one) is not None]
        for one in parts:
            become_fake(one)
        if parts:
            setattr(tensor, _VERSION, tensor._version)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether it wraps meta tensors of which nothing is known."""
    with torch._C.DisableTorchFunction():
        return is_wrapper(tensor) and any(one.is_meta and mark_of(one) is None for one in parts_of(tensor))


def check_wrapper(tensor: torch.Tensor) -> None:
    """Raises UnsupportedValueError if a wrapper was written: its parts don't know of it."""
    with torch._C.DisableTorchFunction():
        writes = tensor._version - getattr(tensor, _VERSION, 0)
        if writes > 0:
            raise UnsupportedValueError(
                f"{an(type(tensor))} of shape {tuple(tensor.shape)} was written {_times(writes)} while it was "
                "deferred, which isn't recorded: write before it is distributed, or materialize it first"
            )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


@functools.cache
def note_new_parameters() -> None:
    """From now on parameters that wrap deferred tensors are noted when a module gets them."""
    register_module_parameter_registration_hook(_note)


def _note(module: torch.nn.Module, name: str, parameter: Any) -> None:
    if parameter is not None:
        note_wrapper(parameter)
