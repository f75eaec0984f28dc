"""Constructors that fail or do what can't be deferred, and calls that callers should not make."""

from __future__ import annotations

import io
import operator
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import memstore
from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import UnsupportedValueError
from memstore.fake import fake_mode, is_fake
from tests.deferred_init.modules import assert_made_as, deferred, eager, modes_are_left


def test_a_constructor_that_raises_leaves_nothing() -> None:
    def fails() -> nn.Module:
        nn.Linear(3, 3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        deferred_init(fails)
    assert modes_are_left() and not is_fake(torch.ones(2))


def test_a_constructor_that_fails_in_an_operator_raises_what_torch_raises() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        deferred_init(lambda: nn.Linear(3, 3).weight.detach().add_(torch.ones(4)))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        deferred_init(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert modes_are_left()


def test_a_constructor_that_starts_threads_gets_real_tensors_from_them() -> None:
    class Starts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            found: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda: found.append(torch.full((3,), 2.0)))
            thread.start()
            thread.join()
            self.weight = nn.Parameter(torch.ones(3) * found[0])
            self.register_buffer("made", found[0])

    made = deferred_init(Starts)
    assert is_fake(made.weight) and not is_fake(made.made)
    materialize_module(made)
    assert made.weight.tolist() == [2, 2, 2] and made.made.tolist() == [2, 2, 2]


def test_what_a_thread_writes_unseen_is_an_error_and_no_garbage() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            thread = threading.Thread(target=lambda: self.weight.detach().fill_(5.0))
            thread.start()
            thread.join()

    with pytest.raises(UnsupportedValueError, match="another thread"):
        materialize_module(deferred_init(Writes))


def test_what_a_thread_writes_unseen_is_found_among_writes_of_data_too() -> None:
    """Torch counts what is written through `.data` apart: these writes must not pass for those of the thread."""

    class Writes(nn.Module):
        def __init__(self, written: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.weight.data.normal_().clamp_(-1, 1)
            self.raw = self.weight.data
            self.raw.mul_(2)
            if written:
                thread = threading.Thread(target=lambda: self.weight.detach().fill_(5.0))
                thread.start()
                thread.join()

    expected, made = eager(lambda: Writes(False)), deferred(lambda: Writes(False))
    materialize_module(made)
    assert_made_as(expected, made)
    with pytest.raises(UnsupportedValueError, match="another thread"):
        materialize_module(deferred_init(Writes, True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_constructor_that_touches_cuda_where_there_is_none_fails_as_it_would() -> None:
    for touch in (lambda: nn.Linear(2, 2, device="cuda"), lambda: nn.Linear(2, 2).cuda(), torch.cuda.current_device):
        with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
            deferred_init(touch)
    assert modes_are_left()


def test_materializing_twice_changes_nothing() -> None:
    made = deferred(lambda: nn.Linear(3, 3))
    materialize_module(made[0] if isinstance(made, nn.Sequential) else made)
    weight = made.weight
    done = materialize_module(made)
    assert made.weight is weight and done.replayed == () and not is_deferred(made)
    real = torch.ones(3)
    assert materialize_tensor(real) is real


def test_a_deferred_tensor_that_was_materialized_is_written_no_more() -> None:
    made = deferred(lambda: nn.Linear(3, 3))
    weight, bias = made.weight, made.bias
    materialize_tensor(weight)
    with pytest.raises(UnsupportedValueError, match="aten.fill_.*materialized before"), torch.no_grad():
        weight.fill_(1)
    with torch.no_grad():
        bias.fill_(1)
    assert materialize_tensor(bias).tolist() == [1, 1, 1]


def test_a_fake_tensor_from_outside_is_named_with_the_operator_that_takes_it() -> None:
    with fake_mode():
        outside = torch.ones(3)

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3) * outside)
            self.own = nn.Parameter(torch.ones(2))

    made = deferred_init(Takes)
    with pytest.raises(UnsupportedValueError, match="aten.mul.Tensor.*made in fake_mode"):
        materialize_module(made)
    assert is_deferred(made), "as it was"
    assert materialize_tensor(made.own).tolist() == [1, 1]
    with pytest.raises(UnsupportedValueError, match="made in fake_mode"):
        deferred_init(lambda: (torch.ones(3) * outside).sum().item())
    with pytest.raises(UnsupportedValueError, match="made in fake_mode"):
        materialize_tensor(outside)


def test_fakes_that_were_registered_themselves_are_named_and_nothing_is_made() -> None:
    """They would stay fake, and a forward would return fakes without an error."""
    with fake_mode():
        outside, whole = torch.ones(3), nn.Linear(3, 3)

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(2))
            self.inner = nn.Module()
            self.inner.register_buffer("taken", outside)

    made = deferred_init(Takes)
    with pytest.raises(UnsupportedValueError, match=r"^inner.taken: made in fake_mode"):
        materialize_module(made)
    assert is_fake(made.own), "as it was"
    for source in (None, {"weight": torch.ones(3, 3), "bias": torch.ones(3)}):
        with pytest.raises(UnsupportedValueError, match=r"^weight, bias: made in fake_mode"):
            materialize_module(whole, source=source)
    made.inner.taken = torch.ones(3)
    assert materialize_module(made).replayed == ("own",)


def test_a_tensor_of_another_deferred_module_is_one_with_a_past() -> None:
    first = deferred(lambda: nn.Linear(3, 3))
    second = deferred_init(lambda: nn.ParameterList([first.weight, nn.Parameter(first.weight.detach() * 2)]))
    materialize_module(second)
    assert torch.equal(second[1], second[0] * 2)
    materialize_module(first)
    assert first.weight is second[0]


def test_what_was_given_and_written_since_is_an_error() -> None:
    factor = torch.ones(1 << 15)
    made = deferred_init(lambda: nn.ParameterList([nn.Parameter(torch.ones(1) * factor)]))
    factor.add_(1)
    with pytest.raises(UnsupportedValueError, match="aten.mul.Tensor.*written since"):
        materialize_module(made)
    with torch.inference_mode():
        unseen = torch.ones(1 << 15)
        kept = deferred_init(lambda: nn.ParameterList([nn.Parameter(torch.ones(1) * unseen)]))
        made = deferred_init(lambda: nn.ParameterList([nn.Parameter(torch.ones(1) * unseen)]))
    materialize_module(kept)
    assert torch.equal(kept[0], unseen)
    with torch.inference_mode():
        unseen.add_(1)
    with pytest.raises(UnsupportedValueError, match="aten.mul.Tensor.*written since"):
        materialize_module(made)


def test_a_small_tensor_that_was_given_may_be_written() -> None:
    factor = torch.ones(3)
    made = deferred_init(lambda: nn.ParameterList([nn.Parameter(torch.ones(3) * factor)]))
    factor.add_(1)
    materialize_module(made)
    assert made[0].tolist() == [1, 1, 1]


def test_a_deferred_module_is_not_pickled_or_saved(root: str) -> None:
    made = deferred(lambda: nn.Linear(3, 3))
    for save in (
        pickle.dumps,
        lambda one: torch.save(one, io.BytesIO()),
        lambda one: torch.save(one.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(UnsupportedValueError, match="deferred tensor.*materialize it first"):
            save(made)
    with memstore.open(root) as store, pytest.raises(UnsupportedValueError):
        store.put("model", made.state_dict())
    assert materialize_tensor(made.weight).shape == (3, 3)


def test_the_class_of_a_deferred_parameter_makes_real_ones() -> None:
    """Loaders of weights make new parameters of the class of the old ones."""
    made = deferred(lambda: nn.Linear(3, 3))
    cls: Any = type(made.weight)
    for real in (cls(torch.ones(2, 3), requires_grad=False), cls(torch.ones(2, 3))):
        assert type(real) is nn.Parameter and not is_fake(real) and real.sum() == 6


def test_a_state_dict_shares_the_modules_memory_when_both_are_made() -> None:
    made = deferred(lambda: nn.Linear(3, 3))
    state = made.state_dict()
    assert all(is_deferred(one) for one in state.values())
    weight = materialize_tensor(state["weight"])
    materialize_module(made)
    assert weight.data_ptr() == made.weight.data_ptr() and not weight.requires_grad


def test_a_real_tensor_may_be_written_from_a_deferred_one() -> None:
    target = torch.zeros(3)
    expected = eager(lambda: nn.Linear(3, 1)).weight[0]
    deferred(lambda: (target.copy_(nn.Linear(3, 1).weight.detach()[0]), nn.Linear(1, 1))[1])
    assert torch.equal(target, expected)


def test_what_is_no_tensor_is_not_deferred() -> None:
    wrong: Any = "module"
    with pytest.raises(ValueError, match="a tensor or a module"):
        is_deferred(wrong)


def test_tensors_that_wrap_others_keep_their_class() -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.register_buffer("two", TwoTensor(torch.rand(3), torch.ones(3)))
        return module

    expected, made = eager(make), deferred(make)
    assert is_deferred(made)
    materialize_module(made)
    assert type(made.two) is TwoTensor and torch.equal(made.two.a, expected.two.a) and not is_deferred(made)


def test_a_loop_of_modules_leaves_no_memory() -> None:
    """What is made keeps no deferred one alive, and the other way round."""
    import gc
    import weakref

    made = deferred(lambda: nn.Linear(3, 3))
    ghost = weakref.ref(made.weight.untyped_storage())
    materialize_module(made)
    gc.collect()
    assert ghost() is None


def test_threads_that_materialize_at_once_get_the_same() -> None:
    made = deferred(lambda: nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64)))
    start, found = threading.Barrier(4), []

    def materialize() -> None:
        start.wait()
        found.append([materialize_tensor(one) for one in parameters])
        materialize_module(made)

    parameters = list(made.parameters())
    threads = [threading.Thread(target=materialize) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 4
    for tensors in zip(*found, made.parameters(), strict=True):
        assert len({one.data_ptr() for one in tensors}) == 1
    assert all(map(operator.is_, parameters, made.parameters()))
    assert_made_as(eager(lambda: nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64))), made)
