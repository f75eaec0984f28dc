"""Lazy modules that get their weights, and so their shapes, from a source."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import StructureMismatchError
from tests.deferred_init.modules import assert_made_as

Make = Callable[[], nn.Module]


def used(make: Make) -> nn.Module:
    made = make()
    made(torch.ones(2, 5, 4))
    return made


MODULES: dict[str, Make] = {
    "linear": lambda: nn.LazyLinear(3),
    "convolution": lambda: nn.LazyConv1d(3, 2),
    "with buffers": lambda: nn.LazyBatchNorm1d(),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_lazy_module_takes_its_shapes_from_the_source(name: str) -> None:
    state = used(MODULES[name]).state_dict()
    expected, made = MODULES[name](), deferred_init(MODULES[name])
    expected.load_state_dict(state)
    done = materialize_module(made, source=state)
    assert set(done.found) == set(state)
    assert_made_as(expected, made)
    assert torch.equal(made(torch.ones(2, 5, 4)), expected(torch.ones(2, 5, 4)))


def test_a_lazy_module_that_was_looked_at_takes_them_too() -> None:
    state, made = used(MODULES["linear"]).state_dict(), deferred_init(nn.LazyLinear, 3)
    assert is_lazy(materialize_tensor(made.weight))
    materialize_module(made, source=state, dtype=torch.float64)
    assert torch.equal(made.weight, state["weight"].double()) and type(made.weight) is nn.Parameter


def test_what_the_source_has_no_shape_for_stays_lazy() -> None:
    made = deferred_init(nn.LazyLinear, 3)
    done = materialize_module(made, source={"weight": torch.ones(3, 5)})
    assert done == (("weight",), ("bias",)) and is_lazy(made.bias) and not is_lazy(made.weight)
    made = deferred_init(nn.LazyLinear, 3)
    assert materialize_module(made, source=nn.LazyLinear(3).state_dict()).found == ()
    assert is_lazy(made.weight) and not is_deferred(made)
    with pytest.raises(StructureMismatchError, match="weight: the source's is uninitialized"):
        materialize_module(deferred_init(nn.Linear, 5, 3), source=nn.LazyLinear(3).state_dict())
