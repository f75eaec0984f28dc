"""Which part of a source is the module's: prefixes of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memstore
from memstore.deferred_init import deferred_init, is_deferred, materialize_module
from memstore.errors import StructureMismatchError


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def state(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(one, value) for name, one in net().state_dict().items()}


@pytest.mark.parametrize("prefix", ["", "model.", "trainer.state.model."])
def test_a_prefix_that_all_names_have_is_ignored(prefix: str) -> None:
    made = deferred_init(net)
    done = materialize_module(made, source={f"{prefix}{name}": one for name, one in state(2).items()})
    assert len(done.found) == 4 and made[1].weight.unique().tolist() == [2]


@pytest.mark.parametrize("names", [("actor", "actor_target", "critic"), ("ema", "model")])
def test_a_source_with_several_modules_that_fit_is_refused_and_names_them(names: tuple[str, ...]) -> None:
    made, source = deferred_init(net), {name: state(number) for number, name in enumerate(names)}
    with pytest.raises(StructureMismatchError) as caught:
        materialize_module(made, source=source)
    assert all(f"'{name}' (4 of 4)" in str(caught.value) for name in names)
    assert "Say which" in str(caught.value) and is_deferred(made[0]) and is_deferred(made[1])
    materialize_module(made, source=source[names[1]])
    assert made[0].bias.unique().tolist() == [1]


def test_the_same_names_in_a_snapshot_are_refused_and_its_view_says_which(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {"ema": net(), "model": net()}
    memstore.Snapshot.take(tmp_path / "s", values)
    with pytest.raises(StructureMismatchError, match="2 of its parts"):
        materialize_module(deferred_init(net), source=tmp_path / "s")
    made = deferred_init(net)
    materialize_module(made, source=memstore.Snapshot(tmp_path / "s").view()["model"])
    assert torch.equal(made[0].weight, values["model"][0].weight)


def test_a_module_is_found_beside_what_has_other_names() -> None:
    made = deferred_init(net)
    materialize_module(made, source={"optimizer": {"exp_avg": torch.zeros(3)}, "model": state(2)})
    assert made[0].weight.unique().tolist() == [2]


def test_names_without_a_prefix_come_before_those_with_one() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.zeros(1)), nn.ParameterDict({"scale": torch.zeros(1)})

    made = deferred_init(Outer)
    materialize_module(made, source={"scale": torch.ones(1), "inner.scale": torch.full((1,), 2.0)})
    assert made.scale.item() == 1 and made.inner["scale"].item() == 2


def test_a_deep_part_does_not_get_the_weights_of_another() -> None:
    """`weight` is a name of many modules."""
    whole = deferred_init(lambda: nn.ModuleDict({"layers": net(), "head": nn.Linear(3, 3)}))
    part: Any = whole["layers"][0]
    weights = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    source = {
        **{f"layers.0.{name}": one for name, one in weights.items()},
        **{f"head.{name}": one * 9 for name, one in weights.items()},
    }
    with pytest.raises(StructureMismatchError, match=r"'layers\.0' \(2 of 2\), 'head' \(2 of 2\).*check_fn"):
        materialize_module(part, source=source)
    with pytest.raises(StructureMismatchError, match=r"'head' \(1 of 2\)"):
        materialize_module(part, source={"head.weight": torch.ones(3, 3), "other.bias2": torch.ones(3)})
    assert is_deferred(part)
    materialize_module(whole, source=source, check_fn=lambda one: one is part)
    assert part.weight.unique().tolist() == [1] and is_deferred(whole["head"])


def test_a_mismatch_says_which_part_was_compared() -> None:
    source = {f"model.{name}": one[:2] for name, one in state(1).items()}
    with pytest.raises(StructureMismatchError, match=r"under 'model', don't fit"):
        materialize_module(deferred_init(net), source=source)
