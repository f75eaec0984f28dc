"""What torch does with modules by and large: compile, export, functional calls, transforms, scripts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import UnsupportedValueError
from memstore.fake import fake_mode, is_fake
from tests.deferred_init.modules import assert_made_as, deferred, eager


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


ROWS = torch.linspace(-1, 1, 6).view(2, 3)


def test_a_materialized_module_is_compiled_and_exported_as_any_other() -> None:
    expected, made = eager(net), deferred(net)
    materialize_module(made)
    with torch.no_grad():
        wanted = expected(ROWS)
        compiled: Any = torch.compile(made, backend="eager", fullgraph=True)
        assert torch.equal(compiled(ROWS), wanted)
        assert torch.equal(torch.export.export(made, (ROWS,)).module()(ROWS), wanted)
        assert torch.equal(torch.jit.trace(made, (ROWS,))(ROWS), wanted)
    torch._dynamo.reset()


def test_a_module_that_a_constructor_compiles_is_made() -> None:
    expected, made = eager(net), deferred(lambda: torch.compile(net(), backend="eager"))
    materialize_module(made)
    with torch.no_grad():
        assert torch.equal(made(ROWS), expected(ROWS))
    assert_made_as(expected, made._orig_mod)
    torch._dynamo.reset()


def test_a_deferred_module_is_exported_and_not_compiled() -> None:
    """Who compiles it is told to materialize it: compiled code would read memory that isn't there."""
    made = deferred(net)
    with fake_mode():
        fake = net()
    for module in (made, fake):
        with pytest.raises(Exception, match="can't trace.*materialize"):
            torch.compile(module, backend="eager")(ROWS)
        torch._dynamo.reset()
    exported = torch.export.export(made, (ROWS,))
    assert "aten.linear" in exported.graph_module.code
    expected = eager(net)
    materialize_module(made)
    assert_made_as(expected, made)


def test_functional_calls_and_transforms_of_a_deferred_module_are_deferred() -> None:
    expected, made = eager(net), deferred(net)
    parameters = {name: one.detach() for name, one in made.named_parameters()}
    called = torch.func.functional_call(made, parameters, (ROWS,))
    mapped = torch.func.vmap(lambda row: torch.func.functional_call(made, parameters, (row,)))(ROWS)
    assert is_fake(called) and is_deferred(mapped) and mapped.shape == (2, 2)
    wanted = expected(ROWS).detach()
    assert torch.equal(materialize_tensor(called), wanted)
    assert torch.allclose(materialize_tensor(mapped), wanted)


def test_gradients_of_a_constructor_are_made_and_those_of_a_deferred_module_have_no_values() -> None:
    """Outside of the constructor, torch.func wraps tensors such that nobody hears of what it does with them."""

    class Warms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            weights = {name: one.detach() for name, one in self.net.named_parameters()}
            grads = torch.func.grad(lambda one: torch.func.functional_call(self.net, one, (ROWS,)).sum())(weights)
            for name, one in self.net.named_parameters():
                one.data = one.data - grads[name]
            self.net(ROWS).square().sum().backward()
            self.register_buffer("slope", self.net[0].weight.grad)

    expected, made = eager(Warms), deferred(Warms)
    materialize_module(made)
    assert_made_as(expected, made)
    late = deferred(net)
    parameters = {name: one.detach() for name, one in late.named_parameters()}
    grads = torch.func.grad(lambda one: torch.func.functional_call(late, one, (ROWS,)).sum())(parameters)
    assert all(is_fake(one) or one.is_meta for one in grads.values())


def test_many_modules_are_stacked_without_memory() -> None:
    expected, made = eager(lambda: nn.ModuleList([net(), net()])), deferred(lambda: nn.ModuleList([net(), net()]))
    stacked, _ = torch.func.stack_module_state(list(made))
    assert all(is_deferred(one) for one in stacked.values())
    weight = materialize_tensor(stacked["0.weight"])
    assert torch.equal(weight, torch.stack([expected[0][0].weight, expected[1][0].weight]))


def test_a_forward_before_it_is_made_is_recorded() -> None:
    expected, made = eager(net), deferred(net)
    output = made(ROWS)
    assert is_deferred(output) and torch.equal(materialize_tensor(output), expected(ROWS))
    materialize_module(made)
    assert_made_as(expected, made)


def test_a_scripted_module_is_refused_or_made() -> None:
    expected, made = eager(lambda: torch.jit.script(net())), deferred(lambda: torch.jit.script(net()))
    materialize_module(made)
    with torch.no_grad():
        assert torch.equal(made(ROWS), expected(ROWS))


def test_optimizers_that_were_made_before_hold_what_is_deferred() -> None:
    made = deferred(net)
    optimizer = torch.optim.Adam(made.parameters())
    materialize_module(made)
    made(ROWS).sum().backward()
    before = [one.detach().clone() for one in made.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, made.parameters())), "they train nothing: docs/deferred-init.md says so"


def test_errors_of_a_hook_on_a_deferred_module_reach_the_caller() -> None:
    made = deferred_init(net)
    with pytest.raises(UnsupportedValueError, match="needs values|data_ptr"):
        made[0].weight.data_ptr()
