"""What is done to a deferred module between its constructor and `materialize_module`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from memstore.deferred_init import is_deferred, materialize_module, materialize_tensor
from memstore.fake import is_fake
from tests.deferred_init.modules import assert_made_as, deferred, eager


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class Doubled(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * 2


def initialise(module: nn.Module) -> None:
    nn.init.trunc_normal_(module[0].weight)
    nn.init.zeros_(module[2].bias)


def convert(module: nn.Module) -> None:
    module.double().half().float()


def parametrized(module: nn.Module) -> None:
    parametrize.register_parametrization(module[0], "bias", nn.Tanh())


def parametrized_before(module: nn.Module) -> None:
    for leave in (True, False):
        parametrize.register_parametrization(module[0], "weight", Doubled())
        parametrize.remove_parametrizations(module[0], "weight", leave_parametrized=leave)


def replaced(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)


def given_real_data(module: nn.Module) -> None:
    """Deferred tensors get the values of real ones, and not their memory."""
    for one in module.parameters():
        values = torch.arange(float(one.numel())).view(one.shape)
        one.data = values
        if is_fake(one):
            values.zero_()


def set_to_others(module: nn.Module) -> None:
    with torch.no_grad():
        module[0].weight.set_(module[0].weight.detach() + 1)
        module[0].weight.mul_(2)


STEPS: list[Callable[[Any], None]] = [
    initialise,
    convert,
    parametrized,
    parametrized_before,
    replaced,
    given_real_data,
    set_to_others,
]


@pytest.mark.parametrize("step", STEPS)
def test_what_is_done_afterwards_counts(step: Callable[[Any], None]) -> None:
    expected, made = eager(net), deferred(net)
    torch.manual_seed(5)
    step(expected)
    torch.manual_seed(5)
    step(made)
    materialize_module(made)
    assert_made_as(expected, made)


@contextmanager
def flag(name: str) -> Iterator[None]:
    choose = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
    choose(True)
    try:
        yield
    finally:
        choose(False)


@pytest.mark.parametrize("name", ["swap", "overwrite"])
def test_conversions_that_swap_or_replace_parameters_count(name: str) -> None:
    expected, made = eager(net), deferred(net)
    with flag(name):
        expected.double()
        made.double()
        assert is_deferred(made)
        materialize_module(made)
    assert_made_as(expected, made)


def test_a_lazy_module_may_run_before_it_is_made() -> None:
    expected, made = eager(lambda: nn.LazyConv2d(3, 3)), deferred(lambda: nn.LazyConv2d(3, 3))
    for one in (expected, made):
        torch.manual_seed(5)
        one(torch.ones(1, 2, 5, 5))
    assert is_deferred(made) and is_fake(made.weight)
    materialize_module(made)
    assert_made_as(expected, made)


def test_a_vector_of_all_parameters_is_deferred() -> None:
    expected, made = eager(net), deferred(net)
    vector = nn.utils.parameters_to_vector(made.parameters())
    assert is_deferred(vector)
    assert torch.equal(materialize_tensor(vector), nn.utils.parameters_to_vector(expected.parameters()))
