"""Waits of other hosts' processes: kept until a put, a timeout, another epoch, or the end of their connection."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import memstore
from memstore.distributed.rules import Wait
from memstore.distributed.rules.messages import IsAt
from memstore.distributed.serving.questions import Told, decode_answer, encode
from tests.distributed.serving.agents import Agent, Agents, Caller, eventually, owned_by

LONGEST = 10_000  # milliseconds


@pytest.fixture
def agent(kept_agent: Agent) -> Agent:
    return kept_agent


@pytest.fixture
def caller(kept_caller: Caller) -> Caller:
    return kept_caller


def wait(agent: Agent, key: str, newer_than: int = 0, milliseconds: int = LONGEST) -> Wait:
    """For a key of a group that the host owns from now on."""
    return Wait(key.encode(), owned_by(agent, key), newer_than, milliseconds)


def begin(threads: ThreadPoolExecutor, caller: Caller, agent: Agent, request: Wait) -> Future[Told]:
    return threads.submit(caller.call, agent, request)


def test_a_wait_is_answered_by_a_put_of_any_process(agent: Agent, caller: Caller) -> None:
    with ThreadPoolExecutor(2) as threads, memstore.open(agent.root, "r+") as store:
        first, other = (begin(threads, caller, agent, wait(agent, key)) for key in ("put", "never"))
        time.sleep(0.2)  # so that it is kept, most of the time; the answer is the same if it isn't
        assert not first.done()
        started = time.monotonic()
        version = store.put("put", 1)
        assert first.result() == IsAt(version)
        assert time.monotonic() - started < 9  # it would be looked at again after 1 s, and end after 10
        assert caller.call(agent, wait(agent, "put")) == IsAt(version)  # at once
        assert not other.done()
        store.put("never", 1)
        other.result()


def test_a_wait_ends_when_its_time_is_over(agent: Agent, caller: Caller) -> None:
    started = time.monotonic()
    assert caller.call(agent, wait(agent, "nothing", milliseconds=300)) == IsAt(0)
    assert time.monotonic() - started >= 0.3
    assert caller.call(agent, wait(agent, "nothing", milliseconds=0)) == IsAt(0)


def test_a_wait_ends_when_nobody_waits_for_it_any_more(agent: Agent, caller: Caller) -> None:
    """Or who asks for a moment, again and again, would fill the home with waits."""
    told = threading.Event()
    one = caller.links.begin(agent.address, None, encode(wait(agent, "moment")), 0.3, told.set, time.monotonic() + 20)
    assert told.wait(9) and one.answer is not None and decode_answer(one.answer) == IsAt(0)


def test_a_wait_of_who_is_gone_is_forgotten(kept_agents: Agents, agent: Agent, caller: Caller) -> None:
    with ThreadPoolExecutor(1) as threads, Caller(kept_agents.secret) as other:
        kept = threads.submit(other.try_call, agent, wait(agent, "forgotten"), 30.0)
        time.sleep(0.2)
        other.links.close()
        assert kept.result() is None
    assert caller.call(agent, wait(agent, "nothing", milliseconds=0)) == IsAt(0)


def test_many_waits_are_all_answered(agent: Agent, caller: Caller) -> None:
    """Puts come while waits do: none is slept through, or it would take its 10 s."""
    count = 40
    with ThreadPoolExecutor(count) as threads, memstore.open(agent.root, "r+") as store:
        kept = [begin(threads, caller, agent, wait(agent, f"many{number}")) for number in range(count)]
        started = time.monotonic()
        versions = [store.put(f"many{number}", number) for number in range(count)]
        assert [one.result() for one in kept] == [IsAt(version) for version in versions]
        assert time.monotonic() - started < 9


def test_a_killed_index_process_loses_waits_and_their_clients_ask_again(agent: Agent, caller: Caller) -> None:
    before = caller.report(agent)
    with ThreadPoolExecutor(1) as threads, memstore.open(agent.root, "r+") as store:
        kept = begin(threads, caller, agent, wait(agent, "again"))  # as long as it has no answer
        time.sleep(0.2)
        os.kill(before.pid, signal.SIGKILL)
        eventually(lambda: caller.report(agent).pid != before.pid, "another one")
        version = store.put("again", 1)
        assert kept.result() == IsAt(version)


def test_puts_wake_nobody_while_there_is_no_wait(agent: Agent, caller: Caller) -> None:
    """The index process sleeps through puts of a served store that no other host waits for."""
    assert caller.call(agent, wait(agent, "nothing", milliseconds=100)) == IsAt(0)
    with memstore.open(agent.root, "r+") as store:
        store.put("quiet", 0)  # the mark of the last wait is taken away
        pid = caller.report(agent).pid
        before = switches(pid)
        for number in range(1000):
            store.put("quiet", number)
        assert switches(pid) - before < 300  # what it does by itself, some 10 times a second


def switches(pid: int) -> int:
    """How often its threads have gone to sleep."""
    return sum(
        int(path.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        for path in Path(f"/proc/{pid}/task").glob("*/status")
    )
