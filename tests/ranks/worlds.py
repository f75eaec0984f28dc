"""Worlds of ranks that tests share: forked once, and used by one test after the other, of whichever folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.launcher import Ranks
from tests.support.fork_server import ForkServer

# What a rank would import by itself: the first distribute_tensor imports torch._dynamo, which takes seconds.
_PRELOAD = (
    "tests.small_values",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "memstore.integrations.dcp.calls",
    "memstore.store.opening",
    "memstore.store.sharded",
    "memstore.store.models",
    "tests.ranks.layouts",
    "tests.ranks.calls",
    "tests.ranks.models",
    "tests.integrations.dcp.on_ranks",
    "tests.integrations.dcp.models_on_ranks",
)


@pytest.fixture(scope="session")
def rank_server() -> Iterator[ForkServer]:
    with ForkServer(preload=_PRELOAD) as started:
        yield started


@pytest.fixture(scope="session")
def world4(rank_server: ForkServer) -> Iterator[Ranks]:
    with Ranks(rank_server, 4) as started:
        yield started


@pytest.fixture(scope="session")
def world2(rank_server: ForkServer) -> Iterator[Ranks]:
    with Ranks(rank_server, 2) as started:
        yield started


@pytest.fixture
def ranks4(world4: Ranks) -> Iterator[Ranks]:
    with world4.awake():
        yield world4


@pytest.fixture
def ranks2(world2: Ranks) -> Iterator[Ranks]:
    with world2.awake():
        yield world2
