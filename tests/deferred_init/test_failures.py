"""Calls that fail after some tensors were made: the module is as it was, and the next call makes all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memstore.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from memstore.errors import UnsupportedValueError
from memstore.fake import fake_mode
from tests.children import in_a_child
from tests.sharding.fake_world import as_rank

TENTH = 0.1  # which bfloat16 rounds


def stuck() -> nn.Module:
    """Its buffer can't be replayed."""
    with fake_mode():
        outside = torch.ones(3)

    def make() -> nn.Module:
        made = nn.Linear(3, 3)
        made.register_buffer("stuck", torch.ones(3) * outside, persistent=False)
        return made

    return deferred_init(make)


def source(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 3), value), "bias": torch.full((3,), value)}


@pytest.mark.parametrize("kinds", [{}, {"dtype": torch.bfloat16}])
def test_nothing_of_a_call_that_failed_is_left(kinds: Any) -> None:
    made = stuck()
    before = dict(made.named_parameters())
    with pytest.raises(UnsupportedValueError, match="made in fake_mode"):
        materialize_module(made, source=source(TENTH), **kinds)
    assert dict(made.named_parameters()) == before and all(map(is_deferred, before.values()))
    made.stuck = torch.zeros(3)
    done = materialize_module(made, source=source(5.0))
    assert done.found == ("weight", "bias")
    assert made.weight.unique().tolist() == [5] and made.weight.dtype == torch.float32


def test_after_a_call_that_failed_tensors_are_written_and_looked_at_as_before() -> None:
    made = stuck()
    seen = materialize_tensor(made.bias)
    values = seen.clone()
    with pytest.raises(UnsupportedValueError):
        materialize_module(made, source=source(TENTH))
    assert torch.equal(seen, values) and materialize_tensor(made.bias) is seen
    with torch.no_grad():
        made.weight.fill_(4)
    assert materialize_tensor(made.weight).unique().tolist() == [4]


def test_an_interrupt_leaves_nothing_either() -> None:
    made = deferred_init(nn.Linear, 3, 3)

    def interrupted(name: str, tensor: torch.Tensor) -> Any:
        if name == "bias":
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        materialize_module(made, source=source(TENTH), mesh=SimpleNamespace(device_type="cpu"), placements=interrupted)
    materialize_module(made, source=source(5.0))
    assert made.weight.unique().tolist() == [5]


# --- placements -------------------------------------------------------------------------------------------------------


@in_a_child
def test_placements_by_name_are_of_names_that_the_module_has() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from memstore.errors import StructureMismatchError

    def tied() -> nn.Module:
        made = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        made["head"].weight = made["embed"].weight
        return made

    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        for chosen, message in (
            ({"head.wieght": [Shard(0)]}, "lacks: 'head.wieght'; the module has 'embed.weight', 'head.weight'"),
            ({"embed.weight": [Shard(0)], "head.weight": [Replicate()]}, "names of one tensor"),
        ):
            with pytest.raises(StructureMismatchError, match=message):
                materialize_module(deferred_init(tied), mesh=mesh, placements=chosen)
        for name in ("embed.weight", "head.weight"):
            made = deferred_init(tied)
            materialize_module(made, mesh=mesh, placements={name: [Shard(0)]})
            weight: Any = made["embed"].weight
            assert isinstance(weight, DTensor) and weight.to_local().shape == (2, 2)
            assert made["head"].weight is weight
        looked_at = deferred_init(nn.Linear, 2, 2)
        materialize_tensor(looked_at.weight)
        materialize_module(looked_at, mesh=mesh, placements=[Shard(0)])
        assert isinstance(looked_at.weight, DTensor) and looked_at.weight.to_local().shape == (1, 2)


@in_a_child
def test_a_module_that_is_sharded_already_is_as_it_was_after_an_error_and_made_by_the_next_call() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from memstore.errors import StructureMismatchError

    torch.manual_seed(0)
    usual = nn.Linear(8, 4)
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        for state in (None, usual.state_dict()):
            torch.manual_seed(0)
            made: Any = deferred_init(nn.Linear, 8, 4)
            fully_shard(made, mesh=mesh)
            with pytest.raises(StructureMismatchError, match="don't fit"):
                materialize_module(made, source={"weight": torch.ones(1)})
            weight = made.weight
            materialize_module(made, source=state)
            assert torch.equal(made.weight.to_local(), usual.weight[2:])
            assert materialize_tensor(weight) is made.weight
