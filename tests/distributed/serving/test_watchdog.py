"""An index process that hangs is killed and started again; one that was stopped with its agent is not."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import memstore
from memstore.distributed.links import Asked
from memstore.distributed.serving import serve
from memstore.distributed.serving.supervision import Kind, Lines, News, Pulse, Watchdog, look_every, tell
from tests.distributed.links.echoing import MEMBER, linked, listening, soon
from tests.distributed.serving.agents import Agents, Caller, eventually, stopped

HANG_AFTER = ("--hang-after", "1.5")


# --- how silence is counted -------------------------------------------------------------------------------------------


def looks_until_over(watchdog: Watchdog, now: float, every: float) -> int:
    """How many looks it takes, with so many seconds between two."""
    looks = 0
    while True:
        looks, now = looks + 1, now + every
        if watchdog.is_over(now):
            return looks


def test_silence_ends_it_after_its_time_and_a_word_begins_anew() -> None:
    watchdog = Watchdog(10.0, 100.0)
    watchdog.hear(100.0)
    assert not any(watchdog.is_over(101.0 + second) for second in range(9))
    watchdog.hear(109.5)
    assert looks_until_over(watchdog, 109.5, 1.0) == 10


def test_time_in_which_the_agent_was_away_counts_for_one_look() -> None:
    watchdog = Watchdog(10.0, 0.0)
    watchdog.hear(0.0)
    assert not watchdog.is_over(3600.0)
    assert looks_until_over(watchdog, 3600.0, 1.0) == 9
    starved = Watchdog(10.0, 0.0)
    starved.hear(0.0)
    assert looks_until_over(starved, 0.0, 7.0) == 10


def test_its_beginning_may_take_a_minute() -> None:
    assert looks_until_over(Watchdog(1.0, 0.0), 0.0, look_every(1.0)) == 300
    assert looks_until_over(Watchdog(120.0, 0.0), 0.0, 1.0) == 120


# --- the word that it goes on -----------------------------------------------------------------------------------------


def test_it_is_told_as_long_as_the_listener_comes_round() -> None:
    reader, writer = os.pipe()
    may_go_on, is_held = threading.Event(), threading.Event()

    def serve(asked: Asked) -> None:
        if asked.message == b"hang":
            is_held.set()
            may_go_on.wait(60)
        asked.reply(b"")

    def words() -> int:
        told = lines.read()
        assert told is not None and {one.kind for one in told} == {Kind.ALIVE}
        return len(told)

    def hang() -> None:
        links.send(listener.address, MEMBER, b"hang", soon())

    lines = Lines(reader)
    with listening(serve) as listener, linked() as links:
        pulse = Pulse(writer, 0.05)
        pulse.start()
        words()  # of a process that has no listener yet
        pulse.follow(listener)
        assert sum(words() for _ in range(3)) >= 3
        caller = threading.Thread(target=hang)
        caller.start()
        assert is_held.wait(60)
        os.set_blocking(reader, False)
        time.sleep(0.2)  # it may have seen a turn from before
        while True:
            try:
                words()
            except BlockingIOError:
                break
        time.sleep(0.5)
        with pytest.raises(BlockingIOError):
            words()
        may_go_on.set()
        os.set_blocking(reader, True)
        assert words() >= 1
        pulse.close()
        caller.join()


def test_a_pipe_that_nobody_reads_stops_nobody() -> None:
    reader, writer = os.pipe()
    Pulse(writer, 1.0)
    os.write(writer, b"x" * (1 << 16))
    tell(writer, News(Kind.ALIVE))  # it is full
    assert len(os.read(reader, 1 << 17)) == 1 << 16
    tell(writer, News(Kind.ALIVE))
    assert os.read(reader, 100) == b"alive \n"
    os.close(reader)
    os.close(writer)


# --- agents -----------------------------------------------------------------------------------------------------------


def test_an_index_process_that_hangs_is_killed_and_started_again(agents: Agents, caller: Caller) -> None:
    agent = agents.serve("a", *HANG_AFTER)
    with memstore.open(agent.root, "r+") as store:
        version = store.put("k", 1)
    before = caller.report(agent)
    os.kill(before.pid, signal.SIGSTOP)
    eventually(lambda: agent.view().get("index_process") not in (None, before.pid), "another one")
    after = caller.report(agent)
    assert after.incarnation == before.incarnation + 1 and after.keys == 1
    assert f"(pid {before.pid}) has answered nothing for 1.5 s, and was killed: started again at once" in agent.log()
    with memstore.open(agent.root, "r+") as store:
        assert store.version("k") == version and store.get("k") == 1
    agent.terminate()


@pytest.mark.full
def test_a_host_that_was_stopped_for_long_goes_on(agents: Agents, caller: Caller) -> None:
    """All of it, agent and index process; and the agent alone. Nobody takes anybody for hung."""
    agent = agents.serve("a", *HANG_AFTER)
    with memstore.open(agent.root, "r+") as store:
        version = store.put("k", 1)
        before = caller.report(agent)
        with stopped(before.pid), stopped(agent.pid):
            time.sleep(6)
        assert caller.report(agent).pid == before.pid
        with stopped(agent.pid):
            time.sleep(20)
            assert caller.report(agent).pid == before.pid  # it answers meanwhile
            assert store.put("k", 2) > version
        time.sleep(3)
        assert caller.report(agent).pid == before.pid and store.get("k") == 2
    assert "killed" not in agent.log()
    agent.terminate()


@pytest.mark.full
def test_an_index_process_that_hangs_while_its_agent_is_stopped_is_killed_later(agents: Agents, caller: Caller) -> None:
    agent = agents.serve("a", *HANG_AFTER)
    before = caller.report(agent)
    with stopped(agent.pid):
        os.kill(before.pid, signal.SIGSTOP)
        time.sleep(4)
        assert Path(f"/proc/{before.pid}").exists()
    eventually(lambda: agent.view().get("index_process") not in (None, before.pid), "another one")
    assert caller.report(agent).incarnation == before.incarnation + 1


def test_a_time_that_is_too_short_is_refused(scratch: str) -> None:
    for seconds in (0.1, float("nan"), -1.0):
        with pytest.raises(ValueError, match=r"needs 0\.5 s to say that it lives"):
            serve(scratch, "tcp://127.0.0.1:7999", hang_after=seconds)
    assert not Path(scratch).exists()
