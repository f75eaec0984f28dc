"""A data set in a store, read by the workers of a DataLoader: they get a reference to it, and read the rows they need.

    python examples/dataset.py [--rows N] [--batch N] [--epochs N] [--workers N] [--root PATH]

Each worker receives a pickled view: some hundred bytes, however large the data set is. For each batch a worker reads
the rows with one `memstore.read_rows` into memory that it shares with this process. So a row is copied only once
between the file and the training step. In each epoch every row must come once, with its own bytes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from itertools import cycle
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import memstore

KEY, FRAME, MIB = "train", (84, 84, 4), 1 << 20
PREFETCHED = 2  # batches a worker is ahead


class Loaded(NamedTuple):
    batch: TensorDict
    worker: int
    bytes_read: int  # by that worker, so far


class Rows(Dataset[Loaded]):
    """Its items are whole batches: an index is a list of rows."""

    def __init__(self, view: TensorDict, batch_size: int) -> None:
        self._view, self._batch_size = view, batch_size
        self._free: Iterator[TensorDict] | None = None

    def __getitem__(self, rows: list[int]) -> Loaded:
        if self._free is None:
            self._free = cycle([self._new_batch() for _ in range(PREFETCHED + 1)])
        batch = memstore.read_rows(self._view, rows, out=next(self._free))
        return Loaded(batch, os.getpid(), memstore.bytes_read())

    def _new_batch(self) -> TensorDict:
        """In shared memory. One more than are on their way is enough: the step that has the last one still uses it."""
        one = self._view[: self._batch_size]
        return one.apply(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype)).share_memory_()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/dataset.py")
    parser.add_argument("--rows", type=int, default=8_192)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", default="/dev/shm/memstore-dataset", help="of the store, which begins anew")
    options = parser.parse_args()
    with memstore.open(options.root, "w") as store:  # "w": without what a run has left that was killed
        try:
            run(store, options)
        finally:
            memstore.destroy(options.root)


def run(store: memstore.Store, options: argparse.Namespace) -> None:
    store.put(KEY, made_up(options.rows))
    data = Rows(store.view(KEY), options.batch)
    nbytes = store.info(KEY).nbytes
    sent = len(ForkingPickler.dumps(data))
    print(f"data set: {options.rows:,} rows, {nbytes / MIB:.0f} MiB; a worker gets {sent} bytes")
    loader = load(data, options)
    for number in range(1, options.epochs + 1):
        start = time.perf_counter()
        seen, read = epoch(loader)
        seconds = time.perf_counter() - start
        rate = f"{len(seen) / seconds:,.0f} rows/s" if number > 1 else "with the start of the workers"
        print(f"epoch {number}: {len(seen):,} rows in {seconds:.2f} s, {rate}")
        if len(seen.unique()) != options.rows // options.batch * options.batch:
            raise SystemExit(f"only {len(seen.unique()):,} different rows came")
    print(f"read by the workers: {read / MIB:.0f} MiB")


def made_up(rows: int) -> TensorDict:
    """Frames with the number of their row in their first bytes."""
    ids = torch.arange(rows)
    frames = torch.randint(0, 256, (rows, *FRAME), dtype=torch.uint8)
    frames.flatten(1)[:, :8] = stamp(ids)
    return TensorDict({"frame": frames, "reward": torch.randn(rows), "row": ids}, batch_size=[rows])


def stamp(ids: torch.Tensor) -> torch.Tensor:
    return ids.unsqueeze(1).view(torch.uint8)


def load(data: Rows, options: argparse.Namespace) -> Any:
    return DataLoader(
        data,
        batch_size=None,  # the data set makes batches
        sampler=BatchSampler(RandomSampler(range(options.rows)), options.batch, drop_last=True),
        collate_fn=as_it_is,
        num_workers=options.workers,
        prefetch_factor=PREFETCHED,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )


def epoch(loader: Any) -> tuple[torch.Tensor, int]:
    """The rows that came, and the bytes that the workers have read so far."""
    seen: list[torch.Tensor] = []
    read: dict[int, int] = {}
    for batch, worker, bytes_read in loader:
        if not torch.equal(batch["frame"].flatten(1)[:, :8], stamp(batch["row"])):
            raise SystemExit(f"batch {len(seen)} has other frames than rows")
        seen.append(batch["row"].clone())
        read[worker] = bytes_read
    return torch.cat(seen), sum(read.values())


def as_it_is(loaded: Loaded) -> Loaded:
    return loaded


if __name__ == "__main__":
    main()
