"""Saves by a process of torch's own, and what is sent to it, as functions that the tests call on ranks."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from memstore.integrations.dcp import LoadPlanner, SavePlanner, Stager, StorageReader, StorageWriter
from tests.integrations.dcp.models_on_ranks import trained
from tests.integrations.dcp.on_ranks import opened
from tests.integrations.dcp.states import like, load


def _stager(name: str) -> Any:
    """memstore's, or torch's with shared memory, as its process needs it."""
    if name == "memstore":
        return Stager()
    return DefaultStager(StagingOptions(False, True, False, False))


def _state(how: str, seed: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, optimizer = trained(how, seed)
    return model, dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _local(value: Any) -> Any:
    """Copies of what this rank holds."""
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _local(entry) for key, entry in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one == other


def sent(how: str, stager: str) -> bool:
    """What is staged, pickled as for a queue and received again: what the model has, though that changes."""
    model, state = _state(how, 1)
    expected = _local(state)
    message = ForkingPickler.dumps(_stager(stager).stage(state))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = ForkingPickler.loads(message)
    kinds = {name: (type(value), value.placements) for name, value in state["model"].items() if hasattr(value, "_spec")}
    same = all((type(found["model"][name]), found["model"][name].placements) == kinds[name] for name in kinds)
    return same and _same(expected, _local(found))


def save_by_process(place: str, key: str | None, how: str, stager: str) -> list[bool]:
    """Two saves by torch's process, of which the second has to fail and the third succeed."""
    source, found = opened(place, key), list[bool]()
    for number, failing in ((1, False), (2, True), (3, False)):
        model, state = _state(how, number)
        expected = _local(state)
        future: Any = state_dict_saver.async_save(
            state,
            storage_writer=StorageWriter(place, key=key, overwrite=not failing),
            planner=SavePlanner(),
            async_stager=_stager(stager),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if failing:
            found.append("overwrite is False" in str(future.exception()))
            continue
        future.result()
        target = like(_state(how, 9)[1])
        load(target, StorageReader(source, key=key), planner=LoadPlanner())
        found.append(_same(expected, _local(target)))
    return found
