"""An evaluator: waits for a newer version, gets it, measures it. It may die at any line, with nothing to clean up."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDictBase

import memstore
from examples.follow_policy.model import KEY, digits, is_whole, network


def follow(root: str, name: str, steps: int) -> None:
    """Follows the policy to its last step, and reports through the store after each version."""
    torch.set_num_threads(1)
    store = memstore.open(root, "r+")
    _, (pixels, labels) = digits()
    model = network()
    oldest: TensorDictBase | None = None
    latencies: list[float] = []
    version = torn = step = 0
    store.put(f"report/{name}", {"seen": 0, "torn": 0, "step": 0, "accuracy": 0.0, "seconds": torch.zeros(0)})
    while step < steps:
        version = store.wait(KEY, newer_than=version, timeout=30)
        before = time.perf_counter()
        value = store.get(KEY)
        latencies.append(time.perf_counter() - before)

        with value["weights"].to_module(model), torch.no_grad():  # the model runs on the mapped file: no copy
            accuracy = (model(pixels).argmax(1) == labels).float().mean().item()
        oldest = value if oldest is None else oldest
        step = int(value["step"])
        torn += not is_whole(value)  # after its use: it must have stayed whole until now
        if step >= steps:
            torn += not is_whole(oldest)  # held since the start, overwritten hundreds of times since
        seen = {"seen": len(latencies), "torn": torn, "step": step, "accuracy": accuracy}
        store.put(f"report/{name}", {**seen, "seconds": torch.tensor(latencies)})
