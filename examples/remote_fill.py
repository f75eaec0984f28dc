"""A dataset that one process creates and others fill: they receive a reference to it over torch.distributed.rpc.

    python examples/remote_fill.py [--workers N] [--root PATH]

TensorDict's documentation shows the same with memory maps: the rows aren't sent back, because a worker with the
reference writes them to their place. Here rank 0 creates the dataset with room for the digits of scikit-learn. Each
worker receives the reference, some hundred bytes, and its own number; it enlarges the pictures of its rows, and writes
them. All workers also append a row for each step to a second dataset, a log, in any order. At the end rank 0 compares
every row, and seals the dataset: from then on it is an ordinary entry, with checksums.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import multiprocessing
from torch.distributed import rpc as torch_rpc

import memstore

rpc: Any = torch_rpc  # it has no types

SIDE, CHUNK = 64, 100  # pixels of an enlarged picture, rows that a worker writes at once
ROW = {"picture": ((SIDE, SIDE), torch.uint8), "label": ((), torch.int64)}
LOG = {"worker": ((), torch.int64), "rows": ((2,), torch.int64)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/remote_fill.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", default="/dev/shm/memstore-remote-fill", help="of the store, which begins anew")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error("--workers is 1 or more")
    with tempfile.TemporaryDirectory(prefix="memstore-remote-fill-") as folder:
        arguments = (options.workers + 1, f"file://{folder}/meeting", options.root)
        multiprocessing.spawn(run, arguments, options.workers + 1)


def run(rank: int, world: int, meeting: str, root: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own use of it
    backend = rpc.TensorPipeRpcBackendOptions(init_method=meeting, num_worker_threads=2)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=backend)
    if rank == 0:
        with memstore.open(root, "w", checksum=True) as store:  # "w": without what a run has left that was killed
            try:
                create_and_judge(store, world - 1)
            finally:
                memstore.destroy(root)
    rpc.shutdown()  # waits for all calls


# --- a worker ---------------------------------------------------------------------------------------------------------


def fill(data: memstore.Dataset, log: memstore.Dataset, worker: int, workers: int) -> int:
    """Called in a worker: writes every row whose turn is this worker's. Returns its pid."""
    images, labels = digits()
    for start in range((worker - 1) * CHUNK, len(labels), workers * CHUNK):
        stop = min(start + CHUNK, len(labels))
        data[start:stop] = {"picture": enlarged(images[start:stop]), "label": labels[start:stop]}
        log.extend({"worker": torch.tensor([worker]), "rows": torch.tensor([[start, stop]])})
    return os.getpid()


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data: Any = load_digits()
    return torch.tensor(data.images, dtype=torch.uint8), torch.tensor(data.target)


def enlarged(images: torch.Tensor) -> torch.Tensor:
    times = SIDE // images.shape[-1]
    return images.repeat_interleave(times, dim=1).repeat_interleave(times, dim=2)


# --- rank 0 -----------------------------------------------------------------------------------------------------------


def create_and_judge(store: memstore.Store, workers: int) -> None:
    images, labels = digits()
    data = store.create_dataset("digits", ROW, capacity=len(labels), length=len(labels))
    log = store.create_dataset("log", LOG, capacity=len(labels))
    print(f"created    {len(data):,} rows of zeros, {store.info('digits').nbytes / (1 << 20):.1f} MiB")

    calls = [rpc.rpc_async(f"rank{i}", fill, (data, log, i, workers)) for i in range(1, workers + 1)]
    pids: list[int] = [call.wait() for call in calls]

    for i, pid in enumerate(pids, 1):
        own = log[:]["rows"][log[:]["worker"] == i]
        print(f"worker {i}   pid {pid}, {int((own[:, 1] - own[:, 0]).sum()):,} rows in {len(own)} slices")
    filled = data[:]
    same = torch.equal(filled["picture"], enlarged(images)) and torch.equal(filled["label"], labels)
    print(f"filled     rank 0 sees {'every row as it should be' if same else 'OTHER ROWS'}")

    version = data.seal()
    sealed, report = store.get("digits"), store.verify(["digits"])
    same = same and torch.equal(sealed["label"], labels) and report.ok
    print(f"sealed     version {version}, {Path(store.info('digits').files[0]).name}, checksums fit: {report.ok}")
    if not same or os.getpid() in pids:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
