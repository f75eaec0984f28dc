"""Several processes of one host that read one value of another host at the same moment."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import memstore
from tests.benchmarks.on_hosts import HostProcess
from tests.benchmarks.peers import same
from tests.benchmarks.peers.far import Work, value_of
from tests.benchmarks.peers.far_store import key_of
from tests.distributed.hosts.clusters import ROOT


class FarReaders:
    """Args:
    process: of the readers' host, which has not opened the store: it forks them.
    """

    def __init__(self, process: HostProcess, count: int) -> None:
        self._process = process
        process.run(start, count)

    def read(self, work: Work, number: int, count: int, *, check: bool) -> float:
        """So many of them get the value. The seconds until the last one has summed it."""
        return self._process.run(read_at_once, work, number, count, check)

    def close(self) -> None:
        self._process.run(end)
        self._process.close()


# --- on the readers' host ---------------------------------------------------------------------------------------------

_pipes: list[Connection] = []


def start(count: int) -> None:
    context: Any = multiprocessing.get_context("fork")
    for _ in range(count):
        ours, theirs = context.Pipe()
        context.Process(target=_read, args=(theirs,), daemon=True).start()
        theirs.close()
        _pipes.append(ours)
    for pipe in _pipes:
        pipe.recv()


def read_at_once(work: Work, number: int, count: int, check: bool) -> float:
    pipes = _pipes[:count]
    begin = time.perf_counter()
    for pipe in pipes:
        pipe.send((work, number, check))
    ends: list[float] = []
    for pipe in pipes:
        end, is_right = pipe.recv()
        if not is_right:
            raise ValueError(f"{work.id}: what a reader got is not value {number}")
        ends.append(end)
    return max(ends) - begin


def end() -> None:
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


def _read(pipe: Connection) -> None:
    with memstore.open(ROOT, "r+") as store:
        pipe.send(None)
        while True:
            work, number, check = pipe.recv()
            found = store.get(key_of(work, number))
            found.sum()
            end = time.perf_counter()
            pipe.send((end, not check or same(found, value_of(work, number))))
