"""torchao's quantized weights and the states of its 8-bit optimizers, through all that stores and loads models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
from memstore.convert import convert
from memstore.deferred_init import deferred_init, materialize_module
from memstore.errors import StructureMismatchError
from memstore.integrations import dcp

pytest.importorskip("torchao", reason="torchao isn't installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(deprecated|uninitialized|unavailable).*"),
]


def _layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 16))


def int8() -> torch.nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(made := _layers(), Int8WeightOnlyConfig())
    return made


def float8() -> torch.nn.Module:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(made := _layers(), Float8WeightOnlyConfig())
    return made


MODELS = {"int8": int8, "float8": float8}
Make = Callable[[], torch.nn.Module]


@pytest.fixture(params=list(MODELS))
def make(request: pytest.FixtureRequest) -> Make:
    return MODELS[request.param]


def are_same(one: Any, other: Any) -> bool:
    if hasattr(one, "__tensor_flatten__"):
        names, context = one.__tensor_flatten__()
        return (
            type(one) is type(other)
            and context == other.__tensor_flatten__()[1]
            and all(are_same(getattr(one, name), getattr(other, name)) for name in names)
        )
    return one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))  # torch.equal has not every dtype


def _bytes(tensor: Any) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def have_same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(are_same(value, other[key]) for key, value in one.items())


def test_load_model_fills_a_quantized_model_in_place(root: str, make: Make) -> None:
    model, other = make(), make()
    before = list(other.parameters())
    assert not have_same(model.state_dict(), other.state_dict())
    with memstore.open(root) as store:
        store.save_model("model", model)
        store.load_model("model", other)
        assert have_same(model.state_dict(), other.state_dict())
        assert all(one is two for one, two in zip(before, other.parameters(), strict=True))
        with pytest.raises(StructureMismatchError, match=r"model\['0.weight'\]: stored as an? \w+8Tensor"):
            store.load_model("model", plain := _layers())
        store.save_model("plain", plain)
        with pytest.raises(StructureMismatchError, match=r"\['0.weight'\]"):
            store.load_model("plain", other)
        assert have_same(model.state_dict(), other.state_dict())


def test_snapshots_restore_it_and_refuse_a_model_that_is_not_quantized(tmp_path: Path, make: Make) -> None:
    model, other, plain = make(), make(), _layers()
    snapshot = memstore.Snapshot.take(str(tmp_path / "snapshot"), {"model": model})
    snapshot.restore({"model": other})
    assert have_same(model.state_dict(), other.state_dict())
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with pytest.raises(StructureMismatchError, match=r"model/0.weight: stored as one that wraps qdata, scale"):
        snapshot.restore({"model": plain})
    assert have_same(before, plain.state_dict())
    taken = memstore.Snapshot.take(str(tmp_path / "plain"), {"model": plain})
    with pytest.raises(StructureMismatchError, match=r"model/0.weight: stored as a plain tensor"):
        taken.restore({"model": other})


def test_checkpoints_of_dcp_have_it(tmp_path: Path, make: Make) -> None:
    model, other = make(), make()
    dcp.save(dict(model.state_dict()), checkpoint_id=str(tmp_path / "checkpoint"))
    state = dict(other.state_dict())
    dcp.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
    assert have_same(model.state_dict(), state)
    convert(tmp_path / "checkpoint", tmp_path / "model.pt")
    assert have_same(model.state_dict(), torch.load(tmp_path / "model.pt", weights_only=True))


@pytest.mark.parametrize("copy", [False, True])
def test_files_of_torch_with_it_are_attached(root: str, tmp_path: Path, make: Make, copy: bool) -> None:
    model = make()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with memstore.open(root) as store:
        store.attach("model", str(tmp_path / "model.pt"), copy=copy)
        assert have_same(model.state_dict(), store.get("model"))


def test_it_is_a_source_of_deferred_modules(make: Make) -> None:
    model = make()
    made: Any = deferred_init(_layers)
    materialize_module(made, source=dict(model.state_dict()))
    assert have_same(model.state_dict(), made.state_dict())


def _trained() -> tuple[torch.nn.Module, Any]:
    """With states as a step makes them, but without the compiler that one runs."""
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    model = torch.nn.Linear(256, 256, bias=False)
    optimizer: Any = AdamW8bit(model.parameters())
    averages = [OptimState8bit.zeros((256, 256), signed) for signed in (True, False)]
    for average in averages:
        average.codes.random_(256)
        average.scale.uniform_()
    optimizer.state[model.weight] = {"step": torch.rand(()), "exp_avg": averages[0], "exp_avg_sq": averages[1]}
    return model, optimizer


def _untrained() -> tuple[torch.nn.Module, Any]:
    from torchao.optim import AdamW8bit

    model = torch.nn.Linear(256, 256, bias=False)
    return model, AdamW8bit(model.parameters())


def _states(optimizer: Any) -> Any:
    return optimizer.state_dict()["state"][0]


def test_states_of_8_bit_optimizers_come_back(root: str, tmp_path: Path) -> None:
    model, optimizer = _trained()
    assert type(_states(optimizer)["exp_avg"]).__name__ == "OptimState8bit"
    with memstore.open(root) as store:
        store.save_model("run", model, optimizer)
        snapshot = memstore.Snapshot.take(str(tmp_path / "snapshot"), {"model": model, "optimizer": optimizer})
        for other, its in (_trained(), _untrained()):
            store.load_model("run", other, its)
            assert have_same(_states(optimizer), _states(its))
        for other, its in (_trained(), _untrained()):
            snapshot.restore({"model": other, "optimizer": its})
            assert have_same(_states(optimizer), _states(its))
