"""Ranks of torch.distributed on gloo: real processes, forked from one that has torch, which run functions together."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.support.fork_server import ForkServer, WorkerError

PATIENCE = 120.0  # seconds for a call, on a busy machine
_GLOO = timedelta(seconds=60)
_TRIES = 3


class Answer(NamedTuple):
    """What a function returned or raised on a rank, and the seconds that it took."""

    value: Any
    error: Exception | None
    trace: str
    seconds: float


class Ranks:
    """A world of ranks. Use it in a `with`, which kills them.

    Functions are passed by name: they stand in modules, and take what pickles.
    """

    def __init__(self, server: ForkServer, world_size: int) -> None:
        self.world_size = world_size
        self._numbers = [0] * world_size  # of the last call of each rank
        for again in reversed(range(_TRIES)):
            self.workers = [server.start(_serve, rank, world_size) for rank in range(world_size)]
            try:
                self._meet()
                break
            except WorkerError:  # gloo's "Connection closed by peer", once in some thousand groups on a busy machine
                self.__exit__()
                if not again:
                    raise

    def _meet(self) -> None:
        port = self.workers[0].recv(PATIENCE)
        for worker in self.workers[1:]:
            worker.send(port)
        for worker in self.workers:
            worker.recv(PATIENCE)

    def begin(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> None:
        """Calls `function(*arguments)` on these ranks, or all; `answer` brings what it returns."""
        for rank in range(self.world_size) if ranks is None else ranks:
            self._numbers[rank] += 1
            self.workers[rank].send((self._numbers[rank], function, arguments))

    def answer(self, rank: int) -> Answer:
        worker, number = self.workers[rank], 0
        found: list[Any] = []
        while number != self._numbers[rank]:  # a test that failed may have left others
            if not worker.channel.poll(PATIENCE):
                raise TimeoutError(f"rank {rank} said nothing in {PATIENCE:g} s")
            number, *found = pickle.loads(worker.channel.recv_bytes())
        return Answer(*found)

    def answers(self, function: Callable[..., Any], *arguments: Any) -> list[Answer]:
        self.begin(function, *arguments)
        return [self.answer(rank) for rank in range(self.world_size)]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each rank. Raises what one raised, once all have answered."""
        answers = self.answers(function, *arguments)
        for answer in answers:
            if answer.error is not None:
                raise answer.error from RuntimeError(answer.trace)
        return [answer.value for answer in answers]

    def errors(self, function: Callable[..., Any], *arguments: Any) -> list[Exception]:
        """What it raises on each rank; on all of them it must."""
        answers = self.answers(function, *arguments)
        found = [answer.error for answer in answers if answer.error is not None]
        assert len(found) == self.world_size, answers
        return found

    @contextmanager
    def awake(self) -> Generator[None]:
        """Afterwards the ranks are stopped, up to the next call: a thread of gloo looks around 100 times a second."""
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def _send(self, number: int) -> None:
        for worker in self.workers:
            worker.kill(number)

    def kill(self, rank: int) -> None:
        self.workers[rank].kill()
        self.workers[rank].wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()


def _serve(channel: Connection, rank: int, world_size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    make_store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    if rank == 0:
        store = make_store("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        channel.send(store.port)
    else:
        store = make_store("127.0.0.1", channel.recv(), world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_GLOO)
    channel.send("the group stands")
    while True:
        number, function, arguments = channel.recv()
        started = time.monotonic()
        value, error, trace = None, None, ""
        try:
            value = function(*arguments)
        except Exception as raised:
            error, trace = raised, f"on rank {rank}:\n{traceback.format_exc()}"
        channel.send_bytes(pickle.dumps((number, value, error, trace, time.monotonic() - started)))
