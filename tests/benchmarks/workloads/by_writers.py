"""Replay buffers that some processes fill while another one samples them: what `replay` and `replay-write` do.

Each contestant has a home: a process that makes its buffer, fills it, and forks the writers and the sampler, for
TorchRL's and cpprb's buffers are handed on by inheritance only. In a lap some of the writers work, and the sampler if
it shall, for as many seconds as they are told; then they say what they have done.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.benchmarks.peers.replay import ReplayPeer
from tests.support.fork_server import ForkServer, Worker

STAMPS = 4  # batches of each writer, which differ
LOOKS = 16  # places of a row that are compared
UP_SECONDS = 120.0
WARM_UP = 2  # laps
PR_SET_PDEATHSIG = 1


class Plan(NamedTuple):
    """Rows of `width` int64, all of them the same in a row; so many in the buffer, in a call, in a sample."""

    width: int
    capacity: int
    written: int
    sampled: int

    def batches(self, writer: int) -> list[torch.Tensor]:
        """Of one writer. No other has a row with one of their numbers."""
        stamps = range(1 + writer * STAMPS, 1 + (writer + 1) * STAMPS)
        return [torch.full((self.written, self.width), stamp, dtype=torch.int64) for stamp in stamps]


class Work(NamedTuple):
    """One lap: how many writers, whether they add single rows, whether somebody samples meanwhile, for how long."""

    writers: int
    seconds: float
    single: bool = False
    samples: bool = False


class Written(NamedTuple):
    seconds: float
    calls: int
    rows: int


class Sampled(NamedTuple):
    """Seconds in the calls alone; the rows that they returned, and how many of these were of two writes."""

    seconds: float
    rows: int
    torn: int


class Lap(NamedTuple):
    written: list[Written]
    sampled: Sampled | None

    @property
    def rows_written(self) -> float:
        """A second, by all writers together."""
        return sum(one.rows / one.seconds for one in self.written)


class Home(NamedTuple):
    """A contestant's process."""

    peer: ReplayPeer
    worker: Worker

    def run(self, work: Work) -> Lap:
        self.worker.send(work)
        return self.worker.recv(work.seconds + UP_SECONDS)


@contextmanager
def homes(peers: Sequence[ReplayPeer], plan: Plan, *, writers: int) -> Generator[list[Home]]:
    """One for each contestant, in an interpreter that has what it needs. They live as long as the `with`."""
    with ExitStack() as stack:
        servers: dict[str | None, ForkServer] = {}
        found: list[Home] = []
        for peer in peers:
            python = peer.python()
            if python not in servers:
                servers[python] = stack.enter_context(ForkServer([__name__], python=python))
            found.append(Home(peer, stack.enter_context(servers[python].start(live, peer, plan, writers))))
        for home in found:
            home.worker.recv(UP_SECONDS)
        yield found
        for home in found:
            home.worker.send(None)
            home.worker.join()


def take_laps(found: Sequence[Home], work: Work, *, rounds: int) -> list[list[Lap]]:
    """Of each contestant, round by round. They take turns; a long first lap, in which pages are met, doesn't count."""
    laps: list[list[Lap]] = [[] for _ in found]
    for home in found:
        home.run(work._replace(seconds=WARM_UP * work.seconds))
    for turn in range(rounds):
        for place in range(len(found)):
            number = (turn + place) % len(found)
            laps[number].append(found[number].run(work))
    return laps


# --- in a contestant's home -------------------------------------------------------------------------------------------


def live(channel: Connection, peer: ReplayPeer, plan: Plan, writers: int) -> None:
    """Makes the buffer full, and passes on what is to be done."""
    peer.make(plan.capacity, plan.width)
    (first, *_) = plan.batches(0)
    for _ in range(-(-plan.capacity // plan.written)):
        peer.extend(peer.ready(first))
    pens = [_fork(write, peer, plan, number) for number in range(writers)]
    eye = _fork(sample, peer, plan)
    try:
        channel.send(None)
        while (work := channel.recv()) is not None:
            busy = pens[: work.writers]
            for pipe in [*busy, *([eye] if work.samples else [])]:
                pipe.send(work)
            channel.send(Lap([_answer(pipe) for pipe in busy], _answer(eye) if work.samples else None))
    finally:
        for pipe in (*pens, eye):
            pipe.send(None)
        peer.close()


def _fork(function: Callable[..., None], *arguments: Any) -> Any:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    context.Process(target=_work, args=(function, theirs, *arguments)).start()
    theirs.close()
    return ours


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(UP_SECONDS):
        raise TimeoutError(f"a writer or sampler said nothing in {UP_SECONDS:g} s")
    return pipe.recv()


def _work(function: Callable[..., None], *arguments: Any) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # none outlives its home
    torch.set_num_threads(1)
    function(*arguments)


def write(pipe: Connection, peer: ReplayPeer, plan: Plan, number: int) -> None:
    """A writer: batches, or single rows, as fast as it can."""
    peer.join()
    batches = plan.batches(number)
    whole, single = [peer.ready(batch) for batch in batches], [peer.ready_row(batch[0]) for batch in batches]
    while (work := pipe.recv()) is not None:
        call, given = (peer.add, single) if work.single else (peer.extend, whole)
        calls, start = 0, time.perf_counter()
        while time.perf_counter() < start + work.seconds:
            call(given[calls % STAMPS])
            calls += 1
        seconds = time.perf_counter() - start
        pipe.send(Written(seconds, calls, calls * (1 if work.single else plan.written)))


def sample(pipe: Connection, peer: ReplayPeer, plan: Plan) -> None:
    """The sampler: as fast as it can. What it got is looked at outside the time."""
    peer.join()
    while (work := pipe.recv()) is not None:
        seconds, rows, torn, end = 0.0, 0, 0, time.monotonic() + work.seconds
        while time.monotonic() < end:
            start = time.perf_counter()
            found = peer.sample(plan.sampled)
            seconds += time.perf_counter() - start
            rows, torn = rows + len(found), torn + torn_rows(found)
        pipe.send(Sampled(seconds, rows, torn))


def torn_rows(rows: np.ndarray[Any, Any]) -> int:
    """How many rows have more than one number: at places from the first on, and the last."""
    looks = np.append(rows[:, :: max(1, rows.shape[1] // LOOKS)], rows[:, -1:], 1)
    return int((looks != looks[:, :1]).any(1).sum())
