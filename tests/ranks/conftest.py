"""Worlds of ranks that the tests share: forked once, and used by one test after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memstore.testing.fork_server import ForkServer
from tests.ranks.launcher import Ranks

# What a rank would import by itself: the first distribute_tensor imports torch._dynamo, which takes seconds.
_PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "memstore.store.sharded",
    "memstore.store.models",
    "memstore.store.ranks",
    "tests.ranks.layouts",
    "tests.ranks.calls",
    "tests.ranks.models",
)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    with ForkServer(preload=_PRELOAD) as started:
        yield started


@pytest.fixture(scope="session")
def ranks4(server: ForkServer) -> Iterator[Ranks]:
    with Ranks(server, 4) as started:
        yield started


@pytest.fixture(scope="session")
def ranks2(server: ForkServer) -> Iterator[Ranks]:
    with Ranks(server, 2) as started:
        yield started
