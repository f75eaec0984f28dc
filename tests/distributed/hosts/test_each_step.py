"""Index processes, agents and clients that are killed at each message of a call: it is made once, or never.

Only where its error says so, or its caller is dead, it may be either.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.distributed.hosts import actions, dying
from tests.distributed.hosts.clusters import LONG, ROOT, ServedHosts
from tests.examples import IS_FULL
from tests.support.fork_server import WorkerError

SEED, OWNER, CALLER = 0, 1, 2  # the numbers of hosts; both others are deputies of the seed
VICTIMS: dict[str, tuple[int, ...]] = {
    "the owner": (OWNER,),
    "the seed": (SEED,),
    "the caller's index process": (CALLER,),
    "all": (SEED, OWNER, CALLER),
    "the caller": (),
    "the owner's agent": (OWNER,),
    "all agents": (SEED, OWNER, CALLER),
}


class Case:
    """A call of host 2, of a group that nobody has used yet."""

    def __init__(self, cluster: ServedHosts, step: int) -> None:
        self.cluster = cluster
        self.key = f"{self.owned()}/k{step}"

    def owned(self) -> str:
        return self.cluster.group_of(OWNER)

    def prepare(self) -> None:
        self.cluster.call(OWNER, actions.put_whole, self.key, 1)

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return actions.put_whole, (self.key, 2)

    def finds(self, result: Any) -> tuple[int | None, ...]:
        """What may be found after this result; None: of a caller that was killed."""
        if result is None or result == "UnknownOutcomeError":
            return (1, 2)
        assert isinstance(result, int), result
        return (2,)


class FirstPut(Case):
    def owned(self) -> str:
        return f"new-{next(_numbers)}"

    def prepare(self) -> None:
        pass

    def finds(self, result: Any) -> tuple[int | None, ...]:
        return tuple(None if one == 1 else one for one in super().finds(result))


class Deletion(Case):
    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return actions.delete, (self.key,)

    def finds(self, result: Any) -> tuple[int | None, ...]:
        return tuple(None if one == 2 else one for one in super().finds(result))


class Get(Case):
    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return actions.get_whole, (self.key,)

    def finds(self, result: Any) -> tuple[int | None, ...]:
        assert result in (1, None), result
        return (1,)


class ShardedPut(Case):
    """The second of two ranks: the first one has left its part, and is to find the version."""

    def prepare(self) -> None:
        self.cluster.call(OWNER, actions.put_whole, self.key, 1)
        self.cluster.call(OWNER, actions.leave_part, self.key, "one", 2)

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return actions.put_last_part, (self.key, "one", 2)


CASES = {"a put": Case, "a first put": FirstPut, "a deletion": Deletion, "a get": Get, "a sharded put": ShardedPut}
FAST = {("a first put", "the caller")}
_numbers = itertools.count()


@pytest.mark.parametrize(
    ("call", "victim"),
    [
        pytest.param(call, victim, marks=() if (call, victim) in FAST else [pytest.mark.full, pytest.mark.timeout(900)])
        for call in CASES
        for victim in VICTIMS
    ],
)
def test_a_call_is_made_once_or_never(call: str, victim: str, cluster: ServedHosts) -> None:
    """The full run takes what is before the messages, or behind them. Of a first put host 1 is a mere deputy."""
    hosts = VICTIMS[victim]
    pid_of = (lambda number: cluster.agent(number).pid) if "agent" in victim else cluster.index_process
    first = random.randrange(2) if IS_FULL else 1
    step = first
    while True:
        case = CASES[call](cluster, step)
        case.prepare()
        pids = [pid_of(number) for number in hosts]
        arguments = (ROOT, *case.call(), step, pids)
        with agents_are_started_again(cluster), cluster.start(CALLER, dying.call_at_step, *arguments) as worker:
            try:
                result, is_reached = worker.recv(LONG)
            except WorkerError:
                assert not hosts and worker.wait() == -9
                result, is_reached = None, True
        for agent in map(cluster.agent, hosts if is_reached else ()):
            if agent.pid in pids:  # it was killed a moment ago
                agent.wait(LONG)
        cluster.serve_again()
        cluster.wait_for_members(3)
        expected = case.finds(result)
        for number in (OWNER, SEED, CALLER):
            found = cluster.call(number, actions.get_whole, case.key)
            assert found in expected, f"step {step}: {found!r} is found on host {number} after {result!r}"
        assert isinstance(cluster.call(SEED, actions.put_whole, case.key, 3), int)
        assert cluster.call(CALLER, actions.get_whole, case.key) == 3
        if not is_reached:
            break
        step += 2
    assert step > first, "there were messages"


@contextlib.contextmanager
def agents_are_started_again(cluster: ServedHosts) -> Generator[None]:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.1):
            cluster.serve_again()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_process_that_dies_between_grant_and_commit_leaves_a_group_that_its_host_owns(cluster: ServedHosts) -> None:
    with cluster.start(CALLER, dying.die_before_commit, ROOT, "granted/k") as worker, pytest.raises(WorkerError):
        worker.recv()
    assert worker.wait() == -9
    assert cluster.call(SEED, actions.get_whole, "granted/k") is None
    cluster.call(OWNER, actions.put_whole, "granted/k", 1)  # that host has never heard of it, and owns it
    assert cluster.call(SEED, actions.owner_of, "granted/k") == cluster.address(CALLER)
    cluster.kill_agent(CALLER)
    cluster.serve(CALLER)
    cluster.wait_for_members(3)
    assert cluster.call(SEED, actions.get_whole, "granted/k") == 1
