"""What these tests share: agents, and who asks them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.serving.agents import Agent, Agents, Caller, agents_in


@pytest.fixture
def agents(scratch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    """This process has their secret too: first puts ask the seed, wherever that is."""
    with agents_in(Path(scratch).parent, tmp_path) as made:
        monkeypatch.setenv("MEMSTORE_SECRET_FILE", str(made.secret))
        yield made


@pytest.fixture
def caller(agents: Agents) -> Iterator[Caller]:
    with Caller(agents.secret) as made:
        yield made


# --- for tests that leave their agent as it was -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept_agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as folder,
        agents_in(Path(folder), tmp_path_factory.mktemp("logs")) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def kept_agent(kept_agents: Agents) -> Agent:
    return kept_agents.serve("a")


@pytest.fixture
def kept_caller(kept_agents: Agents, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    monkeypatch.setenv("MEMSTORE_SECRET_FILE", str(kept_agents.secret))
    with Caller(kept_agents.secret) as made:
        yield made
