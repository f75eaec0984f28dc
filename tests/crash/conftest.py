"""What all crash tests take: a fork server, whose workers are there to be killed, and chance."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import pytest

from tests.support.fork_server import ForkServer


@pytest.fixture(scope="session")
def server(fork_server: ForkServer) -> ForkServer:
    return fork_server


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Finalizers make system calls too; the steps of an operation must come in one order."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers; the seed is printed when the test fails. MEMSTORE_TEST_SEED replays one."""
    seed = int(os.environ.get("MEMSTORE_TEST_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"replay with MEMSTORE_TEST_SEED={seed}")
    return random.Random(seed)
