"""What becomes of a module that lies in mapped files: it is trained, saved, sent, and its source goes away."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memstore
from memstore.deferred_init import deferred_init, is_deferred, materialize_module
from tests.children import in_child
from tests.deferred_init.test_sources import in_a_file

WIDTH = 128


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return net()


def as_snapshot(model: nn.Module, path: Path) -> str:
    memstore.Snapshot.take(path / "s", {"model": model})
    return str(path / "s")


def as_safetensors(model: nn.Module, path: Path) -> str:
    from safetensors.torch import save_file

    save_file(dict(model.state_dict()), path / "m.safetensors")
    return str(path / "m.safetensors")


SOURCES: dict[str, Callable[[nn.Module, Path], str]] = {"snapshot": as_snapshot, "safetensors": as_safetensors}


def mapped(source: str) -> nn.Module:
    made = deferred_init(net)
    materialize_module(made, source=source)
    assert not is_deferred(made) and in_a_file(made[0].weight)
    return made


def same(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", SOURCES)
def test_an_optimizer_writes_pages_of_its_own_and_never_the_file(name: str, model: nn.Module, tmp_path: Path) -> None:
    source = SOURCES[name](model, tmp_path)
    made, usual, other = mapped(source), copy.deepcopy(model), mapped(source)
    for one in (made, usual):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            one(torch.linspace(-1, 1, WIDTH).expand(4, WIDTH)).sum().backward()
            optimizer.step()
    assert same(made, usual) and not same(made, model)
    assert same(other, model), "nor what others have mapped"
    assert same(mapped(source), model), "nor the file"


def test_it_is_saved_copied_and_pickled_as_any_other(model: nn.Module, tmp_path: Path) -> None:
    made = mapped(as_snapshot(model, tmp_path))
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    nbytes = sum(one.nbytes for one in model.state_dict().values())
    assert file.tell() < nbytes + 8192, "what it shows, and not the file that it lies in"
    loaded = net()
    loaded.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert same(loaded, model)
    copied = copy.deepcopy(made)
    assert same(pickle.loads(pickle.dumps(made)), model) and same(copied, model)
    with torch.no_grad():
        copied[0].weight.zero_()
    assert same(made, model)


def test_state_dicts_go_in_and_out(model: nn.Module, tmp_path: Path) -> None:
    made, other = mapped(as_snapshot(model, tmp_path)), net()
    other.load_state_dict(made.state_dict(), assign=True)
    assert other[0].weight.data_ptr() == made[0].weight.data_ptr() and same(other, model)
    zeros = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    address = made[0].weight.data_ptr()
    made.load_state_dict(zeros)
    assert made[0].weight.data_ptr() == address and not made[0].weight.any()
    assert same(mapped(str(tmp_path / "s")), model), "the file keeps what it has"


def test_a_deferred_module_takes_a_state_dict(model: nn.Module) -> None:
    state = model.state_dict()
    copied, assigned = deferred_init(net), deferred_init(net)
    copied.load_state_dict(state)
    assert is_deferred(copied)
    materialize_module(copied)
    assigned.load_state_dict(state, assign=True)
    assert not is_deferred(assigned) and assigned[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert same(copied, model) and same(assigned, model) and assigned[0].weight.requires_grad
    assert copied[0].weight.data_ptr() != model[0].weight.data_ptr()


@pytest.mark.parametrize("name", SOURCES)
def test_the_source_may_be_replaced_or_removed(name: str, model: nn.Module, tmp_path: Path) -> None:
    source = SOURCES[name](model, tmp_path)
    made = mapped(source)
    (shutil.rmtree if os.path.isdir(source) else os.unlink)(source)
    assert same(made, model)
    other = net()
    SOURCES[name](other, tmp_path)
    assert same(made, model) and same(mapped(source), other)


@pytest.mark.parametrize("name", SOURCES)
def test_it_is_saved_to_where_it_is_mapped_from(name: str, model: nn.Module, tmp_path: Path) -> None:
    source = SOURCES[name](model, tmp_path)
    made = mapped(source)
    with torch.no_grad():
        made[0].weight.add_(1)
    expected = copy.deepcopy(made)
    if name == "snapshot":
        with pytest.raises(memstore.AlreadyExistsError, match="has a snapshot"):
            memstore.Snapshot.take(source, {"model": made})
        memstore.Snapshot.take(source + "2", {"model": made})
        shutil.rmtree(source)
        os.rename(source + "2", source)
    else:
        as_safetensors(made, tmp_path)
    assert same(made, expected) and same(mapped(source), expected)


def test_it_is_put_under_the_key_that_it_is_mapped_from(model: nn.Module, root: str) -> None:
    with memstore.open(root, inline_limit=0) as store:
        store.put("model", dict(model.state_dict()))
        made = deferred_init(net)
        materialize_module(made, source=store.view("model"))
        for _ in range(3):
            with torch.no_grad():
                made[0].weight.add_(1)
            expected = copy.deepcopy(made)
            store.put("model", dict(made.state_dict()))
            store.gc()
            assert same(made, expected)
            assert torch.equal(store.get("model")["0.weight"], expected[0].weight)
        store.delete("model")
        store.gc()
        assert same(made, expected)


def test_a_fork_has_its_own_and_shared_memory_is_shared(model: nn.Module, tmp_path: Path) -> None:
    source = as_snapshot(model, tmp_path)
    made = mapped(source)
    in_child(write_all, made, 7.0)
    assert same(made, model), "copy on write, also after a fork"
    made.share_memory()
    assert made[0].weight.is_shared() and same(made, model)
    in_child(write_all, made, 7.0)
    assert made[0].weight.unique().tolist() == [7.0]
    assert same(mapped(source), model)


def write_all(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for one in module.parameters():
            one.fill_(value)


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_it_is_sent_to_a_process_that_is_started(method: str, model: nn.Module, tmp_path: Path) -> None:
    """Mapped memory is copied for that process; shared memory is shared with it."""
    made = mapped(as_snapshot(model, tmp_path))
    context: Any = torch.multiprocessing.get_context(method)

    def write_there() -> None:
        process = context.Process(target=write_all, args=(made, 3.0))
        process.start()
        process.join(120)
        assert process.exitcode == 0

    write_there()
    assert same(made, model)
    made.share_memory()
    write_there()
    assert made[0].weight.unique().tolist() == [3.0]
    assert multiprocessing.active_children() == []


def test_a_deferred_module_has_no_shared_memory() -> None:
    made = deferred_init(net)
    with pytest.raises(memstore.UnsupportedValueError, match="share_memory_.*materialize"):
        made.share_memory()
    assert not made[0].weight.is_shared()


def test_it_moves_and_converts_as_any_other(model: nn.Module, tmp_path: Path) -> None:
    made = mapped(as_snapshot(model, tmp_path))
    made.to(torch.float64)
    assert torch.equal(made[0].weight, model[0].weight.double())
    made.to(torch.float32).to("cpu")
    assert same(made, model)
    made.to("meta")
    assert made[0].weight.is_meta
