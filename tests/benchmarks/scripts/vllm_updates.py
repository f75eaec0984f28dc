"""How long an update of a vLLM worker takes through a store, beside a copy of its bytes, and vLLM's own reload.

    .venv-vllm/bin/python -m tests.benchmarks.scripts.vllm_updates [--mib N] [--rounds N] [--root PATH]

The contestants take turns, with one thread. Times are those that pass, and those of the processor, which a busy machine doesn't change as
much. `make test-vllm` makes the environment.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

import memstore
from tests.integrations.vllm import engines

WIDTH = 1024


class Wide(torch.nn.Module):
    """vLLM's linear layers of 4 MiB each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from vllm.model_executor.layers.linear import ReplicatedLinear

        options: Any = {"bias": False, "params_dtype": torch.float32}
        self.layers = torch.nn.ModuleList([ReplicatedLinear(WIDTH, WIDTH, **options) for _ in range(layers)])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].weight_loader(parameters[name], weight)


class Source(torch.nn.Module):
    """The trainer's model, with the same names."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--root", default="/dev/shm/memstore-vllm-updates", help="of the store, which begins anew")
    options = parser.parse_args()
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer import ModuleSource
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from memstore.integrations.vllm import LocalClient, MemstoreTrainer, MemstoreTrainerInitInfo

    torch.set_num_threads(1)
    layers = options.mib // 4
    engines.Model = lambda: Wide(layers)  # type: ignore[assignment, misc]
    memstore.open(options.root, "w").close()
    source = Source(layers)
    weights = {name: tensor.detach() for name, tensor in source.named_parameters()}
    target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    one = engines.worker()
    model = one.model_runner.get_model()
    info = MemstoreTrainerInitInfo(options.root, rank=0)
    trainer = MemstoreTrainer.trainer_init(info, client=LocalClient(engines.Offline(one)), source=ModuleSource(source))
    last = [trainer.send_weights().version]

    def copy() -> None:
        for name, tensor in weights.items():
            target[name].copy_(tensor)

    def reload() -> None:
        initialize_layerwise_reload(model)
        model.load_weights(weights.items())
        finalize_layerwise_reload(model, None)

    def update() -> None:
        one.start_weight_update()
        one.update_weights({"version": last[0]})
        one.finish_weight_update()

    def layerwise() -> None:  # as vLLM's own backends begin
        with set_current_vllm_config(one.vllm_config):
            initialize_layerwise_reload(model)
            one.weight_transfer_engine.update_weights({"version": last[0]})
            one.weight_transfer_engine.finish_weight_update()

    def put() -> None:
        last[0] = trainer.put_weights().version

    def late() -> None:
        one.weight_transfer_engine._load_newest(one.weight_transfer_engine._place)

    contestants: dict[str, Callable[[], None]] = {
        "copy of the bytes": copy,
        "vLLM's reload, from memory": reload,
        "send_weights: the put": put,
        "a worker's update": update,
        "the same, all layerwise": layerwise,
        "a late worker's first": late,
    }
    passed: dict[str, list[float]] = {name: [] for name in contestants}
    used: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(options.rounds + 1):
        for name, call in contestants.items():
            began, had = time.perf_counter(), time.process_time()
            call()
            if number:  # the first one touches new memory
                passed[name].append(time.perf_counter() - began)
                used[name].append(time.process_time() - had)
    print(f"{options.mib} MiB, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}; ms, and times those of the copy")
    for what, times in (("passed", passed), ("processor", used)):
        copies = times["copy of the bytes"]
        smallest, middle = min(copies), statistics.median(copies)
        print(f"{what:30}{'min':>8}{'median':>10}{'x min':>8}{'x median':>10}")
        for name, found in times.items():
            low, mid = min(found), statistics.median(found)
            print(f"{name:30}{low * 1e3:8.1f}{mid * 1e3:10.1f}{low / smallest:8.2f}{mid / middle:10.2f}")
    trainer.shutdown()
    one.weight_transfer_engine.shutdown()
    memstore.destroy(options.root)


if __name__ == "__main__":
    main()
