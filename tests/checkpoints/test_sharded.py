"""Models that FSDP shards over ranks: a run continues bit for bit, and on another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from memstore import CheckpointManager, StateDict
from tests.snapshot.ranks import all_right, on_ranks
from tests.support.equality import assert_same


def objects(ranks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "progress": StateDict(step=0)}


def train(app_state: dict[str, Any], until: int) -> list[torch.Tensor]:
    for step in range(app_state["progress"]["step"] + 1, until + 1):
        torch.manual_seed(step)
        app_state["optimizer"].zero_grad()
        app_state["model"](torch.randn(4, 8)).square().mean().backward()
        app_state["optimizer"].step()
        app_state["progress"]["step"] = step
    parameters: list[Any] = list(app_state["model"].parameters())
    return [getattr(one, "full_tensor", one.detach)().detach().clone() for one in parameters]


def run(rank: int, root: str, backend: Any, resumes: bool) -> list[torch.Tensor]:
    app_state = objects(2)
    with CheckpointManager(root, backend=backend) as manager:
        if resumes:
            assert manager.restore(app_state) == 3
        else:
            train(app_state, 3)
            manager.save(3, app_state)
    return train(app_state, 6)


@pytest.mark.parametrize("backend", ["dcp", pytest.param("snapshot", marks=pytest.mark.full)])
def test_a_sharded_run_continues_on_any_number_of_ranks(root: str, backend: Any) -> None:
    expected, _ = all_right(on_ranks(2, run, root, backend, False))
    for found in all_right(on_ranks(2, run, root, backend, True)):
        assert_same(found, expected)
    alone = objects(1)
    assert CheckpointManager(root).restore(alone) == 3
    torch.testing.assert_close(train(alone, 6), expected)  # sums of other parts: not bit for bit
