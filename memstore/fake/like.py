"""fake_like: a value with fake tensors in place of its tensors."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from memstore import structure
from memstore.errors import UnsupportedValueError
from memstore.fake.marks import Mark, mark_of, meta_twin, set_mark
from memstore.fake.tensors import become_fake
from memstore.structure import RefusedError, modes


@modes.uncompiled
def fake_like(value: Any) -> Any:
    """Returns the same containers with fake tensors, of the same shapes, dtypes and devices. No bytes are read.

    Args:
        value: a view, a tensor, a TensorDict, or dicts, lists and tuples of these, of any depth. Other objects stay.

    Returns:
        New containers. A tensor that occurs twice in `value` is one fake tensor.

    Example:
        >>> import torch
        >>> from memstore.fake import fake_like
        >>> fake_like({"w": torch.zeros(2, 3)})
        {'w': tensor(..., size=(2, 3), fake=True)}
    """
    try:
        structure.check_nesting(value)
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None
    with modes.put_aside():
        return _like(value, {})


def _like(value: Any, seen: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen[id(value)] = _fake(value)
        return seen[id(value)]
    if hasattr(value, "apply") and hasattr(value, "batch_size"):  # a TensorDict, or a tensorclass
        return value.apply(lambda one: _like(one, seen), inplace=False)
    if isinstance(value, Mapping):
        names: list[Any] = list(value)
        found = {name: _like(value[name], seen) for name in names}
        if type(value) is dict:
            return found
        if not isinstance(value, dict):
            return type(value)(found)  # type: ignore[call-arg]
        made: Any = copy.copy(value)  # with what else it has: a defaultdict its factory
        made.update(found)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_like(one, seen) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_like(one, seen) for one in value)
    return value


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        made: torch.Tensor = meta_twin(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        mark = mark_of(tensor)
        set_mark(made, Mark(tensor.device if mark is None else mark.device, None))
        become_fake(made)
    return made
