"""What a snapshot is restored into: tensors that share memory, modules without memory, optimizers of another kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import memstore
from memstore import Snapshot, StateDict
from memstore._ranks import RankError


def test_weights_that_are_stored_apart_come_apart_from_the_models(path: str) -> None:
    model = torch.nn.Linear(3, 2)
    best = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
    Snapshot.take(path, {"model": model, "zbest": StateDict(best)})
    want = model.weight.detach().clone()
    other = torch.nn.Linear(3, 2)
    alias = StateDict(other.state_dict())
    address = other.weight.data_ptr()
    Snapshot(path).restore({"model": other, "zbest": alias})
    assert torch.equal(other.weight, want) and other.weight.data_ptr() == address
    assert torch.equal(alias["weight"], torch.full((2, 3), 7.0))


def test_entries_of_a_dict_that_are_one_tensor_come_apart(path: str) -> None:
    Snapshot.take(path, {"state": StateDict(a=torch.zeros(9), b=torch.ones(9), c=[torch.zeros(9)])})
    tensor = torch.full((9,), 5.0)
    state = StateDict(a=tensor, b=tensor, c=[tensor])
    Snapshot(path).restore({"state": state})
    assert state["a"] is tensor and [state[key][0].max().item() for key in "abc"] == [0.0, 1.0, 0.0]


class Tied(torch.nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        if tied:
            self.b.weight = self.a.weight


def test_a_tied_module_takes_what_is_stored_apart_only_if_it_agrees(path: str) -> None:
    apart = Tied(tied=False)
    Snapshot.take(path, {"model": apart})
    tied = Tied(tied=True)
    before = tied.a.weight.detach().clone()
    with pytest.raises(memstore.StructureMismatchError, match=r"model/a.weight, model/b.weight: .*stored apart"):
        Snapshot(path).restore({"model": tied})
    assert torch.equal(tied.a.weight, before)
    apart.b.load_state_dict({"weight": apart.a.weight, "bias": apart.b.bias})
    Snapshot.take(f"{path}-2", {"model": apart})
    Snapshot(f"{path}-2").restore({"model": tied})
    assert torch.equal(tied.b.weight, apart.a.weight)
    Snapshot.take(f"{path}-3", {"model": tied})
    Snapshot(f"{path}-3").restore({"model": tied})


def test_slices_that_overlap_are_restored_only_if_what_is_stored_agrees(path: str) -> None:
    base = torch.arange(12.0)
    state = StateDict(a=base[:8], b=base[4:], c=base[1::2])
    Snapshot.take(path, {"state": state}, checksum=False)
    want = base.clone()
    base.zero_()
    Snapshot(path).restore({"state": state})
    assert torch.equal(base, want)
    Snapshot.take(f"{path}-2", {"state": StateDict(a=torch.ones(8), b=torch.zeros(8))}, checksum=False)
    with pytest.raises(memstore.StructureMismatchError, match="state/a, state/b"):
        Snapshot(f"{path}-2").restore({"state": state})
    assert torch.equal(base, want)


def _stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


OTHERS: list[tuple[Callable[[Any], torch.optim.Optimizer], str]] = [
    (lambda weights: torch.optim.AdamW([{"params": [weight]} for weight in weights]), "stored with 1 groups, here 2"),
    (lambda weights: torch.optim.AdamW(weights[:1]), "param_groups/0: stored with 2 parameters, here 1"),
    (lambda weights: torch.optim.SGD(weights), "stored without momentum, dampening, which SGD needs"),
    (
        lambda weights: torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2)), weights[1]]),
        r"state/0/exp_avg: stored with shape \[16, 8\], and its parameter has \[2, 2\]",
    ),
]


@pytest.mark.parametrize("make, match", OTHERS)
def test_another_optimizer_is_told_before_the_model_is_filled(
    path: str, make: Callable[[Any], torch.optim.Optimizer], match: str
) -> None:
    model = torch.nn.Linear(8, 16)
    Snapshot.take(path, {"model": model, "optimizer": _stepped(model, torch.optim.AdamW(model.parameters()))})
    other = torch.nn.Linear(8, 16)
    before = other.weight.detach().clone()
    with pytest.raises(memstore.StructureMismatchError, match=match):
        Snapshot(path).restore({"model": other, "optimizer": make(list(other.parameters()))})
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize("name", ["SGD", "Adafactor", "LBFGS", "Rprop", "ASGD", "NAdam", "RAdam", "Adagrad", "Adamax"])
def test_optimizers_of_one_kind_fit_before_their_first_step(path: str, name: str) -> None:
    kind: Any = getattr(torch.optim, name)
    model, other = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step(lambda: torch.ones(()))
    Snapshot.take(path, {"optimizer": optimizer}, durability="process")
    fresh = kind(other.parameters())
    torch.optim.lr_scheduler.StepLR(fresh, 10)  # adds a key to the groups
    Snapshot(path).restore({"optimizer": fresh})
    assert fresh.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_a_module_on_the_meta_device_is_refused(path: str) -> None:
    Snapshot.take(path, {"model": torch.nn.Linear(2, 2), "state": StateDict(x=torch.ones(2))})
    meta = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(memstore.StructureMismatchError, match=r"model/bias: .*to_empty"):
        Snapshot(path).restore({"model": meta})
    state = StateDict(x=torch.ones(2, device="meta"))
    Snapshot(path).restore({"state": state})
    assert state["x"].tolist() == [1.0, 1.0]


def test_a_models_tensors_have_their_names_whatever_else_holds_them(path: str) -> None:
    model = torch.nn.Linear(2, 2)
    Snapshot.take(path, {"best": StateDict(model.state_dict()), "model": model})
    assert sorted(load_file(f"{path}/model.safetensors")) == ["bias", "weight"]


def test_a_name_that_is_no_unicode_text_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="lone surrogate") as raised:
        Snapshot.take(path, {"a\ud800": StateDict()})
    assert not isinstance(raised.value, UnicodeError)


@pytest.mark.parametrize("kind", ["annotations", "Path", "OSError", "__name__", "no such"])
def test_an_error_of_a_rank_is_one_of_memstores_or_names_its_kind(kind: str) -> None:
    assert type(RankError(kind, "why", 1).as_error()) is memstore.MemstoreError
    assert str(RankError("CorruptionError", "why", 1).as_error()) == "rank 1: why"


def test_objects_that_only_pickle_reads_are_refused_before_a_tensor_is_filled(path: str) -> None:
    model = torch.nn.Linear(3, 2)
    Snapshot.take(path, {"model": model, "state": StateDict(x=torch.ones(3), y=print)}, allow_pickle=True)
    other, state = torch.nn.Linear(3, 2), StateDict(x=torch.zeros(3), y=None)
    before = other.weight.detach().clone()
    with pytest.raises(memstore.UnsupportedValueError, match="pickle"):
        Snapshot(path).restore({"model": other, "state": state})
    assert torch.equal(other.weight, before) and state["x"].tolist() == [0, 0, 0] and state["y"] is None
    Snapshot(path, storage_options={"allow_pickle": True}).restore({"model": other, "state": state})
    assert torch.equal(other.weight, model.weight) and state["y"] is print


@pytest.mark.parametrize("call", [Snapshot.take, Snapshot.async_take])
def test_objects_that_only_pickle_writes_are_refused_at_the_call(path: str, call: Callable[..., Any]) -> None:
    with pytest.raises(memstore.UnsupportedValueError, match=r"app_state\['state'\].*\['y'\].*allow_pickle"):
        call(path, {"model": torch.nn.Linear(3, 2), "state": StateDict(x=torch.ones(3), y=print)})
    assert not os.path.exists(path), "nothing was written"


def test_an_optimizers_state_is_compared_by_what_is_stored_and_not_by_what_its_memory_has_yet(path: str) -> None:
    """Torch trusts the offsets of jagged tensors, and so they are looked at when one is made."""

    def made() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    first, second = made(), made()
    rows = [torch.full((n, 3), float(n)) for n in (2, 1, 5)]
    first.state[first.param_groups[0]["params"][0]]["rows"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    Snapshot.take(path, {"optimizer": first})
    junk = [torch.full((4,), -7) for _ in range(1000)]  # what new memory has, when it is given back
    del junk
    Snapshot(path).restore({"optimizer": second})
    state = second.state[second.param_groups[0]["params"][0]]
    for found, want in zip(state["rows"].unbind(), rows, strict=True):
        assert torch.equal(found, want)


def test_what_a_module_lacks_and_its_container_looks_into_does_no_harm(path: str) -> None:
    model = torch.nn.Linear(3, 2)
    nested = torch._nested_view_from_buffer(
        torch.arange(5.0), torch.tensor([[2], [3]]), torch.tensor([[1], [1]]), torch.tensor([0, 2])
    )
    model.register_buffer("rows", nested.detach())
    Snapshot.take(path, {"model": model})
    other = torch.nn.Linear(3, 2)
    Snapshot(path).restore({"model": other}, strict=False)
    assert torch.equal(other.weight, model.weight)
