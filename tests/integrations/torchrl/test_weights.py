"""Weights of TorchRL's collectors: what workers act with after a send, workers that come late, and dead ones."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from typing import Any

import pytest
import torch

import memstore

pytest.importorskip("torchrl")
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv

from memstore.errors import StoreTimeoutError
from memstore.integrations.torchrl import MemstoreWeightSyncScheme


class Policy(torch.nn.Module):
    """Acts with its weights, of which all elements are equal: an action is a hundredth of their largest one."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        fill(self, number)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        weights = torch.cat([parameter.flatten() for parameter in self.parameters()])
        return (weights.max() / 100).expand(*observation.shape[:-1], 1).clone()


def fill(module: torch.nn.Module, number: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(number)


def policy_of(number: float) -> TensorDictModule:
    return TensorDictModule(Policy(number), in_keys=["observation"], out_keys=["action"])


def make_env() -> Any:
    return GymEnv("Pendulum-v1")


def test_workers_act_with_what_was_sent(store: memstore.Store) -> None:
    policy = policy_of(1.0)
    scheme = MemstoreWeightSyncScheme(store, "policy")
    collector = MultiSyncCollector(
        [make_env, make_env], policy, frames_per_batch=20, total_frames=100, weight_sync_schemes={"policy": scheme}
    )
    try:
        for number, batch in enumerate(collector, 1):
            assert (batch["action"] * 100).round().unique().tolist() == [number]
            fill(policy, number + 1.0)
            collector.update_policy_weights_(policy)
        assert number == 5 and store.get("policy/workers/1") == scheme.version == store.version("policy")
        os.kill(collector.procs[1].pid, signal.SIGKILL)
        scheme.timeout = 2.0
        with pytest.raises(StoreTimeoutError, match="worker 1 doesn't have version"):
            scheme.send(policy)
    finally:
        for process in collector.procs:
            process.kill()
        collector.shutdown(raise_on_error=False)


def act(root: str, number: int, told: Any) -> None:
    """Runs a worker that no collector has started: it knows the store's path and a key."""
    policy = policy_of(0.0)
    scheme = MemstoreWeightSyncScheme(memstore.open(root), "policy")
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=number)
    scheme.connect()
    told.put(float(next(policy.parameters()).flatten()[0]))
    seen = 0
    while float(next(policy.parameters()).flatten()[0]) < 9:
        seen = scheme.store.wait(f"policy/workers/{number}", newer_than=seen)
    told.put(float(next(policy.parameters()).flatten()[0]))
    scheme.shutdown()


def test_a_late_worker_takes_the_newest_weights_and_follows(store: memstore.Store) -> None:
    policy = policy_of(1.0)
    scheme = MemstoreWeightSyncScheme(store, "policy", acknowledge=False)
    scheme.init_on_sender(model_id="policy", model=policy)
    scheme.connect()
    fill(policy, 2.0)
    scheme.send(policy)
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=partial(act, store.root, 0, told))
    process.start()
    try:
        assert told.get(timeout=240) == 2.0
        fill(policy, 9.0)
        scheme.send(policy)
        assert told.get(timeout=240) == 9.0
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_a_worker_without_weights_says_so(store: memstore.Store) -> None:
    scheme = MemstoreWeightSyncScheme(store, "policy", timeout=0.1)
    scheme.init_on_receiver(model_id="policy", model=policy_of(0.0))
    with pytest.raises(StoreTimeoutError):
        scheme.connect()
