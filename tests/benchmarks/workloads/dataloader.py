"""An epoch of stored rows: by the workers of torch's DataLoader, and by `read_rows` in a loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import BatchSampler, DataLoader, Sampler

import memstore
from tests.benchmarks.measure import Entrant, Samples, as_series
from tests.benchmarks.report import Beside, Goal, Series, Workload
from tests.benchmarks.session import Session

FRAME, ROWS, FEW_ROWS, BATCH, WORKERS = (84, 84, 4), 20_000, 1_024, 256, 2
ROUNDS = 7
SHARE = 0.8  # of read_rows' own rate: the goal
LOOP, INTO, LOADER, MEMMAP = "read_rows in a loop", "read_rows(out=) in a loop", "memstore", "TensorDict.memmap"
Epoch = Callable[[list[list[int]]], Iterator[TensorDict]]


def measure(session: Session) -> Workload:
    count = FEW_ROWS if session.quick else ROWS
    frames = torch.empty(count, *FRAME, dtype=torch.uint8)
    frames.flatten().view(torch.int64).random_()
    value = TensorDict({"frames": frames, "row": torch.arange(count)}, [count])
    with memstore.open(session.root / "dataloader") as store:
        store.put("train", value)
        mapped = value.memmap(session.root / "memmap")
        epochs = {LOADER: _loaded(memstore.StoreDataset(store, "train")), LOOP: _in_a_loop(store), INTO: _into(store)}
        epochs[MEMMAP] = _loaded(_Mapped(mapped))
        series = _compare(epochs, count, 2 if session.quick else ROUNDS, frames)
    return Workload(
        id="dataloader",
        title="An epoch by a DataLoader",
        text=f"{count:,} rows of 28 KiB, shuffled, in batches of {BATCH}, all in memory. {WORKERS} workers, which "
        "persist, read them by StoreDataset, and by the same from a TensorDict in memory maps; a loop of read_rows has "
        "no workers. The training looks at one number of each row. An epoch is timed from its first batch's request.",
        series=[series],
        goals=[_goal(series)],
    )


class _Order(Sampler[list[int]]):
    """The batches that it is told, each epoch others."""

    batches: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def _loaded(data: Any) -> Epoch:
    order = _Order()
    loader: Any = DataLoader(
        data,
        batch_sampler=order,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context="fork",
        collate_fn=_as_it_is if isinstance(data, _Mapped) else None,
    )

    def epoch(batches: list[list[int]]) -> Iterator[TensorDict]:
        order.batches = batches
        return iter(loader)

    return epoch


class _Mapped(torch.utils.data.Dataset[Any]):
    """A TensorDict as its documentation gives it to a DataLoader: a batch by one index."""

    def __init__(self, rows: TensorDict) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, index: list[int]) -> TensorDict:
        return self.rows[index]


def _as_it_is(batch: Any) -> Any:
    return batch


def _in_a_loop(store: memstore.Store) -> Epoch:
    view = store.view("train")
    return lambda batches: (memstore.read_rows(view, batch) for batch in batches)


def _into(store: memstore.Store) -> Epoch:
    view = store.view("train")
    out = memstore.read_rows(view, list(range(BATCH)))
    return lambda batches: (memstore.read_rows(view, batch, out=out[: len(batch)]) for batch in batches)


def _compare(epochs: dict[str, Epoch], count: int, rounds: int, frames: torch.Tensor) -> Series:
    for name, epoch in epochs.items():
        check(name, epoch, frames)
    samples = {name: Samples() for name in epochs}
    names = list(epochs)
    for turn in range(rounds):
        batches = _shuffled(count)
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            start = time.perf_counter_ns()
            for batch in epochs[name](batches):
                batch["row"].sum()
            samples[name].rounds.append([time.perf_counter_ns() - start])
    roles: dict[str, Any] = {LOADER: "memstore", LOOP: "limit", INTO: "limit", MEMMAP: "peer"}
    entrants = [Entrant(name, roles[name]) for name in names]
    title = f"epoch of {count:,} rows of 28 KiB by {WORKERS} workers"
    return as_series("dataloader", title, entrants, list(samples.values()), reference=LOADER)


def _shuffled(count: int) -> list[list[int]]:
    return list(BatchSampler(torch.randperm(count).tolist(), BATCH, drop_last=True))


def check(name: str, epoch: Epoch, frames: torch.Tensor) -> None:
    """Starts the workers, and ends the run unless each row comes once with its bytes."""
    seen: list[torch.Tensor] = []
    for batch in epoch(_shuffled(len(frames))):
        if not torch.equal(batch["frames"], frames[batch["row"]]):
            raise SystemExit(f"{name}: rows differ from what was put")
        seen.append(batch["row"].clone())
    if len(torch.cat(seen).unique()) != len(frames) // BATCH * BATCH:
        raise SystemExit(f"{name}: not each row came once")


def _goal(series: Series) -> Goal:
    loop = series.figure(LOOP)
    assert loop.ratio is not None
    what = f"rows a second by a DataLoader of {WORKERS} workers, against {LOOP}"
    return Goal(what, loop.ratio, ">=", SHARE, "x", limit=Beside(LOOP, loop.value.median))
