"""Processes in which Monarch runs, and which ask index actors. Each is a fork that imports Monarch: no test does."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memstore.distributed.actors import ActorLinks, FindActor, FoundActor
from memstore.distributed.links import CLIENT, Links, hello_of_this_process, read_secret
from memstore.distributed.rules import Answer, Request
from memstore.distributed.serving.messages import Halt, Report, Reported, decode_answer, encode
from memstore.errors import HomeUnavailableError
from tests.children import Child, Wire
from tests.distributed.serving.agents import LONG, Agent, Caller

needs_monarch = pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed")


def wait_for_actor(caller: Caller, agent: Agent) -> FoundActor:
    """The listener says where the actor is, as soon as there is one."""
    deadline = time.monotonic() + LONG
    while not (found := find_actor(caller, agent)).reference:
        assert time.monotonic() < deadline, f"{found} {agent.log()}"
        time.sleep(0.02)
    return found


def find_actor(caller: Caller, agent: Agent) -> FoundActor:
    found = caller.call(agent, FindActor())
    assert isinstance(found, FoundActor)
    return found


class ActorClient:
    """A process with `ActorLinks`."""

    def __init__(self, child: Child, agent: Agent, member: bytes) -> None:
        self.pid, self._child, self._agent, self._member = child.pid, child, agent, member

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function makes of the process's `ActorLinks` and these arguments. Raises what it raises."""
        self._child.send((function, arguments))
        result = self._child.receive()
        if isinstance(result, BaseException):
            raise result
        return result

    def ask(self, request: Request | Report | Halt | bytes, timeout: float = LONG) -> Answer | Reported | None:
        """None: there was no answer."""
        message = request if isinstance(request, bytes) else encode(request)
        received = self.run(send, self._agent.address, self._member, message, timeout)
        answer = None if received is None else decode_answer(received)
        assert not isinstance(answer, FoundActor)
        return answer

    def begin(self, request: Request) -> None:
        """In a thread of the process: `end` returns the answers, in this order."""
        self.run(begin, self._agent.address, self._member, encode(request))

    def end(self) -> list[Answer | Reported | FoundActor | None]:
        return [None if one is None else decode_answer(one) for one in self.run(end)]


@contextmanager
def client_of(agent: Agent, secret: Path, reference: bytes, member: bytes) -> Generator[ActorClient]:
    with Child(_serve, str(secret), reference) as child:
        assert child.receive() == "ready"
        yield ActorClient(child, agent, member)


# --- in the process ---------------------------------------------------------------------------------------------------

_begun: list[Future[bytes | None]] = []
_threads: list[ThreadPoolExecutor] = []


def _serve(wire: Wire, secret: str, reference: bytes) -> None:
    importlib.import_module("monarch.actor").enable_transport("tcp://127.0.0.1:0")
    _threads.append(ThreadPoolExecutor(8))
    links = Links(secret=read_secret(secret), kind=CLIENT, hello=hello_of_this_process())
    ways = ActorLinks(links, [reference])
    wire.send("ready")
    while True:
        function, arguments = wire.receive()
        try:
            wire.send(function(ways, *arguments))
        except Exception as error:
            wire.send(error)


def send(ways: ActorLinks, address: str, member: bytes, message: bytes, timeout: float) -> bytes | None:
    """None: there was no answer, or nothing could be sent."""
    try:
        return ways.send(address, member, message, time.monotonic() + timeout)
    except HomeUnavailableError:
        return None


def begin(ways: ActorLinks, address: str, member: bytes, message: bytes) -> None:
    _begun.append(_threads[0].submit(send, ways, address, member, message, LONG))


def end(ways: ActorLinks) -> list[bytes | None]:
    answers = [one.result() for one in _begun]
    _begun.clear()
    return answers
