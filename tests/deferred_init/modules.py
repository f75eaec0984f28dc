"""Modules, made eagerly and deferred from the same seed, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memstore.deferred_init import deferred_init, is_deferred, materialize_module
from memstore.deferred_init.slots import slots_of
from memstore.deferred_init.tensors import is_wrapper

Make = Callable[[], torch.nn.Module]


def modes_are_left() -> bool:
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0


def eager(make: Make, seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return make()


def deferred(make: Make, seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = deferred_init(make)
    torch.manual_seed(seed + 1000)  # what is drawn later must not count
    return made


def assert_made_as(expected: torch.nn.Module, made: torch.nn.Module) -> None:
    """The same tensors by the same names, to the bit; with the same classes, layout and ties. Attributes, too."""
    assert not is_deferred(made)
    for kind in ("named_parameters", "named_buffers"):
        ours = dict(getattr(made, kind)(remove_duplicate=False))
        theirs = dict(getattr(expected, kind)(remove_duplicate=False))
        assert list(ours) == list(theirs)
        for name, one in theirs.items():
            assert_same(one, ours[name], name)
        assert groups(ours) == groups(theirs), "ties"
    assert list(made.state_dict()) == list(expected.state_dict())
    ours, theirs = attributes(made), attributes(expected)
    assert list(ours) == list(theirs)
    for name, one in theirs.items():
        assert_same(one if one.is_leaf else one.detach(), ours[name], name)  # what is made has no graph


def attributes(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are neither parameters nor buffers, also in containers, by their names."""
    return {
        slot.name: slot.tensor
        for prefix, one in module.named_modules()
        for slot in slots_of(one, f"{prefix}." if prefix else "")
        if not slot.is_parameter and slot.home is not one._buffers and not is_wrapper(slot.tensor)
    }


def assert_same(expected: torch.Tensor, made: torch.Tensor, name: str = "") -> None:
    assert type(made) is type(expected), name
    assert (made.dtype, made.device, made.requires_grad) == (expected.dtype, expected.device, expected.requires_grad)
    if not isinstance(expected, torch.nn.UninitializedParameter):
        assert (made.shape, made.stride()) == (expected.shape, expected.stride()), name
        assert bits(made).equal(bits(expected)), name


def groups(tensors: dict[str, torch.Tensor]) -> set[tuple[str, ...]]:
    """The names that share a storage."""
    found: dict[int, list[str]] = {}
    for name, one in tensors.items():
        if isinstance(one, torch.nn.UninitializedParameter):
            continue
        found.setdefault(one.untyped_storage()._cdata, []).append(name)
    return {tuple(names) for names in found.values()}


def in_any_order(module: torch.nn.Module, order: list[int]) -> None:
    """Materializes the parts of a module by themselves, in this order, then the rest."""
    parts = list(module.modules())
    for number in order:
        materialize_module(parts[number % len(parts)])
    materialize_module(module)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
