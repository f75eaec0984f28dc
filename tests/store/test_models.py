"""save_model and load_model of one process: names, in place, and all that doesn't fit told at once."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memstore
from memstore.errors import KeyNotFoundError, StoreTimeoutError, StructureMismatchError, UnsupportedValueError
from tests.examples import one_in
from tests.support.equality import assert_same


class Net(nn.Module):
    """Tied weights, buffers that are stored and that are not, a frozen parameter, state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(9), persistent=False)
        self.said: Any = {"note": "", "numbers": torch.zeros(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))

    def get_extra_state(self) -> Any:
        return self.said

    def set_extra_state(self, state: Any) -> None:
        self.said = state


def groups(model: Net) -> list[dict[str, Any]]:
    return [{"params": [model.embed.weight], "weight_decay": 0.1}, {"params": list(model.norm.parameters())}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.arange(6) + step % 2
        loss = nn.functional.cross_entropy(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "lbfgs": lambda params: torch.optim.LBFGS([p for group in params for p in group["params"]]),
}


@pytest.mark.parametrize("name", one_in(2, ["adamw", "amsgrad", "sgd", "momentum", "adafactor"]))
@pytest.mark.parametrize("has_states", [False, True])
def test_training_goes_on_bit_by_bit(store: memstore.Store, name: str, has_states: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](groups(model))
    train(model, optimizer, 3)
    model.said = {"note": "three steps", "numbers": torch.tensor([1.0, 2.0])}
    store.save_model("run", model, optimizer)
    expected = train(model, optimizer, 4)
    other = Net()
    later = OPTIMIZERS[name](groups(other))
    if has_states:
        train(other, later, 1)
    store.load_model("run", other, later)
    assert other.said["note"] == "three steps" and torch.equal(other.said["numbers"], torch.tensor([1.0, 2.0]))
    assert other.head.weight is other.embed.weight
    assert torch.equal(train(other, later, 4), expected)
    assert_same(optimizer.state_dict()["state"], later.state_dict()["state"])
    for one, group in zip(optimizer.param_groups, later.param_groups, strict=True):
        assert {**one, "params": 0} == {**group, "params": 0}


def test_lists_of_states_come_back(store: memstore.Store) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    found = [OPTIMIZERS["lbfgs"]([{"params": list(one.parameters())}]) for one in (model, other)]
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        found[0].zero_grad()
        loss.backward()
        return loss

    found[0].step(closure)  # type: ignore[arg-type]
    store.save_model("run", model, found[0])
    store.load_model("run", other, found[1])
    assert_same(found[0].state_dict(), found[1].state_dict())


def test_a_load_writes_into_the_tensors_that_are_there(store: memstore.Store) -> None:
    model, other = Net(), Net()
    optimizer, later = (OPTIMIZERS["adamw"](groups(one)) for one in (model, other))
    train(model, optimizer, 2)
    train(other, later, 1)
    store.save_model("run", model, optimizer)
    places = {name: value.data_ptr() for name, value in other.state_dict(keep_vars=True).items() if name[0] != "_"}
    states = [state["exp_avg"].data_ptr() for state in later.state.values()]
    store.load_model("run", other, later)
    assert {name: other.state_dict()[name].data_ptr() for name in places} == places
    assert [state["exp_avg"].data_ptr() for state in later.state.values()] == states
    assert other.embed.weight.requires_grad and not other.scale.requires_grad


def test_a_save_leaves_a_fresh_optimizer_as_it_is(store: memstore.Store) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    before = copy.deepcopy(model.state_dict())
    store.save_model("run", model, optimizer)
    assert not optimizer.state
    assert_same(before, model.state_dict())
    later = OPTIMIZERS["adamw"](groups(model))
    train(model, later, 1)
    store.load_model("run", model, later)
    assert not later.state


def test_dtype_casts_the_model_and_not_the_optimizer(store: memstore.Store) -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    train(model, optimizer, 1)
    store.save_model("run", model, optimizer, dtype=torch.bfloat16)
    found = store.get("run")
    assert {leaf.dtype for name, leaf in found["model"].items() if name[0] != "_"} == {torch.bfloat16, torch.int64}
    assert found["optimizer"]["state"]["embed.weight"]["exp_avg"].dtype == torch.float32
    other = Net().to(torch.bfloat16)
    store.load_model("run", other)
    assert torch.equal(other.embed.weight, model.embed.weight.to(torch.bfloat16))


def test_names_are_those_of_the_bare_module(store: memstore.Store) -> None:
    compiled: Any = torch.compile(nn.Linear(2, 3))
    wrapped = nn.DataParallel(nn.Sequential(compiled, nn.Sequential(nn.Linear(3, 1))))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for parameter in wrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    store.save_model("run", wrapped, optimizer)
    found = store.get("run")
    assert list(found["model"]) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert list(found["optimizer"]["state"]) == list(found["model"])
    bare = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1)))
    later = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    store.load_model("run", bare, later)
    assert_same(list(wrapped.state_dict().values()), list(bare.state_dict().values()))
    store.save_model("run", bare, later)
    store.load_model("run", wrapped, optimizer)


def test_checkpointed_modules_have_their_own_names(store: memstore.Store) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    bare = nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.Linear(3, 1))
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 3))), nn.Linear(3, 1))
    store.save_model("run", wrapped, torch.optim.Adam(wrapped.parameters()))
    assert list(store.get("run")["model"]) == list(bare.state_dict())
    store.load_model("run", bare, torch.optim.Adam(bare.parameters()))
    assert_same(list(wrapped.state_dict().values()), list(bare.state_dict().values()))


def test_what_is_no_module_or_optimizer_is_refused(store: memstore.Store) -> None:
    model: Any = nn.Linear(1, 1)
    store.save_model("run", model, torch.optim.SGD(model.parameters()))
    scheduler: Any = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    for call in (store.save_model, store.load_model):
        with pytest.raises(TypeError, match="model is a torch.nn.Module, and not a dict"):
            call("run", {"w": model.weight})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="optimizer is a torch.optim.Optimizer, and not a StepLR"):
            call("run", model, scheduler)


def test_a_quantized_module_comes_back(store: memstore.Store) -> None:
    model, other = (torch.ao.nn.quantized.Linear(2, 3) for _ in range(2))
    weight = torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 0, torch.qint8)
    model.set_weight_bias(weight, torch.ones(3))
    model.scale = 0.5
    store.save_model("run", model)
    store.load_model("run", other)
    assert torch.equal(other.weight().dequantize(), weight.dequantize())
    assert torch.equal(other.bias(), torch.ones(3)) and other.scale == 0.5


def test_a_process_group_without_torch_distributed_is_refused(store: memstore.Store) -> None:
    model = nn.Linear(1, 1)
    for call in (store.save_model, store.load_model):
        with pytest.raises(TypeError, match="torch.distributed is not initialized"):
            call("run", model, process_group=object())


def test_all_that_doesnt_fit_is_told_at_once_and_nothing_is_written(store: memstore.Store) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    store.save_model("run", model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 1).double(), nn.Identity(), nn.Linear(1, 1))
    later = torch.optim.SGD(other.parameters(), lr=0.1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(StructureMismatchError) as raised:
        store.load_model("run", other, later)
    lines = str(raised.value).splitlines()
    for expected in (
        "  model['0.weight']: stored with shape [3, 2], here [4, 2]",
        "  model['1.weight']: stored as torch.float32, here torch.float64; cast=True casts it, and save_model(dtype=) "
        "stores another",
        "  model['3.weight']: not stored",
        "  optimizer: it had no parameter '3.bias'",
        "  model['2.weight']",
        "  optimizer: parameter '2.bias'",
    ):
        assert expected in lines, lines
    assert_same(before, other.state_dict())
    with pytest.raises(StructureMismatchError, match="here \\[4, 2\\]"):
        store.load_model("run", other, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_of_another_kind_is_refused(store: memstore.Store, strict: bool) -> None:
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    train_once(model, adam)
    store.save_model("run", model, adam)
    other = nn.Linear(2, 2)
    for kind, lacks in ((torch.optim.SGD, "momentum, dampening"), (torch.optim.RMSprop, "momentum, alpha")):
        later = kind(other.parameters(), lr=0.1)
        before = copy.deepcopy((other.state_dict(), later.state_dict()))
        with pytest.raises(StructureMismatchError, match=f"stored without {lacks}, which {kind.__name__} needs"):
            store.load_model("run", other, later, strict=strict)
        assert_same((other.state_dict(), later.state_dict()), before)
    store.load_model("run", other, torch.optim.AdamW(other.parameters()))  # whose states are the same


def test_groups_of_other_ranks_may_be_of_other_kinds(store: memstore.Store) -> None:
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    train_once(model, adam)
    store.save_model("run", model, adam)
    value = store.get("run")
    value["optimizer"]["param_groups"]["other.weight"] = {"params": {"other.weight": None}, "lr": 0.1, "momentum": 0.9}
    version = store.put("run", value)
    assert store.load_model("run", model, adam, strict=False) == version


class Warmed(torch.optim.Optimizer):
    def __init__(self, params: Any, **options: float) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    def step(self, closure: Any = None) -> None: ...


def test_an_option_that_an_optimizer_of_others_has_since_then_keeps_its_value(store: memstore.Store) -> None:
    model = nn.Linear(2, 2)
    store.save_model("run", model, Warmed(model.parameters()))
    later = Warmed(model.parameters(), warmup=10)
    store.load_model("run", model, later)
    assert later.param_groups[0]["warmup"] == 10


def train_once(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def test_without_strict_what_is_common_is_loaded(store: memstore.Store) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    other: Any = nn.Sequential(nn.Linear(2, 3), nn.Identity())
    store.save_model("run", model)
    with pytest.raises(StructureMismatchError, match=r"strict=False leaves it out:\n  model\['1.weight'\]"):
        store.load_model("run", other)
    with pytest.raises(StructureMismatchError, match="optimizer: none is stored: leave optimizer= out, or store it"):
        store.load_model("run", model, torch.optim.SGD(model.parameters()))
    store.load_model("run", other, torch.optim.SGD(other.parameters()), strict=False)
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("value", [torch.ones(3), {"a": 1}, {"model": torch.ones(2)}, [1]])
def test_what_is_no_model_is_told(store: memstore.Store, value: Any) -> None:
    store.put("run", value)
    what = "a Tensor" if isinstance(value, torch.Tensor) else f"an? {type(value).__name__}"
    with pytest.raises(StructureMismatchError, match=f"{what} is stored, which save_model didn.t make"):
        store.load_model("run", nn.Linear(1, 1))


def test_a_state_dict_of_an_optimizer_is_told_how_it_is_loaded(store: memstore.Store) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train_once(model, optimizer)
    store.put("run", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(StructureMismatchError) as raised:
        store.load_model("run", model, torch.optim.AdamW(model.parameters()))
    assert str(raised.value).endswith("optimizer.load_state_dict(store.get('run')['optimizer']) loads it")
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(store.get("run")["optimizer"])
    assert fresh.state_dict()["state"][0]["step"] == 1


def test_modules_without_memory_are_told(store: memstore.Store) -> None:
    store.save_model("run", nn.Linear(2, 2))
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(StructureMismatchError, match="to_empty"):
        store.load_model("run", model)
    model.to_empty(device="cpu")
    store.load_model("run", model)


def test_parameters_of_another_model_are_refused(store: memstore.Store) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(5))])
    with pytest.raises(UnsupportedValueError, match=r"parameter 2 of the optimizer's group 0, of shape \[5\]"):
        store.save_model("run", model, optimizer)
    assert "run" not in store


def test_stored_groups_may_be_split_but_not_joined_where_they_differ(store: memstore.Store) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    store.save_model("one", model, torch.optim.SGD(model.parameters(), lr=0.3))
    split = torch.optim.SGD([{"params": list(layer.parameters()), "lr": 0.9} for layer in model])
    store.load_model("one", model, split)
    assert [group["lr"] for group in split.param_groups] == [0.3, 0.3]
    split.param_groups[1]["lr"] = 0.5
    store.save_model("two", model, split)
    with pytest.raises(StructureMismatchError, match=r"of '0.weight' and '1.weight', whose options differ"):
        store.load_model("two", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_load_waits_for_a_newer_version(store: memstore.Store) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(KeyNotFoundError):
        store.load_model("run", model)
    version = store.save_model("run", model)
    assert store.load_model("run", model, newer_than=0) == version
    with pytest.raises(StoreTimeoutError):
        store.load_model("run", model, newer_than=version, timeout=0.05)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_of_torch_change_nothing(store: memstore.Store, mode: Callable[[], Any]) -> None:
    model, other = Net(), Net()
    with mode():
        store.save_model("run", model)
        store.load_model("run", other)
    assert torch.equal(model.embed.weight, other.embed.weight) and not other.embed.weight.is_inference()
    other.embed.weight.sum().backward()


# --- state_dicts, and other dtypes ------------------------------------------------------------------------------------


def test_a_state_dict_that_was_put_is_loaded(store: memstore.Store) -> None:
    saved, model = Net(), Net()
    saved.said = {"note": "was put", "numbers": torch.ones(2)}
    with torch.no_grad():
        saved.scale.fill_(3.0)
    parameter = model.embed.weight
    version = store.put("weights", saved.state_dict())
    assert store.load_model("weights", model) == version
    assert_same(dict(model.state_dict()), dict(saved.state_dict()))
    assert model.embed.weight is parameter and model.said["note"] == "was put"
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(StructureMismatchError, match="none of the model's names"):
        store.load_model("weights", other, strict=False)


def test_a_state_dict_of_a_wrapper_is_loaded_into_it(store: memstore.Store) -> None:
    saved, model = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    store.put("weights", torch.compile(saved).state_dict())
    store.load_model("weights", torch.compile(model))
    assert torch.equal(model.weight, saved.weight)


def test_what_a_state_dict_lacks_or_has_too_much_is_told(store: memstore.Store) -> None:
    model = torch.nn.Linear(2, 3)
    before = model.weight.detach().clone()
    store.put("weights", {"weight": torch.ones(3, 2), "other": torch.ones(1)})
    with pytest.raises(StructureMismatchError, match=r"(?s)model\['bias'\]: not stored.*model\['other'\]"):
        store.load_model("weights", model)
    assert torch.equal(model.weight, before)
    store.load_model("weights", model, strict=False)
    assert torch.equal(model.weight, torch.ones(3, 2))


@pytest.mark.parametrize("puts", [False, True], ids=["save_model", "put"])
def test_a_module_of_another_floating_dtype_is_filled_if_it_is_asked_for(store: memstore.Store, puts: bool) -> None:
    saved, model = Net(), Net().bfloat16()
    if puts:
        store.put("weights", saved.state_dict())
    else:
        store.save_model("weights", saved)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(StructureMismatchError, match="cast=True casts it"):
        store.load_model("weights", model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    store.load_model("weights", model, cast=True)
    for name, tensor in model.named_parameters():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, saved.get_parameter(name).bfloat16())
    model.seen = model.seen.float()
    with pytest.raises(StructureMismatchError, match=r"model\['seen'\]: stored as torch.int64"):
        store.load_model("weights", model, cast=True)
