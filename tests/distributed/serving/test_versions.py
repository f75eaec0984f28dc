"""Hosts of different versions: what has to agree, and how they are told apart. Each version is a process's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import memstore
from memstore.distributed.links import Hello, handshake
from memstore.distributed.links.handshake import PROTOCOL
from tests.distributed.serving.agents import LONG, SOURCES, Agents, eventually
from tests.distributed.serving.test_status import command

FAKED = Path(__file__).parent / "faked"
REFUSED = 3


def versions(**faked: str) -> dict[str, Any]:
    """The environment of a process that has these."""
    told = ",".join(f"{name}={version}" for name, version in faked.items())
    return {"PYTHONPATH": f"{FAKED}:{SOURCES}", "FAKED_VERSIONS": told}


def run(agents: Agents, code: str, **faked: str) -> subprocess.CompletedProcess[str]:
    environment = {**agents.environment, **versions(**faked)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LONG)


# --- the protocol has to agree ----------------------------------------------------------------------------------------


def test_a_host_of_another_protocol_is_refused_and_both_are_named(agents: Agents) -> None:
    seed = agents.serve("a")
    code, text = agents.start("b", join=seed, **versions(protocol="7")).ended()
    assert code == REFUSED
    assert f"{seed.address} speaks protocol {PROTOCOL}, and this process protocol 7" in text
    assert "run versions of memstore on both hosts that speak the same one" in text
    assert len(seed.view()["members"]) == 1


def test_a_host_that_speaks_older_protocols_too_is_let_in_and_both_ranges_are_named_where_none_is_common(
    agents: Agents,
) -> None:
    seed = agents.serve("a", **versions(protocol="1-7"))
    agents.serve("b", join=seed, members=2)
    code, text = agents.start("c", join=seed, **versions(protocol="8-9")).ended()
    assert code == REFUSED and f"{seed.address} speaks protocol 1 to 7, and this process protocol 8 to 9" in text


@pytest.mark.full
def test_a_member_that_comes_back_with_another_protocol_is_told_by_status_and_by_gets(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.serve("b", "--no-owner", join=seed, members=2)
    with memstore.open(seed.root, "r+") as store:
        store.put("k", 1)
    seed.terminate()
    seed = agents.serve("a", address=seed.address, members=2, **versions(protocol="7"))
    told = f"{seed.address} speaks protocol 7, and this process protocol {PROTOCOL}"
    done = run(agents, f"import memstore; memstore.open({other.root!r}).get('k', timeout=20.0)")
    assert f"LinkRefusedError: {told}" in done.stderr, done.stderr
    hosts = json.loads(command(agents, "status", other.root, "--json").stdout)["hosts"]
    assert [told in host["trouble"] for host in hosts] == [True, False]
    eventually(lambda: told in other.log(), "its index process says so")
    assert other.process.poll() is None  # it may become whole again


# --- versions need not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["memstore", *(pytest.param(name, marks=pytest.mark.full) for name in ("torch", "torchmonarch"))]
)
def test_other_versions_go_together_and_are_told(agents: Agents, name: str) -> None:
    seed = agents.serve("a")
    other = agents.serve("b", join=seed, members=2, **versions(**{name: "99.1"}))
    with memstore.open(seed.root, "r+") as here, memstore.open(other.root, "r+") as there:
        for number in range(8):
            version = here.put(f"{number}/k", number)
            assert there.get(f"{number}/k") == number and there.put(f"{number}/k", -1) > version
            assert here.get(f"{number}/k") == -1
    shown = "monarch" if name == "torchmonarch" else name
    eventually(lambda: f"{shown} " in other.log() and ", this host 99.1" in other.log(), "it says so")
    text = " ".join(command(agents, "status", seed.root).stdout.split())
    assert f"{shown} 99.1" in text and f"at {other.address}" in text


def test_a_hello_of_a_later_version_may_say_more() -> None:
    """And less than it does today is a Hello, too; what is no version is none."""
    longer = msgspec.msgpack.encode([0, "9.9.9", "2.13.0", "", 3, 4, "b", "c", "more", {"and": "more"}])
    assert handshake.decode_hello(longer) == Hello("9.9.9", "2.13.0", "", 3, 4, "b", "c")
    assert handshake.decode_hello(msgspec.msgpack.encode([0, "0.0.1"])) == Hello("0.0.1")
    for bad in ([0, 1], [0, "1", "2", "3", -1], [0, "x" * 5000], [1, "0.1.0"], "0.1.0"):
        with pytest.raises(msgspec.DecodeError):
            handshake.decode_hello(msgspec.msgpack.encode(bad))


@pytest.mark.full
def test_a_dtype_that_the_readers_torch_lacks_is_named(agents: Agents) -> None:
    seed = agents.serve("a")
    other = agents.serve("b", "--no-owner", join=seed, members=2)
    done = run(
        agents,
        "import memstore, torch\n"
        f"with memstore.open({seed.root!r}, 'r+') as store: "
        "store.put('new', torch.zeros(4, dtype=torch.float8_e8m0fnu)); store.put('old', torch.ones(4))",
    )
    assert done.returncode == 0, done.stderr
    done = run(
        agents,
        "import torch\n"
        "del torch.float8_e8m0fnu\n"
        "import memstore\n"
        f"store = memstore.open({other.root!r})\n"
        "assert store.get('old').sum() == 4\n"
        "store.get('new')",
    )
    assert "UnsupportedValueError" in done.stderr and "a leaf of torch.float8_e8m0fnu, which torch" in done.stderr


# --- Monarch ----------------------------------------------------------------------------------------------------------


def test_without_monarch_a_transport_that_takes_it_is_refused_and_the_extra_named(agents: Agents) -> None:
    code, text = agents.start("a", "--transport", "monarch", **versions(torchmonarch="")).ended()
    assert code == REFUSED and "pip install 'torchmonarch>=0.7,<0.8'" in text, text
    assert not Path(f"{agents.folder}/a").exists()
