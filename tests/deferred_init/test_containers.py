"""Tensors of a module that are in containers: lists, tuples, dicts, TensorDicts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn

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


def test_buffers_only_leaves_parameters_in_containers() -> None:
    made = deferred(lambda: nn.LSTM(3, 3))
    materialize_module(made, buffers_only=True)
    assert is_deferred(made) and all(is_fake(one) for one in made.parameters())
    materialize_module(made)
    expected = eager(lambda: nn.LSTM(3, 3))
    assert torch.equal(made(torch.ones(2, 3))[0], expected(torch.ones(2, 3))[0])


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
