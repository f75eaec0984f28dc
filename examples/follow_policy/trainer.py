"""The trainer: after each step it puts its weights. It doesn't know which processes follow."""

from __future__ import annotations

import time

import torch
from torch import nn

import memstore
from examples.follow_policy.model import KEY, digits, network, publishable


def train(root: str, steps: int, pace: float, sabotage: int) -> None:
    """Publishes the weights after each of `steps` steps, `pace` seconds apart at least, so that one can watch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = memstore.open(root, "r+")
    (pixels, labels), _ = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    latencies: list[float] = []
    for step in range(1, steps + 1):
        started = time.perf_counter()
        batch = torch.randint(len(labels), (64,))
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        value = publishable(model, step)
        if step == sabotage:  # to see the evaluators find it
            value["weights", "4", "bias"][0] += 1
        before = time.perf_counter()
        store.put(KEY, value)
        latencies.append(time.perf_counter() - before)

        store.put("report/trainer", {"step": step, "loss": loss.item(), "seconds": torch.tensor(latencies)})
        time.sleep(max(0.0, started + pace - time.perf_counter()))
