"""Minutes of overwrites, beside a reader that holds versions for random times: does anything slow down or grow?"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression, mean, median, stdev
from typing import NamedTuple, TypeVar

import torch

import memstore
from tests.benchmarks.machine import busy_seconds
from tests.benchmarks.measure import spread
from tests.benchmarks.report import Figure, Goal, Series, Unit, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.table import amount
from tests.support.fork_server import ForkServer

Item = TypeVar("Item")
KIB, MIB = 1 << 10, 1 << 20
MIX = {"large": (1, 64 * MIB), "medium": (20, 1 * MIB), "small": (200, 2 * KIB)}  # keys, bytes each
READ = {"large": 0.02, "medium": 0.28, "small": 0.7}  # how often the reader takes one of each
PAUSE, HOLD = 0.02, 0.5  # seconds between reads; a version is held so long, in the mean
A_SAMPLE = 1.0  # seconds
POINTS, GROUPS = 60, 20  # of a plot; of the part that is judged
SETTLED = 1 / 3  # of the run: until then, files are made that the versions in flight need
NOISE = 2.0  # how many times the noise a drift may be
LEAST_NOISE = 0.01  # of the median: what never moves has no noise of its own


class Sample(NamedTuple):
    """What was so at a moment, in seconds from the start; `rate` and `others` are since the sample before."""

    at: float
    rate: float
    others: float  # cores that other processes kept busy
    rss: int
    anonymous: int
    reader_rss: int
    reader_anonymous: int
    live: int
    reusable: int
    pinned: int
    filling: int
    catalog: int

    @property
    def files(self) -> int:
        return self.live + self.reusable + self.pinned + self.filling


class Line(NamedTuple):
    """A line of a plot. `worse` says which way it must not go: 1 up, -1 down, 0 either."""

    name: str
    of: Callable[[Sample], float]
    worse: int = 0


PLOTS: dict[tuple[str, str, Unit], list[Line]] = {
    ("rate", "throughput of the writer", "B/s"): [Line("bytes written a second", lambda s: s.rate, -1)],
    ("memory", "memory of the processes", "B"): [
        Line("writer, RSS", lambda s: s.rss, 1),
        Line("writer, anonymous", lambda s: s.anonymous, 1),
        Line("reader, RSS", lambda s: s.reader_rss, 1),
        Line("reader, anonymous", lambda s: s.reader_anonymous, 1),
    ],
    ("store", "files of the store", "B"): [
        Line("files of the store", lambda s: s.files, 1),
        Line("of them live", lambda s: s.live),
        Line("of them kept for reuse", lambda s: s.reusable),
        Line("of them held", lambda s: s.pinned),
    ],
    ("catalog", "catalog", "B"): [Line("catalog", lambda s: s.catalog, 1)],
}


class Drift(NamedTuple):
    """How far a line through the settled part of a run goes, and how far the samples are from that line."""

    drift: float
    noise: float
    middle: float


def measure(session: Session, minutes: float) -> Workload:
    root = str(session.root / "long")
    with memstore.open(root) as store, ForkServer([__name__]) as server:
        values = {f"{kind}-{i}": torch.randn(nbytes // 4) for kind, (keys, nbytes) in MIX.items() for i in range(keys)}
        store.put_many({key: _stamped(value, 0) for key, value in values.items()})
        reader = server.start(hold_versions, root)
        reader.recv()
        samples = list(_overwrite(store, values, reader.pid, minutes * 60))
        reader.send("stop")
        held, wrong = reader.recv()
        reader.join()
        unlike = [key for key, value in values.items() if not torch.equal(store.get(key), value)]
    if wrong or unlike:
        raise SystemExit(f"{wrong} held versions changed, and what was got of {unlike} differs from what was put")
    lines = [(line, unit) for (_, _, unit), lines in PLOTS.items() for line in lines]
    watched = [(line, unit, drift_of([(s.at, line.of(s)) for s in samples])) for line, unit in lines if line.worse]
    written = sum(s.rate * (s.at - before) for s, before in zip(samples, [0.0, *(s.at for s in samples)], strict=False))
    return Workload(
        id="long",
        title=f"Overwrites for {minutes:g} minutes",
        text="One writer overwrites a key of 64 MiB, 20 of 1 MiB and 200 of 2 KiB, round and round, as fast as it can. "
        f"A process beside it gets one of them each {PAUSE * 1000:.0f} ms and holds it for a random time, {HOLD} s in "
        "the mean. Each second looks at what was written, at the memory of both processes (RSS counts mapped files "
        "too), and at the bytes of the store.",
        series=[_series(id, title, unit, samples, lines) for (id, title, unit), lines in PLOTS.items()],
        goals=[_goal(line, found) for line, _, found in watched],
        notes=[
            f"{amount(written, 'B')} were written; the reader held {held:,} versions, and none changed.",
            f"Other processes kept {mean(sample.others for sample in samples):.2f} cores busy in the mean, and up to "
            f"{max(sample.others for sample in samples):.2f}.",
            "A figure is flat if a line through the last two thirds of the run goes the wrong way by no more than "
            f"{NOISE:g} times the noise: the standard deviation around that line of the medians of {GROUPS} groups of "
            f"samples, or {LEAST_NOISE:.0%} of the median if that is more.",
            *(
                f"{line.name}: {amount(found.middle, unit)} (median), drift {found.drift / found.middle:+.2%}, "
                f"noise {found.noise / found.middle:.2%}."
                for line, unit, found in watched
            ),
        ],
    )


def drift_of(points: list[tuple[float, float]]) -> Drift:
    """Of (time, value) pairs: of the settled part, by medians of groups, as peaks are no drift."""
    settled = points[int(len(points) * SETTLED) :]
    groups = in_groups(settled, GROUPS)
    times = [median(at for at, _ in group) for group in groups]
    values = [median(value for _, value in group) for group in groups]
    slope, start = linear_regression(times, values)
    middle = median(values)
    around = stdev([value - start - slope * at for at, value in zip(times, values, strict=True)])
    return Drift(slope * (times[-1] - times[0]), max(around, LEAST_NOISE * middle), middle)


def in_groups(items: list[Item], most: int) -> list[list[Item]]:
    """Neighbours together, so that there are no more than so many groups."""
    size = -(-len(items) // most)
    return [items[start : start + size] for start in range(0, len(items), size)]


def _goal(line: Line, found: Drift) -> Goal:
    way = "grows" if line.worse > 0 else "falls"
    times = line.worse * found.drift / found.noise
    return Goal(f"{line.name} {way} by so many times its noise", exactly(times), "<=", NOISE, "x")


def _series(id: str, title: str, unit: Unit, samples: list[Sample], lines: list[Line]) -> Series:
    """A point of the plot is the median of some samples, with their tenths."""
    groups = in_groups(samples, POINTS)
    figures: list[Figure] = []
    for line in lines:
        role = "memstore" if line is lines[0] else "peer"
        figures += [Figure(line.name, role, spread([line.of(s) for s in group]), 1, x=group[0].at) for group in groups]
    return Series(id, title, unit, figures, x_title="time", x_unit="s")


def _overwrite(store: memstore.Store, values: dict[str, torch.Tensor], reader: int, seconds: float) -> Iterator[Sample]:
    """Puts for so long; a sample each second."""
    chance = random.Random(0)
    keys = list(values)
    start = last = time.monotonic()
    written, used = 0, _used_by_others(reader)
    for turn in count(1):
        chance.shuffle(keys)
        for key in keys:
            store.put(key, _stamped(values[key], turn))
            written += values[key].nbytes
            now = time.monotonic()
            if now < last + A_SAMPLE:
                continue
            before, used = used, _used_by_others(reader)
            yield _look(store, reader, now - start, written / (now - last), (used - before) / (now - last))
            if now > start + seconds:
                for key in values:  # all of the last turn
                    store.put(key, _stamped(values[key], turn))
                return
            last, written = time.monotonic(), 0


def _stamped(value: torch.Tensor, turn: int) -> torch.Tensor:
    """The same tensor, with a number at both its ends."""
    value[0] = value[-1] = turn
    return value


def _used_by_others(reader: int) -> float:
    """Seconds of all cores, but for what this process and the reader took."""
    fields = Path(f"/proc/{reader}/stat").read_text().rpartition(")")[2].split()
    return busy_seconds() - time.process_time() - (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _look(store: memstore.Store, reader: int, at: float, rate: float, others: float) -> Sample:
    stats = store.stats()
    return Sample(
        at,
        rate,
        others,
        *_memory("self"),
        *_memory(str(reader)),
        stats.live_bytes,
        stats.reusable_bytes,
        stats.pinned_bytes,
        stats.filling_bytes,
        stats.catalog_bytes,
    )


def _memory(pid: str) -> tuple[int, int]:
    """RSS, and the anonymous part of it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["VmRSS"].split()[0]) * KIB, int(fields["RssAnon"].split()[0]) * KIB


def hold_versions(channel: Connection, root: str) -> None:
    """The reader: gets keys at random and holds each for a random time, until it is told to stop."""
    chance = random.Random(1)
    held: list[tuple[float, int, torch.Tensor, float]] = []
    wrong = 0
    with memstore.open(root, "r") as store:
        channel.send("ready")
        for number in count():
            if channel.poll(PAUSE):
                break
            now = time.monotonic()
            while held and held[0][0] < now:
                wrong += _differs(*heappop(held)[2:])
            (kind,) = chance.choices(list(READ), list(READ.values()))
            value = store.get(f"{kind}-{chance.randrange(MIX[kind][0])}")
            heappush(held, (now + chance.expovariate(1 / HOLD), number, value, float(value[0])))
        wrong += sum(_differs(*entry[2:]) for entry in held)
    channel.send((number, wrong))


def _differs(value: torch.Tensor, stamp: float) -> bool:
    return not float(value[0]) == float(value[-1]) == stamp
