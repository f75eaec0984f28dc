"""fake_mode, is_fake, meta_like, fake_like: in the mode, after it, and where it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import memstore
from memstore.deferred_init import deferred_init, is_deferred, materialize_module
from memstore.deferred_init.replay import Recording
from memstore.errors import UnsupportedValueError
from memstore.fake import Session, fake_like, fake_mode, in_session, is_fake, meta_like
from tests.deferred_init.modules import modes_are_left

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")


def test_a_tensor_says_where_it_would_be_inside_and_outside() -> None:
    with fake_mode():
        tensor = torch.ones(10, dtype=torch.float16)
        inside = tensor.device, tensor.is_meta, tensor.is_cpu, is_fake(tensor)
    assert inside == (torch.device("cpu"), False, True, True)
    assert (tensor.device, tensor.is_meta, tensor.is_cpu, is_fake(tensor)) == inside
    assert modes_are_left()


@without_cuda
def test_cuda_is_claimed_where_there_is_none() -> None:
    with fake_mode(fake_cuda=True):
        made = torch.ones(10, device="cuda"), torch.ones(2).to("cuda:1"), torch.ones(2).cuda(), torch.ones(2)
        module = torch.nn.Linear(2, 2).to("cuda")
    assert [str(one.device) for one in made] == ["cuda:0", "cuda:1", "cuda:0", "cpu"]
    assert module.weight.is_cuda and module.weight.get_device() == 0


@without_cuda
def test_a_default_device_is_claimed_too_where_there_is_no_cuda() -> None:
    with torch.device("cuda"), fake_mode(fake_cuda=True):
        around = nn.Linear(2, 2).weight, torch.ones(2), torch.tensor([1.0]), torch.ones(2, device="cpu")
    with fake_mode(fake_cuda=True), torch.device("cuda:1"):
        inside = torch.ones(2)
    torch.set_default_device("cuda")
    try:
        with fake_mode(fake_cuda=True):
            default = torch.ones(2)
    finally:
        torch.set_default_device(None)
    assert [str(one.device) for one in around] == ["cuda:0", "cuda:0", "cuda:0", "cpu"]
    assert (str(inside.device), str(default.device)) == ("cuda:1", "cuda:0")


@without_cuda
def test_what_is_made_of_values_is_where_it_was_asked_for() -> None:
    with fake_mode(fake_cuda=True):
        weight = torch.ones(2, dtype=torch.half, device="cuda")
        named = (
            torch.tensor([1], device="cuda:1"),
            torch.as_tensor([1.0], device="cuda"),
            torch.asarray(2, device="cuda"),
        )
        moved = torch.as_tensor(torch.ones(2), device="cuda"), torch.scalar_tensor(1.0, device="cuda")
        like = weight.new_tensor([1.0]), weight.new_tensor(2, dtype=torch.int8, device="cpu")
    assert all(map(is_fake, (*named, *moved, *like)))
    assert [str(one.device) for one in (*named, *moved)] == ["cuda:1", "cuda:0", "cuda:0", "cuda:0", "cuda:0"]
    assert [(str(one.device), one.dtype) for one in like] == [("cuda:0", torch.half), ("cpu", torch.int8)]


def test_a_new_tensor_like_a_deferred_one_is_made() -> None:
    """Torch makes it on the device of the other one, which is meta, where no operator is called."""

    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("scale", module.weight.new_tensor([4.0, 5.0]))
        return module

    made = deferred_init(make)
    assert is_deferred(made.scale)
    materialize_module(made)
    assert made.scale.tolist() == [4, 5] and made.scale.dtype == torch.float32


@without_cuda
def test_cuda_without_an_index_is_the_device_that_is_current_whenever_somebody_asks() -> None:
    """A rank that has called `set_device` replays on its own device, and not where the recording was."""
    heard: list[Any] = []

    class Hears(Recording):
        def begin(self, operator: Any, args: Any, options: Any) -> Any:
            heard.append(options.get("device"))
            return super().begin(operator, args, options)

    with in_session(Session(Hears(), fake_cuda=True)):
        made = torch.ones(2, device="cuda"), torch.ones(2).cuda(), torch.ones(2).to("cuda"), torch.zeros(2).to("cuda:1")
        made[0].new_zeros(3), torch.zeros_like(made[0])
        assert made[0].to("cuda") is made[0] and made[0].to("cuda:0") is made[0]
    given = [str(one) for one in heard if one is not None and one.type == "cuda"]
    assert given[:4] == ["cuda", "cuda", "cuda", "cuda:1"] and "cuda:0" not in given
    assert [str(one.device) for one in made] == ["cuda:0", "cuda:0", "cuda:0", "cuda:1"]


@without_cuda
def test_a_number_on_the_cpu_goes_to_the_device_of_the_others() -> None:
    with fake_mode(fake_cuda=True):
        weight, number, other = torch.ones(3, device="cuda"), torch.tensor(2.0), torch.tensor(3.0)
    assert (number * weight).is_cuda and (weight * number).is_cuda and torch.where(number > 1, number, weight).is_cuda
    assert (number * other).is_cpu and (number * torch.ones(3)).is_cpu


def test_a_parameter_that_nothing_was_done_with_is_fake_afterwards() -> None:
    """`nn.Parameter(tensor)` puts modes aside, so that nobody hears of it."""
    with fake_mode():
        alone, kept = nn.Parameter(torch.ones(3)), torch.ones(4)
        both, data = nn.Parameter(kept, requires_grad=False), torch.ones(2).data
    for one in (alone, both, data):
        assert is_fake(one) and one.device.type == "cpu" and is_fake(one * 2) and "fake=True" in repr(one)
    listed = deferred_init(lambda: {"a": [nn.Parameter(torch.full((3,), 2.0))]})["a"][0]
    assert listed.device.type == "cpu" and is_deferred(listed * 2) and (listed * 2).tolist() == [4, 4, 4]


def test_torchs_modules_need_no_search_for_what_nobody_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search looks at each object of the process."""

    def fails() -> Any:
        raise AssertionError("all objects are looked through")

    monkeypatch.setattr(gc, "get_objects", fails)
    layer = nn.TransformerEncoderLayer
    made = deferred_init(
        lambda: nn.Sequential(nn.TransformerEncoder(layer(4, 2, 4), 2), nn.LSTM(2, 2), nn.Conv1d(2, 2, 1))
    )
    normal = deferred_init(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Embedding(4, 2, padding_idx=0)).half())
    with pytest.raises(AssertionError, match="looked through"):
        deferred_init(lambda: [nn.Parameter(torch.ones(3))])
    assert is_deferred(made) and is_deferred(normal)


def test_moves_to_where_it_is_copy_as_torch_does() -> None:
    with fake_mode():
        tensor = torch.ones(2)
        tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        tied[0].weight.data = tied[1].weight.data
        moved = tied.to("cpu", non_blocking=True)
    number, other = torch.float32, torch.ones(2)
    for copied in (("cpu", number, False, True), (number, False, True), (tensor, False, True), (other, False, True)):
        assert tensor.to(*copied) is not tensor and is_fake(tensor.to(*copied))
    for kept in (("cpu", number, True), (number, True), ("cpu", number, True, False), (tensor, True), (other, True)):
        assert tensor.to(*kept) is tensor
    assert tensor.to("cpu", copy=True) is not tensor and tensor.to("cpu") is tensor
    assert moved[0].weight.untyped_storage()._cdata == moved[1].weight.untyped_storage()._cdata


@without_cuda
@pytest.mark.parametrize("make", [lambda: torch.ones(2, device="cuda"), lambda: torch.ones(2).cuda()])
def test_cuda_is_refused_as_torch_does_unless_it_is_claimed(make: Callable[[], Any]) -> None:
    with pytest.raises((AssertionError, RuntimeError)), fake_mode():
        make()
    with fake_mode(fake_cuda=True):
        make()
    with pytest.raises((AssertionError, RuntimeError)):
        make()
    assert modes_are_left()


def test_what_is_computed_of_fakes_is_fake_after_the_mode_too() -> None:
    with fake_mode():
        layer = torch.nn.Linear(3, 4)
    result = layer(torch.ones(2, 3))
    result.sum().backward()
    assert is_fake(result) and result.shape == (2, 4) and result.requires_grad
    assert layer.weight.grad is not None and is_fake(layer.weight.grad)
    assert isinstance(layer.weight, torch.nn.Parameter) and modes_are_left()


def test_real_tensors_stay_real() -> None:
    real = torch.arange(3.0)
    with fake_mode():
        assert not is_fake(real) and (real + 1).tolist() == [1.0, 2.0, 3.0]
        assert is_fake(torch.tensor([1, 2])) and is_fake(torch.zeros(3) + real)
    assert real.device.type == "cpu" and not is_fake(torch.ones(2))


def test_a_tensor_asked_for_on_meta_is_no_fake() -> None:
    with fake_mode():
        assert not is_fake(torch.ones(2, device="meta"))
        assert not is_fake(torch.ones(2).to("meta"))
        assert not is_fake(torch.tensor([1.0], device="meta"))


def test_fakes_are_printed() -> None:
    with fake_mode(fake_cuda=True):
        tensor = torch.ones(2, 3, dtype=torch.int8, device="cuda:1")
        parameter = torch.nn.Parameter(torch.ones(4))
        assert repr(parameter) == "Parameter containing:\ntensor(..., size=(4,), requires_grad=True, fake=True)"
    assert repr(tensor) == "tensor(..., size=(2, 3), dtype=torch.int8, device=cuda:1, fake=True)"
    assert f"{tensor}" == repr(tensor) and "fake=True" in str([tensor])


def test_meta_like_has_shape_strides_and_dtype() -> None:
    with fake_mode():
        tensor = torch.ones(4, 6, dtype=torch.bfloat16).t().requires_grad_()
    meta = meta_like(tensor)
    assert meta.device.type == "meta" and not is_fake(meta)
    assert (meta.dtype, meta.size(), meta.stride()) == (tensor.dtype, tensor.size(), tensor.stride())
    assert meta.requires_grad and meta.is_leaf


def test_meta_like_refuses_real_tensors() -> None:
    with pytest.raises(ValueError, match="a fake tensor is needed"):
        meta_like(torch.ones(10))


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda one: one.item(), "item|_local_scalar_dense"),
        (lambda one: one.tolist(), "tolist"),
        (lambda one: one.numpy(), "numpy"),
        (lambda one: bool(one > 0), "aten._local_scalar_dense"),
        (lambda one: torch.nonzero(one), "aten.nonzero"),
        (lambda one: one[one > 0], "aten"),
        (lambda one: one.data_ptr(), "data_ptr"),
        (lambda one: torch.zeros(1).copy_(one), "aten.copy_"),
        (pickle.dumps, "materialize"),
    ],
)
def test_what_needs_values_is_refused_by_name(ask: Callable[[torch.Tensor], Any], name: str) -> None:
    with fake_mode():
        tensor = torch.ones(1)
    with pytest.raises(UnsupportedValueError, match=name):
        ask(tensor)
    assert modes_are_left()


def test_values_are_refused_inside_too() -> None:
    with fake_mode():
        tensor = torch.ones(1)
        for ask in (tensor.item, tensor.tolist, tensor.numpy):
            with pytest.raises(UnsupportedValueError):
                ask()


def test_a_mistake_is_the_same_error_as_on_real_tensors() -> None:
    with fake_mode():
        tensor = torch.ones(3)
    with pytest.raises(RuntimeError, match="size|shape|dimension"):
        tensor + torch.ones(2)


def test_deepcopy_keeps_what_shares_a_storage_together() -> None:
    with fake_mode(fake_cuda=True):
        whole = torch.ones(4, device="cuda")
        part = whole[1:]
    first, second = copy.deepcopy([whole, part])
    assert is_fake(first) and first.device.type == "cuda" and first.shape == (4,) and second.shape == (3,)
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert first.untyped_storage()._cdata != whole.untyped_storage()._cdata


@without_cuda
def test_a_copy_of_a_module_is_where_the_module_is() -> None:
    with fake_mode(fake_cuda=True):
        module = torch.nn.Linear(2, 3, device="cuda")
    copied = copy.deepcopy(module)
    assert is_fake(copied.weight) and str(copied.weight.device) == "cuda:0" and copied.weight.requires_grad
    assert is_fake(copied(torch.ones(1, 2))) and is_fake(copied.half().weight) and is_fake(copied.to("cpu").weight)
    with fake_mode(fake_cuda=True):
        again = copy.deepcopy(module)
    assert is_fake(again.weight) and str(again.weight.device) == "cuda:0"


def test_a_copy_of_a_real_tensor_is_real_inside_too() -> None:
    real = torch.arange(100.0)
    with fake_mode():
        copied = copy.deepcopy({"whole": real, "part": real[50:]})
    assert not is_fake(copied["whole"]) and copied["whole"].equal(real) and copied["part"].equal(real[50:])
    assert copied["whole"].untyped_storage()._cdata == copied["part"].untyped_storage()._cdata


def test_a_module_has_a_state_dict_and_moves() -> None:
    with fake_mode():
        module = torch.nn.Linear(2, 3)
    state = module.half().state_dict()
    assert all(is_fake(one) and one.dtype == torch.float16 for one in state.values())
    assert list(state) == ["weight", "bias"]


def test_modes_nest_and_are_of_one_thread() -> None:
    others: list[bool] = []
    with fake_mode(), fake_mode():
        inner = torch.ones(2)
        thread = threading.Thread(target=lambda: others.append(is_fake(torch.ones(2))))
        thread.start()
        thread.join()
    assert is_fake(inner) and others == [False]


def test_an_error_inside_leaves_no_mode() -> None:
    with pytest.raises(ZeroDivisionError), fake_mode():
        tensor = torch.ones(2)
        raise ZeroDivisionError
    assert modes_are_left() and is_fake(tensor) and tensor.device.type == "cpu"


def test_a_store_refuses_a_fake(root: str) -> None:
    with fake_mode():
        tensor = torch.ones(2)
    with memstore.open(root) as store, pytest.raises(UnsupportedValueError):
        store.put("key", {"w": tensor})


def test_functions_of_torch_run_on_fakes() -> None:
    with fake_mode():
        weight, batch = torch.ones(3, 3), torch.ones(5, 3)
    mapped = torch.func.vmap(lambda row: weight @ row)(batch)
    grad = torch.func.grad(lambda one: (one * one).sum())(weight)
    assert is_fake(mapped) and mapped.shape == (5, 3) and grad.shape == (3, 3)


# --- fake_like --------------------------------------------------------------------------------------------------------


def test_fake_like_of_a_view_reads_nothing(root: str) -> None:
    value = {"layer": {"w": torch.ones(64, 8), "n": [torch.zeros(3, dtype=torch.int8), 7]}, "name": "x"}
    with memstore.open(root) as store:
        store.put("key", value)
        before = memstore.bytes_read()
        fake = fake_like(store.view("key"))
        assert memstore.bytes_read() == before
    assert is_fake(fake["layer"]["w"]) and fake["layer"]["w"].shape == (64, 8)
    assert fake["layer"]["n"][0].dtype == torch.int8 and fake["layer"]["n"][1] == 7 and fake["name"] == "x"


def test_fake_like_keeps_dicts_of_other_classes() -> None:
    given = defaultdict(list, a=torch.ones(2), b=[OrderedDict(c=torch.ones(3))])
    fake = fake_like(given)
    assert type(fake) is defaultdict and fake["new"] == [] and is_fake(fake["a"]) and not is_fake(given["a"])
    assert type(fake["b"][0]) is OrderedDict and is_fake(fake["b"][0]["c"])


def test_fake_like_keeps_containers_ties_and_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3).t())
    fake = fake_like({"a": weight, "b": weight, "td": TensorDict({"x": torch.zeros(4, 2)}, [4])})
    assert fake["a"] is fake["b"] and isinstance(fake["a"], torch.nn.Parameter) and fake["a"].stride() == (1, 3)
    assert isinstance(fake["td"], TensorDict) and fake["td"].batch_size == (4,) and is_fake(fake["td"]["x"])


@without_cuda
def test_fake_like_of_a_fake_is_where_that_is() -> None:
    with fake_mode(fake_cuda=True):
        given = {"a": torch.nn.Linear(2, 3, device="cuda").weight, "b": torch.ones(2), "c": torch.ones(2).to("cuda:1")}
    made = fake_like(given)
    assert [str(one.device) for one in made.values()] == ["cuda:0", "cpu", "cuda:1"]
    assert all(is_fake(one) and not one.is_meta for one in made.values()) and made["a"].requires_grad
    assert fake_like(deferred_init(torch.nn.Linear, 2, 3).weight).device.type == "cpu"
