"""Many processes read a key while another overwrites it: nobody sees half a value, nobody waits, the writer goes on."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

import memstore
from tests.benchmarks.measure import spread
from tests.benchmarks.report import Figure, Goal, Series, Spread, Workload, exactly
from tests.benchmarks.session import Session
from tests.support.fork_server import ForkServer, Worker

READERS = (1, 2, 8, 64)
SIZES = {"64 KiB": 64 << 10, "8 MiB": 8 << 20}
READS_A_SECOND = 100
STAMPS = 16  # versions that differ, before the first comes again
LOOKS = 16  # places of a value that a reader compares
UP_SECONDS = 60.0
X_TITLE = "processes that read"


class Read(NamedTuple):
    """What one reader saw in one phase."""

    seconds: list[float]  # each get
    torn: int
    cpu: float  # seconds of the processor, for all of them and the looks at what was got


class Written(NamedTuple):
    """Seconds a put: on the clock, and of the processor."""

    wall: float
    cpu: float
    puts: int


class Phase(NamedTuple):
    """The writer alone, and right after it the same with readers."""

    alone: Written
    beside: Written
    reads: list[Read]


def measure(session: Session) -> Workload:
    rounds, seconds = (1, 0.3) if session.quick else (3, 0.7)
    phases: dict[tuple[str, int], list[Phase]] = {}
    for size, nbytes in SIZES.items():
        phases |= _among_readers(session, size, nbytes, rounds, seconds)
    return Workload(
        id="readers",
        title="Readers beside a writer",
        text=f"Processes that each get one key {READS_A_SECOND} times a second, while another overwrites it at full "
        f"speed, from one thread. Each version has a stamp in all its elements: a reader compares {LOOKS} places of it "
        "and its last. Before each phase with readers the writer runs alone, for comparison.",
        series=[_get_series(phases), *(_put_series(size, phases) for size in SIZES)],
        goals=[goal for size in SIZES for goal in _goals(size, phases)],
        notes=[
            *(_slowest(size, seconds, phases[size, READERS[-1]]) for size in SIZES),
            "A process that sleeps between its gets finds the processor's caches cold: its get takes several times as "
            "long as one of many in a row. So does a lookup in LMDB.",
        ],
    )


def _among_readers(
    session: Session, size: str, nbytes: int, rounds: int, seconds: float
) -> dict[tuple[str, int], list[Phase]]:
    root = str(session.root / f"readers-{nbytes}")
    with memstore.open(root) as store:
        store.put("value", torch.zeros(nbytes // 8, dtype=torch.int64))
    phases: dict[tuple[str, int], list[Phase]] = {(size, count): [] for count in READERS}
    with ForkServer([__name__]) as server:
        writer = server.start(overwrite, root, nbytes)
        readers = [server.start(read, root, seed) for seed in range(max(READERS))]
        for worker in (writer, *readers):
            worker.recv(UP_SECONDS)
        _phase(writer, readers, seconds)  # warm-up: the files that so many readers need are there
        for turn in range(rounds):
            for count in READERS if turn % 2 else reversed(READERS):
                alone, _ = _phase(writer, [], seconds)
                phases[size, count].append(Phase(alone, *_phase(writer, readers[:count], seconds)))
    return phases


def _phase(writer: Worker, readers: list[Worker], seconds: float) -> tuple[Written, list[Read]]:
    for worker in (*readers, writer):
        worker.send(seconds)
    written = writer.recv()
    return written, [reader.recv() for reader in readers]


def overwrite(channel: Connection, root: str, nbytes: int) -> None:
    """The writer: puts for as many seconds as it is told, again and again."""
    values = [torch.full((nbytes // 8,), stamp, dtype=torch.int64) for stamp in range(STAMPS)]
    with memstore.open(root) as store:
        channel.send(None)
        while True:
            seconds = channel.recv()
            end = time.monotonic() + seconds
            puts, wall, cpu = 0, 0, 0
            while time.monotonic() < end:
                value = values[puts % STAMPS]
                start, used = time.perf_counter_ns(), time.thread_time_ns()
                store.put("value", value)
                cpu += time.thread_time_ns() - used
                wall += time.perf_counter_ns() - start
                puts += 1
            channel.send(Written(wall / puts * 1e-9, cpu / puts * 1e-9, puts))


def read(channel: Connection, root: str, seed: int) -> None:
    """A reader: gets at its own pace, from a moment of its own on."""
    pause = 1 / READS_A_SECOND
    first = random.Random(seed).uniform(0, pause)
    with memstore.open(root, "r") as store:
        channel.send(None)
        while True:
            seconds = channel.recv()
            end = time.monotonic() + seconds
            due, taken, torn, used = time.monotonic() + first, [], 0, time.process_time()
            while due < end:
                time.sleep(max(0.0, due - time.monotonic()))
                begin = time.perf_counter()
                value = store.get("value")
                taken.append(time.perf_counter() - begin)
                torn += is_torn(value)
                del value
                due = max(due + pause, time.monotonic())
            channel.send(Read(taken, torn, time.process_time() - used))


def is_torn(value: torch.Tensor) -> bool:
    """Whether a value has two stamps: at places from its first element on, and its last.

    By the buffer, not by torch: cold, its operators take as long as the get.
    """
    memory = memoryview(value.numpy())
    return len({memory[-1], *memory[:: max(1, len(memory) // LOOKS)].tolist()}) > 1


def _get_series(phases: dict[tuple[str, int], list[Phase]]) -> Series:
    figures: list[Figure] = []
    for (size, count), taken in phases.items():
        gets = [_gets(phase) for phase in taken]
        calls = sum(map(len, gets))
        late = spread([_percentile(seconds) for seconds in gets])
        figures += [
            Figure(f"get of {size}", "memstore", spread([s for seconds in gets for s in seconds]), calls, x=count),
            Figure(f"get of {size}, p99", "memstore", late, calls, x=count),
        ]
    title = "get of a key that is overwritten, by the number of readers"
    return Series("get", title, "s", figures, x_title=X_TITLE, x_unit="n")


def _put_series(size: str, phases: dict[tuple[str, int], list[Phase]]) -> Series:
    figures: list[Figure] = []
    for count in READERS:
        taken = phases[size, count]
        puts, alone = sum(p.beside.puts for p in taken), sum(p.alone.puts for p in taken)
        figures += [
            Figure("put", "memstore", spread([p.beside.wall for p in taken]), puts, _wall(taken), x=count),
            Figure("put, CPU time", "memstore", spread([p.beside.cpu for p in taken]), puts, _cpu(taken), x=count),
            Figure("put, alone", "limit", spread([p.alone.wall for p in taken]), alone, x=count),
            Figure("put, alone, CPU time", "limit", spread([p.alone.cpu for p in taken]), alone, x=count),
        ]
    title, id = f"put of {size}, by the number of readers", f"put-{size.lower().replace(' ', '-')}"
    return Series(id, title, "s", figures, reference="the writer alone", x_title=X_TITLE, x_unit="n")


def _gets(phase: Phase) -> list[float]:
    return [seconds for one in phase.reads for seconds in one.seconds]


def _wall(taken: list[Phase]) -> Spread:
    return spread([phase.beside.wall / phase.alone.wall for phase in taken])


def _cpu(taken: list[Phase]) -> Spread:
    return spread([phase.beside.cpu / phase.alone.cpu for phase in taken])


def _percentile(seconds: list[float]) -> float:
    """The ninety-ninth of a hundred."""
    return sorted(seconds)[int(len(seconds) * 0.99)]


def _goals(size: str, phases: dict[tuple[str, int], list[Phase]]) -> list[Goal]:
    most = READERS[-1]
    reads = [one for count in READERS for phase in phases[size, count] for one in phase.reads]
    gets = [seconds for phase in phases[size, most] for seconds in _gets(phase)]
    walls, cpus = ([of(phases[size, count]) for count in READERS] for of in (_wall, _cpu))
    return [
        Goal(f"torn values of {size}", exactly(float(sum(one.torn for one in reads))), "<=", 0, "n"),
        Goal(f"get of {size} beside {most - 1} other readers, p99", exactly(_percentile(gets)), "<=", 5e-3, "s"),
        Goal(f"put of {size} beside readers, against alone: CPU time", _worst(cpus), "<=", 1.3, "x"),
        Goal(f"put of {size} beside readers, against alone", _worst(walls), "<=", 2, "x"),
    ]


def _worst(spreads: list[Spread]) -> Spread:
    return max(spreads, key=lambda found: found.median)


def _slowest(size: str, seconds: float, taken: list[Phase]) -> str:
    """Nobody is starved if the one that came least often came nearly as often as it wanted to."""
    fewest = min(sum(counts) for counts in zip(*([len(one.seconds) for one in p.reads] for p in taken), strict=True))
    cores = sum(one.cpu for phase in taken for one in phase.reads) / (seconds * len(taken))
    return (
        f"{size}: of {READERS[-1]} readers, the one that came least often got {fewest / (seconds * len(taken)):.0f} "
        f"values a second; all of them together kept {cores:.2f} cores busy."
    )
