"""A rank of vLLM's workers, or of a trainer, in a process of its own: prints what it found, as JSON.

python -m tests.integrations.vllm.on_ranks workers|trainers ROOT RANK WORLD_SIZE PORT
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import memstore


def as_worker(root: str, rank: int, world_size: int, meeting: str) -> dict[str, Any]:
    """Starts late, with what the environment says; then takes one update more. Counts the bytes that it reads."""
    from tests.integrations.vllm.engines import Trained, begin, numbers, worker

    begin(rank, world_size, meeting)
    before = memstore.bytes_read()
    one = worker(rank)
    late = memstore.bytes_read() - before
    engine, model = one.weight_transfer_engine, one.model_runner.get_model()
    found: dict[str, Any] = {
        "late": late,
        "started": sorted(model.norm.weight.unique().tolist()),
        "version": engine.version,
    }
    found["whole"] = sum(tensor.nbytes for tensor in Trained().state_dict().values())
    with memstore.open(root) as store:
        store.put(f"ready/{rank}", True)
        store.wait("last", timeout=500.0)  # a version may have come beside the ready
        version = store.version("policy")
        before = memstore.bytes_read()
        one.start_weight_update()
        one.update_weights({"version": version})
        one.finish_weight_update()
        found["update"] = memstore.bytes_read() - before
        weights = store.get("policy")
        parts = torch.cat(
            [weights[f"layers.1.{name}.weight"].chunk(world_size)[rank] for name in ("q_proj", "k_proj", "v_proj")]
        )
        columns = weights["layers.2.down.weight"].chunk(world_size, 1)[rank]
        found["is_its_own"] = torch.equal(model.layers[1].qkv.weight, parts) and torch.equal(
            model.layers[2].down.weight, columns
        )
    found["numbers"] = sorted(numbers(model))
    engine.shutdown()
    return found


class Sharded(torch.nn.Module):
    """Parameters that ranks hold in part: rows that don't come out even, columns, and copies of a whole."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        layouts = {"rows": [Shard(0), Replicate()], "both": [Shard(0), Shard(0)], "mixed": [Shard(1), Shard(0)],
                   "copies": [Replicate(), Replicate()]}  # fmt: skip
        for name, placements in layouts.items():
            whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
            self.register_parameter(name, torch.nn.Parameter(distribute_tensor(whole, mesh, placements)))
        self.plain = torch.nn.Parameter(torch.full((4,), 2.0))


class Silent:
    """A client without workers, which notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.told.append("init")

    def start_weight_update(self) -> None:
        self.told.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.told.append(update_info["version"])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.told.append(weight_version)


def as_trainer(root: str, rank: int, world_size: int, meeting: str) -> dict[str, Any]:
    """Puts a sharded model, whose tensors nobody gathers, and which is cast on the way."""
    from vllm.distributed.weight_transfer import ModuleSource

    from memstore.integrations.vllm import MemstoreTrainer, MemstoreTrainerInitInfo

    class Local(ModuleSource):
        def iter_full(self) -> Any:
            raise AssertionError("it has gathered")

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    client = Silent()
    info = MemstoreTrainerInitInfo(root, key="policy", rank=rank, dtype="bfloat16")
    engine = MemstoreTrainer.trainer_init(info, client=client, source=Local(Sharded()))
    rounds = [engine.send_weights(), engine.send_weights(changed=["mixed"])]
    value = engine.store.get("policy")
    expected = torch.arange(7 * 5, dtype=torch.bfloat16).reshape(7, 5)
    names = ("rows", "both", "mixed", "copies")
    found = {
        "rounds": rounds,
        "told": client.told,
        "whole": all(torch.equal(value[name], expected) for name in names) and value["plain"].tolist() == [2.0] * 4,
        "changed": torch.equal(engine.store.get("policy/changed")["weights"]["mixed"], expected),
    }
    dist.barrier()
    engine.shutdown()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    kind, root, number, count, file = sys.argv[1:]
    result = {"workers": as_worker, "trainers": as_trainer}[kind](root, int(number), int(count), file)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's groups need not be taken down in order
