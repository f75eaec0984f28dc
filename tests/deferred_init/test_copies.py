"""copy.deepcopy of deferred modules and of real ones: the copy is as the original, in each respect, and by itself."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import UnsupportedValueError
from memstore.fake import is_fake
from tests.deferred_init.modules import assert_made_as, deferred, eager


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(given)))


class Scaled(nn.Parameter):
    """A parameter that says itself how it is copied, as those of libraries for quantization do."""

    scale: float

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, *, scale: float = 2.0) -> Scaled:
        made: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.scale = scale
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Scaled:
        made = memo[id(self)] = type(self)(self.data.clone(), self.requires_grad, scale=self.scale)
        return made


def write_the_data(module: Any) -> None:
    module.first.weight.data.mul_(2)


def load(module: Any) -> None:
    module.load_state_dict({name: torch.ones_like(one) for name, one in Net().state_dict().items()})


def run(module: Any) -> None:
    module(torch.arange(6.0).reshape(2, 3))


STEPS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda module: None,
    "write the data": write_the_data,
    "initialise": lambda module: nn.init.trunc_normal_(module.second.weight),
    "half": lambda module: module.half(),
    "to a device": lambda module: module.to("cpu", torch.float64),
    "load": load,
    "run": run,
    "freeze": lambda module: module.requires_grad_(False),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_what_is_done_to_a_copy_counts_and_is_the_copys_alone(step: Callable[[Any], None]) -> None:
    expected, made = copy.deepcopy(eager(Net)), deferred(Net)
    copied = copy.deepcopy(copy.deepcopy(made))
    assert all(is_fake(one) and one.device.type == "cpu" for one in copied.parameters())
    for one in (expected, copied):
        torch.manual_seed(5)
        step(one)
    for one in (copied, made):
        materialize_module(one)
    assert_made_as(expected, copied)
    assert_made_as(eager(Net), made)


def test_what_a_copy_computes_is_deferred() -> None:
    batch = torch.ones(2, 3)
    expected, copied = eager(lambda: nn.Linear(3, 2))(batch), copy.deepcopy(deferred(lambda: nn.Linear(3, 2)))
    result = copied(batch)
    stated = torch.func.functional_call(copied, dict(copied.named_parameters()), (batch,))
    assert is_deferred(result) and is_deferred(stated)
    assert materialize_tensor(result).equal(expected) and materialize_tensor(stated).equal(expected)
    assert copied.weight.sum().item() == eager(lambda: nn.Linear(3, 2)).weight.sum().item()


def test_a_copy_is_not_saved_either() -> None:
    copied: Any = copy.deepcopy(deferred(lambda: nn.Linear(3, 2)))
    for save in (lambda: torch.save(copied.state_dict(), io.BytesIO()), lambda: pickle.dumps(copied.weight)):
        with pytest.raises(UnsupportedValueError, match="materialize it first"):
            save()


def test_clones_of_a_layer_are_each_by_itself() -> None:
    layer = deferred(lambda: nn.Linear(3, 3))
    clones: Any = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])
    for number, one in enumerate(clones):
        one.weight.data.add_(number)
    materialize_module(clones)
    expected = eager(lambda: nn.Linear(3, 3)).weight
    assert all(one.weight.equal(expected + number) for number, one in enumerate(clones)) and is_deferred(layer)


def test_an_optimizer_that_is_copied_with_its_module_has_the_copys_parameters() -> None:
    made: Any = deferred(lambda: nn.Linear(3, 3))
    copied, optimizer = copy.deepcopy((made, torch.optim.SGD(made.parameters())))
    assert copied.weight is optimizer.param_groups[0]["params"][0] and copied.weight.device.type == "cpu"


def test_parameters_of_other_classes_are_copied_as_they_say() -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.weight = Scaled(torch.randn(3), scale=4.0)
        return module

    expected, copied = eager(make), copy.deepcopy(deferred(make))
    assert type(copied.weight).__name__ == "Scaled" and is_fake(copied.weight) and copied.weight.device.type == "cpu"
    materialize_module(copied)
    assert_made_as(expected, copied)
    assert copied.weight.scale == 4.0


def test_a_copy_of_a_lazy_module_may_run_or_be_made_first() -> None:
    expected = eager(lambda: nn.LazyLinear(3))
    runs, made = (copy.deepcopy(deferred(lambda: nn.LazyLinear(3))) for _ in range(2))
    assert is_fake(runs.weight)
    materialize_module(made)
    for one in (expected, runs, made):
        torch.manual_seed(5)
        one(torch.ones(2, 4))
    materialize_module(runs)
    assert_made_as(expected, runs)
    assert_made_as(expected, made)


def test_attributes_of_a_tensor_are_copied_with_it() -> None:
    real = torch.arange(100.0)

    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("scale", torch.ones(2))
        module.scale.of, module.scale.outside, module.scale.again = module.weight, real, module.scale
        return module

    def copies() -> list[Any]:
        return [copy.deepcopy(deferred(make)), deferred(lambda: copy.deepcopy(make()))]

    for copied in copies():
        scale = copied.scale
        assert scale.of is copied.weight and is_fake(scale.of) and scale.again is scale
        assert scale.outside.equal(real) and scale.outside is not real


def test_a_copy_of_what_was_made_before_has_the_past() -> None:
    made: Any = deferred(lambda: nn.BatchNorm1d(50))
    for one in (made.running_var, made.weight):
        with torch.no_grad():
            materialize_tensor(one).fill_(7)
    copied = copy.deepcopy(made)
    assert is_deferred(copied)
    materialize_module(copied)
    assert_made_as(eager(lambda: nn.BatchNorm1d(50)), copied)


def test_a_real_module_that_a_constructor_copies_keeps_its_values() -> None:
    teacher = nn.BatchNorm1d(100)
    teacher.running_mean.copy_(torch.arange(100.0))
    teacher.running_mean.of = teacher.running_var
    made: Any = deferred_init(lambda: nn.Sequential(nn.Linear(3, 3), copy.deepcopy(teacher)))
    assert not is_fake(made[1].running_mean) and made[1].running_mean.of is made[1].running_var
    assert_made_as(teacher, made[1])
    made[1].running_mean.zero_()
    assert teacher.running_mean[1] == 1
    materialize_module(made)
    assert not is_deferred(made)


def test_a_real_tensor_is_copied_with_the_deferred_one_that_it_refers_to() -> None:
    real: Any = torch.arange(100.0)

    def make() -> nn.Module:
        module: Any = nn.Linear(2, 2)
        module.register_buffer("ones", torch.ones(2))
        real.of = module.ones
        module.copied = copy.deepcopy(real)
        return module

    made: Any = deferred(make)
    assert made.copied.equal(real) and is_fake(made.copied.of) and made.copied.of is not made.ones
    assert materialize_tensor(made.copied.of).tolist() == [1, 1]
