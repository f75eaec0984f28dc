"""A fork server for all crash tests: its workers are there to be killed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from memstore.testing.fork_server import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    names = ("workers", "blockers", "forks", "journal", "shards", "shards_at_random")
    preload = [*(f"tests.crash.{name}" for name in names), "memstore.datasets"]  # which takes two seconds
    with ForkServer(preload=preload) as started:
        yield started


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers; the seed is printed when the test fails. MEMSTORE_TEST_SEED replays one."""
    seed = int(os.environ.get("MEMSTORE_TEST_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"replay with MEMSTORE_TEST_SEED={seed}")
    return random.Random(seed)
