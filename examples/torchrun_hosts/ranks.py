"""The script of each rank, on whatever host torchrun has started it.

1. All ranks put weights that are sharded over them by rows, as one value; each stores its rows on its own host.
2. Each rank gets its columns of the weights: only these columns are fetched from the rows of other hosts.
3. Each rank puts a batch, and gets the batch of a rank on the next host.

Every value is compared with what was put.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import memstore

LAYERS, SIDE = 4, 512
BATCH = (64, 1024)
PATIENCE = 120.0
MIB = 1 << 20


class Report(NamedTuple):
    """What a rank has done. Times in seconds, one a step."""

    puts: list[float]
    gets: list[float]
    batches: list[float]
    wrong: int


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    cluster = memstore.join(options.root, timeout=PATIENCE)  # the host's first rank starts its agent
    dist.init_process_group("gloo")
    with memstore.open(options.root) as store:
        report = work(store, options.steps)
    reports: list[Report] = [report] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if dist.get_rank() == 0:
        show(cluster, reports)
        cluster.stop()
    dist.barrier()
    dist.destroy_process_group()
    return int(any(one.wrong for one in reports))


def work(store: memstore.Store, steps: int) -> Report:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    next_host = (rank + world_size // 2) % world_size
    mesh = init_device_mesh("cpu", (world_size,))
    rows, columns = weights(mesh, dim=0), weights(mesh, dim=1)
    report = Report([], [], [], 0)
    wrong = 0
    for step in range(steps):
        for tensor in rows.values():
            tensor.to_local().add_(1)  # what an optimizer does
        began = time.perf_counter()
        version = store.put_sharded("weights", rows, attempt=f"step {step}", timeout=PATIENCE)
        put = time.perf_counter()
        store.get("weights", out=columns, timeout=PATIENCE)
        report.puts.append(put - began)
        report.gets.append(time.perf_counter() - put)
        wrong += not is_step(columns, step + 1) or version != store.version("weights")

        store.put(f"batches-{rank}/{step}", torch.full(BATCH, float(rank * steps + step)))
        theirs = f"batches-{next_host}/{step}"
        store.wait(theirs, newer_than=0, timeout=PATIENCE)
        began = time.perf_counter()
        batch = store.get(theirs, timeout=PATIENCE)
        report.batches.append(time.perf_counter() - began)
        wrong += not bool((batch == next_host * steps + step).all())
        dist.barrier()
    return report._replace(wrong=wrong)


def weights(mesh: DeviceMesh, dim: int) -> dict[str, DTensor]:
    """Square layers, of which each rank has its rows (0) or columns (1). Element i, j is i * SIDE + j."""
    whole = torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE)
    return {
        f"layer{number}": distribute_tensor(whole.clone(), mesh, [Shard(dim)], src_data_rank=None)
        for number in range(LAYERS)
    }


def is_step(found: dict[str, DTensor], step: int) -> bool:
    """Whether all is as it was so many steps after the start."""
    first = next(iter(found.values()))
    expected = weights(first.device_mesh, dim=1)
    return all(torch.equal(found[name].to_local(), expected[name].to_local() + step) for name in expected)


def show(cluster: memstore.Cluster, reports: list[Report]) -> None:
    status = cluster.status()
    steps = len(reports[0].puts)
    nbytes = LAYERS * SIDE * SIDE * 4
    puts, gets, batches = (
        [1e3 * max(times) for times in zip(*column, strict=True)]
        for column in ([one[field] for one in reports] for field in range(3))
    )
    print(f"{len(status.hosts)} hosts serve one store: {', '.join(host.address for host in status.hosts)}")
    print(f"  weights of {nbytes / MIB:.0f} MiB, spread over {len(reports)} ranks: {steps} versions")
    print(f"    put by rows, by all ranks      {statistics.median(puts):7.1f} ms")
    print(f"    got by columns, on each rank   {statistics.median(gets):7.1f} ms")
    print(
        f"  batches from host to host        {statistics.median(batches):7.1f} ms each, {steps * len(reports)} of them"
    )
    print(f"  wrong or torn                    {sum(one.wrong for one in reports):5d}")


if __name__ == "__main__":
    raise SystemExit(main())
