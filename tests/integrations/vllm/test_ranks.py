"""Workers of tensor parallelism, and trainers of several ranks, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest

import memstore
from tests.benchmarks.peers.ray_objects import start_ray
from tests.integrations.vllm.engines import Actor, Trained

from vllm.distributed.weight_transfer import ModuleSource, RayVLLMWeightSyncClient  # isort: skip

from memstore.integrations.vllm import MemstoreTrainer, MemstoreTrainerInitInfo
from memstore.integrations.vllm.weights import Round

PATIENCE = 500.0  # seconds: vLLM takes ten of them to import on an idle machine, and minutes on a busy one


def start(kind: str, root: str, count: int, **environment: str) -> list[subprocess.Popen[str]]:
    meeting = f"{tempfile.mkdtemp()}/meeting"
    module = "tests.integrations.vllm.on_ranks"
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, kind, root, str(rank), str(count), meeting],
            stdout=subprocess.PIPE, text=True, env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]  # fmt: skip


def results(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    try:
        return [json.loads(process.communicate(timeout=PATIENCE)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(900)
def test_ranks_of_workers_read_their_slices_and_take_one_version(root: str) -> None:
    with memstore.open(root) as store:
        model = Trained(1.0)
        store.put("policy", model.state_dict())
        ranks = start("workers", root, 2, MEMSTORE_VLLM_ROOT=root, MEMSTORE_VLLM_KEY="policy")
        deadline = time.monotonic() + PATIENCE
        is_ready = [False, False]
        while not all(is_ready):  # versions come while they start: both take one of them
            is_ready = [f"ready/{rank}" in store for rank in range(2)]
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks)
            if not any(is_ready):
                model.fill(store.version("policy") + 1.0)
                store.put("policy", model.state_dict())
            time.sleep(0.2)
        model.fill(9.0)
        store.put("policy", model.state_dict())
        store.put("last", True)
        one, other = results(ranks)
    assert one["version"] == other["version"]
    assert one["started"] == other["started"] and len(one["started"]) == 1
    assert one["is_its_own"] and other["is_its_own"]
    for what in ("late", "update"):
        both = one[what] + other[what]
        assert 0.99 * one["whole"] < both < 1.02 * one["whole"], what


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_of_a_trainer_put_their_own_shards(root: str, count: int) -> None:
    found = results(start("trainers", root, count))
    assert all(one["whole"] and one["changed"] for one in found)
    rounds = found[0]["rounds"]
    assert all(one["rounds"] == rounds for one in found)
    (first, _), (base, changed) = rounds
    assert base == first and changed > first
    assert found[0]["told"] == ["init", "start", first, str(first), "start", first, f"{first}.{changed}"]
    assert all(one["told"] == [] for one in found[1:])


@pytest.mark.timeout(900)
def test_actors_of_ray_have_what_a_trainer_sends(root: str) -> None:
    ray = pytest.importorskip("ray")
    start_ray()
    try:
        client = RayVLLMWeightSyncClient([ray.remote(Actor).options(num_cpus=0).remote() for _ in range(2)])
        info = MemstoreTrainerInitInfo(root, key="policy", rank=0)
        model = Trained(3.0)
        sender = MemstoreTrainer.trainer_init(info, client=client, source=ModuleSource(model))
        sender.send_weights()
        ray.kill(client.handles.pop())  # a server that dies, and comes back
        client.handles.append(ray.remote(Actor).options(num_cpus=0).remote())
        model.fill(4.0)
        assert sender.send_weights() == Round(2)
        assert ray.get([one.has.remote() for one in client.handles]) == [({4.0}, "2")] * 2
        sender.shutdown()
    finally:
        ray.shutdown()
