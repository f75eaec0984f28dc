"""What was saved by one process is what is restored: values of all kinds, in place and into new memory, by any copy."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import random
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import memstore
from memstore import Snapshot, StateDict, structure
from memstore._ranks import RankError
from memstore.snapshot import differences, drafts, restore
from memstore.snapshot.manifest import load_manifest
from memstore.snapshot.stored import Value
from memstore.structure import traits
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
    names = [name for name in sorted(os.listdir(tmp_path)) if not name.endswith(".sums")]
    assert names == ["memstore_snapshot.json", "state.safetensors"]


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


@pytest.mark.parametrize("own_pages", [1, 1 << 20])
def test_a_copy_has_the_elements_in_order_whatever_their_dtype(own_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_OWN_PAGES", own_pages)
    rows = 500
    for dtype in traits.DTYPES.values():
        if dtype in traits.QUANTIZED:
            continue
        raw = np.random.default_rng(0).integers(0, 2, (rows, 3, dtype.itemsize), np.uint8)  # a bool has no other ones
        storage = torch.from_numpy(raw.reshape(-1)).untyped_storage()
        whole = structure.over(storage, dtype, 0, (rows, 3), (3, 1))
        assert drafts.bytes_of(whole).tobytes() == raw.tobytes(), dtype
        assert drafts.bytes_of(whole.t()).tobytes() == raw.transpose(1, 0, 2).tobytes(), dtype
        assert drafts.bytes_of(whole[::2, 1:]).tobytes() == raw[::2, 1:].tobytes(), dtype
        assert drafts.bytes_of(whole[:1].expand(5, 3)).tobytes() == 5 * raw[:1].tobytes(), dtype
        assert not len(drafts.bytes_of(whole[:0].t()))
        if dtype.is_complex:
            for one in (whole.conj(), whole.conj().t(), whole.conj().imag, whole.t().conj().imag[:, ::2]):
                plain = one.resolve_conj().resolve_neg().contiguous()
                assert drafts.bytes_of(one).tobytes() == structure.memory_of(plain).tobytes(), dtype


def test_tensors_that_are_one_in_memory_are_stored_once(path: str) -> None:
    base, pairs = torch.arange(6.0), torch.zeros(3, dtype=torch.complex64)
    ones = {"a": base, "b": base, "c": base.view(6), "d": base.view(2, 3), "e": base.view(torch.int32), "f": base[:3]}
    ones |= {"g": base.view(2, 3), "h": pairs, "i": pairs.conj(), "j": pairs[:], "k": base.view(3, 2).t()}
    empty = {"l": torch.empty(0), "m": torch.empty(0), "n": torch.empty(0, 3)}
    Snapshot.take(path, {"state": StateDict(ones | empty)})
    names = [tensor.path for tensor in load_manifest(path).tensors]
    assert names == [f"state/{name}" for name in "adefhikln"]
    assert_same(Snapshot(path).get_state_dict_for_key("state")["k"], ones["k"].contiguous())


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


# --- what a snapshot is restored into ---------------------------------------------------------------------------------


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


# --- snapshots that are pickled, copied and sent: by their path, never with what this process has open ----------------


Copy = Callable[[Any], Any]

COPIES: dict[str, Copy] = {
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
    "deep-copied": copy.deepcopy,
    "deep-copied in a dict": lambda value: copy.deepcopy({"resume": value})["resume"],
    "copied": copy.copy,
}


class OnlyPickled:
    """What a snapshot can only store with pickle."""


def take(path: str, number: float = 1.0) -> Snapshot:
    return Snapshot.take(path, {"state": StateDict(w=torch.full((3,), number), step=7)})


def restored(snapshot: Snapshot) -> list[float]:
    state = StateDict(w=torch.zeros(3), step=0)
    snapshot.restore({"state": state})
    assert state["step"] == 7
    return state["w"].tolist()


def read(snapshot: Snapshot) -> list[list[float]]:
    """What all calls that read bytes give."""
    state = snapshot.get_state_dict_for_key("state")
    return [
        restored(snapshot),
        snapshot.read_object("0/state/w").tolist(),
        snapshot.view()["state"]["w"].tolist(),
        state["w"].tolist(),
    ]


def opened(path: str) -> Snapshot:
    """One that has been read."""
    take(path)
    snapshot = Snapshot(path)
    restored(snapshot)
    return snapshot


def taken(path: str) -> Snapshot:
    """One that has been taken, and then read."""
    snapshot = take(path)
    restored(snapshot)
    return snapshot


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("made", [opened, taken, take], ids=["opened", "taken and read", "taken"])
def test_a_copy_reads_beside_the_original_and_after_it(
    tmp_path: Path, made: Callable[[str], Snapshot], copied: Copy
) -> None:
    snapshot = made(f"{tmp_path}/s")
    other = copied(snapshot)
    assert other is not snapshot and other.path == snapshot.path
    assert read(other) == read(snapshot) == [[1.0] * 3] * 4
    del snapshot
    assert read(other) == [[1.0] * 3] * 4


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_no_copy_closes_a_file_that_got_the_originals_descriptor(tmp_path: Path, copied: Copy) -> None:
    snapshot = opened(f"{tmp_path}/s")
    other = copied(snapshot)
    del snapshot
    with open(f"{tmp_path}/log.txt", "w") as log:  # has the number of the folder that was closed
        assert restored(other) == [1.0] * 3
        del other
        log.write("still open")
    assert Path(tmp_path, "log.txt").read_text() == "still open"


@pytest.mark.full  # they import torch anew
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_one_that_is_sent_to_a_started_child_reads_there(tmp_path: Path, method: str) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        assert pool.submit(restored, opened(f"{tmp_path}/s")).result() == [1.0] * 3


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_options(tmp_path: Path, copied: Copy) -> None:
    path = f"{tmp_path}/s"
    snapshot = Snapshot.take(
        path, {"state": StateDict(x=OnlyPickled())}, allow_pickle=True, storage_options={"timeout": 5.0}
    )
    other = copied(snapshot)
    assert isinstance(other.get_state_dict_for_key("state")["x"], OnlyPickled) and other._timeout == 5.0
    with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
        copied(Snapshot(path)).get_state_dict_for_key("state")


def test_copies_have_the_process_group(tmp_path: Path) -> None:
    group = object()
    snapshot = Snapshot(f"{tmp_path}/s", group)
    assert copy.copy(snapshot).pg is group and copy.deepcopy(snapshot).pg is group


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_opens_what_is_at_the_path_by_then(tmp_path: Path, copied: Copy) -> None:
    path = f"{tmp_path}/s"
    snapshot = opened(path)
    other, third = copied(snapshot), copied(snapshot)
    os.rename(path, f"{tmp_path}/moved")
    with pytest.raises(memstore.NotAStoreError, match="no such folder"):
        restored(other)
    assert snapshot.read_object("0/state/w").tolist() == [1.0] * 3, "the original has its folder open"
    take(path, 2.0)
    assert restored(other) == restored(third) == [2.0] * 3
    shutil.rmtree(path)
    with pytest.raises(memstore.NotAStoreError, match="no such folder"):
        restored(copied(third))
