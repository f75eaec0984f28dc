"""What torch does with modules by and large: compile, export, functional calls, transforms, scripts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import UnsupportedValueError
from memstore.fake import fake_mode, is_fake
from tests.children import in_child
from tests.deferred_init.modules import assert_made_as, deferred, eager
from tests.sharding.fake_world import as_rank


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
    for name, one in grads.items():
        assert one.is_meta and one.shape == parameters[name].shape
        with pytest.raises(NotImplementedError, match="meta"):
            one.tolist()


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


def test_errors_of_a_hook_on_a_deferred_module_reach_the_caller() -> None:
    made = deferred_init(net)
    hook = made[0].register_forward_pre_hook(lambda module, _: print(module.weight.data_ptr()))
    with pytest.raises(UnsupportedValueError, match=r"Tensor.data_ptr.*materialize it first"):
        made(ROWS)
    hook.remove()
    assert is_deferred(made(ROWS)) and torch._C._len_torch_dispatch_stack() == 0


def test_a_conversion_that_swaps_parameters_inside_of_a_constructor_is_refused_by_torch() -> None:
    """Torch swaps no tensor that somebody refers to weakly, as a recording does."""

    def make() -> nn.Module:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return net().double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    with pytest.raises(RuntimeError, match="swap"):
        deferred_init(make)


def test_what_was_computed_from_parameters_is_made_without_a_graph() -> None:
    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        module.scaled = module.weight * 2
        return module

    expected, made = eager(make), deferred(make)
    materialize_module(made)
    assert_made_as(expected, made)
    assert expected.scaled.requires_grad and not made.scaled.requires_grad, "docs/deferred-init.md says so"


@pytest.mark.full
def test_a_parallel_module_is_made_before_it_is_sharded_too() -> None:
    in_child(check_sharded_twice, 3, timeout=500.0)


def check_sharded_twice(rank: int) -> None:
    """Tensor parallel on one dimension of the mesh, then made, then FSDP2 on the other: parts of parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    with as_rank(rank, 4):
        mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        usual, made = eager(net), deferred(net)
        for one in (usual, made):
            parallelize_module(one, mesh["tp"], plan, src_data_rank=None)
        assert is_deferred(made)
        materialize_module(made)
        for one in (usual, made):
            fully_shard(one, mesh=mesh["dp"])
        assert not is_deferred(made)
        tensors: list[Any] = list(made.parameters())
        others: list[Any] = list(usual.parameters())
        for one, other in zip(tensors, others, strict=True):
            assert one.placements == other.placements and one.device_mesh == other.device_mesh
            assert torch.equal(one.to_local(), other.to_local())
