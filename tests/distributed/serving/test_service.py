"""An agent as a service: what it is told by signals, what it tells those who started it, and what it prints."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore.distributed.rules import Member, Roster, Standing
from memstore.distributed.serving import membership
from tests.distributed.serving.agents import LONG, Agents, Caller, eventually, free_address

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def none_ignored() -> Iterator[None]:
    """What ignores signals, as `nohup` and jobs in the background do, passes that on to all that it starts."""
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.usefixtures("none_ignored")
def test_each_signal_that_asks_for_the_end_gets_a_clean_one(agents: Agents, caller: Caller) -> None:
    """And the address can be taken again at once, with clients that are connected still."""
    address = free_address(0)
    for number in (signal.SIGHUP, signal.SIGINT):  # all other tests end theirs by SIGTERM
        agent = agents.serve("a", address=address)
        caller.report(agent)
        agent.process.send_signal(number)
        code, text = agent.ended()
        assert code == 0, text
        assert f"{agent.root} is served no longer: {number.name}" in text
        assert agents.processes() == [] and agent.view() == {}


def test_an_index_process_may_have_as_many_connections_as_the_system_allows(agents: Agents) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        agent = agents.serve("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert hard > 512, "this tests nothing"
    assert resource.prlimit(agent.pid, resource.RLIMIT_NOFILE) == (512, hard)
    assert resource.prlimit(agent.index_process(), resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_hangup_that_is_ignored_stays_so(agents: Agents, caller: Caller) -> None:
    """As `nohup` has it."""
    address, root = free_address(0), f"{agents.folder}/a"
    words = ["nohup", sys.executable, "-m", "memstore", "serve", root, "--address", address]
    with subprocess.Popen(words, env=agents.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as agent:
        try:
            eventually(lambda: Path(f"{root}/cluster").exists(), "it serves")
            agent.send_signal(signal.SIGHUP)
            agent.send_signal(signal.SIGTERM)
            output = agent.communicate(timeout=LONG)[0].decode()
        finally:
            agent.kill()
    assert agent.returncode == 0 and "is served no longer: SIGTERM" in output


def test_systemd_is_told_when_it_is_ready_and_when_it_ends(agents: Agents, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(LONG)
        agent = agents.serve("a", NOTIFY_SOCKET=str(tmp_path / "notify"), JOURNAL_STREAM="8:1")
        ready = f"READY=1\nSTATUS=serving {agent.root} at {agent.address}"
        assert manager.recv(1000).decode() == ready
        agent.terminate()
        assert manager.recv(1000) == b"STOPPING=1"
    assert agent.log().startswith("memstore: "), "the journal has the time beside each line"


@pytest.mark.parametrize(
    "path", ["{folder}/none", *(pytest.param(path, marks=pytest.mark.full) for path in ("@memstore-none", "nonsense"))]
)
def test_a_service_manager_that_is_gone_harms_nobody(agents: Agents, tmp_path: Path, path: str) -> None:
    agents.serve("a", NOTIFY_SOCKET=path.format(folder=tmp_path)).terminate()


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_descriptor_hears_whether_it_is_ready(agents: Agents, is_refused: bool) -> None:
    reader, writer = os.pipe()
    address = "tcp://192.0.2.1:7777" if is_refused else free_address(0)
    words = ["serve", f"{agents.folder}/a", "--address", address, "--ready-fd", str(writer)]
    with subprocess.Popen(
        [sys.executable, "-m", "memstore", *words], env=agents.environment, pass_fds=[writer], stderr=subprocess.PIPE
    ) as agent:
        os.close(writer)
        try:
            told = os.read(reader, 4000).decode()
        finally:
            if not is_refused:
                agent.terminate()
            agent.communicate(timeout=LONG)
            os.close(reader)
    if is_refused:
        assert told.startswith("refused tcp://192.0.2.1:7777: ") and agent.returncode == 3
    else:
        assert told == "ready \n" and agent.returncode == 0


def test_each_event_is_a_line_that_names_the_hosts(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.serve("b", join=seed, members=2)
    eventually(lambda: "has joined" in seed.log(), "the seed tells of it")
    other.process.send_signal(signal.SIGTERM)
    other.ended()
    name = re.escape(socket.gethostname())
    for agent in (seed, other):
        for line in agent.log().splitlines():
            assert re.match(f"{TIME}memstore: [^ ]", line), line
    assert re.search(f"memstore: {name} serves {seed.root} at {seed.address} ", seed.log())
    assert re.search(f"epoch 2: {name} at {other.address} has joined", seed.log())
    assert re.search(f"{name} at {other.address} is a member: epoch 2, 2 hosts, seed {seed.address}", other.log())


# --- what has changed -------------------------------------------------------------------------------------------------

A, B = (Member(name.encode() * 16, f"tcp://10.0.0.{number}:1", name, True) for number, name in enumerate("ab", 1))


def standing(epoch: int, *members: Member, seed: Member = A, **more: Any) -> Standing:
    return Standing(A.id, Roster(b"C" * 16, 1, epoch, members, seed.id), **more)


def test_changes_of_members_are_told() -> None:
    guest, moved = Member(B.id, B.address, B.name, False), Member(B.id, "tcp://10.0.0.9:1", B.name)
    alone = "a at tcp://10.0.0.1:1 is a member: epoch 1, 1 host, seed tcp://10.0.0.1:1"
    assert membership.changes_of(None, standing(1, A), A) == [alone]
    for before, after, told in (
        (standing(1, A), standing(2, A, guest), "b at tcp://10.0.0.2:1 has joined"),
        (standing(1, A, guest), standing(2, A, B), "b at tcp://10.0.0.2:1 owns what it puts first"),
        (standing(1, A, B), standing(2, A, guest), "b at tcp://10.0.0.2:1 owns what it has, and no new groups"),
        (standing(1, A, B), standing(2, A, moved), "b is at tcp://10.0.0.9:1 now, and was at tcp://10.0.0.2:1"),
        (standing(1, A, B), standing(2, A), "b at tcp://10.0.0.2:1 was removed"),
        (standing(1, A, B), standing(2, A, B, seed=B), "the seed is tcp://10.0.0.2:1 now, and was tcp://10.0.0.1:1"),
        (standing(2, A, is_joining=True), standing(2, A), "the keys that this root had are the cluster's now"),
        (
            standing(1, A, B),
            standing(2, A, B, unheard=(B.id,)),
            "the directory is made anew: what they own is still to be said by b at tcp://10.0.0.2:1",
        ),
        (
            standing(2, A, B, unheard=(B.id,)),
            standing(2, A, B),
            "the directory is made anew: all members have said what they own",
        ),
    ):
        assert membership.changes_of(before, after, A) == [f"epoch 2: {told}"]
        assert membership.changes_of(after, after, A) == []
