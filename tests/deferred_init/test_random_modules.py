"""Modules of random parts and steps, and random trees of torch's own modules: deferred as made eagerly."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from memstore.deferred_init import materialize_module, materialize_tensor
from tests.deferred_init.modules import assert_made_as, deferred, eager, in_any_order
from tests.deferred_init.trees import NOT_COPIED, Plan, build, kinds, plans

Step = tuple[Any, ...]
SIZES = st.integers(1, 20)
INITS = (
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.trunc_normal_,
    nn.init.ones_,
    nn.init.eye_,
)
WRITES = ["mul_", "add_", "zero_", "copy_", "fill_diagonal_"]

steps = st.one_of(
    st.tuples(st.just("linear"), SIZES, SIZES),
    st.tuples(st.just("norm"), SIZES),
    st.tuples(st.just("parameter"), SIZES, SIZES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
    st.tuples(st.just("init"), st.integers(0, 9), st.sampled_from(range(len(INITS)))),
    st.tuples(st.just("tie"), st.integers(0, 9)),
    st.tuples(st.just("view"), st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.just("write"), st.integers(0, 9), st.sampled_from(WRITES)),
    st.tuples(st.just("data"), st.integers(0, 9)),
    st.tuples(st.just("compute"), st.integers(0, 9), st.sampled_from(["t", "exp", "cumsum", "sort", "double"])),
    st.tuples(st.just("read"), st.integers(0, 9)),
    st.tuples(st.just("copy"), st.integers(0, 9)),
    st.tuples(st.just("seed"), st.integers(0, 3)),
    st.tuples(st.just("dropout"), st.integers(0, 9)),
    st.tuples(st.just("freeze"), st.integers(0, 9)),
)


class Composed(nn.Module):
    """What a list of steps makes. Matrices are parameters, buffers, or attributes; later steps change earlier ones."""

    def __init__(self, plan: list[Step]) -> None:
        super().__init__()
        self.found: list[float] = []
        self.number = 0
        for step in plan:
            getattr(self, f"do_{step[0]}")(*step[1:])

    def matrix(self, number: int) -> torch.Tensor:
        matrices = [one for one in (*self.parameters(), *self.buffers()) if one.dim() == 2]
        if not matrices:
            self.add(torch.rand(3, 4))
            return self.matrix(number)
        return matrices[number % len(matrices)]

    def name(self) -> str:
        self.number += 1
        return f"part{self.number}"

    def add(self, value: torch.Tensor) -> None:
        self.register_buffer(self.name(), value, persistent=self.number % 2 == 0)

    def do_linear(self, rows: int, columns: int) -> None:
        self.add_module(self.name(), nn.Linear(rows, columns))

    def do_norm(self, size: int) -> None:
        self.add_module(self.name(), nn.BatchNorm1d(size))

    def do_parameter(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.register_parameter(self.name(), nn.Parameter(torch.randn(rows, columns, dtype=dtype)))

    def do_init(self, number: int, which: int) -> None:
        one = self.matrix(number)
        if one.dtype == torch.float32:  # qr isn't there for all
            INITS[which](one.detach() if not one.is_leaf else one)

    def do_tie(self, number: int) -> None:
        one = self.matrix(number)
        if isinstance(one, nn.Parameter):
            self.register_parameter(self.name(), one)

    def do_view(self, number: int, how: int) -> None:
        one = self.matrix(number).detach()
        self.add((one.t(), one[:1], one[:, ::2], one.unsqueeze(0))[how])

    def do_write(self, number: int, how: str) -> None:
        one = self.matrix(number)
        with torch.no_grad():
            if how == "copy_":
                one.copy_(torch.rand(one.shape))
            elif how != "fill_diagonal_" or min(one.shape) > 1:
                getattr(one, how)(*(() if how == "zero_" else (2.5,)))

    def do_data(self, number: int) -> None:
        one = self.matrix(number)
        one.data = torch.rand(one.shape).to(one.dtype)

    def do_compute(self, number: int, how: str) -> None:
        one = self.matrix(number).detach()
        made = one.cumsum(0) if how == "cumsum" else one.sort(0).values if how == "sort" else getattr(one, how)()
        self.add(made)

    def do_read(self, number: int) -> None:
        one = self.matrix(number)
        self.found.append(one.float().sum().item())
        if one.float().mean() > 0.5:
            self.add(torch.rand(2, 2))

    def do_copy(self, number: int) -> None:
        self.add(self.matrix(number).detach().clone())

    def do_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def do_dropout(self, number: int) -> None:
        self.add(torch.nn.functional.dropout(self.matrix(number).detach(), 0.4))

    def do_freeze(self, number: int) -> None:
        one = self.matrix(number)
        if one.is_leaf:
            one.requires_grad_(False)


@given(st.lists(steps, min_size=1, max_size=10), st.lists(st.integers(0, 20), max_size=3), st.booleans())
@settings(max_examples=400 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 40)
def test_a_module_is_made_as_without_deferral(plan: list[Step], order: list[int], by_tensors: bool) -> None:
    expected, made = eager(lambda: Composed(plan)), deferred(lambda: Composed(plan))
    assert made.found == expected.found
    if by_tensors:
        tensors = [*made.parameters(), *made.buffers()]
        for number in order[: len(tensors)]:
            materialize_tensor(tensors[number % len(tensors)])
        materialize_module(made)
    else:
        in_any_order(made, order)
    assert_made_as(expected, made)


@given(plans, st.lists(st.integers(0, 20), max_size=3))
@settings(max_examples=300 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 30)
def test_a_tree_of_modules_is_made_as_without_deferral(plan: Plan, order: list[int]) -> None:
    assume("copied" not in kinds(plan) or not kinds(plan) & NOT_COPIED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the hooks of old are deprecated; empty tensors are not initialised
        try:
            expected = eager(lambda: build(plan))
        except (RuntimeError, ValueError, NotImplementedError, TypeError):
            assume(False)  # no such module, deferred or not
        made = deferred(lambda: build(plan))
        in_any_order(made, order)
    assert_made_as(expected, made)
