"""What one iteration of an RLlib-like loop costs: a learner gives its weights to env runners, which are actors of Ray.

    python -m tests.benchmarks.scripts.ray_runners [--mib N] [--runners N] [--rounds N] [--root PATH]

The figures of docs/coming-from/ray.md. The ways take turns; another one is first in each round. Each round has other
weights, and each runner says what it has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import ray
import torch

import memstore
from tests.benchmarks.peers.ray_objects import start_ray

LAYERS = 25
KEY = "policy"
TIMEOUT = 120.0  # seconds


class Policy(torch.nn.Module):
    """Layers that are all filled with the number of a round."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(width, width) for _ in range(LAYERS))

    def numbers(self) -> set[float]:
        """Looks at the begin and the end of each layer."""
        return {place.item() for layer in self.layers for place in (layer[0, 0], layer[-1, -1])}


class EnvRunner:
    """An actor with a policy; a second one has the store's memory as its own."""

    def __init__(self, root: str, width: int) -> None:
        self.store = memstore.open(root, "r", timeout=TIMEOUT)
        self.policy, self.mapped = Policy(width), Policy(width)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read

    def ready(self) -> None:
        """Answers once the actor is there."""

    def from_tensors(self, weights: dict[str, torch.Tensor]) -> set[float]:
        self.policy.load_state_dict(weights)
        return self.policy.numbers()

    def from_arrays(self, weights: dict[str, Any]) -> set[float]:
        self.policy.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        return self.policy.numbers()

    def from_store(self, version: int) -> set[float]:
        self.store.load_model(KEY, self.policy, newer_than=version - 1)
        return self.policy.numbers()

    def from_store_mapped(self, version: int) -> set[float]:
        self.store.wait(KEY, newer_than=version - 1)
        self.mapped.load_state_dict(self.store.get(KEY), assign=True)
        return self.mapped.numbers()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=95, help="of weights: 95 MiB are 100 MB")
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--root", default="/dev/shm/memstore-ray-runners", help="of the store, which begins anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    width = int((options.mib * (1 << 20) / LAYERS / 4) ** 0.5)
    start_ray()
    try:
        _compare(options.root, width, options.runners, options.rounds)
    finally:
        ray.shutdown()


def _compare(root: str, width: int, count: int, rounds: int) -> None:
    learner, store = Policy(width), memstore.open(root, "w")
    actor: Any = ray.remote(EnvRunner)
    runners = [actor.options(num_cpus=0).remote(root, width) for _ in range(count)]
    ray.get([runner.ready.remote() for runner in runners], timeout=TIMEOUT)

    def tensors() -> Any:
        return ray.put(learner.state_dict())

    def arrays() -> Any:
        return ray.put({name: tensor.numpy() for name, tensor in learner.state_dict().items()})

    def version() -> int:
        return store.put(KEY, learner.state_dict())

    ways: dict[str, tuple[Callable[[], Any], str]] = {
        "`ray.put` of tensors": (tensors, "from_tensors"),
        "`ray.put` of numpy arrays, mapped, then copied into the module": (arrays, "from_arrays"),
        "`store.put`, and `load_model` (copied into the module)": (version, "from_store"),
        "`store.put`, and `load_state_dict(store.get(key), assign=True)` (mapped)": (version, "from_store_mapped"),
    }
    put: dict[str, list[float]] = {name: [] for name in ways}
    loaded: dict[str, list[float]] = {name: [] for name in ways}
    number = 0
    for turn in range(rounds + 1):
        for place in range(len(ways)):
            name, (give, method) = list(ways.items())[(turn + place) % len(ways)]
            number += 1
            with torch.no_grad():
                for layer in learner.layers:
                    layer.fill_(float(number))
            began = time.perf_counter()
            given = give()
            was_put = time.perf_counter()
            found = ray.get([getattr(runner, method).remote(given) for runner in runners], timeout=TIMEOUT)
            ended = time.perf_counter()
            if found != [{float(number)}] * count:
                raise ValueError(f"{name}: runners have {found}, of round {number}")
            del given
            if turn:  # the first one touches new memory
                put[name].append(was_put - began)
                loaded[name].append(ended - began)
    store.close()
    memstore.destroy(root)
    nbytes = LAYERS * width**2 * 4
    print(f"{nbytes / 1e6:.0f} MB in {LAYERS} tensors, {count} runners, Ray {ray.__version__}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.0f}; ms, the minimum and the median of {rounds}")  # fmt: skip
    print(f"| | put | until all {count} runners have loaded them |")
    print("|---|---|---|")
    for name in ways:
        cells = (f"{min(each) * 1e3:,.0f}, {statistics.median(each) * 1e3:,.0f}" for each in (put[name], loaded[name]))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
