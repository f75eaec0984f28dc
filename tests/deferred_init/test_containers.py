"""Tensors of a module that are in containers: lists, tuples, dicts, TensorDicts."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn
from torch.fx.immutable_collections import immutable_list

from memstore.deferred_init import is_deferred, materialize_module
from memstore.fake import is_fake
from tests.deferred_init.modules import assert_made_as, deferred, eager


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class Holds(nn.Module):
    """Tensors in attributes that are neither parameters nor buffers, in containers of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.listed = [self.weight, torch.randn(2)]
        self.named = {"a": torch.randn(2), "b": (torch.randn(1), "text", [torch.randn(2)])}
        self.pair = Pair(torch.randn(2), [torch.randn(1)])
        self.around: list[Any] = [1]
        self.around.append(self.around)

    def found(self) -> list[torch.Tensor]:
        first, second = self.named["b"][0], self.named["b"][2][0]  # type: ignore[index]
        return [*self.listed, self.named["a"], first, second, self.pair.left, self.pair.right[0]]  # type: ignore[list-item]


def test_tensors_in_containers_of_a_module_are_made_too() -> None:
    expected, made = eager(Holds), deferred(Holds)
    done = materialize_module(made)
    assert not is_deferred(made) and made.listed[0] is made.weight and type(made.pair) is Pair
    for one, other in zip(made.found(), expected.found(), strict=True):
        assert not is_fake(one) and torch.equal(one, other)
    assert "weight" in done.replayed and "listed.0" not in done.replayed and "listed.1" in done.replayed


class Named(dict[str, Any]):
    """Somebody's, of which nobody should ask more than what it has."""

    def items(self) -> Any:
        raise AssertionError("all of it would be loaded now")


class Listed(list[Any]):
    pass


class Entries(TensorDict):
    pass


class Tuples(nn.Module):
    """Tuples in tuples, also of other classes: the states of an LSTM, caches of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = ((torch.randn(1), torch.randn(1)), [(torch.randn(2), (torch.randn(1),))])
        self.pair = Pair(torch.randn(2), [Pair(torch.randn(1), [])])
        self.top = (torch.max(torch.randn(2, 2), 0), "text")
        self.bias = nn.Parameter(torch.randn(2))

    def found(self) -> list[torch.Tensor]:
        (first, second), [(third, (fourth,))] = self.hidden
        inner: Any = self.pair.right[0]
        return [first, second, third, fourth, self.pair.left, inner.left, *self.top[0]]


def test_tuples_in_tuples_are_made() -> None:
    expected, made = eager(Tuples), deferred(Tuples)
    materialize_module(made)
    assert_made_as(expected, made)
    for one, other in zip(made.found(), expected.found(), strict=True):
        assert not is_fake(one) and torch.equal(one, other)
    assert type(made.pair) is type(made.pair.right[0]) is Pair and type(made.top[0]) is torch.return_types.max


CONTAINERS: dict[str, Any] = {
    "OrderedDict": lambda one: OrderedDict(a=one, b=1),
    "defaultdict": lambda one: defaultdict(list, a=one),
    "a class of dicts": lambda one: Named(a=one),
    "a class of lists": lambda one: Listed(["text", one]),
    "deque": lambda one: deque([one], maxlen=3),
    "a class of TensorDicts": lambda one: Entries({"a": one}, []),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_other_classes_are_kept_and_their_tensors_made(name: str) -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.kept = CONTAINERS[name](torch.randn(3))
        return module

    expected, made = eager(make), deferred(make)
    kept = made.kept
    assert is_deferred(made)
    materialize_module(made)
    place = next(one for one in ("a", 0, 1) if _is_tensor_at(expected.kept, one))
    assert not is_deferred(made) and made.kept is kept
    assert not is_fake(kept[place]) and torch.equal(kept[place], expected.kept[place])


def _is_tensor_at(container: Any, place: Any) -> bool:
    try:
        return isinstance(container[place], torch.Tensor)
    except (KeyError, TypeError, IndexError):
        return False


def test_modules_in_plain_lists_are_left_to_the_caller() -> None:
    """As torch leaves them: `to`, `state_dict` and `parameters` don't see them. They often point to their parents."""

    def make() -> nn.Module:
        module, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
        module.teacher = [teacher]
        return module

    expected, made = eager(make), deferred(make)
    materialize_module(made)
    assert not is_deferred(made) and is_deferred(made.teacher[0])
    materialize_module(made.teacher[0])
    assert_made_as(expected.teacher[0], made.teacher[0])


def test_buffers_only_leaves_parameters_in_containers() -> None:
    def make() -> nn.Module:
        return nn.ModuleList([nn.LSTM(3, 3), nn.BatchNorm1d(3)])

    expected, made = eager(make), deferred(make)
    materialize_module(made, buffers_only=True)
    assert is_deferred(made) and all(is_fake(one) for one in made.parameters())
    assert not any(is_fake(one) for one in made.buffers())
    materialize_module(made)
    assert torch.equal(made[0](torch.ones(2, 3))[0], expected[0](torch.ones(2, 3))[0])


def test_parameters_in_a_tensordict_are_made_there_too() -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.weights = TensorDictParams(TensorDict({"a": torch.randn(3), "inner": {"b": torch.randn(2)}}, []))
        module.plain = TensorDict({"c": torch.randn(2)}, []).lock_()
        return module

    expected, made = eager(make), deferred(make)
    assert is_deferred(made)
    list(made.plain.values(True, True))  # a locked one remembers them
    materialize_module(made)
    assert_made_as(expected, made)
    for ours, theirs in ((made.weights, expected.weights), (made.plain, expected.plain)):
        names = list(theirs.keys(True, True))
        assert [*ours.keys(True, True)] == names and all(torch.equal(ours[name], theirs[name]) for name in names)
        assert not any(is_fake(one) for one in ours.values(True, True))
    assert made.weights["a"] is dict(made.named_parameters())["weights.a"] and made.plain.is_locked


class Fixed(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("it can't be changed")


def test_containers_that_can_not_be_changed_have_real_tensors() -> None:
    def make() -> nn.Module:
        module: Any = nn.Linear(2, 2)
        module.fixed = Fixed(a=torch.randn(2))
        module.listed = immutable_list([torch.randn(2), module.weight])
        return module

    expected, made = eager(make), deferred(make)
    materialize_module(made)
    held: Any = [made.fixed["a"], *made.listed]
    assert not is_deferred(made) and held[2] is made.weight
    assert all(map(torch.equal, held, [expected.fixed["a"], *expected.listed]))
