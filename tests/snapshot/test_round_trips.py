"""What was saved by one process is what is restored: values of all kinds, in place and into new memory."""

from __future__ import annotations

import os
import random
import tempfile
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memstore
from memstore import Snapshot, StateDict
from memstore.snapshot import differences, drafts, restore
from memstore.snapshot.stored import Value
from tests.examples import examples
from tests.support import strategies
from tests.support.equality import assert_same


def plainly(value: Any) -> Any:
    """As a snapshot has it: in C order, and on the CPU."""
    if isinstance(value, dict):
        made = {key: plainly(entry) for key, entry in value.items()}
        return OrderedDict(made) if type(value) is OrderedDict else made
    if type(value) in (list, tuple):
        return type(value)(map(plainly, value))
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    return value


tensors = st.builds(
    lambda shape, dtype, seed: strategies.random_bits(shape, dtype, seed),
    strategies.shapes,
    st.sampled_from(strategies.DTYPES),
    st.integers(0, 99),
)
state_dicts = st.dictionaries(
    strategies.keys(only_text=True),
    st.recursive(
        st.one_of(tensors, tensors, strategies.atoms()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(strategies.keys(), inner, max_size=3),
            st.dictionaries(strategies.keys(only_text=True), inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(state_dicts)
@settings(max_examples=examples(30))
def test_a_state_dict_comes_back_as_it_was(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        snapshot = Snapshot.take(f"{folder}/s", {"state": StateDict(state)}, durability="process")
        assert_same(state, snapshot.get_state_dict_for_key("state"))
        restored = StateDict()
        Snapshot(f"{folder}/s").restore({"state": restored})
        assert_same(state, dict(restored))
        snapshot.verify()


@given(strategies.values())
@settings(max_examples=examples(30))
def test_values_of_all_kinds_are_saved_or_refused(value: Any) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        try:
            snapshot = Snapshot.take(f"{folder}/s", {"state": StateDict(value=value)}, durability="process")
        except memstore.UnsupportedValueError:
            assert not os.path.exists(f"{folder}/s")
            return
        snapshot.get_state_dict_for_key("state")
        snapshot.verify()
        assert snapshot.get_manifest().keys() == Snapshot(f"{folder}/s").get_manifest().keys()


@given(tensors, st.sampled_from(["transposed", "stepped", "row", "whole"]))
@settings(max_examples=examples(40))
def test_tensors_are_filled_in_place_whatever_their_strides(tensor: torch.Tensor, layout: str) -> None:
    room = strategies.random_bits((2, *(2 * size for size in tensor.shape)), tensor.dtype, 1)
    if layout == "stepped":
        target = room[(0, *(slice(None, None, 2) for _ in tensor.shape))]
    elif layout == "row":
        target = room[(1, *(slice(0, size) for size in tensor.shape))]
    elif layout == "transposed":
        turned = torch.empty(tuple(reversed(tensor.shape)), dtype=tensor.dtype)
        target = turned.permute(tuple(range(tensor.ndim - 1, -1, -1)))
    else:
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        snapshot = Snapshot.take(f"{folder}/s", {"state": StateDict(x=tensor)}, durability="process")
        assert snapshot.read_object("0/state/x", target) is target
        assert_same(tensor, target.clone(memory_format=torch.contiguous_format))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def untrained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def test_modules_and_optimizers_that_have_no_state_yet(path: str) -> None:
    model, optimizer = trained()
    Snapshot.take(path, {"model": model, "optimizer": optimizer})
    other, later = untrained()
    addresses = [parameter.data_ptr() for parameter in other.parameters()]
    Snapshot(path).restore({"model": other, "optimizer": later})
    assert_same(plainly(model.state_dict()), plainly(other.state_dict()))
    assert_same(plainly(optimizer.state_dict()), plainly(later.state_dict()))
    assert addresses == [parameter.data_ptr() for parameter in other.parameters()]


def test_state_is_read_into_the_memory_that_is_there(path: str) -> None:
    model, optimizer = trained()
    Snapshot.take(path, {"optimizer": optimizer})
    want = plainly(optimizer.state_dict())
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    addresses = [moment.data_ptr() for moment in moments]
    for moment in moments:
        moment.zero_()
    Snapshot(path).restore({"optimizer": optimizer})
    assert_same(want, plainly(optimizer.state_dict()))
    assert addresses == [state["exp_avg"].data_ptr() for state in optimizer.state.values()]


def test_autograd_notices_that_a_tensor_was_filled(path: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    state = StateDict(x=torch.ones(3))
    Snapshot.take(path, {"state": state})
    product = weight * state["x"]
    Snapshot(path).restore({"state": state})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_tied_tensors_are_written_once(path: str) -> None:
    weight = torch.randn(300, 300)
    state = StateDict(a=weight, b=weight, again={"c": weight.view(300, 300)}, part=weight[:10])
    snapshot = Snapshot.take(path, {"state": state, "more": StateDict(d=weight)})
    assert snapshot.metadata.nbytes < 310 * 300 * 4 + 5000
    found = snapshot.get_state_dict_for_key("state")
    assert found["a"] is found["b"] and torch.equal(found["again"]["c"], weight)
    assert torch.equal(found["part"], weight[:10])


def test_quantized_tensors_and_modules(path: str) -> None:
    quantized = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8)
    snapshot = Snapshot.take(path, {"state": StateDict(q=quantized)})
    found = snapshot.get_state_dict_for_key("state")["q"]
    assert found.dtype is torch.qint8 and torch.equal(found.int_repr(), quantized.int_repr())
    target = StateDict(q=torch.quantize_per_tensor(torch.zeros(4, 4), 0.1, 3, torch.qint8))
    snapshot.restore({"state": target})
    assert torch.equal(target["q"].int_repr(), quantized.int_repr())


@pytest.mark.parametrize("mode", ["inference", "no_grad", "meta"])
def test_torchs_modes_change_nothing(path: str, mode: str) -> None:
    model, optimizer = trained()
    modes: dict[str, Any] = {
        "inference": torch.inference_mode,
        "no_grad": torch.no_grad,
        "meta": lambda: torch.device("meta"),
    }
    with modes[mode]():
        snapshot = Snapshot.take(path, {"model": model, "optimizer": optimizer})
    other, later = untrained()
    with modes[mode]():
        snapshot.restore({"model": other})
    snapshot.restore({"optimizer": later})
    assert_same(plainly(model.state_dict()), plainly(other.state_dict()))
    other(torch.randn(3, 4)).sum().backward()
    later.step()


def test_pickle_is_only_used_where_it_was_asked_for(path: str) -> None:
    state = StateDict(x=complex, y=torch.zeros(2))
    with pytest.raises(memstore.UnsupportedValueError, match="'x'"):
        Snapshot.take(path, {"state": state})
    assert not os.path.exists(path)
    snapshot = Snapshot.take(path, {"state": state}, allow_pickle=True)
    assert snapshot.get_state_dict_for_key("state")["x"] is complex
    with pytest.raises(memstore.UnsupportedValueError, match="pickle"):
        Snapshot(path).restore({"state": StateDict()})
    Snapshot(path).verify()
    assert repr(Snapshot(path).get_manifest()["0/state/x"].value) == "<stored with pickle>"
    assert torch.equal(Snapshot(path).read_object("0/state/y"), torch.zeros(2))
    with pytest.raises(memstore.UnsupportedValueError, match="pickle"):
        Snapshot(path).read_object("0/state/x")
    trusting = Snapshot(path, storage_options={"allow_pickle": True})
    assert trusting.get_state_dict_for_key("state")["x"] is complex


def test_the_random_state_is_restored_last_and_left_alone_by_a_take(path: str) -> None:

    import numpy as np

    class Drawing(StateDict):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            torch.rand(3)
            super().load_state_dict(state_dict)

    app_state: dict[str, Any] = {"a rng": memstore.RNGState(), "drawing": Drawing(x=1)}
    before = torch.get_rng_state()
    Snapshot.take(path, app_state)
    assert torch.equal(before, torch.get_rng_state())
    drawn = torch.rand(3), random.random(), np.random.rand()
    Snapshot(path).restore(app_state)
    again = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(drawn[0], again[0]) and drawn[1:] == again[1:]


def test_the_path_may_be_an_empty_folder_or_a_pathlib_one(tmp_path: Path) -> None:
    Snapshot.take(tmp_path, {"state": StateDict(x=torch.arange(3))})
    assert Snapshot(tmp_path).read_object("0/state/x").tolist() == [0, 1, 2]
    assert sorted(os.listdir(tmp_path)) == ["memstore_snapshot.json", "state.safetensors"]


@pytest.mark.parametrize("left", [0, 400])
@pytest.mark.parametrize("take", [Snapshot.take, Snapshot.async_take])
def test_a_tensor_whose_storage_was_cut_is_named_and_left_as_it_is(path: str, take: Any, left: int) -> None:
    cut = torch.ones(1000)
    cut.untyped_storage().resize_(left)
    with pytest.raises(memstore.UnsupportedValueError, match="state/b/0: .* freed or cut"):
        take(path, {"state": StateDict(a=torch.ones(3), b=[cut])})
    assert cut.untyped_storage().nbytes() == left and not os.path.exists(path)


def test_tensors_are_found_without_looking_through_all_leaves_each_time(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDict(**{f"x{i}": torch.tensor(i) for i in range(50)}, y=["a", 1])
    snapshot = Snapshot.take(path, {"state": state})
    looks: list[Any] = []
    paths_of = Value.paths
    monkeypatch.setattr(Value, "paths", lambda value: looks.append(value) or paths_of(value))
    assert [snapshot.read_object(f"0/state/x{i}").item() for i in range(50)] == list(range(50))
    assert len(looks) == 1
    assert snapshot.read_object("0/state/y/1") == 1
    with pytest.raises(memstore.KeyNotFoundError):
        snapshot.read_object("0/state/x50")


def test_tensors_that_must_be_copied_are_copied_a_few_at_a_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, copies, most = drafts.bytes_of, list[weakref.ref[Any]](), 0

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal most
        found = real(tensor)
        if not tensor.is_contiguous():
            copies.append(weakref.ref(found))
            most = max(most, sum(copy() is not None for copy in copies))
        return found

    monkeypatch.setattr(drafts, "bytes_of", counted)
    state = {f"{i:02}": torch.full((800, 1000), float(i)).t() for i in range(30)}
    Snapshot.take(path, {"state": StateDict(state)}, durability="process")
    assert len(copies) == 30 and most < 20
    assert_same(Snapshot(path).get_state_dict_for_key("state"), {key: one.contiguous() for key, one in state.items()})


def test_pickles_are_compared_by_their_bytes(path: str) -> None:
    for number, value in enumerate((complex, complex, float)):
        Snapshot.take(f"{path}{number}", {"state": StateDict(x=value, y=1)}, allow_pickle=True)
    first, same, other = (Snapshot(f"{path}{number}") for number in range(3))
    assert differences(first, same) == []
    (found,) = differences(first, other)
    assert found.path == "0/state/x" and "pickle" in found.what


def test_what_a_module_leaves_out_is_not_read_unless_it_may_rename_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Snapshot.take(path, {"model": torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(50, 50)})})
    part = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3)})
    read: list[str] = []
    real = restore.read_into

    def recorded(stored: Any, wants: Any, *rest: Any) -> None:
        read.extend(want.tensor.path for want in wants)
        real(stored, wants, *rest)

    monkeypatch.setattr(restore, "read_into", recorded)
    Snapshot(path).restore({"model": part}, strict=False)
    assert sorted(read) == ["model/a.bias", "model/a.weight"]

    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = torch.nn.Linear(50, 50)
            self.register_load_state_dict_pre_hook(self.rename)

        def rename(self, _: torch.nn.Module, state_dict: dict[str, torch.Tensor], *__: object) -> None:
            for name in ("weight", "bias"):
                state_dict[f"c.{name}"] = state_dict.pop(f"b.{name}")

    renamed = Renamed()
    Snapshot(path).restore({"model": renamed}, strict=False)
    assert renamed.c.bias.equal(Snapshot(path).read_object("0/model/b.bias"))


def test_keys_that_are_written_alike_have_paths_of_their_own(path: str) -> None:
    value = {1: torch.zeros(1), "1": torch.ones(1), "a/b": torch.full((1,), 2.0), "a%2Fb": torch.full((1,), 3.0)}
    snapshot = Snapshot.take(path, {"s": StateDict(x=value, a={"b": torch.full((1,), 4.0)})})
    paths = ["0/s/x/1", "0/s/x/1~", "0/s/x/a%2Fb", "0/s/x/a%252Fb", "0/s/a/b"]
    assert sorted(snapshot.get_manifest()) == sorted(paths)
    assert [snapshot.read_object(name).item() for name in paths] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("drawn", [0, 1])
def test_pythons_random_state_is_one_tensor(path: str, drawn: int) -> None:
    """`gauss` keeps every second number that it makes, which is a part of the state."""
    for _ in range(drawn):
        random.gauss(0, 1)
    before = random.getstate()
    assert (before[2] is not None) == bool(drawn % 2)
    Snapshot.take(path, {"rng": memstore.RNGState()})
    assert random.getstate() == before
    random.seed(1)
    Snapshot(path).restore({"rng": memstore.RNGState()})
    assert random.getstate() == before
    assert [name for name in Snapshot(path).get_manifest() if "python" in name] == ["0/rng/python"]


def test_a_random_state_of_an_older_snapshot_is_restored() -> None:
    """Python's own tuple, and the lists that other libraries make of it."""
    before = random.getstate()
    for old in (before, [before[0], list(before[1]), before[2]]):
        random.seed(1)
        memstore.RNGState().load_state_dict({"rng_state": torch.get_rng_state(), "python": old})
        assert random.getstate() == before


def test_errors_are_of_the_kinds_that_torchsnapshots_callers_catch(path: str) -> None:
    model = torch.nn.Linear(2, 2)
    for kind in (RuntimeError, FileNotFoundError, memstore.NotAStoreError):
        with pytest.raises(kind, match="is no snapshot"):
            Snapshot(f"{path}/none").restore({"model": model})
    snapshot = Snapshot.take(path, {"model": model, "step": StateDict(step=3)})
    for kind in (RuntimeError, memstore.KeyNotFoundError):
        with pytest.raises(kind, match="has nothing at"):
            snapshot.read_object("0/model/wait")
        with pytest.raises(kind, match="did you mean"):
            snapshot.read_object("0/model/weigth")
    for kind in (AssertionError, memstore.KeyNotFoundError):
        with pytest.raises(kind, match="has nothing under"):
            snapshot.get_state_dict_for_key("modle")
    for kind in (RuntimeError, memstore.StructureMismatchError):
        with pytest.raises(kind, match="app_state differs"):
            snapshot.restore({"model": torch.nn.Linear(3, 2)})
        with pytest.raises(kind, match="app_state differs"):
            snapshot.restore({"other": model})
        with pytest.raises(kind):
            snapshot.read_object("0/model/weight", torch.zeros(3))


def test_what_would_be_lost_by_a_fresh_start_is_not_told_as_no_snapshot(path: str) -> None:
    """A store, another library's checkpoint, two checkpoints: these pass who catches for a fresh start."""
    os.mkdir(path)
    memstore.open(f"{path}/store").close()
    for name in (".metadata", ".snapshot_metadata"):
        os.makedirs(f"{path}/{name[1:]}")
        open(f"{path}/{name[1:]}/{name}", "w").close()
    Snapshot.take(f"{path}/two", {"a": StateDict(x=1)})
    open(f"{path}/two/.metadata", "w").close()
    for name in ("store", "metadata", "snapshot_metadata", "two"):
        with pytest.raises(memstore.MemstoreError) as raised:
            Snapshot(f"{path}/{name}").restore({"a": StateDict(x=1)})
        assert not isinstance(raised.value, (RuntimeError, FileNotFoundError)), raised.value
