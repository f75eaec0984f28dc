"""What an agent's index process says of a host that gives no answer, and while it waits to be let in."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import pytest

from memstore.distributed.links import INDEX, Hello, Links
from memstore.distributed.rules import Gather, Obey, Roster, Send, Steps
from memstore.distributed.serving.duties import SILENT as LONG
from memstore.distributed.serving.duties import Driver, Ending, Silences
from tests.distributed.serving.agents import Agents, eventually
from tests.distributed.serving.homes import answering


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 100.0
        self.silences = Silences(self.lines.append, lambda: self.now)


def test_a_short_silence_is_not_told() -> None:
    told = Told()
    for _ in range(3):
        told.silences.begin("tcp://10.0.0.1:1", "Connection refused")
        told.now += LONG / 2
        told.silences.end("tcp://10.0.0.1:1")
    assert told.lines == []


def test_a_long_one_is_told_once_and_its_end() -> None:
    told = Told()
    for _ in range(5):
        told.silences.begin("tcp://10.0.0.1:1", "Connection refused")
        told.silences.begin("tcp://10.0.0.2:1", "")
        told.silences.end("tcp://10.0.0.2:1")
        told.now += LONG / 2
    (line,) = told.lines
    assert line.startswith("tcp://10.0.0.1:1 does not answer (Connection refused)")
    told.silences.end("tcp://10.0.0.1:1")
    told.silences.end("tcp://10.0.0.1:1")
    assert told.lines[1:] == ["tcp://10.0.0.1:1 answers again"]


def test_members_that_say_nothing_are_waited_for_at_once(root: str) -> None:
    roster = Roster(b"c" * 16, 1, 1, (), b"m" * 16)

    def ask() -> Steps[list[object]]:
        return (yield Gather(sends))

    with ExitStack() as stack:
        home = stack.enter_context(answering(root))
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        sends = tuple(Send(f"tcp://127.0.0.1:{one.getsockname()[1]}", None, Obey(roster)) for one in servers)
        links = Links(secret=None, kind=INDEX, hello=Hello(memstore="1"))
        stack.callback(links.close)
        began = time.monotonic()
        answers = Driver(home.root, links, Ending(), lambda: None).run(ask())
        assert len(answers) == 5 and time.monotonic() - began < 5.0  # one after the other: ten


@pytest.mark.full
def test_who_waits_for_the_seed_and_for_others_says_so(agents: Agents) -> None:
    seed = agents.serve("a")
    agents.serve("b", join=seed, members=2)
    seed.process.kill()
    seed.process.wait()
    waiting = agents.start("c", join=seed)
    eventually(lambda: f"{seed.address} does not answer (Connection refused)" in waiting.log(), "the seed is named")
    eventually(lambda: f"waits for an answer of each of {seed.address}" in waiting.log(), "so is what it waits for")
