"""What careless people do with the folders and addresses of hosts, and hostile ones with their ports."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from pathlib import Path

import pytest

import memstore
from memstore.distributed.links import CLIENT, hello_of_this_process, parse_address, read_secret
from memstore.distributed.links.dialing import dial
from memstore.distributed.links.frames import frame
from memstore.engine import deadline_after
from memstore.errors import LinkRefusedError
from tests.distributed.serving.agents import Agent, Agents, eventually
from tests.distributed.serving.test_agent import REFUSED

pytestmark = pytest.mark.full
MEBIBYTE = 1 << 20


def test_a_folder_that_is_made_anew_under_its_agent_is_another_host(agents: Agents) -> None:
    agent = agents.serve("a")
    with memstore.open(agent.root) as store:
        store.put("old", 1)
    shutil.rmtree(agent.root)
    with memstore.open(agent.root) as store:
        store.put("new", 1)
    code, text = agent.ended()
    assert code == REFUSED and ("is another store than was opened" in text or "was removed or moved" in text)
    agents.serve("a", address=agent.address)
    with memstore.open(agent.root) as store:
        assert list(store) == ["new"]


def test_another_cluster_at_the_address_of_a_host_is_told_apart(agents: Agents) -> None:
    seed = agents.serve("a")
    member = agents.serve("b", join=seed, members=2)
    here, there = "here/k", "there/k"
    for root, key, value in ((member.root, here, 1), (seed.root, there, 2)):
        with memstore.open(root) as store:
            store.put(key, value)
    seed.terminate()
    stranger = agents.serve("x", address=seed.address)

    with memstore.open(member.root) as store:
        assert store.get(here) == 1
        store.put(here, 3)
        for call in (lambda: store.get(there, timeout=10.0), lambda: store.put(there, 1, timeout=10.0)):
            with pytest.raises(LinkRefusedError, match=seed.address):
                call()
    code, text = agents.start("a", address=seed.address).ended()
    assert code == REFUSED and "in use" in text and seed.address in text
    assert member.process.poll() is None and len(stranger.view()["members"]) == 1
    stranger.terminate()
    agents.serve("a", address=seed.address, members=2)
    with memstore.open(member.root) as store:
        assert store.get(there) == 2 and store.get(here) == 3


def test_garbage_takes_no_memory_and_ends_nothing(agents: Agents) -> None:
    agent = agents.serve("a")
    secret = read_secret(str(agents.secret))
    chance, pid = random.Random(5), agent.index_process()

    def send_some(count: int) -> int:
        """And returns the memory of the index process."""
        for _ in range(count):
            stranger(agent, chance)
            friend(agent, secret, chance)
        with memstore.open(agent.root) as store:
            store.put("key", count)
        return resident(pid)

    before = send_some(300)
    assert send_some(1500) - before < 16 * MEBIBYTE
    assert agent.index_process() == pid
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 100, "its connections are closed")
    agent.terminate()


def stranger(agent: Agent, chance: random.Random) -> None:
    place = parse_address(agent.address)
    with socket.create_connection((place.ip, place.port), timeout=20.0) as sock, contextlib.suppress(OSError):
        sock.sendall(chance.randbytes(chance.randrange(1, 2000)))


def friend(agent: Agent, secret: bytes | None, chance: random.Random) -> None:
    """One who knows the secret: frames of any content, and bytes that are none."""
    own = hello_of_this_process()
    with dial(parse_address(agent.address), None, secret, CLIENT, own, deadline_after(20)).socket as sock:
        sock.settimeout(20.0)
        body = chance.randbytes(chance.randrange(0, 60_000))
        with contextlib.suppress(OSError):
            sock.sendall(frame(1, 1000, body) if chance.random() < 0.7 else body)


def resident(pid: int) -> int:
    """Bytes in memory that are its own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no RssAnon")
