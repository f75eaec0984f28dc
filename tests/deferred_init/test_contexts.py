"""What is around a constructor, and what it brings in: defaults, contexts, files, numpy, other memory."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import UnsupportedValueError
from memstore.fake import fake_mode, is_fake
from tests.deferred_init.modules import assert_made_as, deferred, eager


class Rotary(nn.Module):
    """Numbers of the default dtype, also where no operator is told it: integers that are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / 10.0 ** (torch.arange(0, 8, 2) / 8))
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("ones", torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_that_of_the_recording(dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return Rotary()
        finally:
            torch.set_default_dtype(before)

    expected, made = eager(make), deferred(make)
    materialize_module(made)
    assert_made_as(expected, made)
    assert made.inverse.dtype == dtype and torch.get_default_dtype() == torch.float32


def test_contexts_around_the_replay_do_not_reach_it() -> None:
    def make() -> nn.Module:
        module = nn.Linear(8, 8)
        module.register_buffer("square", module.weight.detach() @ module.weight.detach())
        return module

    expected, made, inside, guarded = eager(make), deferred(make), deferred(make), deferred(make)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        materialize_module(made)
    with torch.device("meta"), torch.inference_mode():
        materialize_module(inside)
    with fake_mode():
        materialize_module(guarded)
    for one in (made, inside, guarded):
        assert_made_as(expected, one)
    inside.weight.sum().backward()


def test_a_constructor_that_multiplies_under_autocast_is_refused_by_name() -> None:
    def make(work: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        module = nn.Linear(8, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.init.xavier_normal_(module.weight)
            module.register_buffer("worked", work(module.weight.detach()))
        return module

    expected, made = eager(lambda: make(torch.exp)), deferred(lambda: make(torch.exp))
    materialize_module(made)
    assert_made_as(expected, made)
    for work in (
        lambda one: one.matmul(one),
        lambda one: nn.functional.linear(one, one),
        lambda one: nn.functional.conv1d(one, one[..., None]),
    ):
        with pytest.raises(UnsupportedValueError, match="aten.*autocast"):
            deferred(lambda work=work: make(work))


def test_modules_made_on_meta_and_emptied_elsewhere_take_no_memory() -> None:
    """`skip_init` and `to_empty`: what is set afterwards is what counts."""

    def make() -> nn.Module:
        with torch.device("meta"):
            first = nn.Linear(4, 4)
        second = nn.utils.skip_init(nn.Linear, 4, 4)
        made = nn.Sequential(first.to_empty(device="cpu"), second)
        for one in made.parameters():
            nn.init.normal_(one)
        return made

    expected, made = eager(make), deferred(make)
    assert all(is_fake(one) and is_deferred(one) for one in made.parameters())
    materialize_module(made)
    assert_made_as(expected, made)
    left = deferred_init(lambda: nn.Linear(2, 2, device="meta"))
    assert left.weight.is_meta and not is_deferred(left)
    with pytest.raises(NotImplementedError, match="meta"):
        deferred_init(lambda: nn.Linear(2, 2, device="meta").to("cpu"))


def test_a_device_around_the_constructor_is_that_of_its_tensors() -> None:
    def make() -> nn.Module:
        with torch.device("cpu"):
            return nn.Linear(3, 3)

    expected = eager(make)
    with torch.device("cpu"):
        made = deferred(make)
    materialize_module(made)
    assert_made_as(expected, made)


class Loads(nn.Module):
    """Loads a checkpoint, as constructors of pretrained backbones do."""

    def __init__(self, file: bytes) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        state = torch.load(io.BytesIO(file), weights_only=True)
        self.layer.load_state_dict(state["layer"])
        self.register_buffer("table", state["table"])
        self.scaled = nn.Parameter(state["table"].t() * 2)


def test_a_checkpoint_that_a_constructor_loads_is_what_it_gets() -> None:
    file = io.BytesIO()
    torch.save({"layer": nn.Linear(3, 3).state_dict(), "table": torch.arange(12.0).view(3, 4)[:, 1:]}, file)
    expected, made = eager(lambda: Loads(file.getvalue())), deferred(lambda: Loads(file.getvalue()))
    materialize_module(made)
    assert_made_as(expected, made)
    assert made.layer.weight.abs().sum() > 0


def test_numbers_of_numpy_and_python_are_drawn_when_the_constructor_runs() -> None:
    def make() -> nn.Module:
        np.random.seed(0)
        random.seed(0)
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(3))
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(np.random.rand(3)))
        module.bias = nn.Parameter(torch.full((2,), random.random()))
        module.legacy = nn.Parameter(torch.FloatTensor(np.random.rand(4).astype(np.float32)))
        module.listed = nn.Parameter(torch.Tensor([random.random(), 2.0]))
        module.empty = nn.Parameter(torch.FloatTensor(3, 2).fill_(random.random()))
        return module

    expected, made = eager(make), deferred(make)
    np.random.rand(5), random.random()
    materialize_module(made)
    assert_made_as(expected, made)


def test_an_array_that_changes_after_it_was_read_is_read_as_it_was_or_named() -> None:
    """Torch doesn't see what numpy writes."""

    def make(array: Any) -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(array.shape))
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(array))
        array[:] = -1
        return module

    small = deferred_init(make, np.ones(10, dtype=np.float32))
    materialize_module(small)
    assert small.weight.tolist() == [1.0] * 10
    large = deferred_init(make, np.ones(1 << 16, dtype=np.float32))
    with pytest.raises(UnsupportedValueError, match="aten.copy_.*written since"):
        materialize_module(large)


def normalized() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LazyBatchNorm1d(), nn.Unflatten(1, (2, 2)))
    module.append(nn.InstanceNorm1d(2, track_running_stats=True))
    for _ in range(2):
        module(torch.rand(5, 3))
    return module


def test_what_a_forward_in_a_constructor_averages_is_kept() -> None:
    """The operator of batch norms says nothing of what it writes."""
    expected, made = eager(normalized), deferred(normalized)
    assert expected[1].running_mean.abs().sum() > 0
    materialize_module(made)
    assert_made_as(expected, made)


def test_a_real_tensor_gets_values_as_its_data() -> None:
    layer = nn.Linear(2, 2)

    def make() -> nn.Module:
        layer.weight.data = torch.full((2, 2), 3.0)
        return nn.Linear(1, 1)

    deferred_init(make)
    assert layer.weight.tolist() == [[3, 3], [3, 3]] and not is_fake(layer.weight)
    with fake_mode(), pytest.raises(UnsupportedValueError, match="data needs values"):
        layer.weight.data = torch.ones(2, 2)


def test_names_of_types_are_those_of_real_tensors() -> None:
    with fake_mode(fake_cuda=True):
        tensor, moved = torch.ones(2), torch.ones(2, dtype=torch.half, device="cuda")
    assert tensor.type() == "torch.FloatTensor" and tensor.type(torch.int8).dtype == torch.int8
    assert moved.type() == "torch.cuda.HalfTensor"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    "made quantized": (lambda: torch._empty_affine_quantized([3], scale=1.0, zero_point=0, dtype=torch.qint8), "quant"),
    "sparse": (lambda: torch.ones(3, 3).to_sparse(), "sparse"),
    "compressed": (lambda: torch.ones(3, 3).to_sparse_csr(), "sparse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_other_layouts_are_refused_by_name(name: str) -> None:
    make, text = REFUSED[name]
    for refusing in (lambda: deferred_init(make), lambda: _in_fake_mode(make)):
        with pytest.raises(UnsupportedValueError, match=f"aten.*{text}|aten.*needs values"):
            refusing()


def _in_fake_mode(make: Callable[[], Any]) -> None:
    with fake_mode():
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_deferred_module_is_not_moved_to_cuda_where_there_is_none() -> None:
    made = deferred(lambda: nn.Linear(3, 3))
    for move in (made.cuda, lambda: made.to("cuda")):
        with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
            move()
    with pytest.raises(RuntimeError, match="device='cuda': this process has no such device"):
        materialize_module(made, device="cuda")
    materialize_module(made)
    assert made.weight.device.type == "cpu" and materialize_tensor(made.weight) is made.weight
