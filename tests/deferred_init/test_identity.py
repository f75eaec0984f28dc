"""A deferred tensor becomes real as the same object: who has got it before has the real one afterwards."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import memstore
from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import UnsupportedValueError
from memstore.fake import is_fake
from tests.children import in_a_child
from tests.deferred_init.modules import assert_made_as, deferred, eager
from tests.sharding.fake_world import as_rank

ROWS = torch.linspace(-1, 1, 12).view(4, 3)
Optimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Tied(nn.Module):
    """Its head has the embedding's weight, also under another name; and it has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.all = (self.embed.weight, [self.norm.running_mean])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(rows)) * self.head(rows)


def train(module: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        module(ROWS).square().sum().backward()
        optimizer.step()


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_was_made_before_trains(name: str) -> None:
    expected, made = eager(Tied), deferred(Tied)
    ours, theirs = (OPTIMIZERS[name](one.parameters()) for one in (made, expected))
    materialize_module(made)
    assert_made_as(expected, made)
    train(made, ours)
    train(expected, theirs)
    assert_made_as(expected, made)


@pytest.mark.parametrize("kind", ["state dict", "snapshot", "converted"])
def test_an_optimizer_that_was_made_before_trains_what_comes_from_a_source(kind: str, tmp_path: Path) -> None:
    expected, made = eager(Tied, seed=5), deferred(Tied)
    source: Any = copy.deepcopy(expected.state_dict())
    if kind == "snapshot":
        source = memstore.Snapshot.take(tmp_path / "s", {"model": expected})
    ours = torch.optim.AdamW(made.parameters(), lr=0.1)
    dtype = torch.float64 if kind == "converted" else None
    materialize_module(made, source=source, dtype=dtype)
    expected = expected if dtype is None else expected.to(dtype)
    theirs = torch.optim.AdamW(expected.parameters(), lr=0.1)
    for one, optimizer in ((made, ours), (expected, theirs)):
        train(lambda rows, one=one: one(rows.to(dtype or rows.dtype)), optimizer)
    for name, value in expected.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name


def test_an_optimizer_gets_its_state_back_before_the_module_is_made() -> None:
    expected, made = eager(Tied), deferred(Tied)
    theirs = torch.optim.AdamW(expected.parameters(), lr=0.1)
    train(expected, theirs)
    saved = copy.deepcopy((expected.state_dict(), theirs.state_dict()))
    ours = torch.optim.AdamW(made.parameters())
    ours.load_state_dict(saved[1])
    materialize_module(made, source=saved[0])
    train(expected, theirs)
    train(made, ours)
    assert_made_as(expected, made)


def test_a_module_that_was_compiled_and_has_an_optimizer_trains() -> None:
    expected, made = eager(Tied), deferred(Tied)
    compiled: Any = torch.compile(made, backend="eager")
    ours, theirs = torch.optim.AdamW(compiled.parameters()), torch.optim.AdamW(expected.parameters())
    materialize_module(made)
    train(compiled, ours)
    train(expected, theirs)
    assert_made_as(expected, made)


# --- who else has the object ------------------------------------------------------------------------------------------


def test_ties_with_modules_and_containers_elsewhere_last() -> None:
    made = deferred(Tied)
    before, outside = dict(made.named_parameters()), nn.Linear(3, 5)
    outside.weight, holder = made.embed.weight, {"mean": made.norm.running_mean, "all": made.all}
    materialize_module(made)
    assert not is_deferred(outside)
    assert all(one is before[name] for name, one in made.named_parameters())
    assert made.head.weight is made.embed.weight is outside.weight is made.all[0]
    assert made.norm.running_mean is holder["mean"] is made.all[1][0] and made.all is holder["all"]


def test_weak_references_are_of_what_is_real() -> None:
    """An LSTM has some of its weights."""
    made: Any = deferred(lambda: nn.LSTM(3, 4))
    references = [weakref.ref(one) for one in made.parameters()]
    materialize_module(made)
    for one, outside, own in zip(made.parameters(), references, made._flat_weight_refs, strict=True):
        assert outside() is one is own() and type(one) is nn.Parameter and not one.is_meta
    assert_made_as(eager(lambda: nn.LSTM(3, 4)), made)


def test_hooks_from_before_are_called_once_and_handles_take_them_away() -> None:
    made = deferred(lambda: nn.Linear(2, 2))
    calls: list[Any] = []
    first = made.weight.register_hook(lambda gradient: calls.append("first"))
    made.weight.register_post_accumulate_grad_hook(lambda one: calls.append(one))
    materialize_module(made)
    second = made.weight.register_hook(lambda gradient: calls.append("second"))
    made(torch.ones(1, 2)).sum().backward()
    assert calls[:2] == ["first", "second"] and calls[2] is made.weight and len(calls) == 3
    first.remove()
    second.remove()
    made(torch.ones(1, 2)).sum().backward()
    assert len(calls) == 4


def test_attributes_and_slots_of_parameters_are_kept() -> None:
    class Slotted(nn.Parameter):
        __slots__ = ("rows", "unset")

    def make() -> nn.Module:
        made = nn.Module()
        made.weight = Slotted(torch.ones(3))
        made.weight.rows = 3
        return made

    made = deferred(make)
    made.weight.tag = tag = object()
    weight = made.weight
    materialize_module(made)
    assert made.weight is weight and type(weight) is Slotted and not is_fake(weight)
    assert weight.tag is tag and weight.rows == 3 and not hasattr(weight, "unset")
    assert set(vars(weight)) == {"tag"}


def test_views_from_before_stay_deferred_and_share_memory_when_they_are_made() -> None:
    made = deferred(lambda: nn.Linear(2, 2))
    row, alias = made.weight[0], made.weight.detach()
    materialize_module(made)
    assert is_deferred(row) and is_deferred(alias)
    with torch.no_grad():
        made.weight.fill_(7)
    assert materialize_tensor(row).tolist() == [7, 7]
    assert materialize_tensor(alias).data_ptr() == made.weight.data_ptr()


def test_backward_of_what_was_computed_before_is_an_error_and_loses_no_gradients() -> None:
    made = deferred(lambda: nn.Linear(3, 2))
    loss = made(ROWS).sum()
    materialize_module(made)
    with pytest.raises(UnsupportedValueError, match="before materialize_module.*call the module again"):
        loss.backward()
    made(ROWS).sum().backward()
    assert made.weight.grad is not None


# --- what materialize_tensor has returned before ----------------------------------------------------------------------


def test_what_was_looked_at_shares_the_memory_and_an_optimizer_from_before_trains() -> None:
    expected, made = eager(Tied), deferred(Tied)
    ours, theirs = torch.optim.SGD(made.parameters(), lr=0.1), torch.optim.SGD(expected.parameters(), lr=0.1)
    weight, seen = made.embed.weight, materialize_tensor(made.embed.weight)
    materialize_module(made)
    assert made.embed.weight is weight is materialize_tensor(weight)
    train(made, ours)
    train(expected, theirs)
    assert_made_as(expected, made)
    assert torch.equal(seen, weight) and seen.data_ptr() == weight.data_ptr()


def test_what_was_looked_at_and_put_into_the_module_is_tied_to_the_rest() -> None:
    made = deferred(Tied)
    seen = made.embed.weight = materialize_tensor(made.embed.weight)
    materialize_module(made)
    assert made.head.weight is seen is made.all[0]


# --- what can't be --------------------------------------------------------------------------------------------------


def test_a_weak_reference_of_cpps_is_told_by_name_and_nothing_is_changed() -> None:
    made = deferred(Tied)
    before, attributes = dict(made.named_parameters()), {one: dict(vars(one)) for one in made.parameters()}
    loss, reference = made.embed(ROWS).sum(), torch._C._WeakTensorRef(made.norm.bias)
    with pytest.raises(UnsupportedValueError, match=r"norm\.bias can't become real as the same object"):
        materialize_module(made, source={"embed.weight": torch.ones(5, 3)})
    assert dict(made.named_parameters()) == before and all(map(is_fake, before.values()))
    assert attributes == {one: dict(vars(one)) for one in made.parameters()}
    loss.backward()
    del reference, loss
    materialize_module(made)
    assert all(one is before[name] for name, one in made.named_parameters())
    assert_made_as(eager(Tied), made)


@in_a_child
def test_a_module_that_is_sharded_already_keeps_its_parameters() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        made: Any = deferred_init(nn.Linear, 8, 4)
        fully_shard(made, mesh=mesh)
        before, values = list(made.parameters()), torch.arange(32.0).view(4, 8)
        optimizer = torch.optim.SGD(before, lr=1.0)
        materialize_module(made, source={"weight": values, "bias": torch.zeros(4)})
        assert all(one is other for one, other in zip(made.parameters(), before, strict=True))
        assert isinstance(made.weight, DTensor) and torch.equal(made.weight.to_local(), values[2:])
        made.weight.grad = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], run_check=False)
        optimizer.step()
        assert torch.equal(made.weight.to_local(), values[2:] - 1)


def test_a_part_of_a_wrapper_that_is_in_the_module_too_stays_its_part() -> None:
    def make() -> nn.Module:
        module, one = nn.Module(), torch.rand(3)
        module.register_buffer("one", one)
        module.register_buffer("two", TwoTensor(one, torch.ones(3)))
        return module

    expected, made = eager(make), deferred(make)
    materialize_module(made)
    two: Any = made.two
    assert not is_deferred(two) and torch.equal(two.a, expected.get_buffer("one"))
    made.get_buffer("one").add_(1)
    assert torch.equal(two.a, expected.get_buffer("one") + 1)
