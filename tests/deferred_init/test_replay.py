"""What is replayed is what eager construction makes, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.fake import is_fake
from tests.deferred_init.modules import Make, assert_made_as, assert_same, deferred, eager, in_any_order
from tests.deferred_init.trees import LEAVES


def initialised(make: Make, initialise: Callable[[torch.Tensor], Any]) -> Make:
    def made() -> nn.Module:
        module = make()
        initialise(module.weight)  # type: ignore[arg-type]
        return module

    return made


class Tied(nn.Module):
    """Ties, a view of a parameter as a buffer that isn't saved, writes through both, `p.data =`, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.flat = nn.Parameter(torch.randn(10))
        self.register_buffer("part", self.flat.detach()[2:5], persistent=False)
        with torch.no_grad():
            self.part.mul_(2)
            self.flat[7:].zero_()
        self.first.bias.data = torch.arange(4.0)
        self.second.bias.requires_grad_(False)
        self.scale = torch.full((2,), 0.5)


class Moved(nn.Module):
    """A view stays where it is when its base moves to other memory, and is written there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("base", torch.rand(3, 4))
        self.register_buffer("view", self.base.detach().t())
        self.base.data = torch.rand(3, 4)
        self.base.normal_()
        self.register_buffer("other", torch.rand(4))
        self.register_buffer("part", self.other.detach()[2:])
        self.other.set_(torch.rand(6))
        self.other.mul_(3)


class Reads(nn.Module):
    """Looks at values, and does another thing for others."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.rand(5)
        count = int((drawn > 0.3).sum())
        self.weight = nn.Parameter(torch.randn(count + 1, 2))
        self.register_buffer("chosen", torch.nonzero(drawn > drawn.mean()).flatten())
        self.register_buffer("few", drawn[drawn > 0.5])
        self.values = drawn.tolist()
        self.array = drawn.numpy().copy()
        if self.weight[0, 0] > 0:
            nn.init.ones_(self.weight)


class Seeds(nn.Module):
    """Seeds on the way, saves the generator's state and restores it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.b = nn.Parameter(torch.randn(5))
        self.c = nn.Parameter(torch.randn(5))
        with torch.random.fork_rng(devices=[]):
            self.d = nn.Parameter(torch.randn(3))
        own, twin = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
        self.e = nn.Parameter(torch.empty(20).normal_(generator=own))
        self.h = nn.Parameter(torch.empty(3).uniform_(generator=twin))
        self.f = nn.Parameter(torch.randn(5) + torch.rand(5, generator=own))
        torch.manual_seed(7)
        self.g = nn.Parameter(torch.randn(5))


MODULES: dict[str, Make] = {
    **{name: partial(make, 3, 4) for name, make in LEAVES.items()},
    "half": lambda: nn.Linear(5, 3).half().double(),
    "normal": lambda: nn.Linear(33, 65, dtype=torch.bfloat16),
    "orthogonal": initialised(lambda: nn.Linear(5, 4), nn.init.orthogonal_),
    "truncated": initialised(lambda: nn.Linear(9, 30), lambda one: nn.init.trunc_normal_(one, std=0.3, a=-0.1, b=0.2)),
    "rejected": initialised(lambda: nn.Linear(9, 30), nn.init.trunc_normal_),
    "sparse": initialised(lambda: nn.Linear(6, 6), lambda one: nn.init.sparse_(one, 0.5)),
    "dirac": initialised(lambda: nn.Conv1d(3, 3, 3), nn.init.dirac_),
    "eye": initialised(lambda: nn.Linear(4, 4), nn.init.eye_),
    "kaiming": initialised(lambda: nn.Linear(4, 4), nn.init.kaiming_normal_),
    "xavier": initialised(lambda: nn.Linear(4, 4), nn.init.xavier_normal_),
    "tied": Tied,
    "moved": Moved,
    "reads": Reads,
    "seeds": Seeds,
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_made_as_without_deferral(name: str) -> None:
    expected = eager(MODULES[name])
    made = deferred(MODULES[name])
    assert is_deferred(made) and all(is_fake(one) for one in made.parameters())
    materialize_module(made)
    assert_made_as(expected, made)
    backwards = deferred(MODULES[name])
    in_any_order(backwards, [3, 1, 2])
    assert_made_as(expected, backwards)


def test_values_that_were_read_are_the_real_ones() -> None:
    expected, made = eager(Reads), deferred(Reads)
    assert made.values == expected.values and (made.array == expected.array).all()


def test_what_shares_memory_shares_it_when_made_one_by_one() -> None:
    made = deferred(Tied)
    part = materialize_tensor(made.part)
    flat = materialize_tensor(made.flat)
    with torch.no_grad():
        flat.fill_(9)
    assert part.tolist() == [9, 9, 9] and materialize_tensor(made.flat) is flat
    assert materialize_tensor(made.first.weight) is materialize_tensor(made.second.weight)


def test_a_part_is_made_as_it_was_whatever_became_of_the_rest() -> None:
    """The second layer was copied from the first one, which has been trained since."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].load_state_dict(module[0].state_dict())
        return module

    expected, made = eager(make), deferred(make)
    materialize_module(made[0])
    with torch.no_grad():
        made[0].weight.zero_()
    materialize_module(made)
    assert torch.equal(made[1].weight, expected[1].weight)


def test_modules_one_by_one_are_those_of_eager_construction() -> None:
    """The generator's place is passed on from one to the next."""
    torch.manual_seed(5)
    expected = [nn.Linear(3, 3) for _ in range(3)]
    torch.manual_seed(5)
    made = [deferred_init(nn.Linear, 3, 3) for _ in range(2)]
    materialize_module(made[1])
    made.append(deferred_init(nn.Linear, 3, 3))
    for module, other in zip(reversed(made), reversed(expected), strict=True):
        materialize_module(module)
        assert_made_as(other, module)


def test_seeding_again_makes_the_same_again() -> None:
    first, second = deferred(lambda: nn.Linear(3, 3)), deferred(lambda: nn.Linear(3, 3))
    third = deferred(lambda: nn.Linear(3, 3), seed=4)
    for module in (first, second, third):
        materialize_module(module)
    assert torch.equal(first.weight, second.weight) and not torch.equal(first.weight, third.weight)


def test_what_is_drawn_afterwards_is_independent_and_reproducible() -> None:
    torch.manual_seed(0)
    module = deferred_init(nn.Linear, 8, 8)
    drawn = torch.rand(8)
    torch.manual_seed(0)
    deferred_init(nn.Linear, 8, 8)
    assert torch.equal(torch.rand(8), drawn)
    state = torch.get_rng_state()
    materialize_module(module)
    assert torch.equal(torch.get_rng_state(), state), "to materialize draws nothing"


def test_classes_and_attributes_of_parameters_are_kept() -> None:
    class Special(nn.Parameter):
        pass

    class Plain(torch.Tensor):
        pass

    def make() -> nn.Module:
        module = nn.Module()
        module.weight = Special(torch.randn(3))
        module.weight.tag = "row"
        module.register_buffer("plain", torch.randn(3).as_subclass(Plain))
        return module

    expected, made = eager(make), deferred(make)
    assert isinstance(made.weight, Special) and isinstance(made.weight, nn.Parameter)
    materialize_module(made)
    assert_same(expected.weight, made.weight)
    assert made.weight.tag == "row" and type(made.plain) is Plain
    assert torch.equal(made.plain.as_subclass(torch.Tensor), expected.plain.as_subclass(torch.Tensor))


def test_children_come_first_and_a_check_chooses() -> None:
    made = deferred(lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))))
    seen: list[nn.Module] = []
    materialize_module(made, check_fn=lambda module: seen.append(module) or module is made[1][0])
    assert seen == [made[0], made[1][0], made[1], made]
    assert is_deferred(made[0]) and not is_deferred(made[1])


def test_tensors_from_before_stay_and_are_read_as_they_were() -> None:
    layer, factor = nn.Linear(2, 2), torch.full((2,), 3.0)

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.weight = nn.Parameter(torch.ones(2) * factor)

    made = deferred_init(Wraps)
    assert made.layer is layer and not is_fake(layer.weight)
    materialize_module(made)
    assert made.weight.tolist() == [3.0, 3.0]
