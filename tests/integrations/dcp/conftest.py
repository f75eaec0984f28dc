"""Ranks on gloo for the tests of checkpoints: forked from a process that has imported what they need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memstore.testing.fork_server import ForkServer
from tests.ranks.launcher import Ranks

_PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "memstore.integrations.dcp.calls",
    "memstore.store.sharded",
    "memstore.store.opening",
    "tests.integrations.dcp.on_ranks",
)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    with ForkServer(preload=_PRELOAD) as started:
        yield started


@pytest.fixture(scope="session")
def ranks4(server: ForkServer) -> Iterator[Ranks]:
    with Ranks(server, 4) as started:
        yield started
